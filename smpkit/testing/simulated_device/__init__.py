"""A simulated accelerator with a race detector: runs asynchronous PyTorch code for a GPU on any CPU, and checks it.

`load()` makes a torch device of type `sim`. It has memory of its own, streams, events, pinned memory, copies that do
not block, an allocator that reuses freed memory at once, random numbers, autocast, several devices, and a process group
for ranks. Operators give what the CPU's kernels give. What it adds:

- **Order.** Streams have no threads: a policy decides what runs when, and the same seed gives the same order again.
  `lazy` runs nothing before somebody waits for it, so what nobody waits for is never there by luck.
- **Races.** All uses of device memory and of pinned memory are compared by vector clocks. Two that nothing orders are
  reported with the lines of Python that made both, under every policy, whether or not the values came out right.
- **Time.** A virtual clock says what the device would have done by when, from the speeds that you give. So overlap,
  stalls and peaks are measured exactly, and the same each time.

::

    from smpkit.testing import simulated_device

    device = simulated_device.load()

    def test_step() -> None:
        for policy in simulated_device.POLICIES:
            with simulated_device.no_races(policy, seed=1):      # raises RaceFound
                train_step(model.to(device), data)

Not simulated: CUDA graphs, kernels of Triton and other kernels of your own, processes that share a device's memory. All
threads of a process count as one host: races between them are not found.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

import torch
from torch.utils import backend_registration

from smpkit import compilers
from smpkit.errors import SmpkitError, UsageError
from smpkit.testing.simulated_device import device_module

__all__ = [
    "POLICIES",
    "Access",
    "Race",
    "RaceFound",
    "Span",
    "Speeds",
    "Unavailable",
    "Wait",
    "configure",
    "host_access",
    "load",
    "no_races",
    "now",
    "races",
    "set_policy",
    "set_speeds",
    "sleep",
    "timeline",
    "waits",
]

POLICIES: Final = ("eager", "lazy", "compute", "copies", "random", "timed")
"""What runs when.

    eager    everything that can run runs at once
    lazy     nothing runs before somebody waits for it
    compute  default streams run at once, the others lag
    copies   the other streams run at once, default streams lag
    random   after each call a few pieces of work run, chosen by the seed
    timed    what the device would have done by now, in virtual time
"""

_loaded: list[int] = []


@dataclass(frozen=True)
class Access:
    """A use of memory.

    Attributes:
        operator: what used it, such as `aten::mm`, `copy to the host`, `all_reduce`, `the allocator (freed memory)`.
        stream: on which stream; the host's own uses of pinned memory are on `the host`.
        verb: `reads` or `writes`.
        lines: where in Python, innermost first, as `file:line:function`; in a backward pass also the lines of the
            forward pass.
    """

    operator: str
    stream: str
    verb: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        here = f"{Path.cwd()}{os.sep}"
        lines = [line.removeprefix(here) for line in self.lines]
        where = ("at " + ", called at ".join(lines)) if lines else "(no line of Python)"
        return f"{self.operator} on {self.stream} {self.verb} {where}"


@dataclass(frozen=True)
class Race:
    """Two uses of the same bytes, at least one of which writes, that nothing orders.

    Attributes:
        second: the one that was queued later.
        memory: whose bytes: `memory of sim:0`, or `pinned host memory`.
    """

    first: Access
    second: Access
    memory: str

    def __str__(self) -> str:
        return f"{self.memory}, and nothing orders these two:\n    {self.second}\n    {self.first}"


class RaceFound(SmpkitError):
    """A checked block had races.

    Attributes:
        races: all of them.
    """

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        shown = "\n".join(f"  {race}" for race in races[:10])
        more = f"\n  and {len(races) - 10} more" if len(races) > 10 else ""
        super().__init__(f"{len(races)} race{'s' if len(races) > 1 else ''}:\n{shown}{more}")


@dataclass(frozen=True)
class Speeds:
    """How fast the device is, in operations, bytes and seconds of virtual time.

    The host's Python takes no time but `launch` for each piece of work. Copies of one direction take turns; kernels of
    several streams do not slow each other.

    Attributes:
        flops: operations per second of matrix products.
        memory: bytes per second that kernels read and write.
        out, back: bytes per second of copies to the host, and to the device.
        peer: bytes per second between devices, and between ranks.
        latency: seconds of each copy and message.
        launch: seconds of the host for each piece of work.
    """

    flops: float = 100e12
    memory: float = 2e12
    out: float = 50e9
    back: float = 50e9
    peer: float = 100e9
    latency: float = 10e-6
    launch: float = 5e-6


@dataclass(frozen=True)
class Span:
    """A piece of work in virtual time, in seconds; stream 0 is the device's default stream."""

    what: str
    device: int
    stream: int
    begin: float
    end: float


@dataclass(frozen=True)
class Wait:
    """A place at which the host waits for the device.

    Attributes:
        what: `item`, the operator, `copy to the host`, `copy to the device`, `stream` or `device`.
        lines: where in Python, as in `Access`.
        times: how often.
    """

    what: str
    lines: tuple[str, ...]
    times: int


def load(devices: int = 1) -> torch.device:
    """Make the device type `sim` in this process, and return `sim:0`; later calls only return it.

    It becomes torch's accelerator (`torch.accelerator`), and `sim` the backend of torch.distributed for its tensors.

    Args:
        devices: how many there are: `sim:0`, `sim:1`, ...

    Raises:
        Unavailable: the library cannot be compiled here, or another plug-in has taken torch's place for devices.
        UsageError: it has been loaded with another number of devices.
    """
    if _loaded:
        if devices != _loaded[0]:
            raise UsageError(
                f"the simulated device was loaded with devices={_loaded[0]}, and cannot have {devices} in this process",
                hint="load it once, with as many devices as you need",
            )
        return torch.device("sim", 0)
    if (name := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise Unavailable(
            f"torch has one place for devices of plug-ins, and {name!r} is in it",
            hint="start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        )
    path = library()
    os.environ["SIM_DEVICES"] = str(devices)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module.make(devices))  # type: ignore[no-untyped-call]
    torch.empty(1, device="cpu").pin_memory()  # before that, torch says of no memory that it is pinned
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    device_module.register_backend()
    site = Path(torch.__file__).parents[1]
    pytest = [site / name for name in ("pytest", "_pytest", "pluggy")]
    hidden = (site / "torch", *pytest, sysconfig.get_path("scripts"), Path(__file__).parent)
    torch.ops.sim.hide([*(f"{folder}{os.sep}" for folder in hidden), contextlib.__file__, "<"])
    _loaded.append(devices)
    configure()
    set_speeds(Speeds())
    return torch.device("sim", 0)


def configure(
    *,
    strict: bool = False,
    poison: bool = True,
    one_communicator_at_a_time: bool = False,
    traced: bool = False,
    lines: bool = True,
    memory: int = 8 << 30,
) -> None:
    """Set how the device behaves; what is left out gets its default.

    Args:
        strict: a race raises where its second use is queued, so that a debugger stops there.
        poison: freed memory is overwritten.
        one_communicator_at_a_time: an operation of a process group holds its device until its peers have come, in the
            order in which the host queued them, across all groups. NCCL promises no more.
        traced: keep what `timeline` returns.
        lines: keep the lines of Python of each use, which takes 3 to 16 % of a training step's processor time: the
            smaller the step, the more.
        memory: bytes of each device.
    """
    torch.ops.sim.options(strict, poison, one_communicator_at_a_time, traced, lines, memory)


def set_policy(policy: str, seed: int = 0) -> None:
    """Set what runs when, see `POLICIES`.

    Raises:
        UsageError: there is no such policy.
    """
    if policy not in POLICIES:
        raise UsageError(f"there is no policy {policy!r}: policies are {', '.join(POLICIES)}")
    torch.ops.sim.policy(policy, seed)


def set_speeds(speeds: Speeds) -> None:
    """Set how fast the device is from now on."""
    torch.ops.sim.speeds(*astuple(speeds))


def races() -> list[Race]:
    """Return the races since the last call; each pair of places once."""
    return [_race(text) for text in torch.ops.sim.races()]


def _race(text: str) -> Race:
    *uses, memory = text.split("\x1f")
    second, first = (
        Access(operator, stream, verb, tuple(filter(None, lines.split("\n"))))
        for operator, stream, verb, lines in (uses[:4], uses[4:])
    )
    return Race(first, second, memory)


@contextlib.contextmanager
def no_races(policy: str = "random", seed: int = 0) -> Iterator[None]:
    """Run a block under a policy, wait for the devices, and raise if there were races.

    Raises:
        RaceFound: there were; if the block itself raises, its exception goes on, with the races as notes.
    """
    races()
    set_policy(policy, seed)
    try:
        yield
        for index in range(_loaded[0]):
            torch.accelerator.synchronize(index)
    except Exception as error:
        if (races_found := races()) and hasattr(error, "add_note"):
            error.add_note(str(RaceFound(races_found)))
        raise
    if races_found := races():
        raise RaceFound(races_found)


def now() -> float:
    """Return the host's virtual time in seconds."""
    time: float = torch.ops.sim.now()
    return time


def timeline() -> list[Span]:
    """Return what the devices have done since the last call, after `configure(traced=True)`."""
    return [Span(*row) for row in zip(*torch.ops.sim.spans(), strict=True)]


def sleep(seconds: float) -> None:
    """Queue a kernel on the current stream that takes so much virtual time."""
    torch.ops.sim.sleep(seconds)


def waits() -> list[Wait]:
    """Return where the host has waited for the device until now, as `torch.cuda.set_sync_debug_mode` tells of CUDA.

    Those are reads of values, operators whose shapes hang on values, copies that block, and waits for streams and
    devices; not waits for events.
    """
    return [
        Wait(what, tuple(filter(None, where.split("\n"))), n)
        for what, where, n in zip(*torch.ops.sim.waits(), strict=True)
    ]


def host_access(tensor: torch.Tensor, *, writes: bool, what: str = "host code") -> None:
    """Say that the host uses a tensor's memory now, as torch's operators do by themselves; ctypes and numpy do not."""
    torch.ops.sim.host_access(tensor, writes, what)


# ---- the library: compiled by the machine's C++ compiler when it is first needed, then kept --------------------------

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
    library = folder / f"simulated_device-{digest.hexdigest()[:20]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "simulated_device.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library)
    return library


def _compile(target: Path) -> None:
    program = compilers.find_compiler()
    if program is None:
        raise Unavailable(
            f"the simulated device is compiled when first used, and there is no C++ compiler ({compilers.NAMES})",
            hint="install one, for example with `apt-get install g++`",
        )
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled = Path(folder, target.name)
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        if os.uname().sysname == "Darwin":  # Python's own symbols are found when the library is loaded
            libraries.append("-Wl,-undefined,dynamic_lookup")
        command = [program, *_FLAGS, *includes, str(_SOURCES / "library.cpp"), "-o", str(compiled), *libraries]
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
        compiled.replace(target)
