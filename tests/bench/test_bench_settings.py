"""Settings refuse what cannot be, by the option's name."""

from __future__ import annotations

from typing import Any

import pytest

from emberline.bench.settings import (
    BenchError,
    ClosedLoop,
    LoadSettings,
    OpenLoop,
    RandomPrompts,
    RequestSettings,
    ServerSettings,
)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_urls(end: str) -> None:
    settings = ServerSettings(base_url=f"http://host:8/api{end}")
    assert settings.root == "http://host:8/api"
    assert settings.url == "http://host:8/api/v1/chat/completions"


def test_headers_win_over_the_key_and_neither_is_shown() -> None:
    settings = ServerSettings(api_key="k", headers=(("X-A", "1"), ("Authorization", "secret")))
    assert settings.request_headers == {"x-a": "1", "authorization": "secret"}
    assert ServerSettings(api_key="k").request_headers == {"authorization": "Bearer k"}
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ServerSettings, {"base_url": "localhost:8000"}, "--base-url must be http"),
        (ServerSettings, {"base_url": "http://h:port"}, "--base-url must be http"),
        (ServerSettings, {"base_url": "http://u:p@h"}, "no query, fragment or user"),
        (ServerSettings, {"base_url": "http://a b"}, "--base-url must be http"),
        (ServerSettings, {"timeout": 0}, "--timeout"),
        (RequestSettings, {"max_tokens": 0}, "--max-tokens"),
        (RequestSettings, {"temperature": float("nan")}, "--temperature"),
        (RequestSettings, {"temperature": -1}, "--temperature"),
        (RequestSettings, {"logprobs": -1}, "--logprobs"),
        (RequestSettings, {"extra_body": {"stream": False}}, "--extra-body may not set 'stream'"),
        (RequestSettings, {"extra_body": {"n": 2}}, "--extra-body may not set 'n'"),
        (ClosedLoop, {"concurrency": 0}, "--concurrency"),
        (OpenLoop, {"request_rate": 0.0}, "--request-rate"),
        (LoadSettings, {}, "--num-requests and --duration"),
        (LoadSettings, {"num_requests": 1, "duration": 1.0}, "--num-requests and --duration"),
        (LoadSettings, {"num_requests": 0}, "--num-requests"),
        (LoadSettings, {"duration": 0.0}, "--duration"),
        (LoadSettings, {"duration": 1.0, "warmup": -1}, "--warmup"),
        (LoadSettings, {"duration": 1.0, "seed": -1}, "--seed"),
        (RandomPrompts, {"input_len": 0}, "--random-input-len"),
        (RandomPrompts, {"output_len": 0}, "--random-output-len"),
        (RandomPrompts, {"range_ratio": 1.0}, "--random-range-ratio"),
        (RandomPrompts, {"shared_prefix_len": -1}, "--shared-prefix-len"),
        (RandomPrompts, {"id_range": (5, 5)}, "--random-id-range"),
    ],
)
def test_refusals(kind: type, given: dict[str, Any], message: str) -> None:
    rest: dict[type, dict[str, Any]] = {
        LoadSettings: {"levels": (ClosedLoop(1),)},
        RandomPrompts: {"input_len": 1, "output_len": 1},
    }
    with pytest.raises(BenchError, match=message):
        kind(**{**rest.get(kind, {}), **given})
