"""Which module a draft's shape asks for."""

from __future__ import annotations

from emberline.train.backbone import DraftModel
from emberline.train.config import DraftConfig
from emberline.train.eagle3 import Eagle3Model

Model = DraftModel | Eagle3Model


def build_model(draft: DraftConfig) -> Model:
    """An untrained draft."""
    return Eagle3Model(draft) if draft.algorithm == "eagle3" else DraftModel(draft)
