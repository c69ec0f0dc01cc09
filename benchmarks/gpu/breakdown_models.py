"""The engine that `gpu.breakdown` looks at: of a model's files, or random of a shape.

Owns what a step of each has to read. Must not know clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from emberline.config import EngineConfig, SpeculationConfig
from emberline.drafters.dialects import read_checkpoint
from emberline.engine.build import model_depth
from emberline.engine.engine import Engine
from emberline.hub import load_tokenizer, resolve_draft, resolve_model
from emberline.llm import LLM
from emberline.models.weights import load_folder

from gpu import synthetic
from gpu.breakdown import Needs
from gpu.random_models import SHAPES
from gpu.workload import random_prompts, read_prompts, settings

LOOKED_UP = ("markov_head.markov_w1.weight", "embed_tokens.weight")
"""Tables of a draft of which a step reads rows."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RANDOM_PROMPTS, RANDOM_LENGTH = 64, 64

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine, and what it takes to judge it."""

    engine: Engine
    needs: Needs
    num_layers: int  # of the target
    texts: tuple[tuple[int, ...], ...]

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        """The first so many, over and over."""
        return [self.texts[index % len(self.texts)] for index in range(count)]


def numbers(target: Shapes, draft: Shapes) -> tuple[int, int]:
    """Weights that a target's step reads, and those of a block: its own, and the target's head."""
    sizes = {name: math.prod(shape) for name, shape in target.items()}
    head = sizes.get(HEAD, sizes[EMBEDDING])
    total = sum(sizes.values()) - (sizes[EMBEDDING] if HEAD in sizes else 0)
    own = sum(math.prod(shape) for name, shape in draft.items() if name not in LOOKED_UP)
    return total, own + (head if HEAD not in draft else 0) if draft else 0


def random_subject(
    name: str, device: str, dtype: str, planner: str, most: int, tokens: int
) -> Subject:
    """Random weights of a shape: prompts of random ids, acceptance by the script."""
    shape = SHAPES[name]
    engine = synthetic.load(shape, device, dtype, most, RANDOM_LENGTH + tokens, planner)
    needs = Needs.of(engine, *numbers(shape.target_shapes(), shape.draft_shapes()))
    prompts = random_prompts(RANDOM_PROMPTS, RANDOM_LENGTH, shape.vocab)
    return Subject(engine, needs, shape.layers, tuple(prompts))


def subject(
    model: str | None,
    draft: str | None,
    device: str,
    dtype: str,
    planner: str,
    most: int,
    tokens: int,
) -> Subject:
    """A model and its draft, the project's own prompts.

    Args:
        model: as in `LLM`.
        draft: as in `LLM`.
        device: torch device.
        dtype: as in `EngineConfig`.
        planner: as in `SpeculationConfig`.
        most: requests at once.
        tokens: that each gets.
    """
    folder = resolve_model(model)
    draft_folder = resolve_draft(draft, folder)
    depth = model_depth(folder.path)
    texts = read_prompts(None, load_tokenizer(folder.path))
    longest = max(len(ids) for ids in texts)
    base = EngineConfig(speculation=SpeculationConfig(planner=planner))  # type: ignore[arg-type]
    engine = LLM(model, draft, settings(device, dtype, most, longest + tokens, base)).engine
    weights = load_folder(folder.path)
    target_shapes = {name: tuple(weights.take(name).shape) for name in weights.names()}
    draft_shapes: Shapes = {}
    if draft_folder is not None:
        draft_shapes = read_checkpoint(draft_folder, None, depth).shapes
    needs = Needs.of(engine, *numbers(target_shapes, draft_shapes))
    return Subject(engine, needs, depth or 1, tuple(texts))
