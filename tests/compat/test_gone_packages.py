"""Packages and names that public scripts import and that are gone: found under `smpkit compat`, unless installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from smpkit.drop_in import STARTUP_PATH, with_startup
from tests.compat.commands import SCRIPTS, run_compat


def test_every_shim_computes_what_plain_torch_does(tmp_path: Path) -> None:
    # The real one has no `load_metric` either, and takes 150 MB.
    (tmp_path / "datasets.py").write_text("")
    said = run_compat(sys.executable, str(SCRIPTS / "gone_packages.py"), env=_in_front(tmp_path))
    (line,) = (line for line in said.splitlines() if line.startswith("RESULTS"))
    results = json.loads(line.removeprefix("RESULTS"))
    assert len(results) > 15
    assert {name: why for name, why in results.items() if why} == {}
    assert said.count("`apex` is not installed: smpkit's stand-in for it is used") == 1
    assert said.count("`flash_attn` is not installed") == 1


def test_what_is_installed_wins(tmp_path: Path) -> None:
    """Real packages, and real names in them."""
    for package in ("apex", "amp_C", "evaluate"):
        (tmp_path / f"{package}.py").write_text(f"real = {package!r}\ndef load(*arguments): return arguments\n")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("")
    (tmp_path / "datasets.py").write_text("")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("def is_torch_tpu_available(): return 'real'\n")
    code = (
        "import importlib.util, sys\n"
        "import apex, amp_C, datasets, flash_attn, transformers\n"
        "assert (apex.real, amp_C.real) == ('apex', 'amp_C')\n"
        "assert transformers.is_torch_tpu_available() == 'real'\n"
        "assert datasets.load_metric('rouge', None, 1) == ('rouge', None, 1)\n"
        "assert importlib.util.find_spec('flash_attn.flash_attention') is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert "not installed" not in run_compat(sys.executable, "-c", code, env=_in_front(tmp_path))


def test_nothing_is_replaced_outside_compat() -> None:
    assert str(STARTUP_PATH) not in os.environ.get("PYTHONPATH", "")
    assert with_startup({}, cuda_on_cpu=False) == {"PYTHONPATH": str(STARTUP_PATH)}
    assert "apex" not in sys.modules


def _in_front(folder: Path) -> dict[str, str]:
    folders = [str(folder), *(str(Path(each).absolute()) for each in sys.path if each and Path(each).is_dir())]
    return {"PYTHONPATH": os.pathsep.join(folders)}
