"""A real server in a thread, over an engine whose target says what a prompt tells it to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from emberline.engine.async_engine import AsyncEngine
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.engine_loop import SteppingEngine
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.running_engine import RunningEngine
from emberline.server.run import make_server
from emberline.server.shutdown import GracefulServer
from emberline.types import EngineSnapshot

from support.engines import make_engine
from support.paged import PrefixDrafter, PrefixTarget

NAME = "tiny"
SPECIALS = ["<eos>", "<say>", "</say>", "<user>", "<system>", "<assistant>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'unwanted' %}{{ raise_exception('not here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix or '' }}"
)


@cache
def make_tokenizer(
    template: str = TEMPLATE, markers: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level, a few merged words, two ids of one text; `markers` are tokens that show."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [" the", "Sun", "ny", "\n\n"]
    mapped = ["".join(part for part, _ in splitter.pre_tokenize_str(word)) for word in words]
    vocab = {piece: i for i, piece in enumerate([*SPECIALS, *sorted(splitter.alphabet()), *mapped])}
    merges = [("S", "un"), ("u", "n"), ("n", "y")]
    vocab["un"] = len(vocab)
    merges.reverse()
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[(a, b) for a, b in merges]))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


class SayingTarget(PrefixTarget):
    """Says what stands between <say> and </say>, then <eos>; else a hash of the last tokens.

    The saying starts behind the last marker of the prompt (</say>, or <assistant> in a chat).
    """

    boost = 20.0

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_model_len: int = 256) -> None:
        size = len(tokenizer) + 3  # a padded vocabulary, as models have
        super().__init__(size, max_model_len=max_model_len, num_slots=16384, scale=2.0)
        ids = tokenizer.convert_tokens_to_ids
        self.eos, self.say, self.unsay, self.assistant = map(
            ids, ("<eos>", "<say>", "</say>", "<assistant>")
        )
        self.delay = 0.0

    def logits_after(self, prefix: list[int]) -> Tensor:
        logits = super().logits_after(prefix)
        end = _last(prefix, self.unsay)
        start = _last(prefix[:end], self.say) + 1
        if not 0 < start <= end:
            logits = logits.clone()
            logits[: len(SPECIALS)] = -30.0
            return logits
        said = len(prefix) - 1 - max(end, _last(prefix, self.assistant))
        script = prefix[start:end]
        logits = logits.clone()
        logits[script[said] if said < len(script) else self.eos] += self.boost
        return logits

    def forward(self, batch: Any) -> Any:
        time.sleep(self.delay)
        return super().forward(batch)


def _last(ids: list[int], wanted: int) -> int:
    """Where `wanted` stands last, -1 if nowhere."""
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == wanted), -1)


@dataclass
class Server:
    """A running server and what is behind it."""

    url: str
    engine: RunningEngine
    process: GracefulServer
    target: SayingTarget | None
    tokenizer: PreTrainedTokenizerFast
    text: TokenText
    http: httpx.Client

    def post(self, path: str, body: object, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        headers = {"content-type": "application/json"}
        return self.http.post(path, content=content, headers=headers, **kwargs)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def complete(self, prompt: object, **options: object) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **options})
        assert answer.status_code == 200, answer.text
        return strict(answer.content)

    def chat(self, content: object, **options: object) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return strict(answer.content)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, `[DONE]` checked and dropped."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [part for part in answer.text.split("\n\n") if part]
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [strict(event.removeprefix("data: ")) for event in events[:-1]]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def until(self, state: Callable[[EngineSnapshot], bool], seconds: float = 5.0) -> None:
        """Wait for a state of the engine; fail if it does not come to pass."""
        end = time.monotonic() + seconds
        while not state(self.engine.snapshot()):
            assert time.monotonic() < end, self.engine.snapshot()
            time.sleep(0.005)

    def rest(self, seconds: float = 5.0) -> None:
        """Wait until nothing runs and nothing is held."""
        self.until(
            lambda now: (now.num_running, now.num_waiting, now.kv_usage) == (0, 0, 0.0), seconds
        )

    def alive(self) -> None:
        """Healthy, idle, and answering."""
        self.rest()
        assert self.get("/health").status_code == 200
        answer = self.complete("<say>ok</say>", max_tokens=5)
        assert answer["choices"][0]["text"] == "ok"
        self.rest()


def strict(text: bytes | str) -> Any:
    """JSON without NaN or Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def say(text: str) -> str:
    """A prompt that makes the target say `text`."""
    return f"<say>{text}</say>"


@contextlib.contextmanager
def serve(
    engine: SteppingEngine,
    tokenizer: PreTrainedTokenizerFast,
    target: SayingTarget | None = None,
    *,
    stall_timeout: float = 300.0,
    **options: Any,
) -> Iterator[Server]:
    """Serve an engine on a free port until the end of the block. `options`: of the server."""
    behind = AsyncEngine(engine, TokenText(tokenizer), stall_timeout=stall_timeout)
    with serve_running(behind, tokenizer, target, **options) as server:
        yield server


@contextlib.contextmanager
def serve_running(
    behind: RunningEngine,
    tokenizer: PreTrainedTokenizerFast,
    target: SayingTarget | None = None,
    **options: Any,
) -> Iterator[Server]:
    """The same of an engine that runs already."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(behind, tokenizer, NAME, log_level="critical", **options)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Server(url, behind, server, target, tokenizer, behind.token_text, http)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def saying_server(
    *,
    num_drafts: int = 0,
    wrong_every: int = 0,
    max_model_len: int = 256,
    delay: float = 0.0,
    num_pages: int = 1024,
    options: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **scheduler: int,
) -> Iterator[Server]:
    """A server over a saying target, with a drafter of `num_drafts` if any."""
    engine, tokenizer, target = saying_engine(
        num_drafts=num_drafts,
        wrong_every=wrong_every,
        max_model_len=max_model_len,
        delay=delay,
        num_pages=num_pages,
        tokenizer=tokenizer,
        **scheduler,
    )
    with serve(engine, tokenizer, target, **(options or {})) as server:
        yield server


def saying_engine(
    *,
    num_drafts: int = 0,
    wrong_every: int = 0,
    max_model_len: int = 256,
    delay: float = 0.0,
    num_pages: int = 1024,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **scheduler: int,
) -> tuple[Engine, PreTrainedTokenizerFast, SayingTarget]:
    """An engine over a saying target, with its tokenizer."""
    tokenizer = tokenizer or make_tokenizer()
    target = SayingTarget(tokenizer, max_model_len)
    target.delay = delay
    drafter = PrefixDrafter(target, num_drafts, wrong_every) if num_drafts else None
    engine = make_engine(target, drafter, num_pages=num_pages, eos_ids=(target.eos,), **scheduler)
    engine.info["model"] = NAME
    engine.grammars = GrammarCompiler(tokenizer, target.vocab_size, (target.eos,))
    torch.set_num_threads(1)
    return engine, tokenizer, target
