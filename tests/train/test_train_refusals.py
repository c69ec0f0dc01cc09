"""`emberline train` ends with one line that says what to change, before the work is begun."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.train import pipeline
from emberline.train.checkpoint import CHECKPOINT, target_digest
from emberline.train.dataset import Role, TokenRows
from emberline.train.recipe import read_recipe

from support.tiny_chat import make_chat_target

LENGTH = 24
SHAPE = "--layers 1 --block-size 3 --taps 0,2"
SIZES = f"--device cpu --steps 2 --seqs 4 --anchors 4 --markov-rank 4 {SHAPE}".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_target(tmp_path_factory.mktemp("refusals") / "target", scale=0.2)


def write_rows(place: Path, top: int = 200, seed: int = 0, split: str = "train") -> Path:
    """[8, LENGTH] random rows of one vocabulary."""
    place.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, top, (8, LENGTH), generator=generator, dtype=torch.int32)
    tokens[0, 0] = top - 1
    roles = torch.full((8, LENGTH), int(Role.ANSWER), dtype=torch.uint8)
    TokenRows(tokens, roles).save(place / f"{split}_000.safetensors")
    return place


def train(out: Path, *words: object) -> tuple[int, str]:
    result = CliRunner().invoke(make_app("train"), ["train", str(out), *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def refused(out: Path, *words: object) -> str:
    code, said = train(out, *words)
    assert code == 2, said
    assert said.startswith("emberline: ")  # nothing else: no bar, no traceback
    return said


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target's weights are loaded")

    monkeypatch.setattr(pipeline, "load_frozen", load)
    monkeypatch.setattr(pipeline, "FrozenTarget", load)


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--taps", "3,9"], "draft.target_layer_ids (--taps): layer 9 is not one of 4: they are 0"),
        (["--mask-token-id", "999"], "draft.mask_token_id 999 is outside the vocabulary"),
        (["--block-size", "0"], "draft.block_size must be at least 1, got 0"),
        (["--layers", "0"], "draft.num_hidden_layers must be at least 1, got 0"),
        (["--block-size", "30"], "draft.block_size 30 needs rows of 32 tokens, these have 24"),
        (["--seqs", "16"], "8 training rows; a step needs 16"),
        (["--accumulate", "3"], "train.seqs_per_step 4 must be a multiple of 3"),
        (["--data", "{tmp}/none"], "none: no such folder"),
        (["--data", "{tmp}/foreign"], "train rows hold token 499, the model's ids are 0 to 260"),
        (["--data", "{tmp}/mixed"], "rows of 20 tokens, those of train_000.safetensors have 24"),
        (["--data", "{tmp}/damaged"], "train_000.safetensors: cannot be read"),
        (["--data", "{tmp}/silent"], "have no token that the model wrote"),
        (["--device", "gpu"], "--device must be auto, cpu or cuda, got 'gpu'"),
        (["--device", "cuda:99"], "--device cuda:99: PyTorch finds"),
        (["--config", "{tmp}"], "cannot be read (Is a directory): give a TOML file"),
        (["--adam-lr", "nan"], "optim.adam_lr must be finite, got nan"),
        (["--set", "train.plain_weight=inf"], "train.plain_weight must be finite, got inf"),
        (["--set", "data.temperatures=[nan, 1.0, 1.0]"], "data.temperatures must be finite"),
        (["--set", "draft.step_loss_decay=nan"], "draft.step_loss_decay"),
        (["--set", "loss.ce=[[0, inf]]"], "loss.ce must be a finite number"),
        (
            ["--set", "loss.ce=0", "--set", "loss.l1=0"],
            "loss.ce: ce, l1, soft_ce, l1_sharp are",
        ),
        (["--set", "data.temperature_weights=[1.0]"], "data.temperature_weights must be one for"),
        (["--set", "optim.ema=1"], "optim.ema must be in [0, 1), got 1.0"),
        (["--set", "train.steps=3"], "train.steps is given twice"),
        (["--set", "train.log_every=3", "--set", "train.log_every=4"], "train.log_every is given"),
        (["--algorithm", "dflash"], "draft.markov_rank is 0 with dflash, got 4"),
    ],
)
def test_before_the_weights_are_loaded(
    words: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data")
    write_rows(tmp_path / "foreign", top=500)
    short = load_file(write_rows(tmp_path / "mixed") / "train_000.safetensors")
    short = {name: tensor[:, :20].contiguous() for name, tensor in short.items()}
    save_file(short, tmp_path / "mixed" / "train_001.safetensors")
    (write_rows(tmp_path / "damaged") / "train_000.safetensors").write_bytes(b"no rows")
    silent = load_file(write_rows(tmp_path / "silent") / "train_000.safetensors")
    silent["roles"] = torch.zeros_like(silent["roles"])
    save_file(silent, tmp_path / "silent" / "train_000.safetensors")
    words = [word.format(tmp=tmp_path) for word in words]
    base = ["--model", folder, *SIZES, "--data", data]
    assert message in refused(tmp_path / "run", *base, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cuda:99"], "--device cuda:99: PyTorch finds"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--seq-len", "257"], "--seq-len 257: the model's context is 256 tokens: use at most"),
        (["--sampler", "lockstep", "--seq-len", "257"], "--seq-len 257: the model's context is"),
        (["--limit", "3"], "--limit is of a file's prompts"),
    ],
)
def test_synthesis_is_refused_before_the_model_is_loaded(
    words: list[str], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberline.engine.build.build_engine", None)
    monkeypatch.setattr("emberline.train.target.FrozenTarget", None)
    base = ["synthesize", str(tmp_path / "rows"), "--model", str(folder), "--device", "cpu"]
    result = CliRunner().invoke(make_app("train"), ["train", *base, *words])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not (tmp_path / "rows").exists()


@pytest.mark.usefixtures("without_weights")
def test_text_of_its_own_is_checked_before_it_is_sampled(folder: Path, tmp_path: Path) -> None:
    base = ["--model", folder, *SIZES]
    few = ["--set", "data.rounds=1", "--set", "data.batch_size=2", "--set", "data.seq_len=64"]
    assert "2 training rows; a step needs 4" in refused(tmp_path / "run", *base, *few)
    said = refused(tmp_path / "run", *base, "--set", "data.seq_len=4")
    assert "draft.block_size 3 needs rows of 5 tokens, these have 4" in said
    said = refused(tmp_path / "run", *base, "--set", "data.seq_len=257")
    assert "data.seq_len 257: the model's context is 256" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm", "dflash", "--markov-head", "rnn"],
        ["--algorithm", "eagle3", "--markov-head", "gated"],
        ["--algorithm", "eagle3", "--mask-token-id", "3"],
        ["--algorithm", "eagle3", "--set", "loss.decay=2"],
        ["--set", "draft.step_loss_decay=0.5"],
        ["--markov-rank", "0", "--markov-head", "rnn"],
    ],
)
def test_what_an_algorithm_has_no_use_for_is_refused(words: list[str], tmp_path: Path) -> None:
    assert "leave it out" in refused(tmp_path / "run", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = -5", ["--steps", "3"]),
        ("[draft]\nblock_size = 0", ["--block-size", "3"]),
        ('[draft]\nmarkov_head_type = "odd"', ["--markov-head", "rnn"]),
    ],
)
def test_what_an_option_replaces_has_to_be_right(
    text: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    key = text.split("\n")[1].split()[0]
    assert f".{key} must be" in refused(tmp_path / "run", "--config", path, *words)


def test_dflash_is_what_its_run_says(folder: Path, tmp_path: Path) -> None:
    data, run = write_rows(tmp_path / "data"), tmp_path / "run"
    sizes = " ".join(SIZES).replace("--markov-rank 4 ", "").split()
    base = ["--model", folder, "--data", data]
    code, said = train(run, *base, *sizes, "--algorithm", "dflash")
    assert code == 0, said
    assert "Loading weights" not in said
    text = (run / "run.toml").read_text()
    assert 'algorithm = "dflash"' in text
    for key in ("markov", "confidence", "step_loss_decay"):
        assert key not in text
    assert read_recipe(run / "run.toml", {}).draft["markov_rank"] == 0
    code, said = train(run, *base, "--config", run / "run.toml", "--device", "cpu")
    assert code == 0, said
    assert "resuming at step 2" in said


@pytest.fixture
def done(folder: Path, tmp_path: Path) -> Path:
    data, run = write_rows(tmp_path / "data"), tmp_path / "run"
    code, said = train(run, "--model", folder, "--data", data, *SIZES)
    assert code == 0, said
    return run


def fine_tuned(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] *= 1.001


def test_a_run_goes_on_with_its_own_target_and_rows_alone(
    done: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    fine_tuned(tensors)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    before = (done / CHECKPOINT).read_bytes()
    more = [*SIZES, "--steps", "4"]
    data, rows = tmp_path / "data", write_rows(tmp_path / "rows", seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "load_frozen", None)
        said = refused(done, "--model", other, "--data", data, *more)
        assert "was made with another target (--model); give the same again, or another" in said
        said = refused(done, "--model", folder, "--data", rows, *more)
        assert "was made with other training rows (--data); give the same again" in said
        said = refused(done, "--model", folder, "--data", data, *more, "--seed", "1")
        assert "was made with train.seed 0, it is 1 now (--seed); give the same again" in said
        said = refused(done, "--model", folder, "--data", data, *more, "--markov-rank", "8")
        assert "another shape: markov_rank 4 there, 8 now; give the same again" in said
    assert (done / CHECKPOINT).read_bytes() == before
    moved = shutil.copytree(data, tmp_path / "moved")
    code, said = train(done, "--model", folder, "--data", moved, *more)
    assert code == 0, said
    assert "resuming at step 2" in said


def test_a_digest_follows_the_weights_and_not_the_files(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")

    def written(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
        copy = shutil.copytree(folder, tmp_path / name)
        own = {key: tensor.clone() for key, tensor in tensors.items()}
        change(own)
        (copy / "model.safetensors").unlink()
        names = sorted(own)
        for number, part in enumerate((names[:7], names[7:])):
            save_file({key: own[key] for key in part}, copy / f"part_{number}.safetensors")
        return target_digest(copy)

    assert written("split", lambda own: None) == target_digest(folder)
    assert written("tuned", fine_tuned) != target_digest(folder)


def test_a_run_that_breaks_stops_and_keeps_its_checkpoint(
    done: Path, folder: Path, tmp_path: Path
) -> None:
    before = (done / CHECKPOINT).read_bytes()
    shutil.rmtree(done / "draft")
    lines = (done / "metrics.jsonl").read_text()
    base = ["--model", folder, "--data", tmp_path / "data", *SIZES, "--steps", "9"]
    code, said = train(done, *base, "--muon-lr", "1e38", "--adam-lr", "1e38")
    assert code == 2, said
    assert "the loss or its gradients are not finite any more; the checkpoint of step 2" in said
    assert "emberline: step " in said
    assert "lower optim.muon_lr" in said
    assert (done / CHECKPOINT).read_bytes() == before
    assert not (done / "draft").exists()
    assert (done / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 48 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_want_of_memory_says_what_to_lower(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise problem

    monkeypatch.setattr("emberline.cli.train._train_draft", run_out)
    result = CliRunner().invoke(make_app("train"), ["train", str(tmp_path / "out"), *SIZES])
    assert result.exit_code == 2
    assert "not enough memory: lower --sample-batch" in " ".join(result.output.split())


def test_any_other_fault_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_badly(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("emberline.cli.train._train_draft", fail_badly)
    result = CliRunner().invoke(make_app("train"), ["train", str(tmp_path / "out"), *SIZES])
    assert isinstance(result.exception, RuntimeError)
