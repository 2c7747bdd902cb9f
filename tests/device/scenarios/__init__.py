"""Small trainings on simulated devices, each compared with the plain model there.

`SCENARIOS` names them. `tests/device/test_*.py` run them under several orders of the device, and `scripts/sync_mutants`
with one synchronisation of the product left out: then one of them must have a race, a wrong value or an error.
"""

from tests.device.scenarios import activations, automatic, measured, offload_model, ranks, steps  # noqa: F401 - each adds its own
from tests.device.scenarios.common import SCENARIOS, Scenario, run_scenario

__all__ = ["SCENARIOS", "Scenario", "run_scenario"]
