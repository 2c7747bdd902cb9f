"""`smpkit compat --check` reads scripts: what they use of SMP v1, and which imports fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smpkit.cli.main import cli
from smpkit.drop_in import DROP_IN_PATH, check
from tests.ranks import run_ranks

SCRIPT = """\
import torch, beside
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import DistributedTransformr
import horovod.torch as hvd
try:
    import not_there
except ImportError:
    not_there = None

@smp.step
def train_step(model):
    import not_there_either
    model.backward(smp.stat.cfg)

smp.state.cfg.anything
smp.DistributedModl().foo
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("beside.py").write_text("import not_there_in_beside\n")
    Path("wrong.py").write_text("print 'x'")
    Path("empty").mkdir()


def run_check(*paths: str) -> Result:
    return CliRunner().invoke(cli, ["compat", "--check", *paths])


def test_everything_is_found() -> None:
    """One process imports for all three forms, which takes it seconds."""
    done = run_check("--json", "train.py")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["can_run"], answer["files"]) == (1, False, ["train.py"])
    by_kind: dict[str, dict[str, tuple[int, bool]]] = {}
    for finding in answer["findings"]:
        by_kind.setdefault(finding["kind"], {})[finding["name"]] = (finding["line"], finding["optional"])
    assert by_kind == {
        "smp": {"smp.step": (10, False), "smp.state": (15, False)},
        "unknown": {
            "smp.nn.DistributedTransformr": (3, False),
            "smp.stat": (13, False),
            "smp.DistributedModl": (16, False),
        },
        "missing": {"horovod": (4, False), "not_there": (6, True), "not_there_either": (12, True)},
    }
    messages = {finding["name"]: finding["message"] for finding in answer["findings"]}
    assert messages["smp.DistributedModl"] == "did you mean `DistributedModel`?"
    assert messages["horovod"] == "No module named 'horovod'"


PUBLIC_IMPORTS = """\
import amp_C, apex_C
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from apex import amp
from apex.amp import _amp_state
from apex.fp16_utils import *
from apex.multi_tensor_apply import multi_tensor_applier
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel.distributed import flat_dist_call
from flash_attn.flash_attention import FlashAttention
from smdistributed.modelparallel.test.torch.utils import dump_model, verify
from smdistributed.modelparallel.torch.nn import DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.optimizers import FusedLAMB
from smdistributed.modelparallel.torch.state_mod import state as smp_state
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from torch._six import inf
torch._C._jit_set_profiling_mode(False)
print(smdistributed.modelparallel.__version__)
"""
"""The imports of public scripts of SMP v1 that need more than today's packages; D5, D6 and B4 were among them."""


def test_the_imports_of_public_scripts_work_and_the_text_says_so() -> None:
    Path("train.py").write_text(PUBLIC_IMPORTS)
    done = run_check("train.py")
    assert done.exit_code == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "can run"
    assert "nn.DistributedTransformerLayer," in done.stdout


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/migrate-from-smp-v1.md").read_text()
    shown = page.partition("$ smpkit compat --check train.py data.py\n")[2].partition("```")[0]
    lines = [""] * 41
    lines[1:5] = ["import smdistributed.modelparallel.torch as smp", "import data", "", "import horovod.torch as hvd"]
    lines[20] = "smp.init, smp.rank, smp.step, smp.DistributedModel, smp.DistributedOptimizer"
    lines[40] = "smp.dp_rnk()"
    Path("train.py").write_text("\n".join(lines))
    Path("data.py").write_text("import os\nimport sys\nimport cv2\n")
    monkeypatch.setattr(check, "_judge", in_this_process)
    assert run_check("train.py", "data.py").stdout == shown


def in_this_process(uses: list[check.Finding]) -> list[check.Finding]:
    (answers,) = run_ranks(try_imports, 1, [use.name for use in uses])
    return [
        check.Finding(answer[0], answer[1], use.file, use.line, answer[2], use.optional)
        for use, answer in zip(uses, answers, strict=True)
        if answer is not None
    ]


def try_imports(names: list[str]) -> list[tuple[check.Kind, str, str | None] | None]:
    sys.path.append(str(DROP_IN_PATH))
    return list(map(check._try_import, names))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--check", "wrong.py"], 2, "wrong.py:1 is not Python 3"),
        (["--check", "nothing.py"], 2, "`nothing.py` does not exist"),
        (["--check", "empty"], 2, "`empty` holds no Python files"),
        (["--json", "--", "true"], 2, "`--json` is for `--check`"),
    ],
)
def test_what_cannot_be_read_is_said(arguments: list[str], code: int, message: str) -> None:
    done = CliRunner().invoke(cli, ["compat", *arguments])
    assert (done.exit_code, message in done.output) == (code, True), done.output
