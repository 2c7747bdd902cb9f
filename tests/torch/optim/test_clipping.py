"""What an optimizer holds itself is not clipped, with a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from smpkit.errors import UsageError
from smpkit.torch.optim.gradient_norm import hold_gradients


class Holder:
    """Takes the gradients of some parameters as they come."""

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = parameters

    def holds_gradients_of(self) -> Iterable[Tensor]:
        return self.parameters


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_functions_refuse_to_clip_nothing(clip: Callable[..., object]) -> None:
    held, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    holder = Holder(held)
    hold_gradients(holder)
    with pytest.raises(UsageError, match=f"{clip.__name__} would clip nothing"):
        clip([held], 1.0)
    other.grad = torch.tensor([3.0, 4.0])
    clip([other], 1.0)
    assert other.grad.max().item() <= 1
