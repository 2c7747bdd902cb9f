"""Texts of the offload, recompute and checkpoint rooms that the table of names2 cannot reach; run from the root."""

from __future__ import annotations

import pathlib
import sys

R = "smpkit/torch/"
O, M, K, C = R + "offload/", R + "offload_model/", R + "checkpointing/", R + "checkpoints/"
EDITS: list[tuple[str, str, str]] = [
    # code: a name that means two things in one file, and comments that the formatter would move
    (R + "model.py", "checkpointing.foreign import adopt\n", "checkpointing.foreign import patch_torch_checkpoint\n"),
    (R + "model.py", "\n    adopt()\n", "\n    patch_torch_checkpoint()\n"),
    ("tests/torch/offload_model/test_streams.py", "offloaded.back in link", "offloaded.h2d_event in link"),
    (
        M + "parking.py",
        """            self._transfers.link.synchronize(offloaded.h2d_event, "a slice's input")  # nobody waited for it, and it is overwritten
""",
        """            # Nobody has waited for this copy, and its memory is about to be overwritten.
            self._transfers.link.synchronize(offloaded.h2d_event, "a slice's input")
""",
    ),
    (
        C + "save.py",
        """    if not save.file_systems.is_leader or not save.staged.exists():  # gone: another leader, who saw our marker late, was faster
""",
        """    # The folder is gone if another leader, who saw our marker late, has published it.
    if not save.file_systems.is_leader or not save.staged.exists():
""",
    ),
    # offload
    (
        O + "__init__.py",
        "scope.py     hooks: what is saved becomes a handle, and the tensor again",
        "scope.py     saved-tensor hooks: pack to a handle, unpack to the tensor",
    ),
    (O + "__init__.py", "departures.py  the way out;  arrivals.py: the way back", "departures.py  copies to the host;  arrivals.py: back"),
    (O + "__init__.py", "record.py    one storage: where its bytes are", "record.py    one saved storage: where its bytes are"),
    (O + "__init__.py", "what backward needs next;  pace.py: how early to load it", "the order of backward;  pace.py: tunes the lead"),
    (O + "active.py", "What takes the boundaries of checkpointed calls away from the device.", "What offloads the inputs of checkpointed calls."),
    (O + "active.py", "Hand boundaries to `engine` from now on, or to nobody; returns who got them before.", "Let `engine` offload from now on, or nobody; returns the engine before it."),
    (O + "active.py", "Have host memory for so many microbatches before a step begins: to pin it can wait for the device.\n\n    In the middle of a step two ranks that send to each other could then wait for each other.", "Reserve host memory for so many microbatches before a step begins.\n\n    Pinning may synchronize with the device; in the middle of a step, two ranks that send to each other could deadlock."),
    (O + "arena.py", '"""What a supply has ready before', '"""What a slab provider has ready before'),
    (O + "arena.py", "Of a slab of a supply up to 1/32", "Of a prepared slab up to 1/32"),
    (O + "arena.py", "        settle: called before memory goes back to the system: blocks until no copy reads or writes it any more. When it\n            raises, the memory stays.", "        synchronize: called before memory goes back to the system: blocks until no copy reads or writes it any more.\n            When it raises, the memory stays."),
    (O + "arena.py", "        supply: makes the next slab ready while", "        provider: makes the next slab ready while"),
    (O + "arena.py", "By address; only with a supply.", "By address; only with a slab provider."),
    (O + "arena.py", "from what is left of segments; `upcoming`", "from what is left of slabs; `upcoming`"),
    (O + "arena.py", "from what is left of a segment, from", "from what is left of a slab, from"),
    (O + "arena.py", "Let the supply have this much ready", "Let the provider prepare this much"),
    (O + "arena.py", "nobody has, the supply included", "nobody has, the provider included"),
    (O + "arena.py", "            ahead: sizes that will be wanted", "            upcoming: sizes that will be wanted"),
    (O + "arrivals.py", '"""The way back: what backward needs is loaded a few layers ahead, and waited for where it is used."""', '"""Host to device: load what backward needs a few layers ahead, and wait for it where it is used."""'),
    (O + "arrivals.py", "Brings records back to the device.", "Loads saved storages to the device."),
    (O + "arrivals.py", "Return the bytes of a record on the device", "Return the bytes of a storage on the device"),
    (O + "arrivals.py", "is out of memory must leave records as they were", "is out of memory must leave storages as they were"),
    (O + "arrivals.py", "Come to a group in backward: load it and those after it.", "Begin the backward of a group: load it and prefetch those after it."),
    (O + "debug.py", "Every stream, copy lane and this thread has a vector clock: how much of each other's work is known to be complete before\nwhat it does next. An event carries the clock of where it was recorded, and a wait joins it. So whether two accesses are\nordered does not depend on how long they happened to take: a missing edge is found even where it did no harm this time.", "Every stream, copy thread and this thread has a vector clock: how much of each other's work is known to be complete\nbefore what it does next. An event carries the clock of where it was recorded, and a wait joins it. So whether two\naccesses are ordered does not depend on how long they happened to take: a missing edge is found even where it did no\nharm this time."),
    (O + "debug.py", "Let a lane do one more thing, after `known`", "Advance a timeline by one operation, after `known`"),
    (O + "debug.py", "by the present work of a lane, and check", "by the present work of a timeline, and check"),
    (O + "debug.py", "Check and copy: the lane reads the device's", "Check and copy: the copy reads the device's"),
    (O + "debug.py", "Check and copy: the lane reads the host's", "Check and copy: the copy reads the host's"),
    (O + "debug.py", "Wait for what a record waits for, behind", "Wait for what a storage waits for, behind"),
    (O + "departures.py", '"""The way out: from a saved storage to host memory, and back into the hands of the allocators when nobody needs it."""', '"""Device to host: copy saved storages out, and free device and host memory when nothing uses it any more."""'),
    (O + "departures.py", "Sends records to the host, and lets go of device and host memory when that is safe.", "Copies saved storages to the host, and frees device and host memory when that is safe."),
    (O + "departures.py", "Begin to copy records of a group to the host;", "Begin to copy storages of a group to the host;"),
    (O + "departures.py", "Begin to copy records of a group to one block;", "Begin to copy storages to one block;"),
    (O + "departures.py", "Take over what a record leaves behind: its block, once nobody reads or writes it any more.", "Retire a storage that no graph needs: free its memory, once no copy uses it any more."),
    (O + "departures.py", "again by the records' streams at once", "again by the storages' streams at once"),
    (O + "departures.py", "Count what backward has got no more: it has gone on to another layer.", "Stop counting what the previous layer's backward used."),
    (O + "departures.py", "Leave a record on the device for good", "Leave a storage on the device for good"),
    (O + "emulated.py", "a copy keeps its lane for latency", "a copy keeps its thread for latency"),
    (O + "emulated.py", "A lane without work for so long ends its thread; the next copy starts another. So none is left behind.", "A copy thread without work for so long ends; the next copy starts another. So none is left behind."),
    (O + "emulated.py", "Copy on the lane to the host.", "Copy on the thread to the host."),
    (O + "emulated.py", "Copy on the lane from the host.", "Copy on the thread from the host."),
    (O + "emulated.py", "# or an idle lane would hold", "# or an idle thread would hold"),
    (O + "engine.py", "left with the latest boundary of each name; the next", "left with the latest call of each name; the next"),
    (O + "engine.py", "in groups that end at `HookContext.next_layer` or when they are large.", "in groups that end at `next_layer` or when they are large."),
    (O + "forms.py", "Keeps forms, to compare them without looking inside: lists of them are compared whenever a layer leaves.", "Interns specs, so that lists of them, which are compared for every layer, compare by identity."),
    (O + "forms.py", "Say whether there are parameters whose casts may be among tensors of half precision.", "Check fp16 and bf16 tensors from now on if they may be autocast copies of parameters."),
    (O + "forms.py", "Return the form for this type and size.", "Return the spec of this dtype and size."),
    (O + "link.py", "two lanes for copies beside the stream that computes", "two copy streams beside the stream that computes"),
    (O + "link.py", "in the work of a stream or lane.", "in the work of a stream."),
    (O + "public.py", "Tells the scope which layer begins", "Tells the hook context which layer begins"),
    (O + "record.py", "Where the bytes of a record are. Bits,", "Where the bytes of a storage are. Bits,"),
    (O + "record.py", "        witness: an alias of the saved tensor, which shares its version counter; without data, unless it is `data`.", "        version_alias: of the saved tensor, whose version counter it shares; without data, unless it is `data`."),
    (O + "record.py", "        form: of `data`, here", "        spec: of `data`, here"),
    (O + "record.py", "Make the witness one of its own: `data` goes to others, and must not be emptied when the record lets go.", "Make the version alias a tensor of its own: `data` goes to others, and must not be emptied with it."),
    (O + "record.py", "needed together: the boundary of one layer, for", "needed together: the inputs of one layer, for"),
    (O + "record.py", "        forget: called with the group when", "        on_release: called with the group when"),
    (O + "record.py", "Note that the group needs a record, once;", "Note that the group needs a storage, once;"),
    (O + "record.py", "may have run since the record was found;", "may have run since the storage was found;"),
    (O + "runtime.py", "Offloads the boundaries of checkpointed layers, for", "Offloads the inputs of checkpointed layers, for"),
    (O + "scope.py", "Where saved tensors go while it is entered.", "Offloads saved tensors while it is entered (a context of saved-tensor hooks)."),
    (O + "scope.py", "Return whether saved tensors are somebody else's here.", "Return whether hooks of somebody else are active."),
    # offload_model
    (M + "chain.py", "    `unpack_tuple`: a tuple that one slice returns becomes the positional arguments of the next, as in FairScale's lists; the\n    layers", "    `unpack_tuple`: a tuple that one slice returns becomes the positional arguments of the next, as in FairScale's\n    lists; the layers"),
    (M + "engine.py", "its slices on the host, the device's buffers, the lanes.", "slices on the host, buffers on the device, copy streams."),
    (M + "engine.py", "        splat: see `Chain`.", "        unpack_tuple: see `SlicedModel`."),
    (M + "engine.py", "keep only the borders of slices, and", "keep only the inputs of slices, and"),
    (M + "engine.py", "for weights and gradients, and for borders; None", "for weights and gradients, and for slice boundaries; None"),
    (M + "engine.py", "host_budget_bytes: for borders; what", "host_budget_bytes: for slice boundaries; what"),
    (M + "engine.py", "Take nothing for known about the values of parameters.", "Assume that the values of parameters may have changed."),
    (M + "engine.py", "UsageError: there is a sink: `who` looks", "UsageError: there is a consumer: `who` looks"),
    (M + "engine.py", "Take nothing for known about parameters: who holds them may write to `.data`, which counts no version.", "Assume that parameters may have changed: writes to `.data` count no version."),
    (M + "gradients.py", "Make the stand-ins' gradients views", "Make the device parameters' gradients views"),
    (M + "gradients.py", "Let autograd make the stand-ins' gradients;", "Let autograd make the device parameters' gradients;"),
    (M + "huggingface.py", "for tensors in it at every border.", "for tensors in it at every slice boundary."),
    (M + "huggingface.py", "so only it is kept at every slice's border.", "so only it is kept at every slice boundary."),
    (M + "inner.py", "What users do with the modules inside an OffloadModel, not through it: read and load their state dicts.", "State dicts of modules inside an OffloadModel: wait for updates before they are read or loaded."),
    (M + "inner.py", "Let updates end before the state dict of any of these modules is read or loaded, for as long as `engine` lives.", "Wait for updates before the state dict of any of these modules is read or loaded, while `engine` lives."),
    (M + "inner.py", "A copy of a module is nobody's.", "Make a copy of the module independent of the engine."),
    (M + "moment.py", "under the same stand-in, what", "under the same device parameter, what"),
    (M + "parking.py", "Tensors at the borders of slices: parked on the host until they are needed again.\n\nA parked tensor is on the device, on its way out, on the host, or on its way back. The device's tensor is kept until its\ncopy has ended,", "Tensors at the boundaries of slices: offloaded to the host until they are needed again.\n\nEach is on the device, on its way out, on the host, or on its way back. The device's tensor is kept until its copy\nhas ended,"),
    (M + "parking.py", "            parked: on the device.", "            offloaded: on the device."),
    (M + "pending.py", "in fp32; its own memory, for the landing's is used again.", "in fp32 and in memory of its own: the copy's buffer is used again."),
    (M + "residence.py", "Return the stand-ins of a slice, to be computed with from now on, and start to load the slice after it.", "Return the device parameters of a slice, to compute with from now on, and start to load the next slice."),
    (M + "residence.py", "            then: which slice comes next;", "            next_index: the slice that comes next;"),
    (M + "residence.py", '"""Whose weights are on the device: two flat', '"""The weights that are on the device: two flat'),
    (M + "residence.py", "so its stand-ins are made once, a slice can be loaded while its neighbour computes,\nand", "so its device parameters are made once, a slice can be loaded while its neighbour\ncomputes, and"),
    (M + "run.py", "whose border tensors may wait", "whose boundary tensors may wait"),
    (M + "run.py", "hand on unchanged is parked once.", "hand on unchanged is offloaded once."),
    (M + "run.py", "else it is the sink who changes weights", "else the consumer changes weights"),
    (M + "run.py", "its weights are added to the stand-ins'.", "its weights are added to the device parameters'."),
    (M + "shard.py", "        chained: whether `layers`", "        sequential: whether `layers`"),
    (M + "transfers.py", "or borders would queue behind whole slices.", "or boundary tensors would queue\n            behind whole slices."),
    (M + "weights.py", "and stand-ins that are views of a buffer on the device.", "and device parameters, views of a buffer on the device."),
    (M + "workers.py", "            spans: disjoint pieces", "            flat_ranges: disjoint pieces"),
    # activation checkpointing
    (K + "chain.py", "        ranks_of_layers: the rank of each layer; an empty set for one that holds nothing and goes with its neighbours, None for\n            one that must stay alone.", "        ranks_of_layers: the rank of each layer; an empty set for one that holds nothing and goes with its neighbours,\n            None for one that must stay alone."),
    (K + "chain.py", "around our way through its layers", "around our loop over its layers"),
    (K + "foreign.py", "Make torch's checkpoint one of ours, for the life of this process.", "Replace two functions of torch.utils.checkpoint, for the life of this process."),
    (K + "foreign.py", "Return what takes the positional tensors of a checkpointed call away; nothing if others see to that.", "Return what offloads the positional tensors of a checkpointed call; nothing if they are not kept."),
    (K + "region.py", "Stands for a tensor of the boundary; no dataclass", "Stands for an input tensor; no dataclass"),
    (K + "region.py", '    """A call without its tensors."""', '    """A checkpointed call without its tensors, which torch keeps."""'),
    (K + "surroundings.py", "What the modules of one checkpointed call see around them.", "What the modules of one checkpointed call read besides their arguments."),
    (K + "surroundings.py", "Be for the length of this block what the call found, and then what is there now.", "Restore what the call found, for the length of this block."),
    (K + "whole.py", "See that modules to be checkpointed lie on one rank each, when it is known where they do.", "Check that modules to be checkpointed lie on one rank each, once the partition is known."),
    # checkpoint files
    (C + "places.py", "one chunk. A tensor-parallel piece is one chunk too, unless several things are packed into it: this rank's\npart", "one chunk. A tensor-parallel piece is one chunk too, unless several things are packed into it: this\nrank's part"),
    (C + "places.py", "Boxes are what torch's distributed checkpoints know as chunks.", "They are the chunks of torch's distributed checkpoints."),
    (C + "places.py", "        at: offsets of its first", "        local_start: offsets of its first"),
    (C + "reader.py", "        at: offsets of the chunk in", "        local_start: offsets of the chunk in"),
    (C + "renamed.py", "        theirs: its names in", "        in_checkpoint: its names in"),
    (C + "originals.py", "        homes: the pipeline rank that provides", "        pp_sources: the pipeline rank that provides"),
    (C + "together.py", "All ranks succeed, or all of them raise the same.", "Run something on all ranks: all of them succeed, or all of them raise."),
    (R + "unread.py", "What was resumed but is not read yet, because a model that is not partitioned does not know what is this rank's.", "Loads that wait for the partition: before it, a rank does not know which parameters it holds."),
]


def main() -> None:
    problems = 0
    for path, old, new in EDITS:
        file = pathlib.Path(path)
        text = file.read_text()
        if text.count(old) == 1:
            file.write_text(text.replace(old, new))
        elif new not in text:
            print(f"{path}: {text.count(old)} times: {old!r}")
            problems += 1
    sys.exit(problems > 0)


if __name__ == "__main__":
    main()
