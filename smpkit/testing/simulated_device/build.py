"""The library of the simulated device: compiled by the machine's C++ compiler when it is first needed, then kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import torch

from smpkit import compilers
from smpkit.errors import SmpkitError

_SOURCES: Final = Path(__file__).with_name("source")
_SECONDS: Final = 900.0
_FLAGS: Final = ("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-w")
"""Little optimisation: it takes an eighth longer to compile than none, and the kernels are torch's own. NDEBUG changes
how torch's classes lie in memory, so it has to be what torch was compiled with."""


class Unavailable(SmpkitError):
    """The simulated device cannot be had on this machine."""


def library() -> Path:
    """Return the compiled library for this torch; the first call on a machine takes 20 to 40 seconds.

    It is kept in `$XDG_CACHE_HOME/smpkit` (`~/.cache/smpkit`) under a name made of its sources, torch's version and the
    flags. Processes that start together compile it once.

    Raises:
        Unavailable: there is no compiler, or it cannot compile the library with this torch.
    """
    if os.name != "posix":
        raise Unavailable("the simulated device needs Linux or macOS")
    sources = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(" ".join((torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), *_FLAGS)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "smpkit")
    found = folder / f"simulated_device-{digest.hexdigest()[:20]}.so"
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "simulated_device.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                _compile(found)
    return found


def _compile(target: Path) -> None:
    program = compilers.find_compiler()
    if program is None:
        raise Unavailable(
            f"the simulated device is compiled when first used, and there is no C++ compiler ({compilers.NAMES})",
            hint="install one, for example with `apt-get install g++`",
        )
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        if os.uname().sysname == "Darwin":  # Python's own symbols are found when the library is loaded
            libraries.append("-Wl,-undefined,dynamic_lookup")
        command = [program, *_FLAGS, *includes, str(_SOURCES / "library.cpp"), "-o", str(made), *libraries]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line]
            raise Unavailable(
                f"{program} cannot compile the simulated device with torch {torch.__version__}: "
                f"{lines[0] if lines else error.stderr.strip()[-300:]}",
                hint="it needs C++20 (g++ 11, clang++ 14 or newer)",
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{program} did not compile the simulated device: {error}") from error
        made.replace(target)
