"""`smp.amp`: torch's gradient scaler for autocast; all ranks of a model skip a step together, or none does."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smpkit.errors import UsageError
from smpkit.torch.core import devices
from smpkit.torch.core.runtime import state
from smpkit.torch.optim.gradient_norm import check_not_held, end_accumulation
from smpkit.torch.precision.cast import half_dtype
from smpkit.torch.precision.loss_scale import all_reduce_found_inf, group_of_all_gradients

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Scale losses under `torch.autocast`, and skip steps whose gradients are not finite on any rank of the model.

    ::

        scaler = smp.amp.GradScaler()

        @smp.step
        def train_step(model, inputs, targets):
            with torch.autocast("cuda"):
                loss = F.cross_entropy(model(inputs), targets)
            model.backward(scaler.scale(loss))
            return loss

        train_step(model, inputs, targets)
        scaler.step(optimizer)
        scaler.update()

    The methods are those of `torch.amp.GradScaler`; `unscale_` and `step` are called by all ranks.

    Args:
        arguments, options: those of `torch.cuda.amp.GradScaler`, as in SMP v1: `init_scale=65536.0`,
            `growth_factor=2.0`, `backoff_factor=0.5`, `growth_interval=2000`, `enabled=True`.
        device: the type of the device that losses are on; this rank's if not given. It may also come first, as in
            `torch.amp.GradScaler`.

    Raises:
        UsageError: with `fp16` or `bf16` in the configuration, where the optimizer scales the loss itself.
    """

    def __init__(self, *arguments: Any, device: str | torch.device | None = None, **options: Any) -> None:
        if arguments and isinstance(arguments[0], str | torch.device):
            device, *rest = arguments
            arguments = tuple(rest)
        here = devices.current_device() if device is None else torch.device(device)
        super().__init__(here.type, *arguments, **options)
        if not self._enabled:
            return
        if state.initialized and half_dtype(state.cfg) is not None:
            name = "fp16" if state.cfg.fp16 else "bf16"
            raise UsageError(
                f"a GradScaler was made, but with `{name}` in the configuration the optimizer sees to the loss scale",
                hint=f"remove the scaler (or pass enabled=False), or remove `{name}` and use torch.autocast",
            )
        # Not lazily at the first loss, as torch does: that may be a fake tensor, when the step is traced.
        self._lazy_init_scale_growth_tracker(here)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, and check on all ranks whether they are finite."""
        if self._enabled:
            held = (param for group in optimizer.param_groups for param in group["params"])
            check_not_held(held, "GradScaler would unscale")
            end_accumulation()
        super().unscale_(optimizer)
        if self._enabled:
            self._share_found_inf(optimizer)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None
        ]
        if all(gradient.is_cpu for gradient in gradients):  # those of an OffloadModel
            # torch's own copies to the host do not block, and it would read the scale before it has come.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        # torch's scaler calls this for optimizers that unscale in their own kernel (`fused=True`).
        end_accumulation()
        super()._check_inf_per_device(optimizer)
        return self._share_found_inf(optimizer)

    def _share_found_inf(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
        """All-reduce `found_inf`: a rank may have no gradients of its own, and must skip the step all the same."""
        optimizer_state = self._per_optimizer_states[id(optimizer)]
        found_inf = torch.zeros((), dtype=torch.float32, device=devices.current_device())
        for flag in optimizer_state["found_inf_per_device"].values():
            found_inf = torch.maximum(found_inf, flag.to(found_inf.device))
        agreed: dict[torch.device, torch.Tensor] = {found_inf.device: all_reduce_found_inf(found_inf)}
        optimizer_state["found_inf_per_device"] = agreed
        return agreed


def refuse_torchs_scaler() -> None:
    """Refuse torch's own scaler for losses of the model, until `smp.shutdown()`, where ranks have different gradients.

    Each rank would look at its own alone: one would skip an update that the others make. `fully_shard` asks all ranks.
    """
    original = torch.amp.GradScaler.scale
    if group_of_all_gradients().size() == 1 or state.cfg.sharded_data_parallel_degree > 1:
        return

    @functools.wraps(original)
    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        # Outside of steps the model of a pipeline gets no gradients: there it scales the loss of something else.
        is_ours = state.step is not None or state.pp_size == 1
        if is_ours and scaler.is_enabled() and not isinstance(scaler, GradScaler):
            raise UsageError(
                f"a loss was scaled by torch's `{type(scaler).__name__}`, which looks for overflows in this rank's"
                " gradients alone, but others have other parts of the model's",
                hint="use `smp.amp.GradScaler()`, which takes the same arguments and asks all ranks",
            )
        return original(scaler, outputs)

    setattr(torch.amp.GradScaler, "scale", scale)  # noqa: B010 - mypy refuses to assign to a method
    state.reset_hooks.append(functools.partial(setattr, torch.amp.GradScaler, "scale", original))
