"""Pack gradients into flat buffers, so that a few large reductions replace hundreds of small ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Bucket", "plan_buckets"]

FIRST_BUCKET_BYTES = 1024 * 1024  # small, so that the first reduction starts soon after backward does


class Bucket:
    """Gradients that are reduced together over one group, in one flat buffer of one dtype on one device.

    ::

        buffer   [ grad 0 | grad 1 | ... | grad n-1 | touched 0 ... touched n-1 ]

    A touched flag is 1 where this rank's backward reached the parameter, so after the sum every rank knows, without
    another message, whether any rank did. A parameter that none reached keeps its gradient (`None` included), as it
    would in one process; torch's reducer leaves such parameters unreduced or fills them with zeros.

    The methods that torch's communication hooks use (`index`, `buffer`, `set_buffer`, `gradients`, `parameters`,
    `is_last`) have the meaning they have on `torch.distributed.GradBucket`, and see the gradients without the flags.
    """

    def __init__(
        self, position: int, is_last: bool, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.position = position
        self.group = group
        self._is_last = is_last
        self.params = list(parameters)
        self.numels = [param.numel() for param in parameters]
        self.touched: set[int] = set()  # slots that a backward reached since the last reduction
        self.fresh: set[int] = set()  # slots that the backward now running has finished
        first = parameters[0]
        self.length = sum(self.numels)
        self._flat = torch.zeros(self.length + len(self.params), dtype=first.dtype, device=first.device)
        self.views = [
            piece.view(param.shape)
            for piece, param in zip(torch.split(self.buffer(), self.numels), parameters, strict=True)
        ]

    @property
    def flat(self) -> torch.Tensor:
        """Gradients and flags: what travels."""
        return self._flat

    @property
    def flags(self) -> torch.Tensor:
        return self._flat[self.length :]

    def index(self) -> int:
        return self.position

    def buffer(self) -> torch.Tensor:
        return self._flat[: self.length]

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.buffer().copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    def parameters(self) -> list[nn.Parameter]:
        return self.params

    def is_last(self) -> bool:
        return self._is_last

    def complete(self) -> bool:
        """Tell whether the backward now running has finished every gradient of this bucket."""
        return len(self.fresh) == len(self.params)

    def _all_touched(self) -> bool:
        return len(self.touched) == len(self.params)

    def pack(self, divisor: int) -> None:
        """Copy this rank's gradients, divided by `divisor`, and its flags into the buffer.

        Dividing before the sum, not after, keeps half-precision sums from overflowing.
        """
        buffer = self.buffer()
        if all(self._in_place(slot) for slot in range(len(self.params))):
            buffer.div_(divisor)
        else:
            pieces = [self._piece(slot) for slot in range(len(self.params))]
            torch.cat(pieces, out=buffer)
            buffer.div_(divisor)
        if self._all_touched():
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor([float(slot in self.touched) for slot in range(len(self.params))]))

    def unpack(self, as_view: bool) -> None:
        """Give each parameter that any rank's backward reached its reduced gradient."""
        # Reading the flags waits for the device, so they are read only when this rank left out a parameter.
        reached = [True] * len(self.params) if self._all_touched() else self.flags.ne(0).tolist()
        for slot, param in enumerate(self.params):
            if not reached[slot]:
                continue
            if as_view:
                param.grad = self.views[slot]
            elif param.grad is None:
                param.grad = self.views[slot].clone()
            else:
                param.grad.copy_(self.views[slot])
        self.touched.clear()
        self.fresh.clear()

    def adopt(self, slot: int) -> None:
        """Make the gradient a view of the buffer, freeing the tensor that autograd made for it."""
        grad = self.params[slot].grad
        if grad is not None and not self._in_place(slot):
            self.views[slot].copy_(grad)
            self.params[slot].grad = self.views[slot]

    def _in_place(self, slot: int) -> bool:
        grad = self.params[slot].grad
        return grad is not None and grad.data_ptr() == self.views[slot].data_ptr() and grad.is_contiguous()

    def _piece(self, slot: int) -> torch.Tensor:
        grad = self.params[slot].grad
        if grad is None:
            return self._flat.new_zeros(self.numels[slot])
        # `torch.cat` may not read what it writes.
        return grad.detach().reshape(-1).clone() if self._in_place(slot) else grad.detach().reshape(-1)


def plan_buckets(
    parameters: Sequence[nn.Parameter],
    cap_bytes: int,
    group_of: Callable[[nn.Parameter], dist.ProcessGroup | None] = lambda _: None,
) -> list[Bucket]:
    """Group parameters, given in the order their gradients become ready, into buckets of at most `cap_bytes`.

    A bucket holds one dtype of one device for one group; a parameter larger than the cap has a bucket of its own.
    """
    contents: list[list[nn.Parameter]] = []
    open_ones: dict[tuple[torch.dtype, torch.device, object], tuple[list[nn.Parameter], int]] = {}
    for param in parameters:
        key = (param.dtype, param.device, group_of(param))
        size = param.numel() * param.element_size()
        content, filled = open_ones.get(key, ([], 0))
        limit = min(FIRST_BUCKET_BYTES, cap_bytes) if content is (contents[0] if contents else None) else cap_bytes
        if not content or filled + size > limit:
            content, filled = [], 0
            contents.append(content)
        content.append(param)
        open_ones[key] = (content, filled + size)
    last = len(contents) - 1
    return [Bucket(index, index == last, each, group_of(each[0])) for index, each in enumerate(contents)]
