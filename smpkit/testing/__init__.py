"""What smpkit offers to the tests of your own code; nothing here needs an account, a GPU or a network.

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

smpkit itself does not import this package. Names are loaded when first used, so each needs only what it uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smpkit.on_demand import names_on_demand

if TYPE_CHECKING:
    from smpkit.testing.emulated_link import EmulatedLink
    from smpkit.testing.ranks import RankFailed, run_ranks

__all__ = [
    "EmulatedLink",
    "RankFailed",
    "run_ranks",
]

_MODULES = {
    "EmulatedLink": "smpkit.testing.emulated_link",
    "RankFailed": "smpkit.testing.ranks",
    "run_ranks": "smpkit.testing.ranks",
}

__getattr__ = names_on_demand(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
