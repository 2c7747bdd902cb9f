"""Writes partial checkpoints as smpkit did in format 2. Frozen: it shares no code with what writes them today.

Tensors lie in files of `torch.save`, in nested dicts; `pieces.json` names the keys. A job whose replicas hold different
parts of a tensor (`sharded_data_parallel_degree`) has a file for each.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["write_format_2"]


def write_format_2(
    path: Path,
    tag: str,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Any],
    *,
    masters: Mapping[str, Tensor] | None = None,
    user_content: Any = None,
    parts: int = 1,
) -> Path:
    """Write the checkpoint `{tag}_partial`, and its name in `newest`; return its folder.

    Args:
        weights: of the model, in the order of the optimizer's numbers.
        optimizer: torch's state dict of an optimizer, with a state for each weight.
        masters: float32 weights by name, if the model's are in half precision.
        parts: over how many ranks tensors are divided by rows.
    """
    folder = path / f"{tag}_partial"
    folder.mkdir(parents=True)
    pieces: dict[str, Any] = {"optim.param_groups": {"pieces": [[_name("optimizer", 0, parts), ["param_groups"]]]}}
    for part in range(parts):
        model: dict[str, Any] = {}
        states: dict[Any, Any] = {"param_groups": optimizer["param_groups"]} if part == 0 else {}
        halves: dict[str, Any] = {"loss_scaler": {"loss_scale": 1.0}, "masters": {}}
        for index, (name, weight) in enumerate(weights.items()):
            file = _name("model", part, parts)
            model[name] = _take(pieces, f"model.{name}", weight, file, [name], (part, parts))
            for key, value in optimizer["state"][index].items():
                file, full = _name("optimizer", part, parts), f"optim.state.{name}.{key}"
                if value.dim() == 0 and part > 0:
                    continue
                kept = states.setdefault("state", {}).setdefault(index, {})
                kept[key] = _take(pieces, full, value, file, ["state", index, key], (part, parts))
            if masters is not None:
                file, full = _name("fp16_states", part, parts), f"optim.state.{name}.master"
                halves["masters"][index] = _take(pieces, full, masters[name], file, ["masters", index], (part, parts))
        written = {"model": model, "optimizer": states, **({} if masters is None else {"fp16_states": halves})}
        for kind, each in written.items():
            torch.save({**each, "_smp_is_partial": True}, folder / _name(kind, part, parts))
    if masters is not None:
        pieces["optim.loss_scaler"] = {"pieces": [[_name("fp16_states", 0, parts), ["loss_scaler"]]]}
    if user_content is not None:
        torch.save(user_content, folder / "user_content.pt")
    text = json.dumps(pieces).encode()
    (folder / "pieces.json").write_bytes(text)
    content = {
        "tag": tag,
        "save_id": "0123456789abcdef",
        "order": 1,
        "degrees": {"pipeline": 1, "tensor": 1, "virtual pipeline": 1},
        "smpkit": "0.1.0",
        "files": {each.name: each.stat().st_size for each in sorted(folder.iterdir())},
        "elsewhere": {},
        "format": 2,
        "random": {"seed": 0, "step": 1},
        "partition": None,
        "checksums": {"pieces.json": zlib.crc32(text)},
    }
    own = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (folder / "index.json").write_text(json.dumps({**content, "crc32": own}, indent=1))
    (path / "newest").write_text(f"{folder.name}\n")
    return folder


def _name(kind: str, part: int, parts: int) -> str:
    return f"{kind}_0_0.pt" if parts == 1 else f"{kind}_0_0_{part}.pt"


def _take(
    pieces: dict[str, Any], name: str, whole: Tensor, file: str, key: list[str | int], place: tuple[int, int]
) -> Tensor:
    """Return the rows of one rank, and note in `pieces` where they are."""
    part, parts = place
    rows = whole.tensor_split(parts)[part].clone() if whole.dim() else whole
    before = sum(each.shape[0] for each in whole.tensor_split(parts)[:part]) if whole.dim() else 0
    zeros = [0] * whole.dim()
    spec = pieces.setdefault(
        name, {"dtype": str(whole.dtype).removeprefix("torch."), "shape": list(whole.shape), "pieces": []}
    )
    spec["pieces"].append([file, key, [before, *zeros[1:]] if whole.dim() else [], list(rows.shape), zeros])
    return rows
