"""Make a model without memory for its weights; each rank allocates and initialises its own part later.

Inside `smp.delay_param_initialization()` a parameter has its shape over a single element, and initialising it does
nothing. When the model is placed, a rank allocates what it holds and runs the initialisation of those modules: the
`_init_weights` of a Hugging Face model, or `reset_parameters`, each under random numbers keyed by the module's name, so
weights do not depend on the partition.

A checkpoint that is loaded before the partition waits for it too (`defer_load`): only then does a rank know its part.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.placement.shards import keep_attributes_in_copies, shard_of, take_shard

_DELAYED: Final = "_smpkit_delayed"
_HALF: Final = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create modules in this block without memory for their parameters (the context of the same name in SMP v1).

    Buffers are made as ever. The parameters get memory and values when the model is wrapped, or with a pipeline when it
    is partitioned: each rank makes its own only. What is loaded before (`load_state_dict`, `from_pretrained`) takes
    memory at once, on each rank. A module whose parameters are not initialised by a `reset_parameters()` of its own or
    the model's `_init_weights(module)` cannot be made this way.
    """
    if not enabled:
        yield
        return
    original_register = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        before = self._parameters.get(name)
        original_register(self, name, param)
        if param is None or is_delayed(param):
            return
        if before is not None and not _is_placeholder(param) and not param.is_meta:
            return  # loaded: `from_pretrained` and `load_state_dict(assign=True)` put another parameter there
        param.data = _without_memory(param)
        setattr(param, _DELAYED, True)
        keep_attributes_in_copies(param)
        loading = functools.partial(_give_memory, name)
        self.register_load_state_dict_pre_hook(loading)  # type: ignore[no-untyped-call]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with _SkipInitialization():
            yield
    finally:
        nn.Module.register_parameter = original_register  # type: ignore[method-assign]


def _give_memory(name: str, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Let a delayed parameter take what is loaded into its module, inside of the block and afterwards."""
    parameter = module._parameters.get(name)
    if prefix + name in state and parameter is not None and is_delayed(parameter):
        set_delayed_value(parameter, parameter)


def make_delayed(root: nn.Module) -> None:
    """Make the parameters of a model delayed, to plan it: tensor parallelism can then divide them without memory."""

    @functools.cache  # tied ones stay tied
    def delayed(parameter: nn.Parameter) -> nn.Parameter:
        placeholder = nn.Parameter(_without_memory(parameter), requires_grad=parameter.requires_grad)
        vars(placeholder).update(vars(parameter))
        setattr(placeholder, _DELAYED, True)
        return placeholder

    for module in root.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        module._parameters.update({name: delayed(param) for name, param in own.items()})


def _without_memory(parameter: nn.Parameter) -> torch.Tensor:
    # NaN, so that `refuse_unset_values` finds what a script computes from it.
    value = torch.nan if parameter.is_floating_point() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def refuse_unset_values(root: nn.Module) -> None:
    """Refuse parameters whose values were computed from those of delayed ones, which have none yet.

    A head that `resize_token_embeddings` has made longer, say: it would be trained from what lay in memory.
    """
    parameters = dict(root.named_parameters())
    if not any(map(is_delayed, parameters.values())):
        return
    for name, param in parameters.items():
        if not is_delayed(param) and param.is_floating_point() and param.isnan().any():
            raise UsageError(
                f"`{name}` was computed from parameters that have no values yet",
                hint="compute it (`resize_token_embeddings`, say) in the block that delays initialisation, too",
            )


def is_delayed(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter has no memory yet."""
    return getattr(parameter, _DELAYED, False)


def allocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Give a delayed parameter memory for this rank's piece; the caller writes the values."""
    shard = shard_of(parameter)
    shape = parameter.shape if shard is None else shard.local_shape
    parameter.data = torch.empty(shape, dtype=parameter.dtype, device=device)
    setattr(parameter, _DELAYED, False)


def set_delayed_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a delayed parameter its memory and the values of a state dict."""
    parameter.data = value.detach().to(parameter.dtype).clone()
    setattr(parameter, _DELAYED, False)


def initialize(
    root: nn.Module, parameters: list[nn.Parameter], device: torch.device, seed: int, prefix: str = ""
) -> None:
    """Allocate and initialise the delayed ones of `parameters` on `device`.

    One seed gives one model at every degree: of a parameter that is divided over tensor-parallel ranks, the whole is
    initialised for a moment. Half precision is initialised in float32 and rounded, because not every initialiser
    supports it.

    Args:
        prefix: the name of `root` in the model: modules of other names draw other numbers.
    """
    pending = {id(parameter): parameter for parameter in parameters if is_delayed(parameter)}
    for name, module in root.named_modules(prefix=prefix):
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) in pending]
        _initialize_own(root, name, module, own, device, seed)
        for parameter in own:
            shard = shard_of(pending.pop(id(parameter)))
            if shard is not None and parameter.shape != shard.local_shape:  # freed before the next module's are made
                parameter.data = take_shard(parameter.data, shard)


def _initialize_own(
    root: nn.Module, name: str, module: nn.Module, own: Sequence[nn.Parameter], device: torch.device, seed: int
) -> None:
    """Allocate a module's own parameters, whole unless it initialises pieces itself, and initialise them."""
    if not own:
        return
    pieces = getattr(type(module), "initializes_shards", False)
    dtypes = [parameter.dtype for parameter in own]
    for parameter in own:
        shard = shard_of(parameter)
        shape = parameter.shape if shard is None or pieces else shard.shape
        dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
        parameter.data = torch.empty(shape, dtype=dtype, device=device)
        setattr(parameter, _DELAYED, False)
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)  # what an initialiser leaves out stays NaN, which is checked below
    for initializer in _initializers(root, module, own_only=pieces):
        with devices.fork_rng(device), _keeping_others(module, own):
            # crc32, not hash(), which differs between processes for the same string.
            torch.manual_seed((seed + zlib.crc32(name.encode())) % (1 << 63))
            initializer()
        if not any(parameter.is_floating_point() and parameter.isnan().any() for parameter in own):
            for parameter, dtype in zip(own, dtypes, strict=True):
                parameter.data = parameter.data.to(dtype)
            return
    kind, ids = type(module).__name__, {id(parameter) for parameter in own}
    names = " and ".join(f"`{key}`" for key, param in module._parameters.items() if id(param) in ids)
    raise UsageError(
        f"nothing says how to initialise {names} of `{name}` ({kind})",
        hint=f"define a function that sets these of a module, and say `{kind}.reset_parameters = function` before"
        " smp.DistributedModel, or make the model outside smp.delay_param_initialization()",
    )


def _initializers(root: nn.Module, module: nn.Module, *, own_only: bool) -> Iterator[Callable[[], Any]]:
    """Yield what may initialise a module's own parameters: `_init_weights` first, which may not know the class."""
    for owner in () if own_only else (root, *root.children()):
        init_weights = getattr(owner, "_init_weights", None)
        if callable(init_weights):
            yield functools.partial(init_weights, module)
            break
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield reset


@contextlib.contextmanager
def _keeping_others(module: nn.Module, own: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keep a module's buffers, and its parameters apart from `own`, all of which `reset_parameters` sets.

    They may have been loaded, as the statistics of BatchNorm or one of two weights, or be another module's, too.
    """
    ids = {id(parameter) for parameter in own}
    kept = [(name, buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None]
    others = [(param, param.data.clone()) for param in module.parameters(recurse=False) if id(param) not in ids]
    yield
    for name, buffer, value in kept:
        module._buffers[name] = buffer.copy_(value)
    for parameter, value in others:
        parameter.data.copy_(value)


class _SkipInitialization(TorchFunctionMode):
    """Skips operations in place on delayed parameters: all elements are one in memory, which torch refuses to write."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        target = args[0] if args else (kwargs or {}).get("tensor")
        name = getattr(func, "__name__", "")
        changes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if changes and isinstance(target, torch.Tensor) and _is_placeholder(target):
            return target
        return func(*args, **(kwargs or {}))


def _is_placeholder(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is (a view of) a parameter without memory: more elements than its storage has."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return bool(strides) and not any(strides)


# --- loads that wait for the partition --------------------------------------------------------------------------------
# Should a script ask for the state before the partition, all of it is read then.


_deferred: list[Callable[[], object]] = []


def defer_load(read: Callable[[], object]) -> None:
    """Put off calling `read` until `run_deferred_loads`."""
    _deferred.append(read)


def run_deferred_loads() -> None:
    """Call the loads that wait, in the order in which they were deferred."""
    while _deferred:
        _deferred.pop(0)()


def drop_deferred_loads() -> None:
    """Drop the loads that wait: something else is loaded instead."""
    _deferred.clear()


state.reset_hooks.append(drop_deferred_loads)
