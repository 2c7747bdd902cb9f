"""What `smpkit submit` and the launcher agree on where a scheduler starts the hosts of a job: variables, exit codes.

On SageMaker `resourceconfig.json` names the hosts. Elsewhere these variables do, beside those of the scheduler that say
which host this is. The launcher alone reads them: its ranks get what they get on SageMaker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HOSTS: Final = "SMPKIT_HOSTS"
"""The names of all hosts in their order, with blanks between them."""
FIRST_HOST: Final = "SMPKIT_FIRST_HOST"
"""The address of the first of them."""
PORT: Final = "SMPKIT_PORT"
"""Where ranks meet, and at the next one the launchers. Default: the launcher's."""
INTERFACE: Final = "SMPKIT_INTERFACE"
"""The network interface over which hosts talk. Default: the one over which the launchers reach each other."""
MACHINE: Final = "SMPKIT_MACHINE"
"""What stands for the instance type."""
PLACES: Final = "SMPKIT_PLACES"
"""JSON: folders below the base folder that lie elsewhere, such as `{"checkpoints": "/shared/checkpoints"}`."""
CONFIG: Final = "SMPKIT_CONFIG"
"""S3 URI of `hyperparameters.json` and `inputdataconfig.json`, where they do not lie in `input/config`."""
VARIABLES: Final = "SMPKIT_VARIABLES"
"""A file of JSON with more variables, which may be secrets and some of these."""
MESSAGE: Final = "SMPKIT_TERMINATION_MESSAGE"
"""The file that Kubernetes reads for the reason of a failure; an S3 URI below which each host leaves its own."""

STOP_FILE: Final = "SMPKIT_STOP_FILE"
"""A file that is there when somebody has asked the job to stop."""

OF_THE_LAUNCHER: Final = (HOSTS, FIRST_HOST, PORT, INTERFACE, MACHINE, PLACES, CONFIG, VARIABLES, MESSAGE, STOP_FILE)


def is_scheduled(environ: Mapping[str, str]) -> bool:
    """Tell whether a scheduler has started this launcher."""
    return bool(environ.get(HOSTS))


STOPPED: Final = 143
"""Exit code of a launcher that SIGTERM ended, as a shell has it, if all its ranks ended with 0 or by SIGTERM, whether
or not they have saved. Slurm's batch script queues such a job again, unless somebody stopped it."""
LOST: Final = 75
"""Exit code of a launcher that ended because another host was lost (`EX_TEMPFAIL`): worth another try."""
