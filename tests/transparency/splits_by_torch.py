"""How many of the models that smpkit trains torch's own pipelining splits in two, unmodified, with the same output.

    python -m tests.transparency.splits_by_torch [NAME ...]     prints one line for each model, and the numbers

`torch.distributed.pipelining.pipeline` exports the model and cuts the graph where a unit of ours begins: the one in
the middle first, then those around it. One that works is enough. Where none does, a Hugging Face model is tried again
without the cache that it returns, which torch cannot export.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils import _pytree as pytree

from smpkit.torch.placement.units import units_of
from tests.models import CASES, HUGGING_FACE, Case
from tests.models_of_others import MISSING, TIMM, TORCHVISION, TRANSFORMERS, import_torchvision
from tests.train import Plain, batch, build

OF_TRANSFORMERS = {**HUGGING_FACE, **TRANSFORMERS}
CASE_OF = {**CASES, **OF_TRANSFORMERS, **TORCHVISION, **TIMM}
MOST_PLACES = 3


def arguments_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the step calls the model with."""
    module, calls = build(case), list[Any]()
    module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    case.step(Plain(module, 1), *batch(case, 0, 2))
    args, kwargs = calls[0]
    return args, kwargs


def places(module: nn.Module) -> Iterator[str]:
    """Yield the names of a few units, the middle one first."""
    names = [unit.name for unit in units_of(module)]
    middle = len(names) // 2
    yield from sorted(names[1:], key=lambda name: abs(names.index(name) - middle))[:MOST_PLACES]


def output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    leaves = pytree.tree_leaves(module(*args, **kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def outcome(case: Case, **changes: Any) -> str:
    """Return `equal`, `differs`, or the error of the first place."""
    found: list[str] = []
    args, kwargs = arguments_of(case)
    for place in places(build(case)):
        plain, module = build(case), build(case)
        for each in (plain, module) if changes else ():
            vars(each.config).update(changes)
        try:
            split = pipeline(module, args, kwargs, split_spec={place: SplitPoint.BEGINNING})
            ours, theirs = output(plain, args, kwargs), output(split, args, kwargs)
            same = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
            found.append("equal" if split.num_stages == 2 and same else "differs")
        except Exception as error:
            found.append(type(error).__name__)
        if found[-1] == "equal":
            return "equal"
    return found[0] if found else "one unit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(CASE_OF))
    warnings.simplefilter("ignore")  # of the libraries
    if "torchvision" not in MISSING:
        import_torchvision()  # before transformers does
    outcomes = Counter[str]()
    for name in parser.parse_args().names:
        found = outcome(CASE_OF[name])
        if found != "equal" and name in OF_TRANSFORMERS and outcome(CASE_OF[name], use_cache=False) == "equal":
            found = "equal without a cache"
        outcomes[found] += 1
        print(f"{name}: {found}", flush=True)  # noqa: T201 - a command
    print(f"{outcomes.total()} models:", dict(outcomes.most_common()))  # noqa: T201 - a command


if __name__ == "__main__":
    main()
