"""`smpkit compat --check` reads scripts: what they use of SMP v1, what stands in, and what cannot work."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smpkit.cli.main import cli
from smpkit.drop_in import DROP_IN_PATH, SHIMS_PATH
from smpkit.drop_in.source_names import names_of
from tests.compat.commands import SCRIPTS
from tests.ranks import run_ranks

SCRIPT = """\
import sys
import numpy as np
import torch, torch._six
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import DistributedTransformr
import horovod.torch as hvd
import smdistributed.dataparallel.torch.distributed
from torch.utils.cpp_extension import CUDAExtension
try:
    from apex.contrib.multihead_attn import SelfMultiheadAttn
    import not_there_1
except ImportError:
    SelfMultiheadAttn = None
try:
    import apex.transformer
except ImportError:
    raise ImportError("install apex")
if is_x_available():
    import not_there_2
from apex.normalization import FusedLayerNorm as Norm
from apex.amp import wrap
import amp_C, not_there_3
import beside
assert torch.cuda.is_available(), "no GPU"
if not torch.cuda.is_available():
    sys.exit(1)

@smp.step
def train_step(model):
    model.backward(np.float(1))
    amp_C.multi_tensor_adam()
    return torch.cuda.FloatTensor(1).type() == "torch.cuda.HalfTensor"

smp.init()
smp.stat.cfg
smp.DistributedModl(Norm(2)).foo, smp.DP_RNK
smp.state.cfg.anything
torch.cuda.set_device(0)
def late():
    if True:
        import not_there_2
try:
    import not_there_4 as kernels
except ImportError:
    import amp_C as kernels
kernels.multi_tensor_sgd
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("beside.py").write_text("from transformers import AdamW, is_torch_tpu_available\nimport train\n")
    return Path("train.py")


def run_check(*paths: str) -> Result:
    return CliRunner().invoke(cli, ["compat", "--check", *paths])


def test_everything_is_found(script: Path) -> None:
    done = run_check("--json", str(script))
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["can_run"], found["files"]) == (False, ["train.py", "beside.py"])
    by_kind: dict[str, dict[str, int]] = {}
    optional = {each["name"] for each in found["findings"] if each["optional"]}
    for each in found["findings"]:
        by_kind.setdefault(each["kind"], {})[each["name"]] = each["line"]
    assert by_kind == {
        "smp": {"smp.init": 34, "smp.step": 28, "smp.state": 37},
        "unknown": {"smp.nn.DistributedTransformr": 5, "smp.stat": 35, "smp.DistributedModl": 36, "smp.DP_RNK": 36},
        "shimmed": {
            "torch._six": 3,
            "amp_C": 22,
            "apex.normalization.FusedLayerNorm": 20,
            "transformers.is_torch_tpu_available": 1,
        },
        "missing": {
            "apex.amp.wrap": 21,
            "amp_C.multi_tensor_adam": 31,
            "amp_C.multi_tensor_sgd": 46,
            "not_there_1": 11,
            "not_there_2": 41,
            "not_there_3": 22,
            "not_there_4": 43,
            "numpy.float": 30,
            "transformers.AdamW": 1,
        },
        "blocked": {
            "horovod": 6,
            "smdistributed.dataparallel": 7,
            "torch.utils.cpp_extension.CUDAExtension": 8,
            "apex.contrib.multihead_attn.SelfMultiheadAttn": 10,
            "apex.transformer": 15,
        },
        "cuda": {
            "assert torch.cuda.is_available()": 24,
            "if not torch.cuda.is_available()": 25,
            "torch.cuda.FloatTensor": 32,
            "torch.cuda.HalfTensor": 32,
        },
    }
    contrib = "apex.contrib.multihead_attn.SelfMultiheadAttn"
    assert optional == {"not_there_1", "not_there_4", "amp_C.multi_tensor_sgd", contrib}
    messages = {each["name"]: each["message"] for each in found["findings"]}
    assert messages["smp.DistributedModl"] == "did you mean `DistributedModel`?"
    assert messages["smp.nn.DistributedTransformr"] == "did you mean `DistributedTransformer`?"
    assert messages["smp.DP_RNK"] == "did you mean `DP_RANK`?"
    assert messages["not_there_3"] == "pip install not_there_3"
    assert "use torch.optim.AdamW" in messages["transformers.AdamW"]


def test_the_table_fits_and_ends_with_the_verdict(script: Path) -> None:
    done = run_check(str(script))
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert max(map(len, lines)) <= 80
    assert lines[0] == "train.py and 1 more"
    assert "SMP v1       init, state, step" in lines
    assert "unknown      train.py:5 smp.nn.DistributedTransformr: did you mean" in lines
    assert "`smpkit compat" in done.stdout
    assert lines[-1] == "cannot run: 14 problems"


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/migrate-from-smp-v1.md").read_text()
    shown = page.partition("$ smpkit compat --check train.py\n")[2].partition("```")[0]
    lines = [""] * 41
    lines[:5] = [
        "import torch",
        "import smdistributed.modelparallel.torch as smp",
        "import data",
        "from apex.normalization import FusedLayerNorm",
        "import horovod.torch as hvd",
    ]
    lines[18] = "assert torch.cuda.is_available()"
    lines[20] = "smp.init, smp.rank, smp.step, smp.DistributedModel, smp.DistributedOptimizer"
    lines[40] = "smp.dp_rnk()"
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("\n".join(lines))
    Path("data.py").write_text("import os\nimport sys\nimport cv2\n")
    assert run_check("train.py").stdout == shown


def test_public_scripts_can_run() -> None:
    done = run_check("--json", *(str(path) for path in SCRIPTS.glob("*.py") if path.stem != "gone_packages"))
    found = json.loads(done.stdout)
    assert [each for each in found["findings"] if each["kind"] not in ("smp", "cuda")] == []
    assert (done.exit_code, found["can_run"]) == (0, True)
    assert {"smp.step", "smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2"} <= {
        each["name"] for each in found["findings"]
    }


def test_installed_packages_are_theirs_to_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    from smpkit.drop_in import check

    check._is_installed.cache_clear()
    script = tmp_path / "there" / "train.py"
    script.parent.mkdir()
    script.write_text("import apex.contrib\n")
    done = run_check("--json", str(script))
    check._is_installed.cache_clear()
    assert json.loads(done.stdout)["findings"] == []


@pytest.mark.parametrize(
    ("text", "arguments", "code", "message"),
    [
        ("print 'x'", ["--check", "train.py"], 1, "train.py:1 syntax: not valid Python 3"),
        ("", ["--check", "nothing.py"], 2, "`nothing.py` does not exist"),
        ("", ["--check", "empty"], 2, "`empty` holds no Python files"),
        ("", ["--json", "--", "true"], 2, "`--json` is for `--check`"),
        ("import os", ["--check", "train.py"], 0, "can run"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("train.py").write_text(text)
    done = CliRunner().invoke(cli, ["compat", *arguments])
    said = done.output + (str(done.exception) if done.exception else "")
    assert message in said
    assert getattr(done.exception, "exit_code", done.exit_code) == code


def test_torch_stays_out_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code = (
        "import sys; from pathlib import Path; from smpkit.drop_in.check import check;"
        " check([Path('train.py')]); print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def wrong_names() -> list[str]:
    """Return names that the sources say and the modules lack, and names in `__all__` that the sources do not say."""
    sys.path += [str(DROP_IN_PATH), str(SHIMS_PATH)]
    wrong = []
    for folder in (DROP_IN_PATH, SHIMS_PATH):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if parts[0] == "torch" or parts[-1] in ("contrib", "fp16_utils", "transformer"):
                continue
            module = importlib.import_module(".".join(parts))
            said = {name for name in names_of(file) if not name.startswith("_") and name != "annotations"}
            wrong += [f"{module.__name__}.{name}" for name in said if not hasattr(module, name)]
            wrong += [
                f"{module.__name__}.{name}?" for name in getattr(module, "__all__", ()) if name not in names_of(file)
            ]
    return wrong


def test_the_sources_say_what_the_modules_have() -> None:
    assert run_ranks(wrong_names, 1) == [[]]
