"""Models of other libraries train unmodified over a pipeline: a few by default, all but one with `-m slow`."""

from __future__ import annotations

from itertools import product

import pytest

from smpkit.testing.ranks import RankFailed
from tests.models_of_others import MISSING, MODELS_OF_OTHERS, VISION
from tests.pairwise import slow
from tests.train import Way, same

FEW = ("ALBERT", "DeBERTa-v2", "Gemma 2", "ResNet", "CLIP", "Whisper")
# Placed by dice: ResNet's changes in place then come out wrong unless all ranks are told of them.
SCATTERED = Way(pipeline=2, batches=(8, 8), placement=3)
DEALT = Way(pipeline=2, batches=(8, 8), placement=-1)
DECIDED = Way(pipeline=4, microbatches=2, batches=(8, 8), traced=True, config={"pipeline": "simple"})
REFUSED = {"timm HRNet": "`stage2` wrote into a dict, a list or a dataclass that it was given"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "way"), [*product(FEW, [SCATTERED]), *slow(product(MODELS_OF_OTHERS, [DEALT, DECIDED]))], ids=str
)
def test_a_model_trains_as_in_one_process(name: str, way: Way) -> None:
    if name in VISION and MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    if name in REFUSED:
        with pytest.raises(RankFailed, match=REFUSED[name]):
            same(MODELS_OF_OTHERS[name], way)
        return
    same(MODELS_OF_OTHERS[name], way)
