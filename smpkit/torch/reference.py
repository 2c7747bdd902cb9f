"""Write the reference of the Python API from its docstrings: `python -m smpkit.torch.reference [--check] [FILE]`."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from smpkit.config._page import write_or_check

__all__ = ["DEFAULT_PATH", "main", "reference"]

DEFAULT_PATH = Path("docs/reference/python.md")

_INTRODUCTION = """\
<!-- Written by `python -m smpkit.torch.reference`. Change the docstrings instead of this file. -->

# Python

What is listed here is public. `smp` is `import smpkit.torch as smp`; under `smpkit run` and `smpkit compat` the same
names are those of `smdistributed.modelparallel.torch`.
"""

_PAGES: Final = {
    "smpkit.torch": "smp",
    "smpkit.torch.nn": "smp.nn",
    "smpkit.torch.amp": "smp.amp",
    "smpkit.torch.optimizers": "smp.optimizers",
    "smpkit.torch.offload": "smpkit.torch.offload",
    "smpkit": "smpkit",
    "smpkit.errors": "smpkit.errors",
    "smpkit.testing": "smpkit.testing",
    "smpkit.testing.simulated_device": "smpkit.testing.simulated_device",
}
"""Modules whose `__all__` is the reference, and how they are called here."""

_METHODS: Final = {
    "DistributedModel": """backward get_module state_dict local_state_dict original_state_dict load_state_dict
        named_parameters local_parameters local_named_parameters local_modules local_named_modules named_buffers
        local_buffers local_named_buffers distributed_modules is_distributed_parameter is_distributed_buffer
        is_scaled_batch_parameter is_scaled_batch_buffer virtual_named_parameters default_reducer_named_parameters
        scaled_batch_reducer_named_parameters register_post_partition_hook register_post_step_hook register_comm_hook
        join""",
    "DistributedOptimizer": """step zero_grad state_dict local_state_dict orig_state_dict load_state_dict
        clip_master_grads step_was_skipped overflow loss_scale fp16_groups fp32_from_fp16_groups init_master_params
        reload_model_params add_param_group""",
    "StepOutput": "reduce_mean reduce_sum concat stack detach",
    "DistributedModule": "load_whole",
    "FlashAttentionLayer": "forward attend",
    "GradScaler": "unscale_ step",
    "activations": "report close",
    "OffloadModel": "forward synchronize named_parameters zero_grad traffic device_buffer_bytes",
    "OffloadOptimizer": "step synchronize zero_grad state_dict load_state_dict add_param_group",
    "Estimator": """fit attach stop logs describe resume plan model_data latest_checkpoint latest_training_job""",
    "FakeClock": "now sleep advance",
    "FakeSageMaker": "jobs now client",
    "FakeJob": "name history status",
    "Faults": "add raises",
}
"""What users call; other methods are there for smpkit's own parts."""

_FIELDS: Final = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples):$")
_WIDTH: Final = 100


def reference() -> str:
    """Return the page."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    for name, called in _PAGES.items():
        module = importlib.import_module(name)
        yield f"## `{called}`\n"
        for public in sorted(module.__all__, key=str.lower):
            thing = getattr(module, public)
            if not (isinstance(thing, enum.Enum) or inspect.ismodule(thing) or isinstance(thing, str)):
                yield from _entry(f"{called}.{public}", thing)


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        yield f"Members: {', '.join(f'`{member}`' for member in thing.__members__)}.\n"
    elif callable(thing) and not (isinstance(thing, type) and (issubclass(thing, BaseException) or _has_fields(thing))):
        yield f"```text\n{_signature(name, thing)}\n```\n"
    yield f"{_prose(inspect.getdoc(thing) or '')}\n"
    if isinstance(thing, type) and not issubclass(thing, enum.Enum | BaseException):
        for method in _METHODS.get(thing.__name__, "").split():
            function = inspect.getattr_static(thing, method)
            yield f"#### `{thing.__name__}.{method}`\n"
            if not isinstance(function, property):
                yield f"```text\n{_signature(method, getattr(thing, method))}\n```\n"
            yield f"{_prose(_own_docstring(thing, method))}\n"


def _has_fields(kind: type) -> bool:
    """Return whether the configuration's page lists what a class takes."""
    return hasattr(kind, "model_fields")


def _own_docstring(kind: type, method: str) -> str:
    """Return what smpkit says of a method; torch's words on those that it inherits change with its version."""
    for base in kind.__mro__:
        if base.__module__.startswith("smpkit") and (found := vars(base).get(method)) is not None:
            return inspect.cleandoc(getattr(found, "__doc__", None) or "")
    return ""


class _Verbatim:
    """Something that a signature shows as it is written in the source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, function: Any) -> str:
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return name
    parameters = [_parameter(each) for each in found.parameters.values() if each.name != "self"]
    returned = found.return_annotation
    plain = found.replace(
        parameters=parameters,
        return_annotation=_Verbatim(returned) if isinstance(returned, str) and returned != "None" else found.empty,
    )
    line = f"{name}{plain}"
    if len(line) <= _WIDTH:
        return line
    arguments, _, end = str(plain).rpartition(")")
    return "\n".join([f"{name}(", *(f"    {each}," for each in _split(arguments[1:])), f"){end}"])


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation, default = parameter.annotation, parameter.default
    if isinstance(annotation, str):
        annotation = _Verbatim(annotation)
    if isinstance(default, enum.Enum):
        default = _Verbatim(f"smp.{default.name}")
    elif default is not parameter.empty and (
        callable(default) or inspect.ismodule(default) or " at 0x" in repr(default)
    ):
        default = _Verbatim(getattr(default, "__name__", "..."))
    return parameter.replace(annotation=annotation, default=default)


def _split(arguments: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for character in arguments:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _prose(docstring: str) -> str:
    """Return a docstring as Markdown: its sections become lists, and indented blocks code."""
    lines: list[str] = []
    section = code = False
    for line in docstring.splitlines():
        indented = line.startswith("    ")
        if code and line.strip() and not indented:
            code = False
            while not lines[-1]:
                lines.pop()
            lines += ["```", ""]
        if match := _FIELDS.match(line):
            section = match[1] not in ("Example", "Examples")
            lines += [f"**{match[1]}**", ""]
        elif not line.strip():
            section = section and not line
            lines.append("")
        elif section and indented:
            lines.append(f"  {line.strip()}" if line.startswith("     ") else f"- {line.strip()}")
        elif indented and not code:
            code = True
            lines += ["```text", line[4:]]
        elif line.strip() != "::":
            if code:
                lines.append(line[4:])
            elif line.endswith("::"):
                lines.append(line.removesuffix(":"))
            else:
                lines.append(line)
    if code:
        lines.append("```")
    return "\n".join(lines).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or with `--check` only say whether it is up to date."""
    return write_or_check(arguments, "smpkit.torch.reference", DEFAULT_PATH, reference)


if __name__ == "__main__":
    sys.exit(main())
