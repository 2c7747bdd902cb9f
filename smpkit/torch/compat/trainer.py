"""Hugging Face's `Trainer` under SMP: what its own SageMaker branch leaves undone, or does for GPUs only.

`Trainer` trains with SMP by itself if `is_sagemaker_mp_enabled()`: it wraps the model and the optimizer, runs its step
through `smp.step`, saves and resumes (transformers 4.4 to 5). Between the releases that SMP v1 was tested with and
those of today that branch has fallen behind the code around it. `Trainer` is therefore replaced by a subclass of
itself as it is loaded, which corrects:

================================= ====================================================================================
place                             without it
================================= ====================================================================================
`args.device`                     is always `cuda`
the accelerator                   takes every rank for a replica: other data on each, metrics gathered from all
batches of an `IterableDataset`   reach replica 0 alone
the model                         is wrapped once more to evaluate it, which raises
the optimizer                     is never made where the model is wrapped (transformers 5)
the optimizer, prepared           is wrapped once more, and its `local_state_dict` with it
the loss                          is the model's, whatever `compute_loss` and label smoothing say; trained and evaluated
tokens                            do not count alike where microbatches or batches have unequal numbers of them
checkpoints                       are deleted by rank 0 (`save_total_limit`) while other ranks still write to them
sharded data parallelism          has only rank 0's part of the optimizer's states saved, and loaded by all ranks
the norm of gradients             is that of this rank's part of the model
the end of an epoch               is divided by more batches than are left for its last update
the random state                  is written to one file by all ranks of a pipeline at once, and without that of dropout
the number of operations          is that of one replica
resuming from `model.safetensors` looks for `pytorch_model.bin`
================================= ====================================================================================
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from safetensors.torch import load_file

from smpkit.errors import CheckpointError, UnsupportedError
from smpkit.plan.mesh import CommGroup
from smpkit.torch.checkpoints.objects import read_file
from smpkit.torch.checkpoints.save_load import names_to_load, save
from smpkit.torch.core.runtime import state
from smpkit.torch.core.tree import map_leaves
from smpkit.torch.distributed.objects import allgather, barrier
from smpkit.torch.model import DistributedModel
from smpkit.torch.optim.gradient_norm import clip_grad_norm_
from smpkit.torch.optimizer import DistributedOptimizer
from smpkit.torch.step import step

_LAUNCHERS: Final = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "OMPI_", "PMI_", "MPI_", "MV2_", "PMIX_")
"""Prefixes of variables from which accelerate concludes that this process is one of several."""

_SFT: Final = "trl.trainer.sft_trainer"
"""Its `compute_loss` gathers metrics from all ranks, which no step may do; the loss is the model's."""
_ITEMS: Final = "num_items_in_batch"
_OPTIMIZER: Final = "optimizer.pt"


class SmpTrainer:
    """A mixin in front of `transformers.Trainer`; `super()` is the original."""

    args: Any
    current_flos: Any
    accelerator: Any
    optimizer: Any
    model_wrapped: Any
    create_optimizer: Any
    compute_loss: Any
    label_names: Any
    can_return_loss: Any
    _prepare_inputs: Any
    _issue_warnings_after_load: Any

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **options: Any) -> None:
        _refuse_trl(type(self), args)
        if args is not None:
            _refuse_another_batch_size(args)
            _set_device(args)
        super().__init__(model, args, *rest, **options)  # type: ignore[call-arg]
        self.create_optimizer = functools.partial(
            self._create_optimizer_once, self.create_optimizer
        )  # a subclass's too
        self._train_step = step(self._train_microbatch)
        if getattr(type(self), "prediction_step", SmpTrainer.prediction_step).__module__ == _SFT:
            self.prediction_step = functools.partial(SmpTrainer.prediction_step, self)  # type: ignore[method-assign]

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator one of a world that has a process for every replica of the model."""
        _set_device(self.args)
        _configure_accelerate()
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adapt_accelerator(self.accelerator)
        _dispatch_batches()

    def hyperparameter_search(self, *_arguments: Any, **_options: Any) -> Any:
        raise UnsupportedError(
            "`hyperparameter_search` trains one model after another, but a job under SMP has one, and its ranks would"
            " each draw values of their own",
            hint="run each trial as a job of its own",
        )

    def _wrap_model(self, model: Any, training: bool = True, **options: Any) -> Any:
        if not isinstance(self.model_wrapped, DistributedModel):
            self.model_wrapped = super()._wrap_model(model, training, **options)  # type: ignore[misc]
        if training:
            self.create_optimizer()
        return self.model_wrapped

    def _create_optimizer_once(self, create: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make the optimizer once: transformers 4 asks for it after the model is wrapped, transformers 5 never."""
        if not isinstance(self.optimizer, DistributedOptimizer):
            create(*arguments, **options)
        return self.optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on one batch; its loss counts as one of the update's batches, of which an epoch may leave fewer."""
        model.train()
        if callable(train := getattr(self.optimizer, "train", None)):  # without a schedule; an evaluation called `eval`
            train()
        # What `Trainer` does without SMP: a loss per item of the whole update is not divided by the update's batches.
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            per_item = num_items_in_batch is not None and getattr(self, "model_accepts_loss_kwargs", False)
            is_scaled = per_item or getattr(self, "compute_loss_func", None) is not None
        number = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
        # A tensor, because a step with another plain number would leave the pipeline's schedule.
        divisor = torch.tensor(1.0 if is_scaled else float(number), device="cpu")
        items = _items_per_microbatch(num_items_in_batch)
        losses = self._train_step(model, self._prepare_inputs(inputs), items, divisor)
        return losses.reduce_mean().detach().to(self.args.device)

    def _train_microbatch(self, model: Any, inputs: Any, items: Any, divisor: torch.Tensor) -> Any:
        loss = self._compute_loss(model, inputs, items) / divisor
        model.backward(loss)
        return loss

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Evaluate one batch by the trainer's own loss, not the model's."""
        if all(inputs.get(name) is not None for name in self.label_names) if self.label_names else self.can_return_loss:
            inputs = {**inputs, _ITEMS: _items_per_microbatch(self._count_items(inputs))}
            model = functools.partial(self._evaluate_microbatch, model)
        return super().prediction_step(model, inputs, *arguments, **options)  # type: ignore[misc]

    def _evaluate_microbatch(self, model: Any, **inputs: Any) -> Any:
        loss, outputs = self._compute_loss(model, inputs, inputs.pop(_ITEMS), return_outputs=True)
        return {**outputs, "loss": loss} if isinstance(outputs, dict) else (loss, *outputs[1:])

    def _count_items(self, inputs: Any) -> Any:
        count = getattr(self, "_get_num_items_in_batch", None)
        return count and count([inputs], self.args.device)

    def _compute_loss(self, model: Any, inputs: Any, items: Any, **options: Any) -> Any:
        compute_loss = self.compute_loss
        if type(self).compute_loss.__module__ == _SFT:
            compute_loss = super().compute_loss  # type: ignore[misc]
        if items is not None:  # scripts of earlier releases do not take it
            options["num_items_in_batch"] = items
        return compute_loss(model, inputs, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super()._save_checkpoint(*arguments, **options)  # type: ignore[misc]
        # Rank 0 may go on to delete the folder (`save_total_limit`) or to upload it while others still write to it.
        barrier()

    def store_flos(self) -> None:
        """Add up the operations of all replicas, as `Trainer` does under DDP."""
        self.current_flos *= _data_replicas()[1]
        super().store_flos()  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # before a barrier in `super()`, after which ranks write their own
            for file in Path(output_dir).glob(f"{_OPTIMIZER}*"):  # of an earlier run, which may have had more stages
                file.unlink()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if state.cfg.sharded_data_parallel_degree > 1 and state.rdp_rank > 0:
            save(self.optimizer.local_state_dict(), Path(output_dir, _OPTIMIZER), v3=True)

    def _save_rng_state(self, output_dir: str) -> None:
        # One rank of those with the same data, which would write the same file, and have the same random state.
        rank = state.mp_rank if state.cfg.prescaled_batch else state.pp_rank
        if rank == 0:
            super()._save_rng_state(output_dir)  # type: ignore[misc]
        if state.mp_rank == 0:
            _streams_in(output_dir).write_text(json.dumps(dict(self.model_wrapped.random_state())), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _check_states_of_all_ranks(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            # Of a pipeline across hosts with disks of their own, the first host has it.
            own = streams.read_text(encoding="utf-8") if (streams := _streams_in(checkpoint)).exists() else ""
            if text := max(allgather(own, CommGroup.MP_GROUP)):
                self.model_wrapped.load_random_state(json.loads(text))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = getattr(self, "state").best_model_checkpoint  # noqa: B009  the Trainer's own state, not ours
        if not self._load_weights(Path(best)):
            super()._load_best_model()  # type: ignore[misc]

    def _load_weights(self, folder: Path) -> bool:
        """Load what `save_pretrained` left in a folder into the wrapped model; False if it left nothing."""
        files, names = list[Path](), dict[str, str]()
        for pattern in ("adapter_model.*", "model*.safetensors", "pytorch_model*.bin"):
            files = files or sorted(folder.glob(pattern))
        if not files or not isinstance(self.model_wrapped, DistributedModel):
            return False
        if files[0].stem == "adapter_model":
            names = _names_of_adapter(self.model_wrapped)
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            content = load_file(file) if file.suffix == ".safetensors" else read_file(file, "cpu")
            weights |= {names.get(name, name): weight for name, weight in content.items()}
        result = self.model_wrapped.load_state_dict(weights, strict=False)
        # Tied weights are saved once, so what is missing under one name may have come under another; and the file of an
        # adapter has its own weights alone.
        missing, module = set(result.missing_keys), self.model_wrapped.module
        loaded = {id(weight) for name, weight in module.named_parameters(remove_duplicate=False) if name not in missing}
        expected = {name: weight for name, weight in module.named_parameters() if not names or name in names.values()}
        result.missing_keys[:] = [name for name, weight in expected.items() if id(weight) not in loaded]
        self._issue_warnings_after_load(result)
        return True


def _check_states_of_all_ranks(checkpoint: str) -> None:
    """Refuse optimizer states saved with other degrees: each rank loads its own file, and what others hold is lost."""
    here = {file.name for file in Path(checkpoint).glob(f"{_OPTIMIZER}*")}
    own = [Path(name).name for name in names_to_load(f"{Path(checkpoint, _OPTIMIZER)}")]
    if state.rdp_rank > 0 and state.cfg.sharded_data_parallel_degree > 1:
        del own[1:]  # the file without a replica's number has replica 0's part, of the same shapes
    common = next((name for name in own if name in here), None)
    answers = allgather((here, common, own[0]), CommGroup.WORLD)
    there = {name for names, _, _ in answers for name in names}  # none: `save_only_model`
    if there and there != {name for _, name, _ in answers}:
        names = ", ".join(sorted(there))
        expected = ", ".join(sorted({name or wanted for _, name, wanted in answers}))
        raise CheckpointError(
            f"the optimizer states in `{checkpoint}` are {names}, but the ranks of this job read {expected}",
            hint="resume with the degrees that saved it, from an earlier checkpoint if the job ended while it saved"
            " this one, or train anew from its weights: `from_pretrained` reads them",
        )


def _streams_in(checkpoint: str) -> Path:
    """Return the file that says where dropout goes on: its random numbers are smpkit's own in a step."""
    return Path(checkpoint, f"smp_random_state_{state.rdp_rank}.json")


def _refuse_another_batch_size(args: Any) -> None:
    """Refuse to begin again with a smaller batch when memory is short: other ranks wait in the midst of the step."""
    if getattr(args, "auto_find_batch_size", False):
        raise UnsupportedError(
            "`auto_find_batch_size` is True, but a rank that is out of memory ends the run",
            hint="leave it out, and set `per_device_train_batch_size`; `smpkit plan` shows what each rank will hold",
        )


def _refuse_trl(trainer: type, args: Any) -> None:
    """Refuse trainers of TRL that would train by another loss, in silence."""
    count = state.cfg.microbatches
    for kind in trainer.__mro__:
        if not kind.__module__.startswith("trl.") or "compute_loss" not in vars(kind):
            continue
        if kind.__module__ == _SFT:
            if getattr(args, "loss_type", "nll") == "dft":
                message = '`loss_type` is "dft", but under SMP the loss of SFTTrainer is the model\'s'
                raise UnsupportedError(message, hint='set it to "nll"')
            continue
        if count > 1:
            raise UnsupportedError(
                f"`microbatches` is {count}, but {kind.__name__} compares the samples of one half of a batch with those"
                " of the other, which are not in the same microbatch",
                hint="set `microbatches` to 1, and `gradient_accumulation_steps` instead",
            )
        # TRL 1 puts a forward of its own in place of the model's, by a function that the module of the trainer imports.
        if state.pp_size > 1 and hasattr(sys.modules.get(kind.__module__), "add_fused_lm_head"):
            raise UnsupportedError(
                f"`partitions` is {state.pp_size}, but {kind.__name__} multiplies by the weight of `lm_head` outside of"
                " that layer, which one rank of a pipeline holds",
                hint="set it to 1, which trains replicas; `smpkit.fit` makes a model fit one GPU",
            )


def _items_per_microbatch(items: Any) -> Any:
    """Divide the number of items of an update, because a step takes the mean of its microbatches' losses."""
    return items if items is None else torch.as_tensor(items, device="cpu") / state.cfg.microbatches


def _names_of_adapter(model: DistributedModel) -> dict[str, str]:
    """Return the model's name of each weight in the file of a PEFT adapter, where the adapter's own is left out."""
    from peft import get_peft_model_state_dict

    whole = model.state_dict()
    # As when it was saved; the embeddings, if the file has them, which PEFT would look up on the hub.
    saved = get_peft_model_state_dict(model.get_module(), state_dict=whole, save_embedding_layers=True)
    own = {id(weight): name for name, weight in whole.items()}
    return {name: own[id(weight)] for name, weight in saved.items()}


# --- the world, as accelerate sees it ---------------------------------------------------------------------------------


def _data_replicas() -> tuple[int, int, CommGroup]:
    """Return (this one, how many there are, the group): processes with data of their own."""
    if state.cfg.prescaled_batch:
        return state.rdp_rank, state.rdp_size, CommGroup.RDP_GROUP
    return state.dp_rank, state.dp_size, CommGroup.DP_GROUP


def _set_device(args: Any) -> None:
    """Set the cached property `TrainingArguments._setup_devices`, which would choose `cuda` in any case."""
    args.__dict__["_setup_devices"] = state.device
    args.distributed_state = None
    args._n_gpu = 1


def _configure_accelerate() -> None:
    """Make accelerate's world one of replicas: a process for each, with its own part of the data."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    environ = dict(os.environ)
    # mpirun's and torchrun's variables count ranks, and would make it gather, broadcast and shard over all of them.
    for name in environ:
        if name.startswith(_LAUNCHERS):
            del os.environ[name]
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(state.device)
    try:
        world = PartialState(cpu=state.device.type == "cpu")
    finally:
        os.environ.clear()
        os.environ.update(environ)
    world.process_index, world.num_processes, _ = _data_replicas()
    world.local_process_index = state.local_rank


def adapt_accelerator(accelerator: Any) -> None:
    """Make an accelerator know the wrapped model, gather from the replicas, and clip by the norm of the whole model."""
    _, replicas, group = _data_replicas()

    def gathered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        pieces = allgather(value.detach().cpu(), group) if replicas > 1 else [value]
        return torch.cat([piece.reshape(-1) if piece.dim() == 0 else piece for piece in pieces]).to(value.device)

    def pad(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return map_leaves(lambda value: _pad(value, dim, pad_index, pad_first, group), tensor)

    def reduced(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        del scale  # TPUs' alone
        return map_leaves(functools.partial(_reduce, reduction, group), tensor)

    def gather_object(objects: list[Any]) -> list[Any]:
        return [item for objects_of_one in allgather(objects, group) for item in objects_of_one]

    unwrap = accelerator.unwrap_model

    def unwrap_model(model: Any, *arguments: Any, **options: Any) -> Any:
        return unwrap(model.get_module() if isinstance(model, DistributedModel) else model, *arguments, **options)

    # By the name of the model's class, label smoothing knows whether labels are shifted.
    accelerator.unwrap_model = unwrap_model
    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.gather = functools.partial(map_leaves, gathered)
    if replicas > 1:
        accelerator.pad_across_processes = pad
        accelerator.reduce = reduced
        vars(sys.modules[type(accelerator).__module__])["gather_object"] = gather_object  # by `gather_for_metrics`


def _dispatch_batches() -> None:
    """Let replica 0, which alone reads an `IterableDataset`, send the others their batches (`dispatch_batches`)."""
    from accelerate import data_loader

    replica, replicas, group = _data_replicas()

    def broadcast(value: Any, from_process: int = 0) -> Any:
        return allgather(value if replica == from_process else None, group)[from_process]

    def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
        objects[:] = broadcast(objects, from_process)
        return objects

    if replicas > 1:  # accelerate's own return what they get, because its world has no process group
        vars(data_loader).update(broadcast=broadcast, broadcast_object_list=broadcast_object_list)


def _reduce(reduction: str, group: CommGroup, value: Any) -> Any:
    """Return the sum, the mean or the largest of a tensor over the group."""
    if not isinstance(value, torch.Tensor):
        return value
    values = torch.stack([part.to(value.device) for part in allgather(value.detach().cpu(), group)])
    return values.amax(0) if reduction == "max" else values.mean(0) if reduction == "mean" else values.sum(0)


def _pad(value: Any, dim: int, pad_index: int, pad_first: bool, group: CommGroup) -> Any:
    """Pad a tensor along `dim` to the longest in the group."""
    if not isinstance(value, torch.Tensor) or dim >= value.dim():
        return value
    missing = max(allgather(value.shape[dim], group)) - value.shape[dim]
    shape = list(value.shape)
    shape[dim] = missing
    padding = value.new_full(shape, pad_index)
    return torch.cat([padding, value] if pad_first else [value, padding], dim)


# --- put in place when `transformers.trainer` has been imported -------------------------------------------------------


def replace_trainer(module: ModuleType) -> None:
    """Replace `Trainer` in its module (called by `smpkit.drop_in.after_import`)."""
    original = vars(module)["Trainer"]
    if not issubclass(original, SmpTrainer):
        names = {"__module__": original.__module__, "__qualname__": "Trainer", "__doc__": original.__doc__}
        vars(module)["Trainer"] = type("Trainer", (SmpTrainer, original), names)
