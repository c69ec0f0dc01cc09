"""Keys: who has none gets a 401 before anything is read, and no key is ever shown."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import typer

from emberline.cli.serve import read_keys
from emberline.server.api_keys import RequireKey, check_key

from support.serving import NAME, Server, saying_server, strict

KEYS = ["first-key", "second-key"]
WRONG = [
    "",
    "Bearer",
    "Bearer first",
    "Bearer first-key2",
    "Basic first-key",
    "first-key",
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with saying_server(options={"api_keys": KEYS}) as server:
        yield server


def authorized(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_every_route(guarded: Server, key: str) -> None:
    body = {"prompt": "free", "max_tokens": 2}
    assert guarded.http.post("/v1/completions", json=body, headers=authorized(key)).is_success
    assert guarded.http.get("/server_info", headers=authorized(key)).is_success
    lower = {"authorization": f"bearer {key}"}
    assert guarded.http.get("/v1/models", headers=lower).is_success


@pytest.mark.parametrize("header", [None, *WRONG])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/server_info"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/route"),
        ("GET", "/health/"),
    ],
)
def test_without_a_key_everything_is_a_401(
    guarded: Server, method: str, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header}
    answer = guarded.http.request(method, path, headers=headers)
    assert answer.status_code == 401
    error = strict(answer.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    challenge = answer.headers["www-authenticate"]
    assert challenge.startswith("Bearer ")
    assert ("invalid_token" in challenge) == (header is not None)
    other = header is not None and not header.startswith("Bearer ")
    assert ("scheme must be Bearer" in error["message"]) == other
    assert not any(key in answer.text for key in KEYS)


def test_two_headers_are_none(guarded: Server) -> None:
    headers = [("authorization", f"Bearer {key}") for key in KEYS]
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401


def test_health_and_metrics_stay_open(guarded: Server) -> None:
    for path in ("/health", "/metrics"):
        assert guarded.get(path).status_code == 200
    assert guarded.http.head("/health").status_code == 200


def test_a_body_without_a_key_is_not_waited_for(guarded: Server) -> None:
    host, port = guarded.url.removeprefix("http://").split(":")
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_the_official_client_says_who_it_is(guarded: Server) -> None:
    url = guarded.url + "/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS[1], max_retries=0) as client:
        assert client.models.retrieve(NAME).id == NAME
    with (
        openai.OpenAI(base_url=url, api_key="another", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refusal,
    ):
        client.models.list()
    assert refusal.value.code == "invalid_api_key"


def test_no_key_is_shown(guarded: Server) -> None:
    shown = [guarded.http.get(path, headers=authorized(KEYS[0])).text for path in
             ("/server_info", "/metrics", "/openapi.json", "/tokenizer_info")]  # fmt: skip
    assert strict(shown[0])["api_keys_needed"] is True
    guard = RequireKey(None, KEYS)  # type: ignore[arg-type]
    assert not any(key in text for key in KEYS for text in [*shown, repr(vars(guard))])


def test_without_keys_none_is_needed(server: Server) -> None:
    assert strict(server.get("/server_info").content)["api_keys_needed"] is False
    assert server.http.get("/v1/models", headers=authorized("anything")).is_success


@pytest.mark.parametrize("key", ["", "a b", "clé", "a\n"])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII") as refusal:
        check_key(key)
    assert not key or key not in str(refusal.value)


def test_keys_come_from_options_and_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n\n  another \n")
    assert read_keys(["given"], file) == ["given", "from-file", "another"]
    assert read_keys([], None) == []
    file.write_text("not a key\n")
    for given, path in ((["sec ret"], None), ([], file), ([], tmp_path / "none"), ([], tmp_path)):
        with pytest.raises(typer.Exit):
            read_keys(given, path)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "--api-key" in said
        assert "sec ret" not in said
        assert "not a key" not in said
    file.write_text("\n")
    with pytest.raises(typer.Exit):
        read_keys([], file)
    assert "holds no key" in capsys.readouterr().err
