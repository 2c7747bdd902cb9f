"""Stand-ins for packages and names that public scripts import and that are gone, unless the real ones are there."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from smpkit.drop_in import STARTUP_PATH, after_import, removed_names
from smpkit.errors import UnsupportedError
from tests.compat.commands import python_path, run_compat
from tests.torch.steps import on_ranks


def check_amp_c() -> None:
    amp_c: Any = importlib.import_module("amp_C")
    apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    grads = [torch.tensor([3.0, 4.0]).half(), torch.tensor([12.0])]
    masters = [torch.zeros(2), torch.zeros(1)]
    overflow = torch.zeros(1, dtype=torch.int)
    apply(amp_c.multi_tensor_scale, overflow, [grads, masters], 0.5)
    assert [master.tolist() for master in masters] == [[1.5, 2.0], [6.0]]
    total, parts = apply(amp_c.multi_tensor_l2norm, overflow, [grads], True)
    assert (total.tolist(), parts.tolist(), total.dtype) == ([13.0], [5.0, 12.0], torch.float32)
    assert [value.tolist() for value in apply(amp_c.multi_tensor_l2norm, overflow, [[]])] == [[0.0], []]
    assert overflow.item() == 0
    apply(amp_c.multi_tensor_scale, overflow, [[torch.tensor([torch.inf])], [masters[1]]], 1.0)
    assert overflow.item() == 1


def check_apex_c() -> None:
    apex_c = importlib.import_module("apex_C")
    tensors = [torch.ones(2, 2), torch.zeros(3)]
    flat = apex_c.flatten(tensors)
    first, second = apex_c.unflatten(flat, tensors)
    flat.fill_(2.0)  # of views, as all-reduces of the flat tensor need them
    assert (first.tolist(), second.tolist()) == ([[2.0, 2.0], [2.0, 2.0]], [2.0, 2.0, 2.0])


def check_refused_names() -> None:
    """D5 and D6: names import, serve as classes and decorators, and say at the call what to use instead."""
    names: dict[str, Any] = {}
    exec("from apex.fp16_utils import *\nfrom apex.amp import _amp_state\nfrom apex import amp, optimizers", names)
    exec("from apex.parallel import DistributedDataParallel", names)
    exec("from apex.parallel.distributed import flat_dist_call", names)
    amp = names["amp"]
    for name, call in {
        "apex.fp16_utils.FP16_Optimizer": names["FP16_Optimizer"],
        "apex.amp.initialize": amp.initialize,
        "apex.amp.scale_loss": amp.scale_loss,
        "apex.parallel.DistributedDataParallel": names["DistributedDataParallel"],
        "apex.parallel.distributed.flat_dist_call": names["flat_dist_call"],
        "apex.optimizers.FusedAdam": names["optimizers"].FusedAdam,
    }.items():
        with pytest.raises(UnsupportedError, match=f"`{name}` is not here"):
            call([], opt_level="O1")
    assert not isinstance(1, names["DistributedDataParallel"])
    assert amp.float_function(abs) is abs
    amp.register_half_function(torch, "bmm")
    model = torch.nn.Linear(1, 1)
    assert list(amp.master_params(torch.optim.SGD(model.parameters(), 0.1))) == list(model.parameters())
    with pytest.raises(ImportError):  # else transformers would build its models of it
        importlib.import_module("apex.normalization")


def check_flash_attention() -> None:
    log = logging.getLogger("smpkit")
    with mock.patch.object(log, "warning") as warning:
        assert importlib.util.find_spec("flash_attn") is not None  # as transformers looks, which then asks its version
        assert importlib.import_module("flash_attn").__version__ < "2"
        warning.assert_not_called()
        importlib.import_module("flash_attn.flash_attention")
        warning.assert_called_once()
    attention = importlib.import_module("flash_attn.flash_attention").FlashAttention(attention_dropout=0.5).eval()
    qkv = torch.randn(2, 5, 3, 4, 8, dtype=torch.float64)
    for causal in (False, True):
        scores = torch.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]) / 8**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), qkv[:, :, 2])
        torch.testing.assert_close(attention(qkv, causal=causal)[0], expected)
    with pytest.raises(UnsupportedError, match="takes no `key_padding_mask`"):
        attention(qkv, torch.ones(2, 5, dtype=torch.bool))


def check_six() -> None:
    six = importlib.import_module("torch._six")
    assert six.PY3
    assert six.inf == float("inf")
    assert isinstance("a", six.string_classes)
    assert isinstance([], six.container_abcs.Sequence)


@pytest.mark.parametrize(
    "check",
    [check_amp_c, check_apex_c, check_refused_names, check_flash_attention, check_six],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
@on_ranks(1)
def test_a_stand_in_does_what_scripts_ask_of_it(check: Callable[[], None]) -> None:
    after_import.install()
    check()


def test_names_are_added_to_modules_that_lack_them(tmp_path: Path) -> None:
    """Real packages win, and D10: `torch._six` is there without an import of it."""
    for package in ("apex", "amp_C", "evaluate"):
        (tmp_path / f"{package}.py").write_text(f"real = {package!r}\ndef load(*arguments): return arguments\n")
    (tmp_path / "datasets.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.hidden_one_ran = True\n")
    for package, source in {
        "torch": "",
        "transformers": "def is_torch_tpu_available(): return 'real'",
        "transformers.utils": "def is_torch_xla_available(check_is_tpu): return check_is_tpu",
    }.items():
        folder = tmp_path / package.replace(".", "/")
        folder.mkdir()
        (folder / "__init__.py").write_text(source)
    code = (
        "import sys, apex, amp_C, datasets, transformers.utils, torch, importlib.util\n"
        "assert (apex.real, amp_C.real, torch._six.PY3) == ('apex', 'amp_C', True)\n"
        "assert transformers.is_torch_tpu_available() == 'real'\n"
        "assert transformers.utils.is_torch_tpu_available() is True\n"
        "assert datasets.load_metric('rouge', None, 1) == ('rouge', None, 1)\n"
        "assert importlib.util.find_spec('flash_attn.flash_attention').origin.startswith(sys.argv[1])\n"
        "assert hidden_one_ran\n"
    )
    shims = str(Path(after_import.__file__).parent)
    said = run_compat(sys.executable, "-c", code, shims, env={"PYTHONPATH": python_path(tmp_path)})
    assert "`apex` is not installed" not in said


def test_load_metric_names_the_package_that_has_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(UnsupportedError, match=r"load_metric\('glue'\) is gone") as caught:
        removed_names.load_metric("glue", "mrpc")
    assert caught.value.hint == "pip install evaluate"


def test_an_interpreter_without_smpkit_starts_as_ever(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(STARTUP_PATH)!r}); sys.modules['smpkit'] = None; import sitecustomize"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=tmp_path)
