"""Outside clients against real servers, each in a process of its own, on the default model.

`make test-clients` installs the clients and runs this folder; `make test` leaves it out. Nothing
here needs a connection: data are files beside the tests, the tokenizer is the model folder's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberline.hub import resolve_draft, resolve_model

from support.documented import commands
from support.program import Program, program

CLIENTS = Path(__file__).parents[2] / ".venv-clients" / "bin"
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
DOCUMENTED_URL = "http://127.0.0.1:8000"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "NO_PROXY": "127.0.0.1",
    "NO_COLOR": "1",
    "COLUMNS": "200",
}
# Float32 on one thread: bitwise the same answers with and without a draft.
SAME_BITS = ("--dtype", "float32", "--threads", "1")
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nYou may call these functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|im_end|>\n'
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The embedded model's folder, which is its tokenizer's as well."""
    return resolve_model(None, progress=False).path


@pytest.fixture(scope="session")
def drafted(logs: Path) -> Iterator[Program]:
    """The default model with its draft."""
    with program(logs / "drafted.log", *SAME_BITS) as served:
        yield served
        served.check()


@pytest.fixture(scope="session")
def plain(logs: Path) -> Iterator[Program]:
    """The same model, one token a step."""
    with program(logs / "plain.log", *SAME_BITS, "--draft", "none") as served:
        yield served
        served.check()


@pytest.fixture(scope="session")
def with_tools(
    logs: Path, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """The default model under a chat template that shows tools."""
    folder = tmp_path_factory.mktemp("tools") / "SmolLM2-135M-Tools"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).symlink_to(file)
    settings = json.loads((model_folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TOOL_TEMPLATE
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    draft = resolve_draft(None, resolve_model(None, progress=False))
    with program(logs / "tools.log", str(folder), "--draft", str(draft), *SAME_BITS) as served:
        yield served
        served.check()


@pytest.fixture(scope="session")
def documented(model_folder: Path) -> Callable[[str, Program], list[list[str]]]:
    """The page's commands of a program, against a running server."""

    def of(client: str, server: Program) -> list[list[str]]:
        replace = {DOCUMENTED_URL: server.url, "$MODEL": str(model_folder)}
        return commands(PAGE, client, replace)

    return of


@pytest.fixture(scope="session")
def run_client(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a client's program to its end; returns what it printed."""
    caches = tmp_path_factory.mktemp("caches")

    def run(*command: str | Path, cwd: Path, seconds: float = 900, offline: bool = True) -> str:
        path = CLIENTS / str(command[0])
        assert path.exists(), f"{path} is missing: run `make test-clients`"
        places = {"HF_HOME": str(caches), "HOME": str(caches)}
        environment = {**os.environ, **QUIET, **places, **(OFFLINE if offline else {})}
        done = subprocess.run(
            [path, *map(str, command[1:])],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout

    return run
