"""Strike a job with a fault that a seed chooses, and check what must hold whatever happens."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.job import SAVE_EVERY, STEPS, TIMEOUT, run
from tests.leftovers import kill_processes_with, processes_with
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Config:
    """On how many ranks, and with which parameters."""

    ranks: int
    degrees: Mapping[str, int]

    @property
    def parameters(self) -> dict[str, Any]:
        return {"microbatches": 2, "ddp": True, "timeout_seconds": TIMEOUT, **self.degrees}


CONFIGS: Mapping[str, Config] = {
    "pipeline 2, data 2": Config(4, {"pipeline_parallel_degree": 2}),
    "tensor 2, pipeline 2": Config(4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pipeline 2": Config(2, {"pipeline_parallel_degree": 2}),
}
_LARGE, _SMALL = [name for name, each in CONFIGS.items() if each.ranks == 4], "pipeline 2"
_MANY_SECONDS = 150
"""A job that takes longer hangs: it has time to start on a busy machine, for a rank's deadline, and to end."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """What a seed has chosen."""

    fault: str
    config: str
    launcher: str
    victim: int
    at: int
    seed: int

    @classmethod
    def of(cls, seed: int, launchers: tuple[str, ...], *, small: bool = False) -> Case:
        """Take the faults in turn, so that as many seeds as there are faults try each, and all else by chance."""
        chance = random.Random(seed)
        fault = list(FAULTS)[seed % len(FAULTS)]
        launcher, config = chance.choice(launchers), _SMALL if small else chance.choice(_LARGE)
        launcher = FAULTS[fault].launcher or launcher
        # A checkpoint before it to go on from, an older one for damage, and steps left to notice it.
        at = chance.randrange(2 * SAVE_EVERY + 1, STEPS - 2)
        config, victims = FAULTS[fault].victims or (config, range(CONFIGS[config].ranks))
        return cls(fault, config, launcher, chance.choice(victims), at, seed)

    @property
    def newest(self) -> str:
        return f"step_{(self.at - 1) // SAVE_EVERY * SAVE_EVERY}"


def make_reference(folder: Path, config: str) -> None:
    """Run the job undisturbed, on ranks that have torch already."""
    run_ranks(run, CONFIGS[config].ranks, str(folder), CONFIGS[config].parameters)


def strike(case: Case, folder: Path, reference: Path) -> None:
    """Run the job of a case in an empty folder and check what comes of it.

    Raises:
        AssertionError: something hung, was left, was not named, or trained to other losses than `reference` has.
    """
    fault, job = FAULTS[case.fault], _Job(folder, case)
    if fault.in_files:
        _copy_checkpoints(reference, folder, case)
        checkpoints = (folder / "checkpoints").glob("*_partial")
        newest_first = sorted(checkpoints, key=lambda each: -int(each.name.split("_")[1]))
        fault.in_files(newest_first, random.Random(f"damage {case.seed}"))
    else:
        (folder / "fault.json").write_text(json.dumps({"fault": case.fault, "at": case.at, "victim": case.victim}))
    code, said = job.run(fault)
    assert code == fault.code or (fault.code is None and code != 0), f"exit code {code}\n{said}"
    for pattern in fault.says:
        wanted = pattern.format(rank=case.victim, newest=case.newest)
        assert re.search(wanted, said), f"nothing like `{wanted}` in\n{said}"
    if fault.misleads:
        _forget_losses(folder, case)
    if fault.resumes and code != 0:
        (folder / "fault.json").unlink()
        code, said = job.run(None)
        assert code == 0, f"the job did not go on: exit code {code}\n{said}"
    _check_losses(folder, reference, case, complete=fault.resumes)


def _copy_checkpoints(reference: Path, folder: Path, case: Case) -> None:
    (folder / "checkpoints").mkdir()
    for step in range(SAVE_EVERY, case.at, SAVE_EVERY):
        name = f"checkpoints/step_{step}_partial"
        shutil.copytree(reference / name, folder / name)
    (folder / "checkpoints" / "newest").write_text(f"{case.newest}_partial\n")


def _check_losses(folder: Path, reference: Path, case: Case, *, complete: bool) -> None:
    """Every step of every rank has the loss of the undisturbed run, to the last bit, also where it was repeated."""
    for rank in range(CONFIGS[case.config].ranks):
        expected = dict(_losses(reference, rank))
        found = _losses(folder, rank)
        different = [line for line in found if expected[line[0]] != line[1]]
        assert not different, f"rank {rank}: {different} instead of {expected}"
        if complete and FAULTS[case.fault].in_files is None:
            assert sorted(dict(found)) == list(range(STEPS)), f"rank {rank} has trained the steps {found}"
            # It went on from the newest checkpoint that was complete when the fault came.
            later = SAVE_EVERY if FAULTS[case.fault].in_background else 0  # at the next save
            assert len(found) <= STEPS + case.at + 2 + later - int(case.newest.removeprefix("step_")), found
        elif complete:
            assert found[-1][0] == STEPS - 1
        else:
            assert not found


def _forget_losses(folder: Path, case: Case) -> None:
    for rank in range(CONFIGS[case.config].ranks):
        kept = [f"{step} {loss}\n" for step, loss in _losses(folder, rank) if step < case.at]
        (folder / f"losses-{rank}").write_text("".join(kept))


def _losses(folder: Path, rank: int) -> list[tuple[int, str]]:
    file = folder / f"losses-{rank}"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


class _Job:
    """`smpkit run` of the job, in a folder; every process of it is known by a variable."""

    def __init__(self, folder: Path, case: Case) -> None:
        self._folder, self._case = folder, case
        self._mark = f"SMPKIT_TEST_MARK={folder}"
        config = CONFIGS[case.config]
        section = {"torchrun": "torch_distributed", "mpirun": "mpi"}[case.launcher]
        launcher = {section: {"enabled": True, "processes_per_host": config.ranks}}
        parallel = {"modelparallel": {"enabled": True, "parameters": config.parameters}}
        job = {
            "entry_point": "train.py",
            "source_dir": "source",
            "distribution": {"smdistributed": parallel, **launcher},
        }
        (folder / "source").mkdir()
        (folder / "source" / "train.py").write_text(
            f"import sys\nsys.path.insert(0, {str(_ROOT)!r})\nfrom tests.chaos.job import run\nrun(sys.argv[-1])\n"
        )
        (folder / "job.yaml").write_text(json.dumps(job))

    def run(self, fault: Fault | None) -> tuple[int, str]:
        """Run to the end, with a fault from outside if it is one; return the exit code and what was said."""
        with self._started() as (process, said):
            if fault is not None and fault.from_outside is not None:
                self._strike(process, fault)
            try:
                code = process.wait(_MANY_SECONDS)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it hung after {self._case}\n{said.read_text()}") from None
            self._wait_for_the_end(said)
        return code, said.read_text()

    @contextmanager
    def _started(self) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        command = [sys.executable, "-m", "smpkit", "run", str(self._folder / "job.yaml"), "--", str(self._folder)]
        name, _, value = self._mark.partition("=")
        environ = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder)}
        said = self._folder / "said"
        with said.open("wb") as file:
            process = subprocess.Popen(command, env=environ, stdout=file, stderr=file, start_new_session=True)
        try:
            yield process, said
        finally:
            kill_processes_with(self._mark)
            process.wait()

    def _strike(self, process: subprocess.Popen[bytes], fault: Fault) -> None:
        victim, deadline = self._folder / "victim", time.monotonic() + _MANY_SECONDS
        while not victim.exists():
            assert time.monotonic() < deadline, "the job never came to the step of the fault"
            assert process.poll() is None, f"the job ended early: {(self._folder / 'said').read_text()}"
            time.sleep(0.005)
        time.sleep(random.Random(f"moment {self._case.seed}").uniform(0, 0.1))
        chain = [int(victim.read_text())]
        while chain[-1] != process.pid:
            stat = Path(f"/proc/{chain[-1]}/stat").read_text()
            chain.append(int(stat.rpartition(")")[2].split()[1]))
        assert fault.from_outside is not None
        fault.from_outside(chain)
        (self._folder / "struck").touch()

    def _wait_for_the_end(self, said: Path) -> None:
        """Nobody outlives the command line by more than the seconds that the ranks get to end."""
        deadline = time.monotonic() + 40
        while left := processes_with(self._mark):
            if time.monotonic() > deadline:
                commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
                raise AssertionError(f"processes were left after {self._case}: {commands}\n{said.read_text()}")
            time.sleep(0.05)
