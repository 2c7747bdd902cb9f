"""Models of other libraries train unmodified over a pipeline: a few by default, all with `-m slow`."""

from __future__ import annotations

import pytest

from tests.models_of_others import MODELS_OF_OTHERS, VISION
from tests.train import Way, same
from tests.vision_libraries import MISSING

FEW = ("ALBERT", "DeBERTa-v2", "Gemma 2", "ResNet", "CLIP", "Whisper")
DEALT = Way(pipeline=2, batches=(8, 8), placement=-1)
WAYS = (
    DEALT,
    Way(pipeline=2, microbatches=1, batches=(8, 4), traced=True, config={"pipeline": "simple"}),
    Way(pipeline=4, microbatches=2, batches=(8, 8), placement=-1),
    Way(pipeline=4, microbatches=2, batches=(8, 8), config={"pipeline": "simple"}),
)
SLOW = pytest.mark.slow, pytest.mark.timeout(400)
INSTALLED = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
ROWS = [
    pytest.param(
        name,
        way,
        id=f"{name}, {way}",
        marks=() if name in FEW and way is DEALT else (*SLOW, INSTALLED) if name in VISION else SLOW,
    )
    for name in MODELS_OF_OTHERS
    for way in WAYS
]


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_a_model_trains_as_in_one_process(name: str, way: Way) -> None:
    same(MODELS_OF_OTHERS[name], way)
