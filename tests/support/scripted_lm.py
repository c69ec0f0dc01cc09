"""A server of both dialects over a language model that is a hash, with faults to switch on.

Fast and without an engine: what it says is computed from the request alone, so a check that fails
on it fails for what was switched on.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from support.fake_server import DONE, Asked, FakeServer, Reply, event, fake_server, json_reply

VOCAB = 30
Json = dict[str, Any]
OPENAI = ("/v1/completions", "/v1/chat/completions")
KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "logprobs", "seed", "n", "echo", "stream",
    "stream_options", "stop", "logit_bias", "frequency_penalty", "presence_penalty", "top_p",
    "return_tokens_as_token_ids", "ignore_eos", "logprob_token_ids", "stop_token_ids", "top_k",
    "messages", "top_logprobs",
}  # fmt: skip


@cache
def logits_after(last: tuple[int, ...]) -> tuple[float, ...]:
    draw = random.Random(str(last))
    return tuple(draw.gauss(0, 2) for _ in range(VOCAB))


def log_softmax(logits: Sequence[float]) -> list[float]:
    high = max(logits)
    total = high + math.log(sum(math.exp(x - high) for x in logits))
    return [x - total for x in logits]


@dataclass
class ScriptedLM:
    """`faults` are names; `unknown` is what happens to fields that it does not know."""

    faults: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    speculates: bool = False  # reads `speculate`
    lenient: bool = False
    native_only: bool = False
    openai_only: bool = False
    cumulative: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def answer(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return self._get(asked.path)
        body = asked.json
        prompt = str(body.get("prompt", body.get("text", body.get("input_ids"))))
        self.seen[prompt] += 1
        body["_again"] = self.seen[prompt] > 1
        if asked.path == "/generate" and not self.openai_only:
            return self._native(body)
        if self.native_only or asked.path not in OPENAI:
            return json_reply({"error": {"message": "no such route"}}, 404)
        if self.speculates and isinstance(body.get("speculate", True), bool):
            body["_drafts"] = body.pop("speculate", True)
        unknown = sorted(
            (body.keys() - KNOWN - {"_again", "_drafts"}) | (body.keys() & self.refuses)
        )
        if unknown and not self.lenient:
            return json_reply({"error": {"message": f"unknown field {unknown[0]}"}}, 400)
        if "crash" in self.faults and body.get("logit_bias"):
            return json_reply({"error": {"message": "out of order"}}, 500)
        if asked.path.endswith("chat/completions"):
            return self._chat(body)
        return self._completion(body)

    def _get(self, path: str) -> Reply:
        if path == "/v1/models":
            if "key" in self.faults:
                return json_reply({"error": {"message": "no key"}}, 401)
            return json_reply({"data": [{"id": "hash"}]})
        if path == "/server_info":
            return json_reply({"dtype": "float32", "max_draft_tokens": 2})
        return json_reply({}, 404)

    def row(self, ids: Sequence[int], body: Json) -> list[float]:
        row = log_softmax(logits_after(tuple(ids[-2:])))
        if "drift" in self.faults and body["_again"]:
            row[0] -= 0.01
        return row

    def generate(self, prompt: Sequence[int], body: Json, choice: int) -> tuple[list[int], str]:
        ids, out = list(prompt), []
        temperature = body.get("temperature", 1.0)
        seeded = body.get("seed") is not None and "no seeds" not in self.faults
        draw = random.Random(f"{body['seed']} {choice}") if seeded else random.Random()
        counts: Counter[int] = Counter()
        stop = body.get("stop") or []
        for _ in range(body["max_tokens"]):
            row = self.row(ids, body)
            if "no bias" not in self.faults:
                for key, bias in (body.get("logit_bias") or {}).items():
                    row[int(key)] += bias
            if "no penalties" not in self.faults:
                for key, count in counts.items():
                    row[key] -= count * body.get("frequency_penalty", 0)
                    row[key] -= body.get("presence_penalty", 0)
            if temperature == 0:
                best = sorted(range(VOCAB), key=lambda i: -row[i])
                drafted = "other greedy" in self.faults and body.get("_drafts") and len(out) == 2
                token = best[1 if drafted else 0]
            else:
                # The fault: what a lossy draft does, taking the likeliest where it should draw.
                lossy = "lossy" in self.faults and out
                warm = [x / (0.6 if lossy else temperature) for x in row]
                token = draw.choices(range(VOCAB), [math.exp(x) for x in log_softmax(warm)])[0]
            ids.append(token)
            out.append(token)
            counts[token] += 1
            if token in (body.get("stop_token_ids") or ()):
                return out, "stop"
            if any(text(out).endswith(one) for one in stop):
                return out, "stop"
        return out, "length"

    def records(self, ids: Sequence[int], start: int, body: Json, top: int) -> list[Json]:
        found = []
        for i in range(start, len(ids)):
            row = self.row(ids[:i], body)
            if "biased values" in self.faults:
                for key, bias in (body.get("logit_bias") or {}).items():
                    row[int(key)] += bias
                row = log_softmax(row)
            best = sorted(range(VOCAB), key=lambda k: -row[k])[:top]
            found.append({"id": ids[i], "value": row[ids[i]], "top": [(k, row[k]) for k in best],
                          "row": row})  # fmt: skip
        return found

    def _completion(self, body: Json) -> Reply:
        prompt = ids_of(body["prompt"])
        by_id = body.get("return_tokens_as_token_ids") and "no ids" not in self.faults
        choices, total = [], 0
        for index in range(body.get("n", 1)):
            out, reason = self.generate(prompt, body, index)
            total += len(out)
            ids = [*prompt, *out]
            start = 0 if body.get("echo") else len(prompt)
            records = self.records(ids, start, body, body.get("logprobs") or 0)
            if start == 0:
                records[0].update(value=None, top=None)
            if "other ids" in self.faults and body["_again"]:
                for one in records:
                    one["row"] = one["row"][::-1]
            if "two floats" in self.faults:
                records[-1]["said"] = records[-1]["value"] - 1e-7
            if "wrong token" in self.faults and start:
                wrong = (records[-1]["id"] + 1) % VOCAB
                records[-1].update(id=wrong, value=records[-1]["row"][wrong])
            said = cut(text(out), body.get("stop") or []) if reason == "stop" else text(out)
            choices.append(
                {
                    "index": index,
                    "text": (text(prompt) if body.get("echo") else "") + said,
                    "finish_reason": reason,
                    "logprobs": arrays(records, bool(by_id), body.get("logprob_token_ids") or ()),
                }
            )
        if "NaN" in self.faults:
            choices[0]["logprobs"]["token_logprobs"][0] = math.nan
        usage = {"prompt_tokens": len(prompt), "completion_tokens": total}
        if body.get("stream"):
            return Reply([*(event({"choices": [one]}) for one in choices),
                          event({"choices": [], "usage": usage}), DONE])  # fmt: skip
        return json_reply({"choices": choices, "usage": usage})

    def _chat(self, body: Json) -> Reply:
        prompt = ids_of(body["messages"][0]["content"])
        out, reason = self.generate(prompt, body, 0)
        entries = [
            entry(one["id"], one["value"])
            | {"top_logprobs": [entry(k, x) for k, x in self._listed(one["top"])]}
            for one in self.records([*prompt, *out], len(prompt), body, body["top_logprobs"])
        ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(out)}
        choice = {"index": 0, "finish_reason": reason, "logprobs": {"content": entries}}
        if body.get("stream"):
            chunk = {**choice, "delta": {"content": text(out)}}
            ends = [event({"choices": [], "usage": usage})] if body.get("stream_options") else []
            return Reply([event({"choices": [chunk]}), *ends, DONE])
        message = {"role": "assistant", "content": text(out)}
        return json_reply({"choices": [{**choice, "message": message}], "usage": usage})

    def _listed(self, top: list[Any]) -> list[Any]:
        return top[::-1] if "unsorted" in self.faults else top

    def _native(self, body: Json) -> Reply:
        params = body["sampling_params"]
        if "logprobs_mode" in body or body.keys() & self.refuses:
            return json_reply({"error": {"message": "unknown field"}}, 400)
        prompt = ids_of(body.get("text", body.get("input_ids")))
        plain = {**params, "_again": body["_again"], "max_tokens": params["max_new_tokens"],
                 "seed": params.get("sampling_seed")}  # fmt: skip
        replies = []
        for index in range(params.get("n", 1)):
            out, reason = self.generate(prompt, plain, index)
            replies.append(self._native_reply(prompt, out, reason, body, plain))
        if not body.get("stream"):
            return json_reply(replies if len(replies) > 1 else replies[0])
        whole = replies[0]
        events = []
        lists = [name for name in whole["meta_info"] if name.startswith("output_")]
        count = len(whole["meta_info"].get("output_token_logprobs", []))
        for end in range(1, count + 1):
            meta = dict(whole["meta_info"])
            for name in lists:
                meta[name] = meta[name][0 if self.cumulative else end - 1 : end]
            meta["completion_tokens"] = end
            events.append(event({"text": whole["text"][:end], "meta_info": meta}))
        return Reply([*events, DONE])

    def _native_reply(
        self, prompt: list[int], out: list[int], reason: str, body: Json, plain: Json
    ) -> Json:
        meta: Json = {
            "finish_reason": {"type": reason},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(out),
            "cached_tokens": 0,
        }
        top, ids = body.get("top_logprobs_num", 0), [*prompt, *out]
        if body.get("return_logprob"):
            start = body.get("logprob_start_len", -1)
            sides = [("output", len(prompt), ids)]
            if start >= 0:
                sides.append(("input", start, list(prompt)))
            for side, first, some in sides:
                records = self.records(some, first, plain, top)
                if side == "input":
                    records[0].update(value=None, top=None)
                meta[f"{side}_token_logprobs"] = [[r["value"], r["id"], None] for r in records]
                if top:
                    meta[f"{side}_top_logprobs"] = [
                        r["top"] and [[x, k, None] for k, x in r["top"]] for r in records
                    ]
                if body.get("token_ids_logprob"):
                    meta[f"{side}_token_ids_logprobs"] = [
                        [[r["row"][i % VOCAB], i, None] for i in body["token_ids_logprob"]]
                        for r in records
                    ]
        said = cut(text(out), plain.get("stop") or []) if reason == "stop" else text(out)
        return {"text": said, "meta_info": meta}


def ids_of(prompt: Any) -> list[int]:
    return [ord(c) % VOCAB for c in prompt] if isinstance(prompt, str) else list(prompt)


def text(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def cut(said: str, stops: Sequence[str]) -> str:
    return min((said[: said.find(one)] for one in stops if one in said), key=len, default=said)


def name(token: int, by_id: bool) -> str:
    return f"token_id:{token}" if by_id else text([token])


def entry(token: int, value: float) -> Json:
    return {"token": text([token]), "logprob": value, "bytes": list(text([token]).encode())}


def arrays(records: Sequence[Json], by_id: bool, chosen: Sequence[int]) -> Json:
    made: Json = {
        "tokens": [name(r["id"], by_id) for r in records],
        "token_logprobs": [r.get("said", r["value"]) for r in records],
        "top_logprobs": [
            None
            if r["top"] is None
            else {name(k, by_id): x for k, x in [*r["top"], (r["id"], r["value"])]}
            for r in records
        ],
        "text_offset": list(range(len(records))),
    }
    if chosen:
        made["token_id_logprobs"] = [{str(i): r["row"][i % VOCAB] for i in chosen} for r in records]
    return made


@contextlib.contextmanager
def scripted_server(lm: ScriptedLM) -> Iterator[FakeServer]:
    with fake_server(lm.answer) as server:
        yield server
