"""Send values and gradients between the ranks of one pipeline.

They travel from GPU to GPU where nccl connects the two (`gpu_link.py`), else through the hosts (`host_link.py`), as all
other messages do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from smpkit.torch.core.tensor_spec import permute_to_memory
from smpkit.torch.pipeline.gpu_link import GpuLink
from smpkit.torch.pipeline.host_link import HostLink
from smpkit.torch.pipeline.messages import Message, P2PTransfer

MessageRecorder = Callable[[str, int, int, int, int, int], object]
"""Called with `(direction, peer, num_bytes, tag, start_ns, end_ns)`.

`direction` is "send" or "receive", `peer` a pp_rank, `tag` the same on both ends and in every step. A send lasts as
long as it kept its caller from other work, a receive from when its data was needed until it was there; times are
`time.perf_counter_ns()`.
"""

_TEXT_BYTES: Final = 256
"""Of the text of a spec that is announced."""


class Transport:
    """One rank's end of the pipeline's connections.

    Args:
        group, ranks: see `HostLink`.
        between_gpus: groups for messages from GPU to GPU, to higher ranks and to lower ones; None: values go through
            the hosts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        device: torch.device,
        between_gpus: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    ) -> None:
        self._on_cpu = device.type == "cpu"
        self.hosts = HostLink(group, ranks, device)
        self.gpus = None if between_gpus is None else GpuLink(*between_gpus, self.hosts, group.rank(), device)
        self.recorder: MessageRecorder | None = None
        """Called for every value and gradient that is sent or received; None costs nothing."""

    def connect(self, transfers: Iterable[P2PTransfer]) -> None:
        """Connect the GPUs between which values travel; all ranks call this with the same transfers."""
        if self.gpus is not None:
            self.gpus.connect([(transfer.source, transfer.target) for transfer in transfers])

    def send(self, tensor: torch.Tensor | None, message: Message, *, copy: bool = False) -> None:
        """Send a value (an activation), or its gradient back; do not wait until it has arrived.

        Args:
            tensor: None: the value has no gradient.
            copy: it may be changed in place before it has arrived.
        """
        if tensor is not None:
            if tensor.requires_grad:
                tensor = tensor.detach()
            if message.transfer.spec.order is not None:
                tensor = permute_to_memory(tensor, message.transfer.spec.order)
            if copy and (self._on_cpu or self.gpus is not None):  # from a GPU through the hosts, a copy travels anyway
                tensor = tensor.clone(memory_format=torch.contiguous_format)
        start_ns = 0 if self.recorder is None else time.perf_counter_ns()
        if self.gpus is not None and self.gpus.reaches(message.receiver):
            self.gpus.send(tensor, message)
        else:
            self.hosts.send(tensor, message)
        if self.recorder is not None:
            num_bytes = 0 if tensor is None else tensor.nbytes
            tag = self.hosts.tag_of(message)
            self.recorder("send", message.receiver, num_bytes, tag, start_ns, time.perf_counter_ns())

    def post(self, message: Message) -> None:
        """Start a receive before its data is needed; those between GPUs begin when their headers are read."""
        if self.gpus is None or not self.gpus.reaches(message.sender):
            self.hosts.post(message)

    def receive(self, message: Message) -> torch.Tensor | None:
        """Return a value or gradient that another rank sends; None: the value has no gradient."""
        start_ns = 0 if self.recorder is None else time.perf_counter_ns()
        is_direct = self.gpus is not None and self.gpus.reaches(message.sender)
        if is_direct and self.gpus is not None:
            value = self.gpus.receive(message, awaits_data=self.recorder is not None)
        else:
            value = self.hosts.receive(message)
        if self.recorder is not None:
            # Between GPUs, a gradient of None is a header without a message.
            num_bytes = 0 if value is None and is_direct else message.transfer.spec.num_bytes
            tag = self.hosts.tag_of(message)
            self.recorder("receive", message.sender, num_bytes, tag, start_ns, time.perf_counter_ns())
        return value

    def announce(self, message: Message) -> None:
        """Tell the receiver which value `send` will send next; without a record, it may expect one of another size.

        Gloo ends the process if a message is longer than its receive, and says nothing if it is shorter.
        """
        text = f"{message.transfer.spec.text:{_TEXT_BYTES}.{_TEXT_BYTES}}".encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.hosts.send_bytes(data, message.receiver, self.hosts.tag_of(message), message)

    def announced(self, message: Message) -> str:
        """Return the text of the spec that the sender has announced."""
        text = self.hosts.receive_bytes(_TEXT_BYTES, message.sender, self.hosts.tag_of(message), message)
        return bytes(text.tolist()).decode().rstrip()

    def end_step(self) -> None:
        """Wait until everything that was sent has arrived."""
        if self.gpus is not None:
            self.gpus.end_step()
        self.hosts.flush()
