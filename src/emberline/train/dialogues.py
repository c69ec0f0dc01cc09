"""Chats with a target through an engine: who says what next, and who wrote which token.

Owns the turn taking and the filling of the engine. Must not know where chats start from, nor what
becomes of them. `synthesize.TurnTaker` plays the same turns in lockstep, on a GPU.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from emberline.engine.engine import Engine
from emberline.models.weights import ModelError
from emberline.train.dataset import Role
from emberline.train.synthesize import TurnScript
from emberline.types import FinishReason, Request, SamplingParams

TokenIds = tuple[int, ...]
Ask = tuple[list[int], SamplingParams]
"""Tokens to continue, and how."""
Advance = Callable[[int, int], None]
"""Told how many dialogues are done, and how many tokens the target has written."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where one dialogue starts from."""

    number: int  # its place among all: its draws follow from it
    token_ids: TokenIds  # given: nobody predicts them
    role: Role  # of what the target writes first
    temperature: float  # of answers and plain text
    later: tuple[TokenIds, ...] | None = None  # users' later turns; None: the target writes them


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a dialogue and its turns may get, and how warm users are."""

    seq_len: int
    max_answer: int  # tokens after which an answer is cut, and its dialogue ends
    user_limit: int  # tokens after which a written user turn is closed
    user_temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What became of a start."""

    tokens: tuple[int, ...]  # at most seq_len
    roles: tuple[int, ...]  # `Role` of each


def converse(
    engine: Engine,
    starts: Sequence[Start],
    script: TurnScript | None,
    limits: Limits,
    advance: Advance,
) -> list[Dialogue]:
    """Play every dialogue, as many at a time as the engine runs; in the order of the starts.

    A dialogue's draws follow from the seed, its number and the turn. Its text is the same again
    if the same starts are played on an engine with an empty prefix cache: the batches are the
    same ones then, and so are the last bits of their logits.

    Args:
        script: the template's tokens between turns; None where dialogues have one answer.

    Raises:
        ModelError: the engine broke off a request.
    """
    engine.clear_prefix_cache()
    waiting = deque(range(len(starts)))
    playing: dict[str, tuple[int, Generator[Ask, TokenIds, Dialogue]]] = {}
    written: dict[str, list[int]] = {}
    done: dict[int, Dialogue] = {}
    num_tokens = num_asked = 0

    def ask(index: int, play: Generator[Ask, TokenIds, Dialogue], said: TokenIds | None) -> None:
        nonlocal num_asked
        try:
            token_ids, params = next(play) if said is None else play.send(said)
        except StopIteration as end:
            done[index] = end.value
            advance(len(done), num_tokens)
            return
        name, num_asked = str(num_asked), num_asked + 1
        engine.add(Request(name, tuple(token_ids), params))
        playing[name], written[name] = (index, play), []

    while len(done) < len(starts):
        while waiting and len(playing) < engine.config.scheduler.max_num_reqs:
            index = waiting.popleft()
            ask(index, _play(starts[index], script, limits, engine.parts.eos_ids), None)
        for output in engine.step():
            name = output.request_id
            written[name] += output.token_ids
            num_tokens += len(output.token_ids)
            if output.finish_reason is FinishReason.ERROR:
                raise ModelError(f"a dialogue broke off: {output.error}")
            if output.finished:
                ask(*playing.pop(name), tuple(written.pop(name)))
    return [done[index] for index in range(len(starts))]


def _play(
    start: Start, script: TurnScript | None, limits: Limits, stop_ids: frozenset[int]
) -> Generator[Ask, TokenIds, Dialogue]:
    """One dialogue: yields what to continue, is sent what was written, returns all of it."""
    tokens, roles = list(start.token_ids), [int(Role.FORCED)] * len(start.token_ids)
    role, turn = start.role, 0
    while len(tokens) < limits.seq_len:
        written = yield tokens, _params(start, role, turn, limits.seq_len - len(tokens), limits)
        tokens += written
        roles += [int(role)] * len(written)
        ended = written[-1] in stop_ids
        given: TokenIds = ()
        if role is Role.USER and script is not None:
            given = script.to_answer if ended else (script.stop_ids[0], *script.to_answer)
            role = Role.ANSWER
        elif role is Role.ANSWER and ended and script is not None:
            given, role = _next_turn(start, turn, script)
        if not given:
            break
        tokens += given
        roles += [int(Role.FORCED)] * len(given)
        turn += 1
    return Dialogue(tuple(tokens[: limits.seq_len]), tuple(roles[: limits.seq_len]))


def _next_turn(start: Start, turn: int, script: TurnScript) -> tuple[TokenIds, Role]:
    """What is given after answer number `turn`, and who goes on; nothing where it was the last."""
    if start.later is None:
        return script.to_user, Role.USER
    if turn >= len(start.later):
        return (), Role.ANSWER
    said = start.later[turn]
    return (*script.to_user, *said, script.stop_ids[0], *script.to_answer), Role.ANSWER


def _params(start: Start, role: Role, turn: int, room: int, limits: Limits) -> SamplingParams:
    of_role = {Role.USER: limits.user_limit, Role.ANSWER: limits.max_answer}
    digest = hashlib.sha256(f"{limits.seed}/{start.number}/{turn}".encode()).digest()
    return SamplingParams(
        temperature=limits.user_temperature if role is Role.USER else start.temperature,
        max_tokens=min(room, of_role.get(role, room)),
        seed=int.from_bytes(digest[:8]),
        accept="rejection",  # nothing is drafted: no noise has to be shared
        ignore_eos=role is Role.PLAIN,
    )
