"""The private names of smpkit that goldens need. Adapt this file when they move; nothing else here uses any."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

__all__ = ["Sandbox", "emulated_links", "launch_plan", "sandbox"]

_PREFIXES = ("SM_", "SMP_", "SMPKIT_", "SAGEMAKER_", "AWS_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS"}


def emulated_links() -> Any:
    """Return the links of an OffloadModel to a device that a CPU emulates."""
    from smpkit.torch.offload.emulated import EmulatedLink

    return EmulatedLink(), EmulatedLink()


class Sandbox:
    """Runs the command line in a folder of its own, in which nothing of this machine shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str = "") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, *arguments: str) -> dict[str, Any]:
        """Return what a command prints, and its exit code."""
        from smpkit.cli.main import cli

        result = CliRunner().invoke(cli, list(arguments), prog_name="smpkit")
        return {"exit": result.exit_code, "stdout": self.plain(result.stdout), "stderr": self.plain(result.stderr)}

    def plain(self, text: str) -> str:
        """Return text without names of this machine's folders and programs."""
        for place, name in ((str(self.folder), "<folder>"), (sys.executable, "<python>")):
            text = text.replace(place, name)
        return re.sub(r"\bPython 3\.\d+\.\d+", "Python 3.x", text)


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """Enter a folder and an environment in which commands give the same on every machine."""
    before, variables = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="smpkit-goldens.") as name:
        folder = Path(name).resolve()
        for key in variables:
            if key.startswith(_PREFIXES) or key in _NAMES:
                del os.environ[key]
        nowhere = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}
        os.environ.update({"NO_COLOR": "1", "HOME": name, "COLUMNS": "100", "AWS_EC2_METADATA_DISABLED": "true"})
        os.environ.update(nowhere)
        os.chdir(folder)
        try:
            yield Sandbox(folder)
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(variables)


def launch_plan(
    base: Path, environ: Mapping[str, str], extra: list[str], *, num_gpus: int, num_cpus: int, has_efa: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the command with which the image's launcher starts ranks, what these run, and their variables.

    Raises:
        SmpkitError: the job cannot be started as described.
    """
    from smpkit_container.environment import Environment
    from smpkit_container.launch import _planned
    from smpkit_container.topology import read_topology

    environment = Environment.read(base, environ, num_gpus=num_gpus, num_cpus=num_cpus, has_efa=has_efa)
    topology = read_topology(environment)
    plan = _planned(environment, topology, topology.port or 7777, b"token", environ, extra, False)
    return _with_plain_python([*plan.command, *plan.program]), dict(plan.environ)


def _with_plain_python(command: list[str]) -> list[str]:
    """Return a command in which modules run the same way in every version of Python."""
    from smpkit.modules import module_command

    before = module_command("")[:-1]
    starts = [start for start in range(len(command)) if command[start : start + len(before)] == before]
    for start in reversed(starts):
        command[start : start + len(before)] = ["<python>", "-m"]
    return command
