"""One microbatch on its way through the step: what it computes here, what it sends, receives and leaves for backward.

All ranks run the same code on the same microbatch, so all see the same calls and moves in the same order and give them
the same numbers (see `moves.py`). What differs is who holds data: the home of a call runs it, everyone else makes
ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from smpkit.errors import UsageError
from smpkit.torch.pipeline.effects import Arguments, apply, changed_anew, changes_in_place, noting_writes
from smpkit.torch.pipeline.homes import home_of_operation
from smpkit.torch.pipeline.located import Located, locate
from smpkit.torch.pipeline.moves import Moves
from smpkit.torch.pipeline.results import UNKNOWN, Call, difference, ghosts, is_same, plain_spec_of
from smpkit.torch.pipeline.specs import PLAIN, TensorSpec, describe, map_tensors, spec_of_plain, tensors_in
from smpkit.torch.pipeline.weights import refused_change

if TYPE_CHECKING:
    from smpkit.torch.calls import Around

__all__ = ["Microbatch"]

_OurOwn: Final = torch._C.DisableTorchFunction
"""Around what the engine itself asks of tensors: that is none of the step's operations."""

_LEAF_CHANGED: Final = "a leaf Variable that requires grad is being used in an in-place operation"
"""What torch says of a change of a value that has arrived, or of a view of one."""

_T: Final = torch.Tensor
_DYNAMIC: Final = frozenset({_T.__bool__, _T.__index__, _T.__int__, _T.__contains__, torch.equal})
"""Questions whose answer is most often a branch, so that another microbatch may take another path."""


class Microbatch(Moves):
    """The run of a step function for one microbatch on this rank."""

    dynamic = False
    """Whether Python asked for a value that a branch may hang on."""
    has_backward = False
    released = False
    """Whether nothing is kept for backward any more."""
    around_units: Around | None = None
    """What code between units asks to be done around each unit that it calls: recomputation by torch's checkpoint."""

    @property
    def is_done(self) -> bool:
        """Whether all of this rank's backward has run."""
        work = self.backward_work
        return len(work.done) == self.num_own_segments and not work.has_halves

    # --- calls ---------------------------------------------------------------------------------------------------

    def operate(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mode: object = None
    ) -> Any:
        """Run one torch operation where its data is; `mode` is what else decides the shape of its result."""
        if self.stage.inside:
            raise UsageError(
                f"`{name}` was called inside a layer on a value that another pipeline rank may hold: it came in an"
                " object (a cache of keys and values, say), in which smpkit does not look, or in a weight's place"
                " (torch.func.functional_call)",
                hint="give it to the layer as an argument: a tensor, or a tuple, list, dict or dataclass with tensors;"
                " make a weight in the module that uses it",
            )
        changes = bool(args) and changes_in_place(func, name, kwargs)
        targets: Sequence[Any] = args[:1] if changes else tensors_in(kwargs["out"]) if "out" in kwargs else ()
        if not targets:
            return self.run_at(home_of_operation(args, kwargs, self.stage), func, name, func, args, kwargs, mode)
        if not all(isinstance(each, Located) for each in targets):
            return self._change_everywhere(func, name, args, kwargs, targets)
        result = self.run_at(targets[0].home, func, name, func, args, kwargs, changes_first=changes)
        return targets[0] if isinstance(result, Located) else result

    def _change_everywhere(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        targets: Sequence[torch.Tensor],
    ) -> Any:
        """Change tensors that every rank holds (running averages) by values of one, which gives them to the others.

        Raises:
            UsageError: not every rank holds them, or the values need gradients.
        """
        for each in targets:
            if id(each) in self.stage.weights_elsewhere:
                raise refused_change(name, each)
        needs_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((args, kwargs)))
        if needs_gradients or any(isinstance(each, Located) for each in targets):
            raise UsageError(
                f"`{name}` changes a tensor that every rank holds by a value that only one pipeline rank holds",
                hint="write `x = x + y` instead of `x += y`, or let the module that does it be placed as a whole"
                " (smp.set_partition); running averages are changed under torch.no_grad()",
            )
        home = home_of_operation(args, kwargs, self.stage)
        result = self.run_at(home, func, name, func, args, kwargs, changes_first="out" not in kwargs)
        return None if result is None else kwargs.get("out", targets[0])

    def run_at(
        self,
        home: int,
        target: Any,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mode: object = None,
        *,
        stream: bool | None = None,
        changes_first: bool = False,
    ) -> Any:
        """Run `function` on rank `home` and make ghosts of its result everywhere else.

        Args:
            target: what the cache knows the call by.
            name: the module or operation, for messages and for its stream of random numbers.
            mode: what else decides the result, such as a module's `training`.
            stream: whether its stream of random numbers is a closed one; None if it has none of its own.
            changes_first: whether it certainly changes its first argument in place.
        """
        stage, given = self.stage, (args, kwargs)
        with _OurOwn():
            self.path.append(name)  # before anything is waited for, which may be because of this very call
            call, args, kwargs = self._brought(home, target, args, kwargs, mode)
            if call.template is UNKNOWN:
                self._stray()  # results of new kinds are told in the program's own order
                stage.results.look_up(call)
            if home != self._rank:
                if stream is not None:
                    stage.random.skip()
                if call.template is UNKNOWN:
                    told = stage.transport.receive_object(home, f"the first result of `{name}`")
                    stage.results.remember(call, *told)
                result = ghosts(call.template, stage.device, home)
                if call.effects is not None:
                    apply(call.effects, self, home, name, given, (args, kwargs), result)
                return result
            if self.carried is not None:
                self.carried.called(target)
            if stream:
                self.backward_work.units[self._segments[home]].append(name)
            brought = args, kwargs
            # Only now that all are here: an arrival may have begun a segment, in which older values are cut.
            if call.template is UNKNOWN or (call.effects is not None and call.effects.changed):
                self._make_changeable((args, kwargs))
            args, kwargs, tensors = self._data_of(call, args, kwargs)
            arguments = Arguments(tensors, changes_first=changes_first)
            if call.template is UNKNOWN and torch.is_inference_mode_enabled():
                function = noting_writes(function, arguments)
        try:
            output = (
                function(*args, **kwargs) if stream is None else stage.random.run(name, stream, function, args, kwargs)
            )
            with _OurOwn():
                result = self._made(call, name, output, arguments)
        except Exception as error:
            stage.failed_alone = True
            if isinstance(error, RuntimeError) and _LEAF_CHANGED in str(error):
                self._refuse_change(name, tensors, error)
            raise
        if call.effects is not None:
            with _OurOwn():
                apply(call.effects, self, home, name, given, brought, result, tensors)
        return result

    def _brought(
        self, home: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: object
    ) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        """Return of which kind a call is, and its arguments as rank `home` has them."""
        results, device_type = self.stage.results, self._device_type
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        how = (mode, torch.is_grad_enabled(), autocast)
        if len(args) == 1 and not kwargs and type(argument := args[0]) is Located:
            call = results.latest_of_one(target, how, argument.spec)
            if call is not None:
                return call, (self._bring(argument, home),), kwargs
        call = None if kwargs else results.latest(target, how, args)
        if call is not None:
            return call, tuple([self._bring(part, home) if type(part) is Located else part for part in args]), kwargs
        key = [target, *how]

        def visit(tensor: torch.Tensor) -> torch.Tensor:
            tensor = self.weights.as_used_on(home, tensor)
            if type(tensor) is Located:
                key.append(tensor.spec)
                return self._bring(tensor, home)
            key.append(plain_spec_of(tensor))
            return tensor

        given = None if kwargs else args
        args = describe(args, key, visit)
        kwargs = describe(kwargs, key, visit) if kwargs else kwargs
        return results.described(target, how, given, tuple(key)), args, kwargs

    def _data_of(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Return the arguments of a call that runs here as their data, and the tensors among them in order."""
        tensors: list[torch.Tensor] = []
        if call.arguments is not None:  # most calls: tensors and numbers, no need to look into containers
            parts = list(args)
            for number, part in enumerate(args):
                if type(part) not in PLAIN:
                    parts[number] = data = self._real(part)
                    tensors.append(data)
            return tuple(parts), kwargs, tensors

        def real(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(self._real(tensor))
            return tensors[-1]

        args = map_tensors(real, args)
        return args, map_tensors(real, kwargs) if kwargs else kwargs, tensors

    def _make_changeable(self, given: Any) -> None:
        """Let a call do with what has arrived what it may do with any other value."""
        segment = self._segments[self._rank]
        for tensor in tensors_in(given):
            if type(tensor) is Located and (value := tensor.value) is not None and value.is_leaf:
                tensor.value = self.backward_work.changeable(value, segment)

    def _refuse_change(self, name: str, tensors: Sequence[torch.Tensor], error: RuntimeError) -> None:
        """Raise if a call that was not known to change what has arrived has tried to."""
        segment = self._segments[self._rank]
        for number, tensor in enumerate(tensors):
            if self.backward_work.has_arrived(tensor if tensor._base is None else tensor._base, segment):
                raise changed_anew(name, number, spec_of_plain(tensor)) from error

    def _made(self, call: Call, name: str, output: Any, arguments: Arguments) -> Any:
        """Return the result of a call that ran here, located; the other ranks are told what it is like, or know."""
        device, home, segment = self.stage.device, self._rank, self._segments[self._rank]
        is_one, is_new = type(output) is torch.Tensor, call.template is UNKNOWN
        tensors = [output] if is_one else tensors_in(output)
        if is_new and any(tensor.is_nested for tensor in tensors):
            raise UsageError(
                f"`{name}` returned a nested tensor, which has no shape that other pipeline ranks could know",
                hint="make it and use it in one torch.nn.Module, or return its values and offsets",
            )
        if not is_new and (untold := arguments.untold(call.effects, name, tensors)):
            # Taken for memory of its own by the other ranks, which it must be then.
            output = map_tensors(lambda tensor: tensor.clone() if id(tensor) in untold else tensor, output)
        if is_one:  # most calls
            template: Any = spec_of_plain(output)
            located: Any = locate(template, device, home, output, segment)
        else:
            located = map_tensors(lambda tensor: locate(spec_of_plain(tensor), device, home, tensor, segment), output)
            template = map_tensors(_spec_of_located, located)
        known = call.template
        if is_new:
            self.stage.results.remember(call, template, arguments.effects(tensors))
            self.stage.transport.broadcast_object((template, call.effects))
        elif known is not template and known != template and not is_same(known, template):
            raise UsageError(
                f"`{name}` returned {difference(known, template)} for arguments of the same shapes",
                hint="shapes that depend on values cannot cross pipeline ranks; put the code that makes and the code"
                " that uses them into one torch.nn.Module, which is placed as a whole",
            )
        return located

    def value_for_python(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give every rank the value, because Python needs it (`.item()`, `if tensor:`)."""
        self.dynamic = self.dynamic or func in _DYNAMIC
        self.stage.count_python_value(func)
        args, kwargs = map_tensors(self.everywhere, (args, kwargs))
        return func(*args, **kwargs)

    def backward(self, roots: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float = 1.0) -> None:
        """Note where backward starts, and with which gradients times `scale`; the schedule decides when it runs."""
        self.has_backward = True
        self.path.append("model.backward")  # a rank that leaves it out would train on without these gradients
        with _OurOwn():
            for root, grad in zip(roots, grads, strict=True):
                # A loss that no unit took part in is known to all ranks; it must count once.
                home = root.home if isinstance(root, Located) else 0
                self._bring(root, home)
                start = None if grad is None else self._bring(grad, home)
                if home == self._rank and (value := self._real(root)).requires_grad:
                    given = None if start is None else self._real(start)
                    start = self.stage.starts.scaled(value, given, scale)
                    self.backward_work.starts(value, start, self._segments[self._rank])

    # --- backward ------------------------------------------------------------------------------------------------

    def note_hooks(self, change: int) -> None:
        """Note that the present segment uses hooks that run in every walk; `change` in how many the code now is."""
        self._in_hooks += change
        self.unsplittable.add(self._segments[self._rank])

    def release(self) -> None:
        """Let go of everything that is kept for backward."""
        self.backward_work.release()
        self.weights.release()
        self._handed_over.clear()
        self.released = True


def _spec_of_located(value: Any) -> TensorSpec:
    spec: TensorSpec = value.spec
    return spec
