"""The modules of a call that are as they were in calls before, compared all at once.

[Note: steady modules] Most modules have only attributes whose values cannot change, no buffers, and weights that no
call writes to. Once calls have shown that, `Layout` compares all of them at once, in loops that run in C, and their
part of a call's state is the versions of their weights (`Reading`). What differs after all, in the forward or before
the recomputation, makes of it what the other modules have.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, Final

from torch import nn

__all__ = ["Layout", "PlainAttributes"]

_PARTS: Final = ("_parameters", "_buffers", "_modules")
_MISSING: Final = object()
_referent: Final[Callable[[weakref.ref[nn.Module]], nn.Module | None]] = weakref.ref.__call__
_version: Final = attrgetter("_version")


class PlainAttributes:
    """The attributes of a module all of whose values are simple: most calls find, and leave, the same ones.

    Args:
        attributes: of the module, with those that every module has.
        simple: those of them that not every module has.
    """

    __slots__ = ("names", "simple", "training")

    def __init__(self, attributes: dict[str, Any], simple: dict[str, Any]) -> None:
        self.names = frozenset(attributes)
        self.simple = simple
        self.training: bool = attributes["training"]

    def are(self, attributes: dict[str, Any]) -> bool:
        """Return whether a module has these very values, and no others."""
        if attributes["training"] is not self.training or len(attributes) != len(self.names):
            return False
        for name, value in self.simple.items():  # noqa: SIM110 - a generator takes twice as long
            if attributes.get(name, _MISSING) is not value:
                return False
        return True

    def put_back(self, attributes: dict[str, Any]) -> None:
        """Give a module that had these values the same ones again."""
        if not self.are(attributes):
            for name in attributes.keys() - self.names:
                del attributes[name]
            attributes.update(self.simple, training=self.training)


@dataclass(eq=False, slots=True)
class Reading:
    """What a layout has found: the modules, which are as it says, what they consist of, and the steady weights."""

    modules: list[nn.Module]
    dicts: list[dict[str, Any]]
    parts: list[Any]
    weights: list[nn.Parameter]
    versions: list[int]

    def is_unchanged(self) -> bool:
        """Return whether modules still have these parts, and nobody has written to the weights."""
        now = [*itertools.chain.from_iterable(map(dict.values, self.dicts))]
        return (
            [*map(_version, self.weights)] == self.versions
            and len(now) == len(self.parts)
            and all(map(is_, now, self.parts))
        )

    def is_same(self, later: Reading | None) -> bool:
        """Return whether the same layout has later found the same weights, and nobody has written to them."""
        return later is not None and later.versions == self.versions and all(map(is_, later.weights, self.weights))


class Layout:
    """The modules of a call: which are where, and the attributes of the steady ones ([Note: steady modules]).

    Holds no module, and nothing that can hold one: modules end although `_layouts` knows them.

    Args:
        roots: of the call.
        modules: these and all modules in them.
        plains: the attributes of the steady ones, by `id`.
    """

    def __init__(
        self, roots: Sequence[nn.Module], modules: Sequence[nn.Module], plains: dict[int, PlainAttributes]
    ) -> None:
        places = {id(module): place for place, module in enumerate(modules)}
        self.plains = [plains.get(id(module)) for module in modules]
        self._is_steady = [plain is not None for plain in self.plains]
        self._is_other = [plain is None for plain in self.plains]
        self._modules = [weakref.ref(module) for module in modules]
        self._roots = [places[id(root)] for root in roots]
        attributes = [vars(module) for module in itertools.compress(modules, self._is_steady)]
        self._names = [*map(tuple, attributes)]
        simple = [{*plain.simple, "training"} for plain in self.plains if plain is not None]
        self._is_simple = [name in own for each, own in zip(attributes, simple, strict=True) for name in each]
        self._is_part = [name in _PARTS for each in attributes for name in each]
        values = [value for each in attributes for value in each.values()]
        self._simple = [*itertools.compress(values, self._is_simple)]
        dicts = self._dicts(modules, values)
        self._part_names = [*map(tuple, dicts)]
        parts = [part for each in dicts for part in each.values()]
        self._types = [*map(type, parts)]
        self._is_weight = [isinstance(part, nn.Parameter) for part in parts]
        self._is_child = [isinstance(part, nn.Module) for part in parts]
        self._children = [places[id(child)] for child in itertools.compress(parts, self._is_child)]

    def _dicts(self, modules: Sequence[nn.Module], values: list[Any]) -> list[dict[str, Any]]:
        """Return the dicts of weights, buffers and modules of each steady module, and of modules of the others."""
        others: list[dict[str, Any]] = [module._modules for module in itertools.compress(modules, self._is_other)]
        return [*itertools.compress(values, self._is_part), *others]

    def others(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """Return those modules that are not steady."""
        return [*itertools.compress(modules, self._is_other)]

    def read(self, roots: Sequence[nn.Module]) -> Reading | None:
        """Return the present weights and their versions; None if anything else is not as it was."""
        modules: list[Any] = [*map(_referent, self._modules)]
        if None in modules or [*roots] != [*map(modules.__getitem__, self._roots)]:
            return None
        values = self.attributes(modules)
        if values is None:
            return None
        dicts = self._dicts(modules, values)
        if [*map(tuple, dicts)] != self._part_names:
            return None
        parts = [*itertools.chain.from_iterable(map(dict.values, dicts))]
        children = map(modules.__getitem__, self._children)
        if [*map(type, parts)] != self._types or not all(map(is_, itertools.compress(parts, self._is_child), children)):
            return None
        weights = [*itertools.compress(parts, self._is_weight)]
        try:
            return Reading(modules, dicts, parts, weights, [*map(_version, weights)])
        except RuntimeError:  # one was made in inference mode
            return None

    def attributes(self, modules: Sequence[nn.Module]) -> list[Any] | None:
        """Return the values of all attributes of the steady modules; None if a simple one, or a name, is another."""
        attributes = [*map(vars, itertools.compress(modules, self._is_steady))]
        if [*map(tuple, attributes)] != self._names:
            return None
        values = [*itertools.chain.from_iterable(map(dict.values, attributes))]
        return values if all(map(is_, itertools.compress(values, self._is_simple), self._simple)) else None

    def steady(self, reading: Reading) -> Iterator[tuple[nn.Module, PlainAttributes, dict[str, Any]]]:
        """Yield the steady modules of a reading with their attributes, and their modules and weights by name."""
        names, parts = iter(self._part_names), iter(reading.parts)
        for module, plain in zip(reading.modules, self.plains, strict=True):
            if plain is not None:
                own = itertools.chain.from_iterable(itertools.islice(names, len(_PARTS)))
                yield module, plain, {name: next(parts) for name in own}
