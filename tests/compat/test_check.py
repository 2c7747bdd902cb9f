"""`smpkit compat --check` reads scripts: which of their imports fail, and which names of SMP v1 do not exist."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
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
    done = run_check("--json", "train.py")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["can_run"]) == (1, False)
    assert {finding["name"]: (finding["line"], finding["optional"]) for finding in answer["findings"]} == {
        "smp.nn.DistributedTransformr": (3, False),
        "horovod": (4, False),
        "not_there": (6, True),
        "not_there_either": (12, True),
        "smp.stat": (13, False),
        "smp.DistributedModl": (16, False),
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
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import get_hf_gpt2_transformer_layer_hooks
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_block_state_dict_to_smdistributed
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed_gpt2
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_layer_state_dict_to_hf_gpt2_block
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_state_dict_to_hf_gpt2
from smdistributed.modelparallel.torch.nn.huggingface.gptj import translate_hf_state_dict_to_smdistributed_gptj
from smdistributed.modelparallel.torch.nn.huggingface.gptj import translate_state_dict_to_hf_gptj
from smdistributed.modelparallel.torch.nn.huggingface.gptneo import translate_hf_gptneo_state_dict_to_smdistributed
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
    assert done.stdout == "can run\n"


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/migrate-from-smp-v1.md").read_text()
    shown = page.partition("$ smpkit compat --check train.py data.py\n")[2].partition("```")[0]
    lines = [""] * 41
    lines[1:5] = ["import smdistributed.modelparallel.torch as smp", "import data", "", "import horovod.torch as hvd"]
    lines[40] = "smp.dp_rnk()"
    Path("train.py").write_text("\n".join(lines))
    Path("data.py").write_text("try:\n    import cv2\nexcept ImportError:\n    pass\n")
    monkeypatch.setattr(check, "_failing", failing_here)
    assert run_check("train.py", "data.py").stdout == shown


def failing_here(uses: list[check.Finding]) -> list[check.Finding]:
    """Do what the other process would, in a rank that has torch already."""
    (failures,) = run_ranks(try_imports, 1, [use.name for use in uses])
    pairs = zip(uses, failures, strict=True)
    return [replace(use, name=failure[0], message=failure[1]) for use, failure in pairs if failure is not None]


def try_imports(names: list[str]) -> list[tuple[str, str] | None]:
    sys.path.append(str(DROP_IN_PATH))
    return list(map(check._failure_of, names))


def test_an_import_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_IMPORT_SECONDS", 0.01)
    assert "the imports cannot be tried: they did not end within 0.01 s" in run_check("train.py").output


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
