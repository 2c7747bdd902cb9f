"""What smpkit uses of torch that torch does not promise is listed, and the installed torch has it.

After a change of the product or of torch, `python -m tests.torch.test_private_names` renews the list.
"""

from __future__ import annotations

import pkgutil
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import torch

LIST = Path(__file__).with_name("private_names.txt")
VERSION = ".".join(torch.__version__.split(".")[:2])
ELSEWHERE = {
    "torch._six": "smpkit/drop_in puts it there",
    "torch._C._distributed_c10d.ProcessGroupNCCL": "only where torch has NCCL",
}
"""What the torch that is installed may lack, and why."""
RESULTS = {"torch.distributed.fsdp.fully_shard.state": "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"}
"""What functions return of which private names are used."""


def used() -> list[str]:
    """Return the private names in the product, as `scripts/measure` finds them."""
    top = Path(__file__).parents[2]
    loader = SourceFileLoader("measure", str(top / "scripts" / "measure"))
    spec = spec_from_loader("measure", loader)
    assert spec is not None
    loader.exec_module(measure := module_from_spec(spec))
    files = [path for folder in measure.PRODUCT for path in (top / folder).rglob("*.py")]
    return measure.private_names(path.read_text(encoding="utf-8") for path in files)


def listed() -> dict[str, list[str]]:
    """Return the versions of torch that each name was seen in."""
    lines = [line.split() for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {name: versions for name, *versions in lines}


def is_there(name: str) -> bool:
    for function, result in RESULTS.items():
        name = name.replace(function, result)
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def renew() -> None:
    """Write the list anew."""
    known = listed() if LIST.exists() else {}
    seen = {name: sorted({*known.get(name, []), *[VERSION] * is_there(name)}) for name in used()}
    heading = "# Private names of torch that the product uses, and the versions that had them.\n"
    LIST.write_text(heading + "".join(f"{' '.join([name, *versions])}\n" for name, versions in seen.items()))


def test_each_private_name_is_listed_and_the_installed_torch_has_it() -> None:
    names, known = used(), listed()
    assert sorted(known) == names, "run `python -m tests.torch.test_private_names`, and read what has changed"
    gone = [f"{name} (seen in {' '.join(known[name])})" for name in names if not is_there(name) | (name in ELSEWHERE)]
    assert not gone, f"torch {VERSION} lacks {', '.join(gone)}"


if __name__ == "__main__":
    renew()
