"""Training rows from a target through the engine: rounds of dialogues, then a selection.

    OUT/synthesis.json             settings, and the counts once all is done
    OUT/sampled/round_000.safetensors, ...   every dialogue as it was sampled
    OUT/train_000.safetensors, ..., OUT/held_out_000.safetensors, ...   the rows

A round is sampled from an empty prefix cache and written whole, so that an interrupted synthesis
that goes on makes what an uninterrupted one makes. Rows follow from the rounds alone: other bounds
or another split need no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from emberline.engine.engine import Engine
from emberline.train.config import SynthesisConfig
from emberline.train.dataset import Role
from emberline.train.dialogues import Dialogue, Limits, converse
from emberline.train.question_split import prompt_digest
from emberline.train.sampled_with import check_sampling, write_sampling
from emberline.train.selection import Counts, Sampled, Selection, pad, select
from emberline.train.starts import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_ROWS = 4096
PLAIN_PROMPT = 64  # first tokens of a plain row, by which it is told from others

Advance = Callable[[int, int, int], None]
"""Told how many dialogues are done, how many there are, and the tokens written in this run."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that rows follow from."""

    model: str  # the target's name
    source: Source
    config: SynthesisConfig
    max_answer: int  # tokens after which an answer is cut, and its dialogue ends
    selection: Selection

    def __post_init__(self) -> None:
        if self.max_answer < self.selection.min_answer:
            raise ValueError(
                f"max_answer {self.max_answer} is under min_answer {self.selection.min_answer}"
            )

    def sampling(self) -> dict[str, Any]:
        """What the dialogues follow from; the selection takes from them."""
        config = asdict(self.config)
        del config["rounds"]  # the source's to say: those of a file follow from its prompts
        return {
            "sampler": "engine",
            "model": self.model,
            **config,
            "max_answer": self.max_answer,
            **self.source.describe(),
        }


def regenerate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    job: Job,
    advance: Advance,
) -> Counts:
    """Sample what is missing, select, and write the rows.

    Raises:
        ValueError: the folder holds rows of other settings or of none known, or no dialogue is
            left to train on.
        ModelError: the engine broke off a request.
    """
    rounds = folder / "sampled"
    check_folder(folder, job)
    rounds.mkdir(parents=True, exist_ok=True)
    _write_settings(folder, job, None)  # from here on the rows are not whole
    for split in ("train", "held_out"):
        for old in folder.glob(f"{split}_*.safetensors"):
            old.unlink()
    sampled: list[Sampled] = []
    num_tokens = 0
    for index in range(job.source.num_rounds):
        path = rounds / f"round_{index:03d}.safetensors"
        if not path.exists():
            before = len(sampled)

            def tell(done: int, tokens: int, before: int = before, first: int = num_tokens) -> None:
                advance(before + done, job.source.num_starts, first + tokens)

            found = _sample(engine, tokenizer, job, index, tell)
            num_tokens += sum(role != Role.FORCED for one in found for role in one.dialogue.roles)
            _save_round(path, found)
        sampled += _load_round(path)
        advance(len(sampled), job.source.num_starts, num_tokens)
    try:
        train, held_out, counts = select(sampled, job.selection, job.config.seed)
    except ValueError as problem:
        _write_settings(folder, job, None, str(problem))  # the same again would end here again
        raise
    for split, dialogues in (("held_out", held_out), ("train", train)):
        for number, part in enumerate(_shards(dialogues)):
            path = folder / f"{split}_{number:03d}.safetensors"
            pad(part, job.config.seq_len).save(path)
    _write_settings(folder, job, counts)
    return counts


def _sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
    index: int,
    tell: Callable[[int, int], None],
) -> list[Sampled]:
    config = job.config
    limits = Limits(
        config.seq_len, job.max_answer, config.user_limit, config.user_temperature, config.seed
    )
    pairs = job.source.starts(index)
    starts = [start for start, _ in pairs]
    dialogues = converse(engine, starts, job.source.script, limits, tell)
    return [
        Sampled(_digest(tokenizer, one) if digest is None else digest, one)
        for (_, digest), one in zip(pairs, dialogues, strict=True)
    ]


def _digest(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> int:
    """Of a prompt that the target wrote: all before the first answer, or the row's beginning."""
    end = PLAIN_PROMPT
    if Role.ANSWER in dialogue.roles:
        end = dialogue.roles.index(Role.ANSWER)
    return prompt_digest(str(tokenizer.decode(dialogue.tokens[:end])))


def _shards(dialogues: Sequence[Dialogue]) -> Iterator[Sequence[Dialogue]]:
    for first in range(0, len(dialogues), SHARD_ROWS):
        yield dialogues[first : first + SHARD_ROWS]


def _save_round(path: Path, sampled: Sequence[Sampled]) -> None:
    """Write one round, whole or not at all."""
    dialogues = [one.dialogue for one in sampled]
    tensors = {
        "tokens": torch.tensor([t for one in dialogues for t in one.tokens], dtype=torch.int32),
        "roles": torch.tensor([r for one in dialogues for r in one.roles], dtype=torch.uint8),
        "lens": torch.tensor([len(one.tokens) for one in dialogues], dtype=torch.int32),
        "prompts": torch.tensor([one.prompt for one in sampled], dtype=torch.int64),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def _load_round(path: Path) -> list[Sampled]:
    found = load_file(path)
    lens = found["lens"].tolist()
    columns = (found[name].split(lens) for name in ("tokens", "roles"))
    return [
        Sampled(prompt, Dialogue(tuple(tokens.tolist()), tuple(roles.tolist())))
        for prompt, tokens, roles in zip(found["prompts"].tolist(), *columns, strict=True)
    ]


def check_folder(folder: Path, job: Job) -> None:
    """Raises ValueError where the folder holds dialogues of other settings, or rows of others."""
    check_sampling(folder, job.sampling())


def _write_settings(
    folder: Path, job: Job, counts: Counts | None, refused: str | None = None
) -> None:
    """Counts once all is done, or why no rows were left."""
    rest = {
        "selection": asdict(job.selection),
        "counts": asdict(counts) if counts is not None else None,
        **({"refused": refused} if refused is not None else {}),
    }
    write_sampling(folder, job.sampling(), rest)
