"""What smpkit offers to the tests of your own code; nothing here needs an account, a GPU or a network.

**A SageMaker in memory.** `FakeSageMaker` takes the place of a boto3 session: in smpkit, as `Estimator(session=fake)`,
and in your own code that calls `session.client("sagemaker")`. It plays every phase of a job, its log and its objects in
S3, on a clock of its own. It checks requests and answers against botocore's model of the service, so code that works
here sends nothing whose type the service refuses.

::

    from smpkit import Estimator
    from smpkit.testing import FakeSageMaker, Line, Script

    fake = FakeSageMaker(script=Script(lines=(Line(1, "[rank 0] loss 2.5"),), training=3600))
    estimator = Estimator("train.py", role=..., image_uri=..., instance_type="ml.m5.large", session=fake)
    job = estimator.fit(wait=False)
    fake.clock.advance(90)                      # 90 seconds later
    assert job.status().phase == "Training"
    assert job.wait().succeeded                 # an hour passes at once

- `Script` says what a job does: how long each phase takes, the log (`Line`), failure, interruptions.
- `FakeClock` stands still until something sleeps or `advance` is called; `FastClock` runs as fast as you like.
- `fake.faults` (`Faults`) lets calls fail: throttled, refused, or with their answer lost.
- `fake.jobs` has each job (`FakeJob`) with its request and history; `fake.storage.objects` has each `FakeObject`.

**Ranks in a test.** `run_ranks` runs a function on real ranks, one process each, and returns what each returned::

    def losses(steps: int) -> list[float]:      # a function of a module
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
        ...

    def test_losses() -> None:
        first, second = run_ranks(losses, 2, 3)

A rank that raises, dies or hangs fails the test with every rank's traceback (`RankFailed`). It needs `smpkit[torch]`.

**Offloading on a CPU.** `EmulatedLink` stands in for a GPU's link to host memory, as slow as you make it, so order,
overlap and stalls show on any machine::

    from smpkit.testing import EmulatedLink

    offload = smpkit.offload_activations(model, link=EmulatedLink(25e9, latency_seconds=10e-6))

**A simulated accelerator.** `smpkit.testing.simulated_device` makes a torch device that runs on any CPU and finds races
between streams, in your code as in smpkit's (`docs/how-to/check-async-code.md`). It needs `smpkit[torch]` and a C++
compiler::

    from smpkit.testing import simulated_device

    device = simulated_device.load()
    with simulated_device.no_races("lazy"):     # raises RaceFound, with both lines
        train_step(model.to(device), data)

smpkit itself does not import this package; only `--backend fake` loads it, by name. Names are loaded when first used,
so the fake service needs no torch and the link no botocore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smpkit.on_demand import names_on_demand

if TYPE_CHECKING:
    from smpkit.testing.emulated_link import EmulatedLink
    from smpkit.testing.fake_sagemaker.client import Faults
    from smpkit.testing.fake_sagemaker.clock import FakeClock, FastClock
    from smpkit.testing.fake_sagemaker.jobs import FakeJob
    from smpkit.testing.fake_sagemaker.script import Line, Script
    from smpkit.testing.fake_sagemaker.session import FakeSageMaker
    from smpkit.testing.fake_sagemaker.storage import FakeObject
    from smpkit.testing.ranks import RankFailed, run_ranks

__all__ = [
    "EmulatedLink",
    "FakeClock",
    "FakeJob",
    "FakeObject",
    "FakeSageMaker",
    "FastClock",
    "Faults",
    "Line",
    "RankFailed",
    "Script",
    "run_ranks",
]

_MODULES = {
    "EmulatedLink": "smpkit.testing.emulated_link",
    "FakeClock": "smpkit.testing.fake_sagemaker.clock",
    "FakeJob": "smpkit.testing.fake_sagemaker.jobs",
    "FakeObject": "smpkit.testing.fake_sagemaker.storage",
    "FakeSageMaker": "smpkit.testing.fake_sagemaker.session",
    "FastClock": "smpkit.testing.fake_sagemaker.clock",
    "Faults": "smpkit.testing.fake_sagemaker.client",
    "Line": "smpkit.testing.fake_sagemaker.script",
    "RankFailed": "smpkit.testing.ranks",
    "Script": "smpkit.testing.fake_sagemaker.script",
    "run_ranks": "smpkit.testing.ranks",
}

__getattr__ = names_on_demand(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
