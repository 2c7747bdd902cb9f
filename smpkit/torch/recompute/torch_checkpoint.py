"""torch.utils.checkpoint in the user's model, and so Hugging Face's `gradient_checkpointing_enable()`.

User code holds references to `torch.utils.checkpoint.checkpoint` itself, so what that looks up when it runs is
replaced: the generator around a call, which enters our region; the function of `use_reentrant=True`, which has the same
gradients and goes the same way; and three classes of selective checkpointing, through which an engine offloads what a
policy names. So torch's checkpoints and `smp.checkpoint` are one: both name the layer in errors, and both offload.

[Note: checkpoints around several ranks] A function in code that every rank runs may call units of several ranks. In
backward each rank works alone and could not run the function again: it has neither the others' weights nor their
results. So each unit that the function calls is recomputed by itself, on the rank that holds it; operations between
units save what they need.

[Note: policies that offload] In eager mode torch recomputes what `MUST_CPU_OFFLOAD` or `PREFER_CPU_OFFLOAD` names. Its
mode for the forward asks the policy, and then wraps what is to be saved in `_VersionWrapper`; its mode for backward
returns what the wrapper's `get_val` returns. So what the policy returns is noted on its way, torch is told to save, and
the wrapper parks the output with the engine in place of holding it. A view has no memory of its own, and costs nothing
to make again, so it is: that also keeps weights which a policy for all operators names from being copied.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy

from smpkit.errors import UsageError
from smpkit.torch.core.module_call import OriginalCall
from smpkit.torch.core.warn import warn_user
from smpkit.torch.pipeline.stage_tensor import microbatch_between_units
from smpkit.torch.recompute.region import checkpointing, name_of, recording
from smpkit.torch.recompute.surroundings import all_modules

_log = logging.getLogger("smpkit")
_Generator = Generator[None, None, None]
_Settings = dict[str, Any]
"""The keyword arguments of `torch.utils.checkpoint.checkpoint`, but `use_reentrant`."""

_GENERATORS: Final = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""What `checkpoint(..., use_reentrant=False)` runs around a call, its latest name first: in torch 2.14.1 it takes the
call's arguments as a tuple and a dict, and settings by keyword; until 2.13 settings and then the positional arguments.
Where both exist, the second only calls the first."""


# --- a checkpoint enters our region -----------------------------------------------------------------------------------


def _entered(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: _Settings
) -> _Generator:
    """Let a call of `function` run inside our region."""
    if (microbatch := microbatch_between_units()) is not None:
        # See [Note: checkpoints around several ranks].
        outer, microbatch.unit_wrapper = microbatch.unit_wrapper, functools.partial(_recomputed, settings)
        try:
            yield
        finally:
            microbatch.unit_wrapper = outer
        return
    early_stop = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
    modules, name = _module_and_name(function)
    with checkpointing(
        function,
        modules,
        args,
        kwargs,
        name,
        preserve_rng_state=settings["preserve_rng_state"],
        contexts=_contexts(settings),
        stops_early=settings.get("early_stop", True) if early_stop is None else early_stop,
        compares=_compares(settings),
        norms=[] if modules else _norms_in(function),
    ):
        yield


def _contexts(settings: _Settings) -> Any:
    context_fn = settings.get("context_fn", torch_checkpoint.noop_context_fn)
    if settings.get("debug"):
        warn_user("debug=True of torch.utils.checkpoint has no effect: errors name the layer and the tensor without it")
    if settings.get("respect_saved_tensors_hooks"):
        raise UsageError(
            "respect_saved_tensors_hooks=True of torch.utils.checkpoint is not served here",
            hint="leave it out: what a policy saves stays where it is, and what it offloads leaves for the host",
        )
    if context_fn is not torch_checkpoint.noop_context_fn and not _serves_policies():
        raise UsageError(
            f"selective checkpointing of torch {torch.__version__} is not known here, and its offload policies would be"
            " ignored",
            hint="torch 2.11 to 2.14 are; or leave context_fn out",
        )
    return context_fn()


def _compares(settings: _Settings) -> bool:
    check = settings.get("determinism_check", "default")
    if check not in ("default", "none"):
        raise ValueError(f"determinism_check should be one of ['default', 'none'], but got {check}")
    return bool(check == "default")


_entering: Final = contextlib.contextmanager(_entered)


def _recomputed(settings: _Settings, original: OriginalCall) -> OriginalCall:
    """Return a call that is recomputed in backward, with the settings of the torch.utils.checkpoint around it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _entering(original, args, kwargs, settings):
            return original(*args, **kwargs)

    return run


def _generator_in_place_of(name: str, original: Callable[..., _Generator]) -> Callable[..., _Generator]:
    """Return the replacement of torch's generator."""
    parameters = inspect.signature(original).parameters.values()
    names = [param.name for param in parameters if param.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]

    def until_2_13(function: Callable[..., Any], *positional: Any, **kwargs: Any) -> _Generator:
        if torch.compiler.is_compiling():
            return original(function, *positional, **kwargs)
        settings = dict(zip(names, positional, strict=False))
        return _entered(function, positional[len(names) :], kwargs, settings)

    def since_2_14(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any
    ) -> _Generator:
        if torch.compiler.is_compiling():
            return original(function, args, kwargs, **settings)
        return _entered(function, args, kwargs, settings)

    return since_2_14 if name == _GENERATORS[0] else until_2_13


class _Checkpoint(torch_checkpoint.CheckpointFunction):
    """Replaces torch's class, of which `torch.utils.checkpoint` calls `apply`; others may derive from it."""

    @classmethod
    def apply(cls, function: Any, *args: Any) -> Any:
        if cls is not _Checkpoint:
            return super().apply(function, *args)  # type: ignore[no-untyped-call]
        preserve_rng_state, *rest = args
        return torch_checkpoint.checkpoint(function, *rest, use_reentrant=False, preserve_rng_state=preserve_rng_state)


# --- selective checkpointing: see [Note: policies that offload] -------------------------------------------------------


class _LastPolicy(threading.local):
    """What the policy returned for the operator that has just run."""

    region: Any = None
    """With which the output is parked; None: it is not."""
    must_leave: str | None = None


_last_policy: Final = _LastPolicy()
_torch_wrapper: Final[Any] = getattr(torch_checkpoint, "_VersionWrapper", None)
_torch_forward_mode: Final[Any] = getattr(torch_checkpoint, "_CachingTorchDispatchMode", object)
_torch_backward_mode: Final[Any] = getattr(torch_checkpoint, "_CachedTorchDispatchMode", object)


def _offloads(policy: object) -> bool:
    return policy is CheckpointPolicy.MUST_CPU_OFFLOAD or policy is CheckpointPolicy.PREFER_CPU_OFFLOAD


class _ForwardMode(_torch_forward_mode):  # type: ignore[misc]
    """Torch's mode for the forward; notes what the policy returns."""

    _region: Any = None
    """The call around which it is; another checkpoint may run inside."""

    def __init__(self, policy_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def noting(context: Any, operator: Any, *values: Any, **options: Any) -> Any:
            policy = policy_fn(context, operator, *values, **options)
            _last_policy.region = self._region if _offloads(policy) else None
            if _last_policy.region is not None and _is_view(operator):
                _last_policy.region = None
                return CheckpointPolicy.PREFER_RECOMPUTE
            _last_policy.must_leave = str(operator) if policy is CheckpointPolicy.MUST_CPU_OFFLOAD else None
            return CheckpointPolicy.MUST_SAVE if _last_policy.region is not None else policy

        super().__init__(noting, *args, **kwargs)
        # Since 2.14 torch looks for hooks of the user's around a checkpoint, and would take our region's for those.
        self.respect_saved_tensors_hooks = False

    def __enter__(self) -> Any:
        self._region = recording.region
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._region = _last_policy.region = None  # which holds this very mode
        super().__exit__(*error)


class _BackwardMode(_torch_backward_mode):  # type: ignore[misc]
    """Torch's mode for backward. In torch 2.11 it asks the policy again, which must save what is parked."""

    def __init__(self, policy_fn: Callable[..., Any] | None, storage: Any, *args: Any, **kwargs: Any) -> None:
        def saving(context: Any, operator: Any, *values: Any, **options: Any) -> Any:
            assert policy_fn is not None
            policy = policy_fn(context, operator, *values, **options)
            return CheckpointPolicy.MUST_SAVE if _offloads(policy) and operator in storage else policy

        super().__init__(policy_fn and saving, storage, *args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _is_view(operator: Any) -> bool:
    returns = getattr(getattr(operator, "_schema", None), "returns", ())
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


class _ParkedOutput:
    """Stands for a saved tensor; has the method that torch's mode for backward calls."""

    def __init__(self, take: Callable[[], Tensor]) -> None:
        self._take = take

    def get_val(self, _allow_cache_entry_mutation: bool) -> Tensor:
        return self._take()


def _wrapper(value: Any) -> Any:
    """Return what torch keeps of a value that is saved: in place of its `_VersionWrapper`."""
    if _last_policy.region is None or not isinstance(value, Tensor):
        return _torch_wrapper(value)
    return _ParkedOutput(_last_policy.region.park_output(value, _last_policy.must_leave))


@functools.lru_cache(maxsize=1)
def _serves_policies() -> bool:
    """Return whether a policy that offloads comes through, in this version of torch: try it on two numbers."""
    parked: list[Tensor] = []

    def park_output(tensor: Tensor, _must_leave: str | None) -> Callable[[], Tensor]:
        parked.append(tensor)
        return lambda: tensor

    outer, recording.region = recording.region, SimpleNamespace(park_output=park_output)  # type: ignore[assignment]
    contexts: Any = torch_checkpoint.create_selective_checkpoint_contexts
    try:
        forward, backward = contexts(lambda *_, **__: CheckpointPolicy.PREFER_CPU_OFFLOAD)
        ones = torch.ones(2, device="cpu")
        with forward:
            torch.neg(ones)
        with backward:
            again = torch.neg(ones)
        serves = len(parked) == 1 and again is parked[0]
    except Exception:  # whatever is different in that torch: the caller refuses it by name
        return False
    finally:
        recording.region = outer
    if serves:
        _log.info("smpkit copies what policies of torch's checkpoint offload: torch's own ways do not take part")
    return serves


def patch_torch_checkpoint() -> None:
    """Replace what is named above in torch.utils.checkpoint, for the life of this process."""
    if torch_checkpoint.CheckpointFunction is _Checkpoint:
        return
    for name in _GENERATORS:
        if (original := getattr(torch_checkpoint, name, None)) is not None:
            setattr(torch_checkpoint, name, _generator_in_place_of(name, original))
            break
    torch_checkpoint.CheckpointFunction = _Checkpoint  # type: ignore[misc]
    if _torch_wrapper is not None:
        torch_checkpoint._VersionWrapper = _wrapper  # type: ignore[assignment, misc]
        torch_checkpoint._CachingTorchDispatchMode = _ForwardMode  # type: ignore[misc]
        torch_checkpoint._CachedTorchDispatchMode = _BackwardMode  # type: ignore[misc]


def _module_and_name(function: Callable[..., Any]) -> tuple[list[nn.Module], str]:
    """Return the module that a function calls, and its path; if none can be found, the function's own name."""
    called, arguments = (function.func, function.args) if isinstance(function, functools.partial) else (function, ())
    for candidate in (called, *arguments[:1], getattr(called, "__self__", None)):
        if isinstance(candidate, nn.Module):
            return [candidate], name_of(candidate)
    return [], getattr(called, "__qualname__", type(called).__name__)


def _norms_in(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the norms that a function inside another one may call, as torch's `checkpoint_sequential` makes them."""
    cells, held = getattr(function, "__closure__", None) or (), list[Any](getattr(function, "__defaults__", None) or ())
    for cell in cells:
        with contextlib.suppress(ValueError):  # the variable has no value yet
            held.append(cell.cell_contents)
    roots = [root for value in held for root in (value if isinstance(value, list | tuple) else [value])]
    modules = all_modules(root for root in roots if isinstance(root, nn.Module))
    return [module for module in modules if isinstance(module, _NormBase) and module.training]
