"""Give a distributed module the weights of the one whose place it takes, without ever holding two whole models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from smpkit.errors import UsageError
from smpkit.torch.partitioning.delayed import initial_values, initialize, is_delayed, set_initializer
from smpkit.torch.state import state
from smpkit.torch.tensor_parallel.agreement import ModelComparison
from smpkit.torch.tensor_parallel.module import global_shape, load_shard
from smpkit.torch.tensor_parallel.registry import Translation

__all__ = ["load_replacement_weights"]


def load_replacement_weights(
    root: nn.Module,
    name: str,
    module: nn.Module,
    replacement: nn.Module,
    translation: Translation | None,
    comparison: ModelComparison,
) -> None:
    """Fill `replacement` with this rank's pieces of what `module` has, or of what it would be initialised with.

    Where `module` has no memory yet, `replacement` gets its own when the model is placed. Without a translation it is
    initialised by itself.

    Args:
        root: the model, `name` that of `module` in it.
    """
    source = _OriginalState(root, name, module, comparison.seed)
    is_delayed_source = source.is_delayed
    if translation is not None:

        def fill(wanted: Collection[int], device: torch.device) -> None:
            source.device = device
            _load_shards(replacement, source, translation, wanted, comparison)

        set_initializer(replacement, fill)
    if not is_delayed_source:
        parameters = list(replacement.parameters())
        device = next((each.device for each in module.parameters()), state.device)
        initialize(replacement, parameters, device, comparison.seed)


def _load_shards(
    replacement: nn.Module,
    source: _OriginalState,
    translation: Translation,
    wanted: Collection[int],
    comparison: ModelComparison,
) -> None:
    """Fill those parameters (by id) of a distributed module that are wanted, one after the other, and its buffers.

    Raises:
        UsageError: the translation makes a name or a shape that the distributed module has not.
    """
    own_tensors: dict[str, torch.Tensor] = dict(replacement.named_parameters(remove_duplicate=False))
    saved = replacement.state_dict(keep_vars=True)
    own_tensors.update({name: buffer for name, buffer in replacement.named_buffers() if name in saved})
    done: set[int] = set()
    for name, made in translation(source, replacement):
        tensor = own_tensors.get(name)
        if tensor is None:
            raise UsageError(f"a translation made `{name}`, which {type(replacement).__name__} does not have")
        if id(tensor) in done or (isinstance(tensor, nn.Parameter) and id(tensor) not in wanted):
            continue
        whole = made() if callable(made) else made
        if whole.shape != global_shape(tensor):
            raise UsageError(
                f"a translation made `{name}` of {type(replacement).__name__} {list(whole.shape)},"
                f" not {list(global_shape(tensor))}"
            )
        _load(tensor, comparison.first(whole), source.device)
        done.add(id(tensor))


def _load(tensor: torch.Tensor, whole: torch.Tensor, device: torch.device) -> None:
    load_shard(tensor, whole)
    if tensor.device != device:
        tensor.data = tensor.data.to(device)


class _OriginalState(Mapping[str, torch.Tensor]):
    """The state dict of a module that is to be replaced; weights without memory are made anew when asked for."""

    def __init__(self, root: nn.Module, name: str, module: nn.Module, seed: int) -> None:
        self.device = state.device
        self._root = root
        self._seed = seed
        self._values: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        self._owners: dict[int, tuple[str, nn.Module]] = {}
        for owner_name, owner in module.named_modules(prefix=name):
            for parameter in owner.parameters(recurse=False):
                self._owners.setdefault(id(parameter), (owner_name, owner))
        self._last: dict[int, torch.Tensor] = {}

    @property
    def is_delayed(self) -> bool:
        """Whether a weight has no memory yet."""
        return any(is_delayed(each) for each in self._values.values())

    def __getitem__(self, key: str) -> torch.Tensor:
        value = self._values[key]
        if is_delayed(value):
            return self._initialized(value)
        return value.detach()

    def _initialized(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return what a parameter is initialised with; those of one module are made together and kept till the next."""
        name, owner = self._owners[id(parameter)]
        if id(parameter) not in self._last:
            values = initial_values(self._root, name, owner, self.device, self._seed)
            own = dict(owner.named_parameters(recurse=False))
            self._last = {id(own[key]): value for key, value in values.items()}
        return self._last[id(parameter)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
