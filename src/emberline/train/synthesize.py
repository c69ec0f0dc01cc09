"""Training text, sampled from the target itself: it plays the user and the assistant.

Every chat starts from the chat template and, mostly, the first words of a question; the model
writes the rest of the user turn, the answer, and further turns until the row is full. Owns the
turn taking; how a token is computed belongs to `target.Lockstep`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from emberline.train.config import SynthesisConfig
from emberline.train.dataset import Role, TokenRows, log_round
from emberline.train.openings import OPENINGS, PLAIN, SYSTEM_PROMPTS
from emberline.train.question_split import draw_question
from emberline.train.sampled_with import REMEDY, check_sampling, seed_of, write_sampling
from emberline.train.target import FrozenTarget, Lockstep

MARK_USER = "\u0001user\u0001"
MARK_ANSWER = "\u0001answer\u0001"
PLAIN_TEMPERATURE = 1.0
"""Of plain text: its few openings have one greedy continuation each, which is soon learnt."""
Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class TurnScript:
    """The template's own tokens around turns."""

    before_user: str  # text from the start of the chat to the first user turn, default system turn
    other_systems: tuple[str, ...]  # the same with other system turns; () if it refuses them
    to_answer: tuple[int, ...]  # from the end of a user turn to the start of the answer
    to_user: tuple[int, ...]  # from the end of an answer to the start of the next user turn
    stop_ids: tuple[int, ...]  # tokens that end a turn; the first also closes a turn that is cut


def read_script(tokenizer: Any, stop_ids: tuple[int, ...]) -> TurnScript:
    """Find the template's pieces by rendering a chat with marks in it."""
    turns = [
        {"role": "user", "content": MARK_USER},
        {"role": "assistant", "content": MARK_ANSWER},
        {"role": "user", "content": MARK_USER},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    before, to_answer, rest = text.split(MARK_USER)
    to_answer, to_user = to_answer.split(MARK_ANSWER)
    if rest.split(MARK_ANSWER)[0] != to_answer:
        raise ValueError("the chat template does not repeat itself from turn to turn")

    def ids(piece: str) -> tuple[int, ...]:
        found = tokenizer(piece, add_special_tokens=False).input_ids
        if not found or found[0] not in stop_ids:
            raise ValueError(f"turns of this template do not end with a stop token: {piece!r}")
        return tuple(found[1:])

    closing = tokenizer(to_answer, add_special_tokens=False).input_ids[0]
    ordered = (closing, *(stop for stop in stop_ids if stop != closing))
    return TurnScript(before, _other_systems(tokenizer), ids(to_answer), ids(to_user), ordered)


@dataclass(frozen=True, slots=True)
class Starts:
    """How the rows of one round begin."""

    tokens: Tensor  # [B, F] int64, right-padded
    lens: Tensor  # [B] int64
    roles: Tensor  # [B] int64, role of what the model writes first
    temperatures: Tensor  # [B] float32 of answers and plain text


def make_starts(
    tokenizer: Any,
    script: TurnScript,
    config: SynthesisConfig,
    rng: random.Random,
    split: Split = "train",
) -> Starts:
    """Draw a round's beginnings: chat or plain, system prompt, opening, temperature.

    Held-out rows all begin with questions that no training row is given. Of openings there are
    too few to keep some aside.
    """
    starts = [_start(script, config, rng, split) for _ in range(config.batch_size)]
    encoded = tokenizer([text for text, _ in starts], add_special_tokens=False).input_ids
    roles = [int(role) for _, role in starts]
    asked = (script.stop_ids[0], *script.to_answer)
    rows = [
        [*ids, *asked] if role == Role.ANSWER else list(ids)
        for ids, role in zip(encoded, roles, strict=True)
    ]
    longest = min(max(map(len, rows)), config.seq_len - 1)
    padded = [row[:longest] + [0] * (longest - len(row)) for row in rows]
    drawn = rng.choices(config.temperatures, config.temperature_weights, k=config.batch_size)
    temperatures = [
        PLAIN_TEMPERATURE if role == Role.PLAIN else temperature
        for role, temperature in zip(roles, drawn, strict=True)
    ]
    return Starts(
        tokens=torch.tensor(padded),
        lens=torch.tensor([min(len(row), longest) for row in rows]),
        roles=torch.tensor(roles),
        temperatures=torch.tensor(temperatures, dtype=torch.float32),
    )


def _start(
    script: TurnScript, config: SynthesisConfig, rng: random.Random, split: Split
) -> tuple[str, Role]:
    """One row's given text, and what the model writes after it."""
    held_out = split == "held_out"
    if not held_out and rng.random() < config.plain_fraction:
        return rng.choice(PLAIN), Role.PLAIN
    text = script.before_user
    if script.other_systems and rng.random() < config.system_fraction:
        text = rng.choice(script.other_systems)
    if held_out or rng.random() < config.question_fraction:
        return text + draw_question(rng, reserved=held_out), Role.ANSWER
    if rng.random() < config.opening_fraction:
        text += rng.choice(OPENINGS)
    return text, Role.USER


def _other_systems(tokenizer: Any) -> tuple[str, ...]:
    """What comes before the user's first words under other system prompts; () if it refuses them.

    Some templates (Gemma 2) know no system role.
    """
    from jinja2 import TemplateError

    found = []
    for prompt in SYSTEM_PROMPTS:
        turns = [{"role": "system", "content": prompt}, {"role": "user", "content": MARK_USER}]
        try:
            text: str = tokenizer.apply_chat_template(turns, tokenize=False)
        except TemplateError:
            return ()
        found.append(text.split(MARK_USER)[0])
    return tuple(found)


class TurnTaker:
    """Buffers of one batch, and the step that decides each row's next token.

    Every buffer is written in place, so that a captured graph keeps reading the same memory.
    """

    def __init__(
        self,
        target: FrozenTarget,
        script: TurnScript,
        config: SynthesisConfig,
    ) -> None:
        device, batch = target.device, config.batch_size
        self.target, self.config = target, config
        self.lockstep = Lockstep(target, batch, config.seq_len)
        self.tokens = torch.zeros(batch, config.seq_len, dtype=torch.int64, device=device)
        self.roles = torch.zeros_like(self.tokens)
        self.start_lens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.temperatures = torch.ones(batch, device=device)
        self.role = torch.zeros_like(self.start_lens)  # of what the model writes now
        self.turn_len = torch.zeros_like(self.start_lens)
        self.script_at = torch.zeros_like(self.start_lens)  # next forced piece; -1: none
        width = max(len(script.to_answer), len(script.to_user))
        pieces = torch.zeros(4, width, dtype=torch.int64)
        pieces[Role.USER, : len(script.to_user)] = torch.tensor(script.to_user)
        pieces[Role.ANSWER, : len(script.to_answer)] = torch.tensor(script.to_answer)
        self.pieces = pieces.to(device)  # by the role that starts after them
        lens = [0, len(script.to_user), len(script.to_answer), 0]
        self.piece_lens = torch.tensor(lens, device=device)
        self.stops = torch.tensor(script.stop_ids, device=device)
        self.pick: Callable[[Tensor, Tensor, Tensor], Tensor] = gumbel_pick

    def begin(self, starts: Starts) -> None:
        """Load a round's beginnings."""
        width = starts.tokens.shape[1]
        self.tokens.zero_()
        self.tokens[:, :width] = starts.tokens.to(self.tokens.device)
        self.start_lens.copy_(starts.lens)
        self.role.copy_(starts.roles)
        self.temperatures.copy_(starts.temperatures)
        self.roles.zero_()
        self.turn_len.zero_()
        self.script_at.fill_(-1)

    def step(self, position: int) -> None:
        """Run the tokens at `position` and write those at `position + 1`."""
        logits = self.lockstep.forward(self.tokens[:, position], position)
        in_user = self.role == Role.USER
        temperature = self.temperatures.masked_fill(in_user, self.config.user_temperature)
        noise = torch.rand_like(logits)
        drawn = self.pick(logits, temperature, noise)
        at = position + 1
        given = self.start_lens > at
        scripted = self.script_at >= 0
        writes = ~given & ~scripted
        # A user turn that never ends is closed, so that there is room for an answer.
        cut = writes & in_user & (self.turn_len >= self.config.user_limit)
        drawn = torch.where(cut, self.stops[0], drawn)
        piece = self.pieces[self.role, self.script_at.clamp(min=0)]
        token = torch.where(scripted, piece, drawn)
        token = torch.where(given, self.tokens[:, at], token)
        self.tokens[:, at] = token
        model_wrote = writes & ~cut
        self.roles[:, at] = torch.where(model_wrote, self.role, int(Role.FORCED))
        self._advance(token, writes, scripted)

    def _advance(self, token: Tensor, writes: Tensor, scripted: Tensor) -> None:
        chatting = self.role != Role.PLAIN
        ended = writes & chatting & torch.isin(token, self.stops)
        next_role = torch.where(self.role == Role.USER, int(Role.ANSWER), int(Role.USER))
        self.role.copy_(torch.where(ended, next_role, self.role))
        self.turn_len.copy_(torch.where(ended, 0, self.turn_len + writes))
        after = torch.where(scripted, self.script_at + 1, self.script_at)
        done = scripted & (after >= self.piece_lens[self.role])
        after = torch.where(done, -1, after)
        self.script_at.copy_(torch.where(ended, 0, after))


def gumbel_pick(logits: Tensor, temperature: Tensor, noise: Tensor) -> Tensor:
    """Draw one id a row from softmax(logits / T). logits, noise [B, V], temperature [B] -> [B]."""
    gumbel = -torch.log(-torch.log(noise.clamp(1e-20, 1 - 1e-7)))
    return (logits / temperature[:, None] + gumbel).argmax(dim=-1)


def synthesize(
    target: FrozenTarget,
    tokenizer: Any,
    folder: Path,
    config: SynthesisConfig,
    stop_ids: tuple[int, ...],
    held_out_rows: int = 0,
    report: Callable[[str], None] = print,
) -> None:
    """Write `rounds` files of training rows, and `held_out_rows` of a round of their own.

    A round that is already on disk is kept, so an interrupted synthesis goes on where it stopped,
    and one with more rounds adds to a shorter one.

    Raises:
        ValueError: the folder holds rows of other settings, or more rounds.
    """
    sampling = _sampling(target, config, held_out_rows)
    check_sampling(folder, sampling)
    _check_rounds(folder, config.rounds)
    script = read_script(tokenizer, stop_ids)
    folder.mkdir(parents=True, exist_ok=True)
    write_sampling(folder, sampling, {"counts": None})  # from here on the rows are not whole
    taker = TurnTaker(target, script, config)
    step = _graph_steps(taker) if target.device.type == "cuda" else taker.step
    names = [f"train_{index:03d}" for index in range(config.rounds)]
    if held_out_rows:
        names.insert(0, "held_out_000")
    for name in names:
        path = folder / f"{name}.safetensors"
        if path.exists():
            continue
        started = time.perf_counter()
        rng = random.Random(f"{config.seed}/{name}")
        torch.manual_seed(seed_of(config.seed, name))
        split: Split = "held_out" if name.startswith("held_out") else "train"
        taker.begin(make_starts(tokenizer, script, config, rng, split))
        for position in range(config.seq_len - 1):
            step(position)
        rows = TokenRows(taker.tokens.int(), taker.roles.to(torch.uint8))
        if split == "held_out":
            rows = TokenRows(rows.tokens[:held_out_rows], rows.roles[:held_out_rows])
        rows.save(path)
        seconds = time.perf_counter() - started
        log_round(folder, split, rows.num_rows, seconds)
        rate = config.batch_size * config.seq_len / seconds
        report(f"{name}: {rows.num_rows} rows in {seconds:.1f} s, {rate:,.0f} tokens/s")
    aside = min(held_out_rows, config.batch_size)
    counts = {"train": config.rounds * config.batch_size, "held_out": aside}
    write_sampling(folder, sampling, {"counts": counts})


def _sampling(target: FrozenTarget, config: SynthesisConfig, held_out_rows: int) -> dict[str, Any]:
    """What every round follows from, besides its name."""
    settings = asdict(config)
    del settings["rounds"]  # each is drawn from its own name
    settings["held_out_rows"] = held_out_rows
    return {"sampler": "lockstep", "model": target.digest(), **settings}


def _check_rounds(folder: Path, rounds: int) -> None:
    there = len(list(folder.glob("train_*.safetensors")))
    if there > rounds:
        raise ValueError(f"{folder}: holds {there} rounds, and rounds is {rounds}: {REMEDY}")


def _graph_steps(taker: TurnTaker) -> Callable[[int], None]:
    """Capture each position on first use; replay it from then on."""
    target = taker.target
    target.project = torch.compile(target.project, dynamic=False)
    target.finish = torch.compile(target.finish, dynamic=False)
    taker.pick = torch.compile(gumbel_pick, dynamic=False)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    pool = torch.cuda.graph_pool_handle()

    def run(position: int) -> None:
        if position not in graphs:
            if not graphs:
                # Compiles and creates library handles outside any capture; every buffer that the
                # warm-up moves on is restored.
                kept = {n: b.clone() for n, b in vars(taker).items() if isinstance(b, Tensor)}
                taker.step(position)
                for name, buffer in kept.items():
                    getattr(taker, name).copy_(buffer)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                taker.step(position)
            graphs[position] = graph
        graphs[position].replay()

    return run
