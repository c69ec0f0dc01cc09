"""Drafters: what proposes tokens for the target to verify.

`base.py` is the protocol. A new algorithm is one file, one line in `DRAFTERS` and one row in the
conformance test; `checkpoint.load_drafter` builds those that have weights.
"""

from __future__ import annotations

from emberline.drafters.base import Drafter
from emberline.drafters.dflash import DFlashDrafter
from emberline.drafters.dspark import DSparkDrafter
from emberline.drafters.eagle3 import Eagle3Drafter
from emberline.drafters.ngram import NGramDrafter
from emberline.drafters.standalone import StandaloneDrafter

__all__ = [
    "DRAFTERS",
    "DFlashDrafter",
    "DSparkDrafter",
    "Drafter",
    "Eagle3Drafter",
    "NGramDrafter",
    "StandaloneDrafter",
]

DRAFTERS: dict[str, type[Drafter]] = {
    "dspark": DSparkDrafter,
    "dflash": DFlashDrafter,
    "eagle3": Eagle3Drafter,
    "ngram": NGramDrafter,
    "standalone": StandaloneDrafter,
}
"""Algorithm name to class."""
