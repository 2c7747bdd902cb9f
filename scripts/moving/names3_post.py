"""Texts that a table of names cannot change; run from the root of the tree, after the table."""

from __future__ import annotations

import pathlib
import sys

TP = "smpkit/torch/tensor_parallel"

REPLACEMENTS: list[tuple[str, str, str]] = [
    # --- collectives ---
    (
        f"{TP}/collectives.py",
        """    forward          what this rank gets                            backward
    copy             its value, as it is                            reduce
    reduce           the sum of all ranks' values                   copy
    gather           all ranks' values, side by side on a dim       reduce_scatter_from_tp
    reduce_scatter_from_tp   its part of the sum of all ranks' values       gather
    gather_from_tp     all ranks' values, side by side on a dim       split
    split            its part of a value that all ranks have        gather_from_tp
    exchange         its part of every rank's value                 exchange, the other way round

After `gather_to_tp` each rank goes its own way with the whole, so gradients add up; after `gather_from_tp` all ranks compute
the same, so each has the whole gradient already and takes its part. Backwards are made of these functions too, so they
can be differentiated again. With one tensor-parallel rank they return their argument.

While a step is tried out on one rank, to measure it or on tensors without data, values of the right shape take the
place of what the others would send.
""",
        """    forward                  what this rank gets                            backward
    copy_to_tp               its value, as it is                            reduce_from_tp
    reduce_from_tp           the sum of all ranks' values                   copy_to_tp
    gather_to_tp             all ranks' values, side by side on a dim       reduce_scatter_from_tp
    reduce_scatter_from_tp   its part of the sum of all ranks' values       gather_to_tp
    gather_from_tp           all ranks' values, side by side on a dim       scatter_to_tp
    scatter_to_tp            its part of a value that all ranks have        gather_from_tp
    all_to_all               its part of every rank's value                 all_to_all, the other way round

The names are Megatron's: `to_tp` enters the region in which the ranks compute different things, `from_tp` leaves it.
(`gather_to_tp` and `reduce_scatter_from_tp` are its `gather_from_sequence_parallel_region` and
`reduce_scatter_to_sequence_parallel_region`, for any dimension.) After `gather_to_tp` each rank uses the whole for
something else, so gradients add up; after `gather_from_tp` all ranks compute the same, so each has the whole gradient
already and takes its part. Backwards are made of these functions too, so they can be differentiated again. With one
tensor-parallel rank they return their argument.

In a dry run (a step that is traced or measured on one rank, or runs on fake tensors) nothing is sent: the result has
the right shape and stands for what the other ranks would send.
""",
    ),
    (
        f"{TP}/collectives.py",
        "Return this rank's part along dimension `split_dim` of every rank's value, in their order along dimension `concat_dim`.",
        "Return this rank's part along `split_dim` of every rank's value, in their order along `concat_dim`.",
    ),
    (
        f"{TP}/collectives.py",
        '"""Return whether the other ranks take no part in what happens to `x`: it has no data, or a step is tried out."""',
        '"""Return whether no collective may run on `x`: it has no data, or this rank traces a step alone."""',
    ),
    (
        f"{TP}/collectives.py",
        '"""Note a random number that all ranks have without an exchange: ranks that got out of step have different ones."""',
        '"""Add a random number that all ranks know without communication: it differs on ranks that got out of step."""',
    ),
    (
        f"{TP}/collectives.py",
        '"""Let a value that lies on another pipeline rank say where this happens."""',
        '"""Hand the call to a tensor of another pipeline rank: it runs where the tensor is."""',
    ),
    (
        f"{TP}/collectives.py",
        '"""Begin to gather, outside of autograd; what is returned waits and gives the result."""',
        '"""Start an all-gather, outside of autograd; the function that is returned waits for it and returns the result."""',
    ),
    (
        f"{TP}/collectives.py",
        '"""Begin to reduce and scatter, outside of autograd; what is returned waits and gives the result."""',
        '"""Start a reduce-scatter, outside of autograd; the returned function waits for it and returns the result."""',
    ),
    (
        f"{TP}/collectives.py",
        '''            f"{kind.replace('_', '-')} of a {list(x.shape)} tensor: dimension {dim} is {x.shape[dim]}, which the"''',
        '''            f"{_SPOKEN[kind]} of a {list(x.shape)} tensor: dimension {dim} is {x.shape[dim]}, which the"''',
    ),
    (
        f"{TP}/collectives.py",
        """    "all_to_all": "all_to_all",
}


def _run_or_dry_run(""",
        """    "all_to_all": "all_to_all",
}

_SPOKEN: Final = {"reduce_scatter_from_tp": "reduce-scatter", "scatter_to_tp": "split", "all_to_all": "exchange"}


def _run_or_dry_run(""",
    ),
    # --- layouts ---
    (
        f"{TP}/boundary.py",
        '''"""What the values between distributed modules are on the tensor-parallel ranks, and what that means for gradients.

=========  ==============================================  ======================  =========================
boundary   a rank holds                                    into a module           out of it
=========  ==============================================  ======================  =========================
BATCH      its own samples                                 gather on dim 0         reduce-scatter on dim 0
GATHERED   the samples of all ranks, equal on all          copy                    reduce
REPLICATE  the one batch of all ranks, equal on all        copy                    reduce
SEQUENCE   its part of each sequence of that one batch     gather on dim 1         reduce-scatter on dim 1
=========  ==============================================  ======================  =========================

The configuration chooses: BATCH without `prescaled_batch`, REPLICATE with it. Inside a stack of transformer layers the
values change once, at its ends: `optimize: speed` takes the one of the two that is equal on all ranks (GATHERED or
REPLICATE), `optimize: memory` the one where no rank holds what another does (BATCH or SEQUENCE).
''',
        '''"""How the values between distributed modules lie on the tensor-parallel ranks, and what that means for gradients.

==================  =========  ============================================  ===============  =======================
layout              DTensor    a rank holds                                  into a module    out of it
==================  =========  ============================================  ===============  =======================
SHARD_BATCH         Shard(0)   its own samples                               gather on dim 0  reduce-scatter on dim 0
REPLICATE_GATHERED  Replicate  the samples of all ranks, equal on all        copy             reduce
REPLICATE           Replicate  the one batch of all ranks, equal on all      copy             reduce
SHARD_SEQUENCE      Shard(1)   its part of each sequence of that one batch   gather on dim 1  reduce-scatter on dim 1
==================  =========  ============================================  ===============  =======================

The configuration chooses: SHARD_BATCH without `prescaled_batch`, REPLICATE with it. Inside a stack of transformer
layers the layout changes once, at its ends: `optimize: speed` takes the replicated one of the two (REPLICATE_GATHERED
or REPLICATE), `optimize: memory` the sharded one (SHARD_BATCH or SHARD_SEQUENCE).
''',
    ),
    (
        f"{TP}/boundary.py",
        """=========  ===============================  ==================================================
boundary   weight divided over the ranks    weight that all hold, used on the values in between
=========  ===============================  ==================================================
BATCH      RDP_GROUP, 1 / tp_size           DP_GROUP, 1        (it has seen this rank's samples)
GATHERED   RDP_GROUP, 1 / tp_size           RDP_GROUP, 1 / tp_size           (those of all ranks)
REPLICATE  RDP_GROUP, 1                     DP_GROUP, 1                                 (all, too)
SEQUENCE   RDP_GROUP, 1                     DP_GROUP, tp_size   (a part of what makes one gradient)
=========  ===============================  ==================================================
""",
        """==================  ===========================  ==========================================================
layout              sharded weight               replicated weight, used on the values in between
==================  ===========================  ==========================================================
SHARD_BATCH         RDP_GROUP, 1 / tp_size       DP_GROUP, 1              (it has seen this rank's samples)
REPLICATE_GATHERED  RDP_GROUP, 1 / tp_size       RDP_GROUP, 1 / tp_size               (those of all ranks)
REPLICATE           RDP_GROUP, 1                 DP_GROUP, 1                                     (all, too)
SHARD_SEQUENCE      RDP_GROUP, 1                 DP_GROUP, tp_size     (a part of what makes one gradient)
==================  ===========================  ==========================================================
""",
    ),
    (
        f"{TP}/boundary.py",
        '"""Return what distributed modules take and return by the configuration."""',
        '"""Return the layout of what distributed modules take and return, by the configuration."""',
    ),
    (
        f"{TP}/boundary.py",
        '"""Return what the layers of a transformer stack hand on by the configuration."""',
        '"""Return the layout between the layers of a transformer stack, by the configuration."""',
    ),
    (
        f"{TP}/plan_stacks.py",
        "           gather            (everywhere    change                 change\n           (BATCH, GATHERED)  an ordinary    to the                back\n                              parameter)     stack's boundary\n",
        "           gather inputs     (everywhere    change                 change\n           (SHARD_BATCH or    an ordinary    to the                back\n           REPLICATE_GATHERED) parameter)    stack's layout\n",
    ),
    (
        f"{TP}/embedding.py",
        "boundary: what comes in and goes out; under SEQUENCE whole sequences of indices come in.",
        "boundary: what comes in and goes out; under SHARD_SEQUENCE whole sequences of indices come in.",
    ),
    (
        f"{TP}/cross_entropy.py",
        """        boundary: whether ranks have samples of their own (BATCH) or the same (REPLICATE); None for what the
            configuration says.
""",
        """        boundary: whether ranks have samples of their own (SHARD_BATCH) or the same (REPLICATE); None for what the
            configuration says.
""",
    ),
    (
        "docs/reference/python.md",
        "- boundary: what comes in and goes out; under SEQUENCE whole sequences of indices come in.",
        "- boundary: what comes in and goes out; under SHARD_SEQUENCE whole sequences of indices come in.",
    ),
    (
        "docs/reference/python.md",
        "- boundary: whether ranks have samples of their own (BATCH) or the same (REPLICATE); None for what the",
        "- boundary: whether ranks have samples of their own (SHARD_BATCH) or the same (REPLICATE); None for what the",
    ),
    (
        "docs/reference/python.md",
        "a layer around this one normalises, adds residuals, and calls `share`.",
        "a layer around this one normalises, adds residuals, and calls `partial_output`.",
    ),
    ("docs/reference/python.md", "boundary: Boundary | None", "boundary: Layout | None"),
    ("docs/reference/python.md", "inner: Boundary | None", "inner: Layout | None"),
    (
        f"{TP}/linear.py",
        """A block of two needs one exchange on its way in and one on its way out::

    x ──enter──► ColumnParallelLinear ──► (anything per feature) ──► RowParallelLinear ──leave──► y
                 output features divided                             input features divided
""",
        """A block of two needs one collective on its way in and one on its way out::

    x ──enter_region──► ColumnParallelLinear ──► (per feature) ──► RowParallelLinear ──leave_region──► y
                        output features divided                    input features divided
""",
    ),
    (
        f"{TP}/gathered_linear.py",
        "`linear(gather(x, dim), weight, bias)`",
        "`linear(gather_to_tp(x, dim), weight, bias)`",
    ),
    # --- tensor parallelism: messages and docstrings ---
    (
        f"{TP}/shards.py",
        "Return the whole tensor from the pieces of the tensor-parallel ranks, in their order: the reverse of `take_shard`.",
        "Return the whole tensor from the pieces of the ranks, in their order: the reverse of `take_shard`.",
    ),
    (
        f"{TP}/plan_paths.py",
        """its plan: {bypass} reaches"
                " its result past""",
        """its plan: {bypass}"
                " reaches its result past""",
    ),
    (
        f"{TP}/same_call.py",
        """they took different paths through the model"
                " in the call before""",
        """they took different paths through the"
                " model in the call before""",
    ),
    (
        f"{TP}/successors.py",
        """which has replaced `{found.full_name(key)}`"
            f" and {len(replaced)""",
        """which has replaced"
            f" `{found.full_name(key)}` and {len(replaced)""",
    ),
    (
        f"{TP}/successors.py",
        '''"""Optimizers that were made before the model was wrapped: they get the parameters that took the place of theirs.

Which those are, the translation of weights tells: it is run on tensors without data, and what it reads to make a weight
is what the weight took the place of.
"""''',
        '''"""Give optimizers that were made before the model was wrapped the parameters that replaced theirs.

Which parameter replaced which is found by running the translation of weights on tensors without data: a weight replaces
the weights that the translation reads to make it.
"""''',
    ),
    (
        f"{TP}/same_call.py",
        '"""Compare what tensor-parallel ranks are about to do, before their collectives wait for each other.',
        '"""Check that tensor-parallel ranks are about to make the same call, before any collective blocks.',
    ),
    (
        f"{TP}/lazy_logits.py",
        '"""Outputs of Hugging Face models whose logits are brought together when somebody looks at them.',
        '"""Outputs of Hugging Face models whose logits are gathered on first access.',
    ),
    (
        f"{TP}/arguments.py",
        '"""What users give to distributed modules: refused at once where it cannot be meant."""',
        '"""Checks of the arguments of distributed modules."""',
    ),
    (
        f"{TP}/plan_paths.py",
        '"""See, once per block, that what comes out of it has passed its row-divided layer.',
        '"""Check, once per block, that its result depends on its inputs only through its row-divided layer.',
    ),
    # --- placement of parameters, data parallelism ---
    (
        "smpkit/torch/data_parallel.py",
        "def _reduce_target_of(self, placements: ParameterPlacement) -> ReduceTarget:",
        "def _reduce_target_of(self, placement: ParameterPlacement) -> ReduceTarget:",
    ),
    (
        "smpkit/torch/data_parallel.py",
        "return ReduceTarget(placements.reduce_group) if self.zero1 is None else self.zero1.reduce_target_of(placements)",
        "return ReduceTarget(placement.reduce_group) if self.zero1 is None else self.zero1.reduce_target_of(placement)",
    ),
    (
        "smpkit/torch/data_parallel.py",
        '        placements = [buffer for buffer in self._module.buffers() if buffer.device.type != "meta"]\n        pieces = [buffer for buffer in placements if',
        '        buffers = [buffer for buffer in self._module.buffers() if buffer.device.type != "meta"]\n        pieces = [buffer for buffer in buffers if',
    ),
    (
        "smpkit/torch/data_parallel.py",
        "broadcast_tensors([buffer for buffer in placements if id(buffer)",
        "broadcast_tensors([buffer for buffer in buffers if id(buffer)",
    ),
    (
        "smpkit/torch/data_parallel.py",
        "def _holder_in_replica(placements: ParameterPlacement, rank: int) -> int:",
        "def _holder_in_replica(placement: ParameterPlacement, rank: int) -> int:",
    ),
    (
        "smpkit/torch/data_parallel.py",
        "    assert placements.replica_group is not None\n",
        "    assert placement.replica_group is not None\n",
    ),
    (
        "smpkit/torch/data_parallel.py",
        "dist.get_process_group_ranks(placements.replica_group)",
        "dist.get_process_group_ranks(placement.replica_group)",
    ),
    (
        "smpkit/torch/data_parallel.py",
        "[each for each, place in coordinates_by_rank.items() if place.rdp == wanted.rdp]",
        "[each for each, own in coordinates_by_rank.items() if own.rdp == wanted.rdp]",
    ),
    (
        "smpkit/torch/sharded_state.py",
        "def reduce_target_of(self, placements: ParameterPlacement) -> ReduceTarget:",
        "def reduce_target_of(self, placement: ParameterPlacement) -> ReduceTarget:",
    ),
    (
        "smpkit/torch/sharded_state.py",
        "return ReduceTarget(placements.reduce_group, self._owners.get(id(placements.parameter)))",
        "return ReduceTarget(placement.reduce_group, self._owners.get(id(placement.parameter)))",
    ),
    (
        "smpkit/torch/sharded_state.py",
        '"""Give the owners\' values to all that hold the parameters; every rank calls this, after a step."""',
        '"""Broadcast each updated parameter from its owner; every rank calls this, after a step."""',
    ),
    (
        "smpkit/torch/sharded_state.py",
        '"""Parameters on their way from their owner."""',
        '"""A broadcast of packed parameters from their owner, under way."""',
    ),
    (
        "smpkit/torch/sharded_data_parallel.py",
        'is multiplied by {each.grad_scale:g}, which sharded data parallelism "\n                "does not do"',
        'is multiplied by {each.grad_scale:g}, which sharded data "\n                "parallelism does not do"',
    ),
    (
        "smpkit/torch/holders.py",
        '''"""Which ranks hold a parameter, and which of them average its gradient.

::

    parameter                        held by (equal values)      gradient averaged over     then multiplied by
''',
        '''"""Where a parameter is placed: which ranks hold it, and which of them average its gradient.

::

    parameter                        replica group               reduce group               gradient scale
''',
    ),
    (
        "smpkit/torch/gradient_norm.py",
        "import torch.nn.utils.clip_grad as torchs_clipping\n",
        "import torch.nn.utils.clip_grad as torch_clip_grad\n",
    ),
    ("smpkit/torch/gradient_norm.py", "getattr(torchs_clipping, ", "getattr(torch_clip_grad, "),
    ("smpkit/torch/gradient_norm.py", "setattr(torchs_clipping, ", "setattr(torch_clip_grad, "),
    (
        "smpkit/torch/gradient_norm.py",
        '''"""Have torch's own `clip_grad_norm_` say what it does to a model on several pipeline ranks, from now on.

    Scripts hold on to that function itself, so one that it looks up when it is called is replaced.
    """''',
        '''"""Make torch's own `clip_grad_norm_` warn that it clips by the norm of one pipeline rank's part only.

    Scripts import that function by name, so the helper that it looks up on every call is replaced instead.
    """''',
    ),
    (
        "smpkit/torch/join.py",
        '"""What a rank without inputs does while others train."""',
        '"""Shadows the collectives of the ranks that still train, as torch\'s join asks of a rank without inputs."""',
    ),
    # --- model, optimizer, precision ---
    (
        "smpkit/torch/model.py",
        "self.data_parallel.adopt(state.optimizer.param_groups)",
        "self.data_parallel.update_param_groups(state.optimizer.param_groups)",
    ),
    (
        "smpkit/torch/model.py",
        "# then it is placed a block at a time, as its own masters",
        "# `shard_model` then places it block by block, in float32",
    ),
    (
        "smpkit/torch/amp.py",
        '"""`smp.amp`: torch\'s gradient scaler for autocast, with all ranks of a model of one mind."""',
        '"""`smp.amp`: torch\'s gradient scaler for autocast; all ranks of a model skip a step together, or none does."""',
    ),
    (
        "smpkit/torch/amp.py",
        '"""Let every rank know what any has found; a rank may have no gradients at all, and have found nothing."""',
        '"""All-reduce `found_inf`: a rank may have no gradients of its own, and must skip the step all the same."""',
    ),
    # --- placement of modules, tracing ---
    (
        "smpkit/torch/nn/huggingface/generation.py",
        """    if ranks_have_own_samples:  # all ranks go through all samples, so that they stop together, and keep their own in the end
""",
        """    if ranks_have_own_samples:
        # All ranks generate for all samples, so that they stop at the same token, and keep their own in the end.
""",
    ),
    (
        "smpkit/torch/partitioning/trace.py",
        """            fakes = parameter if isinstance(parameter, FakeTensor) else mode.from_tensor(parameter)
            self._seen[_storage_key(fakes)] = fakes
""",
        """            fake = parameter if isinstance(parameter, FakeTensor) else mode.from_tensor(parameter)
            self._seen[_storage_key(fake)] = fake
""",
    ),
    (
        "smpkit/torch/partitioning/trace.py",
        '"""Know the parameters again as this mode shows them to operations: it makes one fake tensor of each."""',
        '"""Count the fake tensors that this mode makes of the parameters as seen: operations save those."""',
    ),
    (
        "smpkit/torch/gradient_norm.py",
        """    packed = torch.stack([value.nan_to_num(nan=0.0, posinf=float("inf")), value.isnan().double()])  # a maximum loses NaN
""",
        """    # NaN travels as a flag of its own: a maximum would lose it.
    packed = torch.stack([value.nan_to_num(nan=0.0, posinf=float("inf")), value.isnan().double()])
""",
    ),
    (
        "smpkit/torch/partitioning/apply.py",
        '"""Make an assignment so: every rank keeps its own units\' weights, and what several ranks use is kept equal."""',
        '"""Apply an assignment: every rank keeps the weights of its own units, and those that several ranks use."""',
    ),
    (
        "smpkit/torch/partitioning/trace.py",
        '"""Let a step be tried out on this rank only: afterwards the model and chance are what they were.\n',
        '"""Restore the model and the random number generators after a trial of the step on this rank only.\n',
    ),
    (
        "smpkit/torch/partitioning/recomputed.py",
        '"""Stands where an offload engine would, and takes notes.\n',
        '"""Installed in the place of an offload engine, to record checkpointed calls.\n',
    ),
    (
        "smpkit/torch/partitioning/recomputed.py",
        '"""Be told of checkpointed calls meanwhile."""',
        '"""Record checkpointed calls in this block."""',
    ),
    # --- names of arguments in docstrings ---
    (
        "smpkit/torch/gradient_factors.py",
        "        factors: parameters, and what theirs are multiplied by.",
        "        grad_scales: parameters, and what their gradients are multiplied by.",
    ),
    (
        "smpkit/torch/holders.py",
        "        copies: the ranks that hold equal values; None where no other does.\n        averaged: the ranks that average its gradient; None where there is nothing to average.",
        "        replica_group: the ranks that hold equal values; None where no other does.\n        reduce_group: the ranks that average its gradient; None where there is nothing to average.",
    ),
    (
        "smpkit/torch/holders.py",
        "        factor: what every gradient is multiplied by as it arises.",
        "        grad_scale: what every gradient is multiplied by as it arises.",
    ),
    (
        "smpkit/torch/holders.py",
        "RDP_GROUP                  Shard.scale\n",
        "RDP_GROUP                  TpShard.scale\n",
    ),
    (
        "smpkit/torch/holders.py",
        "Shard.group                Shard.scale\n",
        "TpShard.group              TpShard.scale\n",
    ),
    (
        "smpkit/torch/partitioning/manual.py",
        "        places: partition by module name; modules whose parts were placed apart are left out.",
        "        partitions: partition by module name; modules whose parts were placed apart are left out.",
    ),
    (
        "smpkit/torch/sharded_state.py",
        "        held: this rank's parameters; the same on all ranks that hold the same.",
        "        placements: of this rank's parameters; the same on all ranks that hold the same.",
    ),
    (
        "smpkit/torch/tensor_parallel/collectives.py",
        "        forget: begin anew afterwards.",
        "        reset: begin anew afterwards.",
    ),
    (
        "smpkit/torch/buckets.py",
        "        buffer   [ grad 0 | grad 1 | ... | grad n-1 | touched 0 ... touched n-1 ]",
        "        buffer   [ grad 0 | grad 1 | ... | grad n-1 | used 0 ... used n-1 ]",
    ),
    (
        "smpkit/torch/buckets.py",
        "    A touched flag is 1 where this rank's backward reached the parameter, so after the sum every rank knows, without",
        "    A used flag is 1 where this rank's backward reached the parameter, so after the sum every rank knows, without",
    ),
    (
        "smpkit/torch/reducer.py",
        "A factor, where a gradient has one,\ntherefore multiplies",
        "A scale, where a gradient has one,\ntherefore multiplies",
    ),
    (
        "smpkit/torch/reducer.py",
        "The owner therefore sets it aside when a backward\nadds to it, before it does,",
        "The owner therefore stashes it when a backward\nadds to it, before it does,",
    ),
    (
        "smpkit/torch/tensor_parallel/registry.py",
        "so that an entry for a library imports it",
        "so that a rule for a library imports it",
    ),
    (
        "smpkit/torch/tensor_parallel/registry.py",
        "How modules that no entry names are made",
        "How modules that no rule names are made",
    ),
    (
        "smpkit/torch/tensor_parallel/registry.py",
        "a later entry for the same class takes its place",
        "a later rule for the same class takes its place",
    ),
    (
        "smpkit/torch/tensor_parallel/registry.py",
        "Let marked modules that no entry names be rewritten",
        "Let marked modules that no rule names be rewritten",
    ),
    (
        "smpkit/torch/tensor_parallel/replace.py",
        "Return by which entry a distributed module took",
        "Return by which rule a distributed module took",
    ),
    (
        "smpkit/torch/tensor_parallel/whole_state.py",
        "with their names and by which entry.",
        "with their names and by which rule.",
    ),
]


def main() -> None:
    missing = 0
    for path, old, new in REPLACEMENTS:
        file = pathlib.Path(path)
        text = file.read_text()
        if old in text:
            file.write_text(text.replace(old, new))
        elif new not in text:
            print(f"missing in {path}: {old!r}")
            missing += 1
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
