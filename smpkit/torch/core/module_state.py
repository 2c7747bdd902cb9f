"""What a call of modules reads and changes besides its arguments, so that backward can run the call again.

A recomputation must find everything as the first run did, and leave it as it finds it. Arguments, autocast and the
default random generators are the caller's business; here is what lies on the modules themselves:

==================  ==================================================================================================
`training`          of each module; also other simple attributes (`Dropout.p`, a counter)
buffers             which there are (None, registered late), and their contents
weights             which there are (`torch.func.functional_call`), and the contents of those that forward writes to
modules             which are where; what a first call makes stays for its recomputation
attributes          tensors (a mask that the caller has put there), and lists, dicts, tuples and sets of such values
generators          `torch.Generator` attributes: their states
==================  ==================================================================================================

[Note: who copies what] Only what forward writes to in place must be copied before it, and nearly nothing is. A write
changes a tensor's version, but it is then too late for a copy. So a call copies what earlier calls of that module have
written to. The first calls in a *configuration* (training mode and simple attributes) copy everything and compare it
afterwards, which also finds writes that leave the version alone: `.data`, NumPy, operations in C++. Of small buffers
one copy per version is kept, for a write that comes after many calls without one. A large tensor that is written to
for the first time in a known configuration cannot be had back: the recomputation refuses, and the next call copies.

The only modules of torch that write without a new version are the batch norms (`native_batch_norm` and its variants for
devices have no alias annotation for running statistics; instance norms and spectral norms do change the version). In
training their output does not depend on the statistics, so recomputation gets copies to update and drop. In evaluation
`num_batches_tracked`, which has a version, tells whether the statistics are still those of the call.

What most modules have is compared at once, see [Note: steady modules] in `steady_modules.py`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from smpkit.errors import UsageError
from smpkit.torch.core.steady_modules import Layout, PlainAttributes
from smpkit.torch.core.tensor_spec import version_of

__all__ = ["FIRST_CALLS", "ModuleState"]

_COMMON: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has; `training`, which may change, is saved by itself."""
_SIMPLE: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout}
)
"""Types whose values cannot change. Objects of other types are the user's, too expensive to copy."""
_CONTAINERS: Final = frozenset({list, tuple, dict, set, deque, OrderedDict, defaultdict})
_MOST_ITEMS: Final = 256
"""Larger containers are left alone: a list that grows with every call would cost more with every call."""
_MOST_CONFIGURATIONS: Final = 16
"""Of a module with more of them (it has a counter) only the training mode counts."""
FIRST_CALLS: Final = 3
"""So many calls in a configuration compare: one alone may happen to write what was there."""
_SMALL_BYTES: Final = 64 << 10


class _History:
    """What the calls of one module have shown so far."""

    def __init__(self) -> None:
        self.written: dict[Any, set[str]] = {}
        """By configuration: the tensors that a call has written to in place."""
        self.num_calls: dict[Any, int] = {}
        """By configuration, up to `FIRST_CALLS`."""
        self.is_silent = False
        """Whether a call has written to buffers or attributes without changing their version."""
        self.has_silent_weights = False
        """Whether one has written so to weights."""
        self.copies: dict[str, tuple[weakref.ref[Tensor], Any, Tensor]] = {}
        """Small tensors: of which one, of which version, and its content."""
        self.num_writes: dict[str, int] = {}
        """By how much calls have raised the version of a weight."""
        self.plain: PlainAttributes | None = None
        """The attributes at the latest call, if their values cannot change."""


_histories: Final[weakref.WeakKeyDictionary[nn.Module, _History]] = weakref.WeakKeyDictionary()
_layouts: Final[weakref.WeakKeyDictionary[nn.Module, Layout]] = weakref.WeakKeyDictionary()
"""By the first root of a call. Empty again whenever calls show something new about writes."""
_wrappers: Final[weakref.WeakKeyDictionary[type[nn.Module], bool]] = weakref.WeakKeyDictionary()


class _Cell:
    """A tensor on a module, at the time of a call; several attributes may share it."""

    # Defaults of the class: a call makes a cell per weight, and few of them are written to.
    stamp: Any = None
    """Of the content, where the version alone does not tell whether it has changed."""
    content: Tensor | None = None
    """A copy; None if recomputation does not need one."""
    placeholder: Any = None
    """Of the tensor or its copy, if somebody else keeps it."""
    written: set[str]
    """The tensors that calls in this configuration write to; set where the forward may write to this one."""
    is_compared = False
    """Whether the content was copied only to see whether it changes."""
    is_written = False
    is_lost = False
    """Whether it was written to in place, and there is no copy."""
    is_statistic = False
    """Whether it does not affect the output: recomputation writes to a copy of what it finds."""
    is_weight = False
    is_normed = False
    """Whether it is the table of an embedding that scales rows in forward."""
    num_writes = 0

    def __init__(self, owner: str, name: str, value: Tensor, history: _History) -> None:
        self.owner, self.name, self.history = owner, name, history
        self.value: Tensor | None = value
        self.version = self.version_after = version_of(value)

    @property
    def is_silent(self) -> bool:
        """Whether calls may write to it without changing its version."""
        if self.is_statistic or self.is_normed:
            return False
        return self.history.has_silent_weights if self.is_weight else self.history.is_silent

    @property
    def label(self) -> str:
        return f"`{self.name}` of a {self.owner}"


class _Copied:
    """A container at the time of a call."""

    __slots__ = ("items", "keys", "make")

    def __init__(self, make: Callable[[Any], Any], keys: list[Any] | None, items: list[Any]) -> None:
        self.make, self.keys, self.items = make, keys, items


class _Saved:
    """A module at the time of a call."""

    __slots__ = (
        *("attributes", "buffers", "children", "is_built", "left", "module"),
        *("is_steady", "names", "parameters", "plain", "training"),
    )

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.training = module.training
        self.attributes: dict[str, Any] = {}
        """Simple values; `_Cell` for tensors, `_Copied` for containers."""
        self.buffers: dict[str, _Cell | None] | None = None
        self.parameters: dict[str, _Cell] = {}
        self.children: dict[str, nn.Module | None] = {}
        self.names: frozenset[str] | None = None
        """Of all attributes; None: those of the module are left as they are."""
        self.plain: PlainAttributes | None = None
        """All attributes, if their values cannot change."""
        self.is_built = False
        """Whether the call has made parts of the module: it can be repeated with these only."""
        self.is_steady = False
        """Whether a `Layout` can compare it the next time."""
        self.left: dict[str, Any] | None = None
        """The modules and weights that the call has left, if it has put others in place of those that it found."""

    def parts(self) -> dict[str, Any]:
        """Return the modules and weights that the call has found."""
        return {**self.children, **{name: cell.value for name, cell in self.parameters.items()}}


class ModuleState:
    """What the modules of one call read besides their arguments.

    Made before the call; `end_forward` follows it, and each recomputation runs in `restored`.

    Args:
        modules: the roots of what is called.
        keep: returns a placeholder for a tensor that somebody else keeps until backward; called for each tensor that is
            a plain attribute. None: this object keeps it.
        generators: whether the modules' own generators must draw the same numbers again.
        overwrite_weights: write earlier contents to the memory of weights, which others have used meanwhile, instead
            of putting other parameters in their place; then nobody checks that they are the same as in forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        keep: Callable[[Tensor], Any] | None = None,
        *,
        generators: bool = True,
        overwrite_weights: bool = False,
    ) -> None:
        self._keep = keep
        self._overwrites_weights = overwrite_weights
        self._wants_generators = generators
        self._has_data = not torch._C._len_torch_dispatch_stack() or type(torch.empty(0, device="cpu")) is Tensor
        """Whether there is no FakeTensorMode around the call: what it makes could neither be compared nor kept."""
        self._generators: dict[torch.Generator, Tensor] = {}
        self._cells: dict[int, _Cell] = {}
        """By id of the tensor; all live until `end_forward`."""
        self._containers: dict[int, _Copied] = {}
        self._roots = modules
        self._layout = _layouts.get(modules[0]) if self._has_data else None
        self._reading = None if self._layout is None else self._layout.read(modules)
        """Of the steady modules; all others are in `_saved`."""
        if self._layout is not None and self._reading is not None:
            everything = self._reading.modules
            self._saved = [self._save(module) for module in self._layout.others(everything)]
        else:
            everything = _all_modules(modules)
            self._saved = [self._save(module) for module in everything]
        self._note_steady(everything)
        self._containers.clear()
        self._keep = None  # a method of who holds this object: no cycle, which would keep tensors until it is collected

    # --- before the forward ------------------------------------------------------------------------------------------

    def _note_steady(self, everything: Sequence[nn.Module]) -> None:
        """Have more modules compared at once the next time, if there are more that can be."""
        found = {id(saved.module): saved.plain for saved in self._saved if saved.is_steady and saved.plain is not None}
        if not found or not self._has_data:
            return
        if self._layout is not None and self._reading is not None:
            known = zip(everything, self._layout.plains, strict=True)
            found |= {id(module): plain for module, plain in known if plain is not None}
        _layouts[self._roots[0]] = Layout(self._roots, everything, found)

    def _look_closer(self) -> None:
        """Take what the layout has read for what is saved of each module: something differs now."""
        layout, reading, self._reading = self._layout, self._reading, None
        if layout is None or reading is None:
            return
        versions = iter(reading.versions)
        for module, plain, parts in layout.steady(reading):
            saved, history = _Saved(module), _histories[module]
            saved.training, saved.plain = plain.training, plain
            saved.attributes, saved.names = plain.simple, plain.names
            saved.buffers = {}
            visit = _Visit(module, history, has_data=True)
            visit.configure(plain.training)
            for name, part in parts.items():
                if isinstance(part, nn.Module):
                    saved.children[name] = part
                elif part is not None:
                    saved.parameters[name] = cell = self._cells.setdefault(
                        id(part), _Cell(visit.owner, name, part, history)
                    )
                    cell.version = cell.version_after = next(versions)
                    cell.num_writes = history.num_writes.get(name, 0)
                    cell.is_weight, cell.written = True, visit.written
            self._saved.append(saved)

    def _save(self, module: nn.Module) -> _Saved:
        saved = _Saved(module)
        if isinstance(module, torch.jit.ScriptModule) or _is_wrapper(type(module)):
            return saved
        if _has_lazy(module):
            saved.is_built = True
            return saved
        history = _histories.get(module)
        if history is None:
            history = _histories[module] = _History()
        saved.buffers = {}
        others = self._save_attributes(saved, history)
        if module._modules:
            saved.children = dict(module._modules)
        saved.is_steady &= not module._buffers and None not in saved.children.values()
        if not (others or module._buffers or module._parameters):
            return saved
        visit = _Visit(module, history, has_data=self._has_data)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                saved.parameters[name] = self._weight(name, parameter, visit)
        if others or module._buffers:
            visit.configure((saved.training, frozenset(saved.attributes.items())), (saved.training,))
        for name, buffer in module._buffers.items():
            saved.buffers[name] = None if buffer is None else self._buffer(name, buffer, visit)
        for name, value in others:
            saved.attributes[name] = self._copied(name, value, visit)
        if visit.is_normed:
            # Its forward has scaled these rows in the weight. Running it again would scale them once more, by a
            # rounding error; without `max_norm` it returns what the forward has returned.
            saved.attributes, saved.plain = {**saved.attributes, "max_norm": None}, None
        saved.is_steady &= (
            not (visit.is_new or visit.written or history.has_silent_weights)
            and saved.plain is not None
            and all(type(cell.value) is nn.Parameter for cell in saved.parameters.values())
        )
        return saved

    def _save_attributes(self, saved: _Saved, history: _History) -> list[tuple[str, Any]]:
        """Save attributes that cannot change, and generators; return tensors and containers."""
        attributes, plain = vars(saved.module), history.plain
        if plain is not None and plain.are(attributes):
            saved.plain, saved.names, saved.attributes = plain, plain.names, plain.simple
            saved.is_steady = True
            return []
        saved.names = frozenset(attributes)
        own = attributes.keys() - _COMMON
        others = []
        for name in own:
            value = attributes[name]
            kind = type(value)
            if kind in _SIMPLE or (kind is tuple and all(type(item) in _SIMPLE for item in value)):
                saved.attributes[name] = value
            elif isinstance(value, Tensor) or (kind in _CONTAINERS and _count(value, _MOST_ITEMS) >= 0):
                others.append((name, value))
            elif kind is torch.Generator:
                self._note_generator(value)
        if len(saved.attributes) == len(own):
            saved.plain = history.plain = PlainAttributes(attributes, saved.attributes)
        return others

    def _note_generator(self, generator: torch.Generator) -> None:
        if self._wants_generators and generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def _weight(self, name: str, parameter: Tensor, visit: _Visit) -> _Cell:
        cell = self._cells.get(id(parameter))
        if cell is None:
            cell = self._cells[id(parameter)] = _Cell(visit.owner, name, parameter, visit.history)
            visit.configure(visit.module.training)
            cell.is_weight = True
            cell.is_normed = visit.is_normed
            self._copy(cell, visit)
        return cell

    def _buffer(self, name: str, buffer: Tensor, visit: _Visit) -> _Cell:
        cell = self._cells.get(id(buffer))
        if cell is not None:
            return cell
        cell = self._cells[id(buffer)] = _Cell(visit.owner, name, buffer, visit.history)
        module = visit.module
        if isinstance(module, _NormBase):
            if module.training and not _is_custom(module):
                cell.is_statistic = True
                return cell
            count = module.num_batches_tracked
            cell.stamp = object() if count is None else version_of(count)
        if not self._copy(cell, visit) and buffer.nbytes <= _SMALL_BYTES:
            cell.content = self._shared_copy(cell, visit, is_new=True)
        return cell

    def _attribute(self, name: str, tensor: Tensor, visit: _Visit) -> _Cell:
        cell = self._cells.get(id(tensor))
        if cell is not None:
            return cell
        cell = self._cells[id(tensor)] = _Cell(visit.owner, name, tensor, visit.history)
        if not self._copy(cell, visit) and tensor.nbytes <= _SMALL_BYTES:
            cell.content = self._shared_copy(cell, visit, is_new=False)
        if self._keep is not None:  # a copy if the forward may write to it
            cell.placeholder = self._keep(tensor if cell.content is None else cell.content)
        return cell

    def _copied(self, name: str, value: Any, visit: _Visit) -> Any:
        """Return what stands for an attribute, or for an item of a container."""
        kind = type(value)
        if isinstance(value, Tensor):
            return value if isinstance(value, nn.Parameter) else self._attribute(name, value, visit)
        if kind is torch.Generator:
            self._note_generator(value)
        if kind not in _CONTAINERS:
            return value
        known = self._containers.get(id(value))
        if known is not None:
            return known
        is_dict = isinstance(value, dict)
        pairs = value.items() if is_dict else enumerate(value)
        items = [self._copied(f"{name}[{key!r}]", item, visit) for key, item in pairs]
        made = self._containers[id(value)] = _Copied(_maker(value), list(value) if is_dict else None, items)
        return made

    def _copy(self, cell: _Cell, visit: _Visit) -> bool:
        """Copy a tensor if the forward may write to it; return whether it was copied."""
        cell.written = visit.written
        if not (visit.is_new or cell.name in cell.written or cell.is_silent):
            return False
        assert cell.value is not None
        # Of sharded weights, which others gather and free, there are no copies.
        if cell.is_weight and (cell.is_normed or not _is_comparable(cell.value)):
            return False
        # Nor of large weights in case: hardly a forward writes to any, and the copies could fill the device.
        in_case = cell.name not in cell.written and not cell.is_silent
        if cell.is_weight and in_case and cell.value.nbytes > _SMALL_BYTES:
            return False
        cell.is_compared = visit.is_new
        cell.content = _clone(cell.value)
        return True

    def _shared_copy(self, cell: _Cell, visit: _Visit, *, is_new: bool) -> Tensor | None:
        """Return the copy of a small tensor that calls share as long as it does not change.

        Args:
            is_new: whether to copy a tensor that earlier calls have not seen.
        """
        value = cell.value
        assert value is not None
        known = visit.history.copies.get(cell.name)
        if known is not None and known[0]() is value:
            if known[1] == (cell.version, cell.stamp):
                return known[2]
        elif not is_new:
            return None
        content = _clone(value)
        if not self._has_data:
            return content
        visit.history.copies[cell.name] = (weakref.ref(value), (cell.version, cell.stamp), content)
        return content

    # --- after the forward -------------------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """Note which tensors the call has written to, and drop the copies of the others."""
        if self._reading is not None and not self._reading.is_unchanged():
            self._look_closer()
        for cell in self._cells.values():
            assert cell.value is not None
            cell.version_after = version_of(cell.value)
            cell.is_written = cell.version_after != cell.version
            if not cell.is_written and cell.is_compared and cell.content is not None and _is_comparable(cell.value):
                cell.is_written = not torch.equal(cell.value, cell.content)
                # Of all the module's buffers: another one may happen to have got the content that it had.
                cell.history.is_silent |= cell.is_written and not cell.is_weight
                cell.history.has_silent_weights |= cell.is_written and cell.is_weight
                if cell.is_written:
                    _layouts.clear()
        for cell in self._cells.values():
            self._end(cell)
        for saved in self._saved:
            if saved.names is None or not _has_other_parts(saved):
                continue
            left = _parts(saved.module)
            if any(left.get(name) is not part for name, part in saved.parts().items() if part is not None):
                saved.left = left
                continue
            # Lazy modules: their first call makes what later calls find, the recomputation of the first one too.
            saved.names, saved.buffers, saved.attributes, saved.parameters = None, None, {}, {}
            saved.is_built = True
        self._cells.clear()

    def _end(self, cell: _Cell) -> None:
        value, history, name = cell.value, cell.history, cell.name
        assert value is not None
        cell.is_written |= cell.is_silent  # perhaps: to compare in each call would make a GPU wait
        if cell.is_written:
            history.num_writes[name] = history.num_writes.get(name, 0) + cell.version_after - cell.version
            if not cell.is_statistic and name not in cell.written:
                cell.written.add(name)
                _layouts.clear()
            cell.is_lost = cell.content is None and cell.placeholder is None and not cell.is_statistic
        elif cell.is_compared:
            if not cell.is_weight and value.nbytes <= _SMALL_BYTES and cell.content is not None:
                history.copies[name] = (weakref.ref(value), (cell.version, cell.stamp), cell.content)
            else:
                cell.content = None
        cell.num_writes = history.num_writes.get(name, 0)
        if cell.placeholder is not None:
            cell.value = cell.content = None  # so that it can be offloaded

    # --- recomputation -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def restored(self, kept: Callable[[Any], Any] = lambda placeholder: placeholder) -> Iterator[None]:
        """Restore inside what the call has read; afterwards everything is as it was before.

        Args:
            kept: returns the tensor for a placeholder of `keep`.

        Raises:
            UsageError: a tensor that the call has read has been changed in place since, and cannot be had back; or the
                call makes modules or weights, and has made others this time.
        """
        layout, reading = self._layout, self._reading
        if layout is not None and reading is not None:
            now = layout.read(self._roots)
            if now is None if self._overwrites_weights else not reading.is_same(now):
                self._look_closer()
                self._cells.clear()
        restorer = _Restorer(kept, overwrite_weights=self._overwrites_weights)
        states = [(generator, generator.get_state()) for generator in self._generators]
        with contextlib.ExitStack() as undo:
            for saved in self._saved:
                restorer.restore(saved, undo)
            for generator, state in states:
                undo.callback(generator.set_state, state)
                generator.set_state(self._generators[generator])
            try:
                yield
            finally:  # torch ends a recomputation by an exception once it has what it needs
                self._put_back()
                for saved in self._saved:
                    if saved.left is not None:
                        _check_not_remade(saved, saved.left)

    def _put_back(self) -> None:
        """Give steady modules the attributes again that a recomputation has changed."""
        layout, reading = self._layout, self._reading
        if layout is not None and reading is not None and layout.attributes(reading.modules) is None:
            for module, plain, _ in layout.steady(reading):
                plain.put_back(vars(module))


class _Visit:
    """A module whose state is being saved, and what is known about its calls."""

    def __init__(self, module: nn.Module, history: _History, *, has_data: bool) -> None:
        self._has_data = has_data
        self.module = module
        self.owner = type(module).__name__
        self.history = history
        self.is_new = False
        """Whether few calls have had this configuration."""
        self.written: set[str] = set()
        """What calls with this configuration have written to."""
        self.is_normed = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        """Whether the module scales the rows that it looks up in its weight."""

    def configure(self, *configurations: Any) -> None:
        """Take the first configuration that is known, or for which there is room."""
        known = self.history.written
        for configuration in configurations:
            if configuration in known or len(known) < _MOST_CONFIGURATIONS:
                break
        num_calls = self.history.num_calls.get(configuration, 0)
        self.is_new = self._has_data and num_calls < FIRST_CALLS
        if self.is_new:
            self.history.num_calls[configuration] = num_calls + 1
        self.written = known.setdefault(configuration, set())


class _Restorer:
    """Puts one state back for a recomputation, and the present one afterwards."""

    def __init__(self, kept: Callable[[Any], Any], *, overwrite_weights: bool) -> None:
        self._kept = kept
        self._overwrites_weights = overwrite_weights
        self._tensors: dict[int, Tensor] = {}
        self._containers: dict[int, Any] = {}

    def restore(self, saved: _Saved, undo: contextlib.ExitStack) -> None:
        """Restore a module; `undo` gets what puts the present state back."""
        module = saved.module
        if saved.names is None or saved.buffers is None:
            undo.callback(setattr, module, "training", module.training)
            module.training = saved.training
            if saved.is_built:
                undo.callback(_refill, module._buffers, dict(module._buffers))
                _refill(
                    module._buffers,
                    {name: None if each is None else _clone(each) for name, each in module._buffers.items()},
                )
            return
        attributes = vars(module)
        if saved.plain is not None and saved.plain.are(attributes):
            undo.callback(saved.plain.put_back, attributes)
        else:
            undo.callback(_refill, attributes, dict(attributes))
            for name in attributes.keys() - saved.names:
                if _is_restorable(attributes[name]):
                    del attributes[name]
            for name, value in saved.attributes.items():
                attributes[name] = self._value(value)
            attributes["training"] = saved.training
        children, buffers = module._modules, module._buffers
        if saved.left is not None:  # the recomputation replaces parts again
            undo.callback(_refill, module._parameters, dict(module._parameters))
        if saved.left is not None or children != saved.children:
            undo.callback(_refill, children, dict(children))
            _refill(children, saved.children)
        if buffers or saved.buffers:
            undo.callback(_refill, buffers, dict(buffers))
            earlier = {name: None if cell is None else self._tensor(cell) for name, cell in saved.buffers.items()}
            _refill(buffers, earlier)
        for name, cell in saved.parameters.items():
            self._restore_weight(module, name, cell, undo)

    def _value(self, value: Any) -> Any:
        if type(value) is _Cell:
            return self._tensor(value)
        if type(value) is not _Copied:
            return value
        made = self._containers.get(id(value))
        if made is None:
            items = [self._value(item) for item in value.items]
            made = value.make(items if value.keys is None else zip(value.keys, items, strict=True))
            self._containers[id(value)] = made
        return made

    def _tensor(self, cell: _Cell) -> Tensor:
        found = self._tensors.get(id(cell))
        if found is None:
            found = self._tensors[id(cell)] = _earlier(cell, self._kept)
        return found

    def _restore_weight(self, module: nn.Module, name: str, cell: _Cell, undo: contextlib.ExitStack) -> None:
        now, then = module._parameters.get(name), cell.value
        assert then is not None
        if cell.is_lost and not cell.is_normed and _is_plain(then):
            raise _lost(cell)
        if self._overwrites_weights:
            if cell.is_written and cell.content is not None and id(cell) not in self._tensors:
                self._tensors[id(cell)] = then
                undo.callback(then.data.copy_, then.detach().clone())
                then.data.copy_(cell.content)
            return
        if now is not then and (now is None or not (_is_plain(now) and _is_plain(then)) or now.shape != then.shape):
            return  # sharded weights: who shards them puts whole ones in their place, and takes care of their contents
        if cell.is_written and cell.content is not None:
            scratch = self._tensors.get(id(cell))
            if scratch is None:
                scratch = self._tensors[id(cell)] = _scratch(cell.content, then)
        else:
            scratch = then
            writes = cell.history.num_writes.get(cell.name, 0) - cell.num_writes
            is_same = version_of(then) == cell.version_after + writes and (not writes or cell.is_normed)
            if _is_plain(then) and not is_same:
                raise _changed(cell)
        if now is not scratch:
            undo.callback(module._parameters.__setitem__, name, now)
            module._parameters[name] = scratch  # type: ignore[assignment]


def _scratch(content: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy that forward may take for the parameter and write to."""
    if not isinstance(parameter, nn.Parameter):
        return _clone(content)
    scratch = nn.Parameter(_clone(content).detach(), requires_grad=parameter.requires_grad)
    scratch.__dict__.update(parameter.__dict__)  # libraries put attributes on parameters
    return scratch


def _earlier(cell: _Cell, kept: Callable[[Any], Any]) -> Tensor:
    """Return a tensor with the content that it had before the forward, for the recomputation to write to."""
    if cell.placeholder is not None:
        tensor: Tensor = kept(cell.placeholder)
        return _clone(tensor) if cell.is_written else tensor
    value, content = cell.value, cell.content
    assert value is not None
    if cell.is_statistic:
        return _clone(value)
    if cell.is_lost:
        raise _lost(cell)
    if content is not None and (cell.is_written or cell.is_silent):
        return _clone(content)
    if version_of(value) == cell.version_after and (content is None or cell.stamp is None):
        return value
    if content is None:
        raise _changed(cell)
    return content


def _lost(cell: _Cell) -> UsageError:
    assert cell.value is not None
    return UsageError(
        f"{cell.label} was changed in place in a forward that is to be run again, and none before had changed it"
        f" (it has {cell.value.nbytes} bytes, too many to keep a copy in case)",
        hint="assign a new tensor to it, or do not checkpoint this module",
    )


def _changed(cell: _Cell) -> UsageError:
    return UsageError(
        f"{cell.label} was changed in place between a forward and its backward, which runs that forward again",
        hint="run backward first (optimizer.step() changes weights in place), or do not checkpoint this module",
    )


def _clone(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy


def _all_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    for root in roots:
        _note_modules(root, found)
    return list(found.values())


def _note_modules(module: nn.Module, found: dict[int, nn.Module]) -> None:
    """Note a module and those in it, by `id`; `nn.Module.modules` takes three times as long."""
    found[id(module)] = module
    for child in module._modules.values():
        if child is not None and id(child) not in found:
            _note_modules(child, found)


def _refill(where: dict[str, Any], content: dict[str, Any]) -> None:
    where.clear()
    where.update(content)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _is_comparable(tensor: Tensor) -> bool:
    """Return whether the tensor's values can be read here and now."""
    return (
        _is_plain(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not torch._C._are_functorch_transforms_active()
    )


def _is_restorable(value: Any) -> bool:
    kind = type(value)
    return kind in _SIMPLE or kind in _CONTAINERS or kind is torch.Generator or isinstance(value, Tensor)


def _is_custom(norm: nn.Module) -> bool:
    """Return whether a norm may read its statistics in training, too."""
    return not type(norm).__module__.startswith("torch.nn.") or bool(norm._forward_hooks or norm._forward_pre_hooks)


def _is_wrapper(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class run another one and keep state of their own about it (FSDP, DDP, scripts)."""
    known = _wrappers.get(kind)
    if known is None:
        of_forward = next(each for each in kind.__mro__ if "forward" in vars(each))
        known = of_forward.__module__.startswith(("torch.distributed.", "torch.nn.parallel.", "torch.jit."))
        _wrappers[kind] = known
    return known


def _has_lazy(module: nn.Module) -> bool:
    """Return whether the module's weights or buffers have no shape yet."""
    for tensors in (module._parameters, module._buffers):
        for each in tensors.values():
            if each is not None and is_lazy(each):
                return True
    return False


def _parts(module: nn.Module) -> dict[str, Any]:
    """Return the modules and weights of a module."""
    weights = {name: each for name, each in module._parameters.items() if each is not None}
    return {**module._modules, **weights}


def _has_other_parts(saved: _Saved) -> bool:
    """Return whether the forward has given a module other parts than it had."""
    module = saved.module
    if saved.children != module._modules:
        return True
    present, found = module._parameters, saved.parameters
    if len(present) != len(found) and sum(each is not None for each in present.values()) != len(found):
        return True
    return any(cell.value is not present.get(name) for name, cell in found.items())


def _check_not_remade(saved: _Saved, left: dict[str, Any]) -> None:
    """Raise UsageError if a recomputation has made parts of its own, whose gradients would reach nobody."""
    found = saved.parts()
    for name, part in _parts(saved.module).items():
        if part is not found.get(name) and part is not left.get(name) and not _is_sharded(part):
            raise UsageError(
                f"the forward of a {type(saved.module).__name__} makes a new `{name}` in each call, so running it again"
                " gives gradients to another one",
                hint="make it in __init__, or do not checkpoint this module",
            )


def _is_sharded(part: Any) -> bool:
    return isinstance(part, Tensor) and not _is_plain(part)


def _count(value: Any, most: int) -> int:
    """Return how many of `most` items a container leaves over; -1 if there are more."""
    for item in value.values() if isinstance(value, dict) else value:
        most -= 1
        if type(item) in _CONTAINERS:
            most = _count(item, most)
        if most < 0:
            return -1
    return most


def _maker(container: Any) -> Callable[[Any], Any]:
    """Return what makes a container like this one."""
    if isinstance(container, defaultdict):
        return functools.partial(defaultdict, container.default_factory)
    if isinstance(container, deque):
        return functools.partial(deque, maxlen=container.maxlen)
    kind: Any = type(container)
    return cast("Callable[[Any], Any]", kind)
