"""A transformer's facts without a model: an embedding, equal layers, a head."""

from __future__ import annotations

from smpkit.plan.memory import ModelFacts, TensorFacts, UnitFacts
from smpkit.plan.partition.assignment import UnitCost

MIB = 2**20


def gpt(num_layers: int = 12, degree: int = 1, mib: int = 64) -> ModelFacts:
    """Return the facts of the first of `degree` tensor-parallel ranks, for a microbatch of one sample.

    Args:
        mib: parameters of a layer, in MiB of float32.
    """
    size = mib * MIB // degree
    tensors, units, blocks = {}, [], []

    def add(name: str, num_bytes: int, activation_bytes: int, flops: float) -> None:
        tensors[name] = TensorFacts(
            name, "float32", num_bytes // 4, num_bytes, True, rows=256, pieces=(num_bytes,) * degree * (degree > 1)
        )
        cost = UnitCost(name, num_bytes, activation_bytes, flops / degree, output_bytes=4 * MIB)
        units.append(UnitFacts(cost, (name,)))

    add("embed", size, MIB, 0.0)
    for layer in range(num_layers):
        add(f"layers.{layer}", size, 40 * MIB // degree, 1e12)
        blocks.append((f"layers.{layer}",))
    add("head", size, 8 * MIB, 1e12)
    return ModelFacts("Gpt", tuple(units), tensors, (), True, blocks=tuple(blocks), samples=1, tokens=128)
