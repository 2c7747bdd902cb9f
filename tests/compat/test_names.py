"""Every name by which public scripts reach into SMP v1 is there (reference: its specification), and does its work."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smpkit.torch as smp
from smpkit.drop_in import DROP_IN_PATH
from smpkit.torch.compat.utils import dump_model, verify
from tests.compat.signatures import SIGNATURES
from tests.ranks import run_ranks
from tests.torch.steps import on_ranks

# Names that are no calls; calls are in `signatures.py`.
PACKAGE = """
    CommGroup RankType StepOutput shutdown state amp nn optimizers patches exceptions utils state_mod model
""".split()  # noqa: SIM905
MODEL = ["forward", "partitioned", "module", "parameters", "named_parameters", "modules"]
OPTIMIZER = ["param_groups", "state", "optimizer", "redefined_params", "_global_grad_norm"]
OPTIMIZER_IN_FP16 = ["overflow", "loss_scale", "loss_scaler", "fp16_groups", "fp32_from_fp16_groups"]
STATE = ["cfg", "model", "optimizer", "module_manager", "param_index_to_name_tp_group", "param_name_to_index_tp_group"]


def documented() -> Iterator[tuple[str, inspect.Signature]]:
    """Yield the names of SIGNATURES, and what is documented of each."""
    for call in re.findall(r"^([\w.]+)(\(.*?\))$", SIGNATURES, re.M | re.S):
        scope: dict[str, Any] = {}
        exec(f"def documented{call[1]}: ...", scope)
        yield call[0], inspect.signature(scope["documented"])


def contradictions(name: str, wanted: inspect.Signature, found: inspect.Signature) -> Iterator[str]:
    """Yield in what the documented call is not taken as it is meant."""
    ours = found.parameters
    takes_any = any(each.kind == each.VAR_KEYWORD for each in ours.values())
    in_order = [each for each in ours.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    in_order_wanted = [each for each in wanted.parameters.values() if each.kind == each.POSITIONAL_OR_KEYWORD]
    if not any(each.kind == each.VAR_POSITIONAL and each.name not in wanted.parameters for each in ours.values()):
        for place, each in enumerate(in_order_wanted):
            # What is always needed is given by its place. What has a default is given by its name, too.
            by_place = each.default is each.empty
            if place >= len(in_order) or not (by_place or in_order[place].name == each.name):
                yield f"{name}: `{each.name}` is not at place {place}"
    for each in wanted.parameters.values():
        if each.default is each.empty:
            continue
        if each.name not in ours and not takes_any:
            yield f"{name}: there is no `{each.name}`"
        elif each.default is not ... and each.name in ours and ours[each.name].default != each.default:
            yield f"{name}: the default of `{each.name}` is {ours[each.name].default!r}, not {each.default!r}"
    for each in ours.values():
        needed = each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if needed and (each not in in_order or in_order.index(each) >= len(in_order_wanted)):
            yield f"{name}: needs `{each.name}`"


def missing_and_refused() -> list[str]:
    """Return the names that are not there, and the calls that are not taken."""
    sys.path.append(str(DROP_IN_PATH))
    import smdistributed.modelparallel.torch as v1
    from smdistributed.modelparallel.test.torch.utils import dump_model, verify

    assert callable(dump_model)
    assert callable(verify)
    v1.init({"fp16": True})
    model = v1.DistributedModel(nn.Linear(2, 2))
    optimizer = v1.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    names = [(v1, PACKAGE), (model, MODEL), (optimizer, [*OPTIMIZER, *OPTIMIZER_IN_FP16]), (v1.state, STATE)]
    found = [name for owner, of_owner in names for name in of_owner if not hasattr(owner, name)]
    instances = {
        "DistributedModel": model,
        "DistributedOptimizer": optimizer,
        "StepOutput": v1.StepOutput([torch.ones(1)]),
    }
    for name, wanted in documented():
        first, _, rest = name.partition(".")
        owner = instances[first] if rest and first in instances else getattr(v1, first)
        try:
            called = functools.reduce(getattr, rest.split(".") if rest else [], owner)
        except AttributeError as error:
            found.append(f"{name}: {error}")
        else:
            found += contradictions(name, wanted, inspect.signature(called))
    return found


def test_every_name_of_the_specification_is_there_and_every_call_is_taken() -> None:
    assert len(list(documented())) > 120
    assert run_ranks(missing_and_refused, 1) == [[]]


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x).pow(4).mean()
    model.backward(loss)
    return loss


@on_ranks(4)
def test_names_and_numbers_of_parameters(tmp_path: Path) -> None:
    """See what helpers for state dicts ask for, and what `verify` says of a model after a step."""
    options = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True, "auto_partition": False}
    smp.init(options | {"default_partition": 0, "prescaled_batch": True})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        inner = nn.Linear(4, 4)
    outer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model: Any = smp.DistributedModel(nn.Sequential(OrderedDict(inner=inner, outer=outer)))
    smp.set_partition(model.module.outer, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    train_step(model, torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    dump_model(model, tmp_path / "dump")
    verify(model, tmp_path / "dump")
    optimizer.step()
    with pytest.raises(AssertionError, match="Tensor-likes are not close!"):
        verify(model, tmp_path / "dump")
    names = ["inner.weight", "inner.bias", "outer.0.weight", "outer.0.bias", "outer.1.weight", "outer.1.bias"]
    assert smp.state.param_index_to_name_tp_group == [dict(enumerate(names))] * 2
    assert smp.state.param_name_to_index_tp_group == [{name: number for number, name in enumerate(names)}] * 2
    assert list(optimizer._param_id_to_index().values()) == list(range(6))
    here = [name for name in names if name.startswith("inner") == (smp.pp_rank() == 0)]
    numbers = optimizer.param_name_to_index()
    assert sorted(optimizer._param_index_to_param_local()) == sorted(numbers[name] for name in here)
