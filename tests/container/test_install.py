"""What the image's build asks the package manager for; every program that it calls is a stand-in."""

from __future__ import annotations

import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest

SCRIPT = resources.files("smpkit_container").joinpath("install.sh")
DOCKERFILE = resources.files("smpkit_container").joinpath("Dockerfile")

PYTHON = """#!/bin/sh
case "$*" in
  *Python.h*) exit {headers} ;;
  *) echo "python3 $*" >>{log} ;;
esac
"""


def installed(
    folder: Path, manager: str, variables: dict[str, str], *, headers: bool = False, there: tuple[str, ...] = ()
) -> list[str]:
    """Return the packages that the system's part of the build asks for, on an image with Python and some programs."""
    log, programs = folder / "log", folder / "bin"
    programs.mkdir()
    stand_ins = {
        "python3": PYTHON.format(headers=0 if headers else 1, log=log),
        "ls": "#!/bin/sh\nexit 1\n",
        "rm": "#!/bin/sh\n",
        **{name: f'#!/bin/sh\necho "{name} $*" >>{log}\n' for name in (manager, *there)},
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    # Nothing of this machine is on the path: the script removes files of the system that it prepares.
    environ = {"PATH": str(programs), "TORCH": "torch>=2.11", "TORCH_OPTIONS": "", **variables}
    subprocess.run(["/bin/sh", str(SCRIPT), "base"], env=environ, check=True, timeout=60)
    (line,) = re.findall(rf"^{manager} install (.*)$", log.read_text(), re.MULTILINE)
    return [word for word in str(line).split() if not word.startswith("-")]


@pytest.mark.parametrize(
    ("manager", "compiler", "headers"), [("apt-get", "g++", "python3-dev"), ("dnf", "gcc-c++", "python3-devel")]
)
def test_a_compiler_and_pythons_headers_are_installed_unless_they_are_there(
    manager: str, compiler: str, headers: str, tmp_path: Path
) -> None:
    for number, (variables, has_headers, there, expected) in enumerate(
        [
            ({}, False, (), {compiler, headers}),
            ({"COMPILER": "1"}, True, (), {compiler}),
            ({"COMPILER": "1"}, False, ("g++",), {headers}),
            ({"COMPILER": "0"}, False, (), set()),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = installed(folder, manager, variables, headers=has_headers, there=there)
        assert {compiler, headers} & set(found) == expected
        assert any(name.startswith("openssh") for name in found)


def test_the_build_argument_reaches_the_script() -> None:
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    argument, run = lines.index("ARG COMPILER=1"), lines.index("RUN sh /tmp/smpkit-build/install.sh base")
    assert max(number for number, line in enumerate(lines) if line.startswith("FROM ")) < argument < run
