"""Packages and names that public scripts import and that are gone: found under `smpkit compat`, unless installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.drop_in import SHIMS_PATH, STARTUP_PATH, with_startup
from tests.compat.commands import SCRIPTS, run_compat
from tests.ranks import run_ranks


@pytest.mark.slow
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


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def larc_of(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    sys.path.append(str(SHIMS_PATH))
    from apex.parallel import LARC  # type: ignore[import-not-found, unused-ignore]

    inner = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    return LARC(inner), inner


def train_with_larc() -> tuple[dict[str, torch.Tensor], list[float]]:
    smp.init({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0})
    model = smp.DistributedModel(build())
    larc, _ = larc_of(model)
    optimizer = smp.DistributedOptimizer(larc)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4).double() * (smp.rank() + 1)).pow(2).sum().backward()
        optimizer.step()
    from apex.parallel import Reducer  # type: ignore[import-not-found, unused-ignore]

    weight = nn.Linear(1, 1, bias=False)
    weight.weight.data.fill_(smp.rank())
    reducer = Reducer(weight)
    weight.weight.grad = torch.full((1, 1), float(smp.rank()))
    reducer.reduce()
    other = torch.full((2,), float(smp.rank()))
    Reducer([other]).reduce()
    return model.state_dict(), [weight.weight.item(), weight.weight.grad.item(), *other.tolist()]


def train_plainly_with_larc() -> dict[str, torch.Tensor]:
    plain = build()
    larc, inner = larc_of(plain)
    for _ in range(3):
        inner.zero_grad()
        for size in (1, 2):
            (plain(torch.ones(1, 4).double() * size).pow(2).sum() / 2).backward()
        larc.step()
    return plain.state_dict()


def test_larc_sees_whole_norms_and_a_reducer_averages_over_ranks() -> None:
    (plain,) = run_ranks(train_plainly_with_larc, 1)
    for weights, reduced in run_ranks(train_with_larc, 2):
        torch.testing.assert_close(dict(weights), dict(plain))
        assert reduced == [0.0, 0.5, 0.5, 0.5]


def _in_front(folder: Path) -> dict[str, str]:
    folders = [str(folder), *(str(Path(each).absolute()) for each in sys.path if each and Path(each).is_dir())]
    return {"PYTHONPATH": os.pathsep.join(folders)}
