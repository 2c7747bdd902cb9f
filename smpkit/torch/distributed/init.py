"""`smp.init()`: read the configuration, meet the other ranks, make the groups; and `smp.shutdown()` undoes all that."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from smpkit.config.modelparallel import ENVIRONMENT_VARIABLE, ModelParallelConfig
from smpkit.errors import ConfigError, Problem, UnsupportedError, UsageError
from smpkit.plan.mesh import CommGroup, Mesh
from smpkit.torch.core import devices
from smpkit.torch.core.context import Launch, launch_from
from smpkit.torch.core.devices import backends
from smpkit.torch.core.runtime import state
from smpkit.torch.core.warn import warn_user
from smpkit.torch.distributed import cores, deadline, gpus, watcher
from smpkit.torch.distributed.failure_store import FailureStore
from smpkit.torch.distributed.groups import Groups, loopback
from smpkit.torch.distributed.rendezvous import connect_store, gather

_log = logging.getLogger("smpkit")


@dataclasses.dataclass
class _World:
    """The default group of this process and what depends on it, from the first `init` to `shutdown`."""

    launch: Launch
    store: Store
    groups: Groups
    owned: bool
    num_exchanges: int = 0


_world: _World | None = None
_PDB = "SMPKIT_PDB"
_DEBUGGED_SECONDS = 7 * 86_400
_generation = 0
"""How often a world was made: a new one must not read the old one's keys in the same store."""


def init(config: Mapping[str, Any] | ModelParallelConfig | None = None) -> None:
    """Initialise smpkit in this process. Every rank calls it, before anything else of smpkit.

    ::

        smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})

    Under `smpkit run` with a job file the degrees are in that, and `smp.init()` is enough.

    A second call is harmless: without a configuration, or with the one in use, it does nothing. With another one it
    starts over, as long as no model has been wrapped (Hugging Face calls `init()` when it is imported, and the script
    again with its dict).

    Args:
        config: SMP v1's parameters; keys of the environment variable `SM_HP_MP_PARAMETERS` override them.

    Raises:
        ConfigError: the configuration is invalid, does not fit the number of ranks, or differs between ranks; or a rank
            that should have a GPU sees none.
        UsageError: the launcher's variables contradict each other, or a model depends on another configuration.
        DeadlineError: not all ranks came.
    """
    if config is None and state.initialized:
        return
    cfg, notices = ModelParallelConfig.from_sources(config, os.environ.get(ENVIRONMENT_VARIABLE))
    if os.environ.get(_PDB):  # somebody looks at a rank, and the others wait for it
        cfg = cfg.model_copy(update={"timeout_seconds": _DEBUGGED_SECONDS})
    if state.initialized:
        if cfg == state.cfg:
            return
        _refuse_if_in_use(cfg)
    launch = _world.launch if _world is not None else _find_launch()
    mesh = Mesh.of(cfg, launch.world_size)
    _start(cfg, launch, mesh)
    _announce(cfg, notices, mesh)


def extra_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a process group of some ranks, this one among them; all of them call this."""
    assert _world is not None, "smp.init() has been called"
    return _world.groups.for_ranks(ranks)


def message_groups(ranks: tuple[int, ...]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of a pipeline's messages, between GPUs if its ranks have any: to higher ranks, and to lower."""
    assert _world is not None, "smp.init() has been called"
    return _world.groups.for_messages(ranks, backends.backend_for(state.device) or backends.GLOO)


def shared_store(name: str) -> Store:
    """Return a part of the store that all ranks share, for keys that begin with a name of their own."""
    assert _world is not None, "smp.init() has been called"
    return PrefixStore(name, _world.store)


def save_group() -> dist.ProcessGroup:
    """Return the group in which all ranks agree on a save beside training; all of them call this."""
    assert _world is not None, "smp.init() has been called"
    return _world.groups.over_gloo("saves")


def shutdown() -> None:
    """Forget everything `smp.init()` made and end the process groups, unless the script made the default group.

    Runs at exit by itself. Waits for other ranks only to finish a checkpoint that is being saved in the background.

    Raises:
        CheckpointError: that failed.
    """
    error = end_work()
    _shut_down()
    if error is not None:
        raise error


def end_work() -> Exception | None:
    """Finish what runs in the background; return why it failed, if it did."""
    if not state.initialized or deadline.failed():  # after a failure, other ranks may be gone
        return None
    return next(filter(None, [finish() for finish in state.end_hooks]), None)


def _shut_down() -> None:
    global _world
    world, _world = _world, None
    if state.model is not None and state.model.data_parallel is not None:
        state.model.data_parallel.release()
    state.end()
    for reset in state.reset_hooks:
        reset()
    watcher.stop()
    deadline.detach()
    if world is not None and world.owned and dist.is_initialized():
        dist.destroy_process_group()
    # A group's threads and sockets live as long as something refers to it, and a model that the script has dropped
    # refers to its groups from cycles: a process that starts over again and again would collect them.
    if world is not None:
        gc.collect()


# --- the configuration ------------------------------------------------------------------------------------------------


def _refuse_if_in_use(cfg: ModelParallelConfig) -> None:
    if state.model is None and state.optimizer is None:
        return
    old, new = state.cfg.model_dump(), cfg.model_dump()
    changes = ", ".join(f"{key} {old[key]!r} -> {new[key]!r}" for key in new if old[key] != new[key])
    raise UsageError(
        f"smp.init() was called again with another configuration after a model was wrapped ({changes})",
        hint="call smp.init(config) before smp.DistributedModel(...)",
    )


def _announce(cfg: ModelParallelConfig, notices: Sequence[Problem], mesh: Mesh) -> None:
    """Warn and log, on rank 0 only: all ranks have the same configuration."""
    if state.rank != 0:
        return
    for text in [*map(str, notices), *_setting_notices(cfg, mesh)]:
        warn_user(text)
    _log.info("Configuration parameters:")
    for key, value in cfg.effective().items():
        _log.info("  %s: %s", key, value)


def _setting_notices(cfg: ModelParallelConfig, mesh: Mesh) -> list[str]:
    """Return warnings about settings that are legal, but have little effect in this world."""
    texts = []
    if not cfg.ddp and mesh.dp_size > 1:
        cut = '`smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})` cuts the model over ranks, '
        texts.append(
            f"ddp is False with {mesh.dp_size} data-parallel ranks: the replicas train independently; "
            f'{cut * (mesh.dp_size == mesh.size)}`"ddp": True` averages the gradients of replicas'
        )
    if cfg.ddp and cfg.ddp_dist_backend == backends.NCCL and not backends.uses_nccl(state.device):
        kind, used = state.device.type, backends.backend_for(state.device) or backends.GLOO
        present = "there is no GPU" if kind == "cpu" else f"this rank's device is {kind}"
        texts.append(f"ddp_dist_backend is nccl, but {present}: {used} is used")
    return texts


# --- the launch -------------------------------------------------------------------------------------------------------


def _find_launch() -> Launch:
    """Return rank and size of this process, which must agree with a default group that the script may have made."""
    launch = launch_from(os.environ)
    if not dist.is_initialized():
        return launch
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (launch.rank, launch.world_size):
        return launch
    if launch.launcher == "no launcher":  # who is on which host, ranks can only tell each other
        store, deadline_of_hosts = _store_of_default_group(), timedelta(seconds=600)
        hosts = gather(store, "hosts", rank, range(size), socket.gethostname(), deadline_of_hosts)
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return Launch(rank, size, here.index(rank), len(here), launcher="torch.distributed")
    raise UsageError(
        f"torch.distributed was initialised as rank {rank} of {size}, but {launch.launcher} says "
        f"rank {launch.rank} of {launch.world_size}",
        hint="let smp.init() initialise torch.distributed, or pass it the launcher's rank and world size",
    )


def _at_exit() -> None:
    """End the process groups, or torch warns that they were never destroyed."""
    # After a failure, other ranks may be gone, and destroying nccl communicators with them could wait for ever. So
    # abort them: a process does not end either while one of its kernels waits.
    if deadline.failed():
        if _world is not None:
            deadline.abort(_world.groups.all())
        watcher.stop()
        return
    error = end_work()
    if (failures := deadline.current_failures()) is not None:
        failures.report_end()
    _shut_down()
    if error is not None:
        # Python ignores errors of what runs at exit: the job would seem to have ended well, without its checkpoint.
        # What the script registered with `atexit` before `smp.init()` does not run then.
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


# --- the groups -------------------------------------------------------------------------------------------------------


def _start(cfg: ModelParallelConfig, launch: Launch, mesh: Mesh) -> None:
    global _world  # noqa: PLW0603
    timeout = timedelta(seconds=cfg.timeout_seconds)
    known = _world is not None
    world = _world or _connect_world(cfg, launch, timeout)
    _world = world
    failure_store = FailureStore(
        *(world.store, launch.rank, launch.world_size, timeout, world.groups.all),
        server="the launcher" if launch.agent_store else "rank 0",
        serves_store=launch.rank == 0 and not launch.agent_store,
    )
    try:
        with _serving_errors(failure_store):
            gpu_infos = _exchange_facts(world, cfg, timeout)
            backend, notices = gpus.backend_of(gpu_infos, str(cfg.ddp_dist_backend)) if world.owned else ("", [])
        if launch.rank == 0 and not known:
            for text in [*gpus.notices_of(gpu_infos), *notices]:
                warn_user(text)
        _set_device(launch, gpu_infos)
        if not dist.is_initialized():
            _make_default_group(backend, world, timeout)
        elif known:
            world.groups.set_timeout(timeout, owns_default_group=world.owned)
        failures = deadline.attach(failure_store)
        groups = world.groups.for_mesh(mesh, launch.rank)
        state.begin(cfg, launch, mesh, groups, world.groups.for_objects())
        watcher.watch(failures)
        if backends.connects(groups[CommGroup.WORLD], state.device):
            world.groups.warm_up(groups, state.device)
        for start in state.start_hooks:
            start()
    except BaseException:
        if not known:
            shutdown()
        raise
    atexit.unregister(_at_exit)  # once is enough
    atexit.register(_at_exit)


def _connect_world(cfg: ModelParallelConfig, launch: Launch, timeout: timedelta) -> _World:
    global _generation  # noqa: PLW0603
    owned = not dist.is_initialized()
    store = connect_store(launch, cfg.ddp_port, timeout) if owned else _store_of_default_group()
    _generation += 1
    store = PrefixStore(f"smpkit/{_generation}", store)
    groups = Groups(store, launch.rank, timeout, single_host=launch.single_host)
    return _World(launch, store, groups, owned)


def _store_of_default_group() -> Store:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _exchange_facts(world: _World, cfg: ModelParallelConfig, timeout: timedelta) -> list[gpus.GpuInfo]:
    """Wait for all ranks, compare their configurations, and return what each knows about GPUs."""
    world.num_exchanges += 1
    launch, key = world.launch, f"facts/{world.num_exchanges}"
    own_facts = json.dumps({"cfg": cfg.model_dump(), "gpu": dataclasses.asdict(gpus.probe_gpu(launch))})
    everyone = range(launch.world_size)
    facts = [json.loads(text) for text in gather(world.store, key, launch.rank, everyone, own_facts, timeout)]
    ours = facts[launch.rank]["cfg"]
    for rank, theirs in enumerate(fact["cfg"] for fact in facts):
        problems = [
            Problem((key,), f"is {ours[key]!r} on rank {launch.rank} but {theirs.get(key)!r} on rank {rank}")
            for key in ours
            if theirs.get(key) != ours[key]
        ]
        if problems:
            raise ConfigError(problems)
    gpu_infos = [gpus.GpuInfo(**fact["gpu"]) for fact in facts]
    if problems := gpus.problems_of(gpu_infos):
        raise ConfigError(problems, subject="GPUs of the job")
    return gpu_infos


@contextlib.contextmanager
def _serving_errors(failure_store: FailureStore) -> Iterator[None]:
    """On an error of the configuration, wait until all ranks have read it before the store ends with this process."""
    try:
        yield
    except (ConfigError, UnsupportedError):
        with contextlib.suppress(dist.DistError, RuntimeError):
            if failure_store.serves_store:
                failure_store.serve_until_read()
            else:
                failure_store.ack()
        raise


def _set_device(launch: Launch, gpu_infos: Sequence[gpus.GpuInfo]) -> None:
    # Scripts that forget torch.cuda.set_device(smp.local_rank()) would otherwise put every rank on GPU 0.
    if (device := devices.choose_device(launch.local_rank)) is not None:
        devices.make_current(device)
        if sum(gpu_info.gpu == gpu_infos[launch.rank].gpu for gpu_info in gpu_infos) == 1:
            cores.bind(device)


def _make_default_group(backend: str, world: _World, timeout: timedelta) -> None:
    """Initialise torch.distributed."""
    # Without `device_id`: a group bound to a device makes every later group a split, in which all ranks must take part.
    backends.prepare(backend, world.launch.launcher, single_host=world.launch.single_host)
    with loopback(single_host=world.launch.single_host):
        dist.init_process_group(
            backend, store=world.store, rank=world.launch.rank, world_size=world.launch.world_size, timeout=timeout
        )
