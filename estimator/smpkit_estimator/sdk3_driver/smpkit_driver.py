"""Become smpkit's launcher: it is in the image, and reads everything from /opt/ml.

Needs nothing but Python to find out that smpkit is not there. With the argument `check`, only look whether it is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

_MISSING = "smpkit is not in this image"
_FAILURE = Path("/opt/ml/output/failure")
_HYPERPARAMETERS = Path("/opt/ml/input/config/hyperparameters.json")
_DRIVERS = Path("/opt/ml/input/data/sm_drivers")


def main() -> None:
    if importlib.util.find_spec("smpkit_container") is None:
        with contextlib.suppress(OSError):  # what SageMaker shows as the reason; the log says it anyway
            _FAILURE.parent.mkdir(parents=True, exist_ok=True)
            _FAILURE.write_text(f"{_MISSING}; install it there with `pip install 'smpkit[torch]'`", encoding="utf-8")
        sys.exit(f"error: {_MISSING}\nhint: install it there with `pip install 'smpkit[torch]'`")
    if sys.argv[1:] != ["check"]:
        os.environ.update(_missing_hyperparameters())
        # Not from the present folder, which is that of the sources: a `json.py` there would stand in the way.
        os.execv(sys.executable, [sys.executable, "-P", "-m", "smpkit_container", "train"])  # noqa: S606  no shell


def _missing_hyperparameters() -> dict[str, str]:
    """Return what the launcher needs, as a variable, if the user did not send it as hyperparameters.

    The trainer sends the script's name and the options of `Smpkit` along anyway.
    """
    # Only here is it known that smpkit is in the image.
    from smpkit.errors import SmpkitError
    from smpkit_estimator.arguments import job_from_arguments
    from smpkit_estimator.hyperparameters import for_trainer

    files = (_HYPERPARAMETERS, _DRIVERS / "sourcecode.json", _DRIVERS / "distributed.json")
    try:
        sent, source, options = (json.loads(file.read_bytes()) if file.is_file() else {} for file in files)
        script = source.get("entry_script")
        if "sagemaker_program" in sent or not script:
            return {}
        job = job_from_arguments({"entry_point": script}, options.get("smp_options"), options.get("mpi_options"))
    except (OSError, ValueError, SmpkitError) as error:
        _FAILURE.parent.mkdir(parents=True, exist_ok=True)
        _FAILURE.write_text(str(error)[:1024], encoding="utf-8")
        sys.exit(f"error: {error}")
    return {"SMPKIT_HYPERPARAMETERS": json.dumps(for_trainer(job))}


if __name__ == "__main__":
    main()
