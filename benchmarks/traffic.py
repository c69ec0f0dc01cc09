"""Random clients of a server: what they ask, how they behave, and whether the answer was right.

Owns the life of a client and what counts as a fault. Must not know how the server was started, nor
what is measured of it besides.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/no"}}}
BAD: Sequence[dict[str, Any]] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"n": 10**7},
    {"prompt_logprobs": 10**7},
    {"logit_bias": {"999999999": 1}},
    {"stop_token_ids": [10**9]},
    {"stop": [""]},
    {"timeout": 0},
    {"priority": 0.5},
    {"unheard_of": 1},
    {"response_format": GRAMMAR},
)
REFUSED = 400
FULL = 429
ENDING = 503  # allowed for a server that is shutting down, and only with that code
SLOW_READ = 4096  # bytes at a time


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model can take."""

    vocab_size: int
    prompt_tokens: int  # of the longest prompt
    max_tokens: int  # of the longest answer

    def __post_init__(self) -> None:
        if self.prompt_tokens < 2 or self.max_tokens < 2:
            raise ValueError("prompts and answers need room for two tokens")


@dataclass(frozen=True, slots=True)
class Wish:
    """One call, and how its client behaves."""

    kind: str
    path: str
    body: dict[str, Any]
    expects: int | None = 200  # None: the client does not stay for an answer
    share_sent: float = 1.0  # of the body's bytes, before the client leaves
    stays: float | None = None  # seconds from the last byte sent until it leaves
    pause: float = 0.0  # seconds between two reads


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call."""

    wish: Wish
    status: int | None  # None: the client left, or was cut
    seconds: float
    fault: str | None = None


@dataclass(slots=True)
class Report:
    """What came of all calls."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """What must not happen, one line each."""
        return [f"{one.wish.kind}: {one.fault}" for one in self.outcomes if one.fault]

    def statuses(self) -> dict[str, int]:
        """How many calls ended with each status; "left" for clients that did not stay."""
        found = Counter("left" if one.status is None else str(one.status) for one in self.outcomes)
        return dict(sorted(found.items()))

    def kinds(self) -> dict[str, int]:
        """How many calls there were of each kind."""
        return dict(sorted(Counter(one.wish.kind for one in self.outcomes).items()))

    @property
    def longest_seconds(self) -> float:
        """The longest call whose client stayed for the answer."""
        return max((one.seconds for one in self.outcomes if one.status is not None), default=0.0)


def draw_wish(dice: random.Random, limits: Limits) -> Wish:
    """A random call of a random kind."""
    draw = dice.choices(*zip(*KINDS, strict=True))[0]
    return draw(dice, limits)


def _body(dice: random.Random, limits: Limits) -> tuple[str, dict[str, Any]]:
    """Lengths, options and priorities at random; half of the prompts share their beginning."""
    size = dice.randint(1, limits.prompt_tokens)
    prompt = [dice.randrange(limits.vocab_size) for _ in range(size)]
    if dice.random() < 0.5:
        common = random.Random(dice.randrange(8))
        shared = [common.randrange(limits.vocab_size) for _ in range(size)]
        prompt[: size * 3 // 4] = shared[: size * 3 // 4]
    body: dict[str, Any] = {
        "max_tokens": dice.randint(1, limits.max_tokens),
        "temperature": dice.choice([0, 0, 0.7, 1.0]),
        "priority": dice.choice([0, 0, 0, -1, 1]),
    }
    for chance, option in (
        (0.2, {"n": dice.randint(2, 3)}),
        (0.2, {"seed": dice.randrange(1000)}),
        (0.2, {"frequency_penalty": 0.5}),
        (0.2, {"ignore_eos": True}),
        (0.2, {"stop": ["e", "\n\n"]}),
        (0.1, {"prompt_logprobs": 1}),
    ):
        if dice.random() < chance:
            body |= option
    if dice.random() < 0.5:
        body["logprobs"] = dice.choice([0, 2, 20])
    if dice.random() < 0.6:
        return COMPLETIONS, body | {"prompt": prompt}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    text = " ".join(dice.choices(("the", "sun", "7", "née", "🙂", "x=1"), k=max(1, size // 4)))
    return CHAT, body | {"messages": [{"role": "user", "content": text}]}


def _whole(dice: random.Random, limits: Limits) -> Wish:
    return Wish("whole", *_body(dice, limits))


def _stream(dice: random.Random, limits: Limits) -> Wish:
    path, body = _body(dice, limits)
    options = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.3}
    return Wish("stream", path, body | {"stream": True, "stream_options": options})


def _leaves(dice: random.Random, limits: Limits) -> Wish:
    """While it waits, in its prompt or in its answer: whatever the time hits."""
    path, body = _body(dice, limits)
    body |= {"stream": dice.random() < 0.5, "max_tokens": limits.max_tokens, "ignore_eos": True}
    return Wish("leaves", path, body, expects=None, stays=dice.expovariate(4.0))


def _leaves_in_body(dice: random.Random, limits: Limits) -> Wish:
    path, body = _body(dice, limits)
    return Wish("leaves in its body", path, body, expects=None, share_sent=dice.random(), stays=0.1)


def _slow(dice: random.Random, limits: Limits) -> Wish:
    path, body = _body(dice, limits)
    return Wish("slow reader", path, body | {"stream": True}, pause=dice.uniform(0.01, 0.05))


def _never_reads(dice: random.Random, limits: Limits) -> Wish:
    """Asks for more than all buffers hold, before anybody else, and takes nothing of it."""
    prompt = [dice.randrange(limits.vocab_size) for _ in range(limits.prompt_tokens)]
    body = {
        "prompt": prompt,
        "max_tokens": limits.max_tokens,
        "ignore_eos": True,
        "logprobs": 100,
        "prompt_logprobs": min(limits.vocab_size, 200),
        "priority": -2,
        "stream": True,
    }
    return Wish("never reads", COMPLETIONS, body, expects=None, stays=10.0, pause=60.0)


def _bad(dice: random.Random, limits: Limits) -> Wish:
    path, body = _body(dice, limits)
    return Wish("bad", path, body | dice.choice(BAD), expects=REFUSED)


def _short_of_time(dice: random.Random, limits: Limits) -> Wish:
    path, body = _body(dice, limits)
    body |= {"timeout": dice.uniform(0.01, 1.0), "stream": dice.random() < 0.5}
    return Wish("short of time", path, body | {"max_tokens": limits.max_tokens})


KINDS: Sequence[tuple[Callable[[random.Random, Limits], Wish], float]] = (
    (_whole, 30),
    (_stream, 26),
    (_leaves, 16),
    (_leaves_in_body, 4),
    (_slow, 6),
    (_never_reads, 4),
    (_bad, 8),
    (_short_of_time, 8),
)


async def run_clients(
    url: str,
    limits: Limits,
    *,
    num_clients: int,
    seconds: float,
    seed: int = 0,
    patience: float = 120.0,
    done: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Let clients call, one call after the other each, for so long; then until the last has ended.

    Args:
        url: of the server.
        limits: of its model.
        num_clients: how many call side by side.
        seconds: after which none begins a new call.
        seed: of everything that is drawn.
        patience: seconds after which a call counts as hung.
        done: told after each call what there is so far.
    """
    report, end = Report(), time.monotonic() + seconds

    async def client(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        first, _ = KINDS[number % len(KINDS)]  # so that every kind comes, while the queue has room
        wish = first(dice, limits)
        while time.monotonic() < end:
            outcome = await call(url, wish, patience)
            wish = draw_wish(dice, limits)
            report.outcomes.append(outcome)
            done(report)
            if outcome.status == ENDING or outcome.fault == GONE:
                return
            if outcome.status == FULL:
                await asyncio.sleep(dice.uniform(1.0, 3.0))

    await asyncio.gather(*(client(i) for i in range(num_clients)))
    return report


GONE = "the server does not listen"


async def call(url: str, wish: Wish, patience: float) -> Outcome:
    """One call from its first byte to its last."""
    began = time.monotonic()

    def outcome(status: int | None, fault: str | None = None) -> Outcome:
        return Outcome(wish, status, time.monotonic() - began, fault)

    try:
        async with asyncio.timeout(patience):
            status, headers, body = await _exchange(url, wish)
    except TimeoutError:
        return outcome(None, f"nothing after {patience:g} s")
    except _Left:
        return outcome(None)
    except ConnectionRefusedError:
        return outcome(None, GONE)
    except (OSError, h11.RemoteProtocolError) as problem:
        # Only who does not read may be cut.
        return outcome(None, None if wish.pause else f"broken off: {problem!r}")
    try:
        return outcome(status, _fault(wish, status, headers, body))
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        return outcome(status, f"not an answer: {problem!r}: {body[:200]!r}")


class _Left(Exception):
    """The client has gone before the end."""


async def _exchange(url: str, wish: Wish) -> tuple[int, dict[str, str], bytes]:
    content = json.dumps(wish.body).encode()
    parts = urlsplit(url)
    assert parts.hostname is not None
    wire, connection = h11.Connection(h11.CLIENT), socket.socket()
    connection.setblocking(False)
    if wish.pause:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_READ)
    loop = asyncio.get_running_loop()
    with connection:
        await loop.sock_connect(connection, (parts.hostname, parts.port))
        headers = {
            "host": parts.netloc,
            "content-type": "application/json",
            "content-length": str(len(content)),
            "connection": "close",
        }
        head = wire.send(h11.Request(method="POST", target=wish.path, headers=[*headers.items()]))
        assert head is not None
        sent = content[: int(len(content) * wish.share_sent)]
        await loop.sock_sendall(connection, head + sent)
        if wish.expects is None and not wish.body.get("stream"):
            await asyncio.sleep(wish.stays or 0.0)
            raise _Left
        wire.send(h11.Data(data=content))
        wire.send(h11.EndOfMessage())
        leaving = asyncio.timeout(wish.stays)
        try:
            async with leaving:
                return await _read(connection, wire, wish.pause)
        except TimeoutError:
            if leaving.expired():
                raise _Left from None
            raise


async def _read(
    connection: socket.socket, wire: h11.Connection, pause: float
) -> tuple[int, dict[str, str], bytes]:
    loop, body, status, headers = asyncio.get_running_loop(), bytearray(), 0, {}
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            await asyncio.sleep(pause)
            wire.receive_data(await loop.sock_recv(connection, SLOW_READ if pause else 65536))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode(): value.decode() for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return status, headers, bytes(body)


def _fault(wish: Wish, status: int, headers: dict[str, str], body: bytes) -> str | None:
    """What is wrong with an answer, if anything."""
    if status == 200 and wish.body.get("stream"):
        return _fault_of_events(wish, [_strict(one) for one in _events(body)])
    data = _strict(body)
    if status == FULL:
        return None if int(headers["retry-after"]) >= 1 else "429 without a time to come back"
    if status == ENDING and data["error"]["code"] == "shutting_down":
        return None
    if status != (wish.expects or 200):
        return f"status {status} instead of {wish.expects}: {body[:300]!r}"
    if status == REFUSED:
        return None if data["error"]["message"] else "a refusal without a reason"
    counted = sum(_num_records(choice) for choice in data["choices"])
    return _fault_of_choices(wish, data["choices"]) or _fault_of_count(wish, counted, data["usage"])


def _fault_of_events(wish: Wish, events: Sequence[dict[str, Any]]) -> str | None:
    if any("error" in event for event in events):
        return f"an error in the stream: {events[-1]}"
    choices = [choice for event in events for choice in event["choices"]]
    counted = sum(map(_num_records, choices))
    usage = events[-1].get("usage") or {}
    ends = [choice for choice in choices if choice["finish_reason"] is not None]
    return _fault_of_choices(wish, ends) or (
        _fault_of_count(wish, counted, usage) if usage else None
    )


def _fault_of_choices(wish: Wish, ends: Sequence[dict[str, Any]]) -> str | None:
    if sorted(choice["index"] for choice in ends) != list(range(wish.body.get("n", 1))):
        return "not every choice ended once"
    timed_out = {choice["stop_reason"] == "timeout" for choice in ends if _aborted(choice)}
    if timed_out - {True} or (timed_out and "timeout" not in wish.body):
        return "aborted, although its time was not over"
    return None


def _aborted(choice: dict[str, Any]) -> bool:
    return bool(choice["finish_reason"] not in ("stop", "length"))


def _fault_of_count(wish: Wish, counted: int, usage: dict[str, Any]) -> str | None:
    """One record a token wherever records were asked for."""
    if "logprobs" in wish.body and counted != usage["completion_tokens"]:
        return f"{counted} records for {usage['completion_tokens']} tokens"
    return None


def _num_records(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("content") or logprobs.get("tokens") or ())


def _events(body: bytes) -> Iterator[bytes]:
    *parts, last, nothing = body.split(b"\n\n")
    if last != b"data: [DONE]" or nothing:
        raise ValueError("the stream has no end")
    for part in parts:
        if not part.startswith(b"data: "):
            raise ValueError(f"no event: {part!r}")
        yield part.removeprefix(b"data: ")


def _strict(text: bytes) -> Any:
    """JSON, numbers finite."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)
