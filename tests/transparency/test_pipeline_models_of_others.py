"""Models of other libraries train unmodified over a pipeline: a few by default, all with `-m slow`."""

from __future__ import annotations

import pytest

from tests.models_of_others import MISSING, MODELS_OF_OTHERS, VISION
from tests.train import Way, same

FEW = ("ALBERT", "DeBERTa-v2", "Gemma 2", "ResNet", "CLIP", "Whisper")
# Placed by dice: ResNet's changes in place then come out wrong unless all ranks are told of them.
SCATTERED = Way(pipeline=2, batches=(8, 8), placement=3)
DEALT = Way(pipeline=2, batches=(8, 8), placement=-1)
DECIDED = Way(pipeline=4, microbatches=2, batches=(8, 8), traced=True, config={"pipeline": "simple"})
INSTALLED = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.mark.parametrize("name", FEW)
def test_a_model_trains_as_in_one_process(name: str) -> None:
    same(MODELS_OF_OTHERS[name], SCATTERED)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", [DEALT, DECIDED], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=INSTALLED if name in VISION else ()) for name in MODELS_OF_OTHERS]
)
def test_every_model_trains_as_in_one_process(name: str, way: Way) -> None:
    same(MODELS_OF_OTHERS[name], way)
