"""Synthesis, and the commands `train` and `export` from a target folder to a draft."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from emberline.cli import make_app
from emberline.models.weights import read_json
from emberline.train.config import SynthesisConfig
from emberline.train.dataset import Role, load_rows
from emberline.train.pipeline import choose_mask
from emberline.train.question_split import is_reserved
from emberline.train.recipe import read_recipe
from emberline.train.synthesize import (
    Split,
    Starts,
    TurnTaker,
    make_starts,
    read_script,
    synthesize,
)
from emberline.train.target import FrozenTarget

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<spare_1>", "<spare_2>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STOPS = (2, 0)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that can chat: byte tokens, special tokens, a template."""
    folder = tmp_path_factory.mktemp("chat")
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<spare_1>", "<spare_2>"],
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=[2, 0],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(chat_folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(chat_folder)


def test_script_is_read_from_the_template(tokenizer: PreTrainedTokenizerFast):
    script = read_script(tokenizer, STOPS)
    assert script.before_user == "<|im_start|>user\n"
    assert tokenizer.decode(script.to_answer) == "\n<|im_start|>assistant\n"
    assert tokenizer.decode(script.to_user) == "\n<|im_start|>user\n"
    assert script.stop_ids == (2, 0)


def test_template_without_stop_tokens_is_refused(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ValueError, match="do not end with a stop token"):
        read_script(tokenizer, (0,))


def test_mask_token_is_a_special_one_that_nobody_uses(tokenizer: PreTrainedTokenizerFast):
    assert choose_mask(tokenizer, STOPS) == tokenizer.convert_tokens_to_ids("<spare_2>")
    with pytest.raises(ValueError, match="--mask-token-id"):
        choose_mask(tokenizer, range(len(SPECIAL)))


def test_turns_follow_the_script(chat_folder: Path, tokenizer: PreTrainedTokenizerFast):
    target = FrozenTarget(chat_folder, torch.device("cpu"))
    script = read_script(tokenizer, STOPS)
    config = SynthesisConfig(batch_size=16, seq_len=120, user_limit=6, plain_fraction=0.2)
    taker = TurnTaker(target, script, config)

    def often_stop(logits: torch.Tensor, temperature: torch.Tensor, noise: torch.Tensor):
        coin = noise[:, 0]
        return torch.where(coin < 0.1, 2, torch.where(coin < 0.15, 0, 70))

    taker.pick = often_stop
    torch.manual_seed(0)
    starts = make_starts(tokenizer, script, config, random.Random(0))
    taker.begin(starts)
    for position in range(119):
        taker.step(position)
    pieces = {Role.USER: list(script.to_answer), Role.ANSWER: list(script.to_user)}
    for row, length, first in zip(range(16), starts.lens.tolist(), starts.roles, strict=True):
        tokens, roles = taker.tokens[row].tolist(), taker.roles[row].tolist()
        assert tokens[:length] == starts.tokens[row, :length].tolist()
        assert not any(roles[:length])
        at, role, written = length, Role(int(first)), 0
        while at < 120:
            cut = role == Role.USER and written >= 6
            assert roles[at] == (Role.FORCED if cut else role)
            at, written = at + 1, written + 1
            if tokens[at - 1] in STOPS and role != Role.PLAIN:
                piece = pieces[role][: 120 - at]
                assert tokens[at : at + len(piece)] == piece
                assert not any(roles[at : at + len(piece)])
                at, written = at + len(piece), 0
                role = Role.ANSWER if role == Role.USER else Role.USER
            assert written <= 7 or role != Role.USER


def test_synthesis_keeps_what_is_there(
    chat_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    target = FrozenTarget(chat_folder, torch.device("cpu"))
    config = SynthesisConfig(rounds=2, batch_size=4, seq_len=64)
    said: list[str] = []
    synthesize(target, tokenizer, tmp_path, config, STOPS, 2, said.append)
    assert [line.split(":")[0] for line in said] == ["held_out_000", "train_000", "train_001"]
    before = load_rows(tmp_path, "train")
    assert before.tokens.shape == (8, 64)
    assert load_rows(tmp_path, "held_out").num_rows == 2
    (tmp_path / "train_001.safetensors").unlink()
    synthesize(target, tokenizer, tmp_path, config, STOPS, 2, said.append)
    assert len(said) == 4
    assert torch.equal(load_rows(tmp_path, "train").tokens, before.tokens)


def test_synthesis_goes_on_with_the_same_settings_alone(
    chat_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    target = FrozenTarget(chat_folder, torch.device("cpu"))
    config = SynthesisConfig(rounds=1, batch_size=4, seq_len=48)

    def sample(folder: str, held_out: int = 2, **changes: int) -> Path:
        wanted = replace(config, **changes)
        synthesize(target, tokenizer, tmp_path / folder, wanted, STOPS, held_out, lambda _: None)
        return tmp_path / folder

    sample("a")
    for changes, message in (
        ({"seed": 1}, "sampled with seed 0, not 1"),
        ({"seq_len": 32}, "sampled with seq_len 48, not 32"),
        ({"held_out": 3}, "sampled with held_out_rows 2, not 3"),
    ):
        with pytest.raises(ValueError, match=message):
            sample("a", **changes)
    other = FrozenTarget(chat_folder, torch.device("cpu"))
    other.layers[1].down.mul_(1.5)
    with pytest.raises(ValueError, match="sampled with model"):
        synthesize(other, tokenizer, tmp_path / "a", config, STOPS, 2)
    assert load_rows(tmp_path / "a", "train").num_rows == 4
    longer, whole = sample("a", rounds=2), sample("b", rounds=2)
    aside = sample("c", rounds=2, held_out=0)
    for name in ("train_000.safetensors", "train_001.safetensors"):
        assert (longer / name).read_bytes() == (whole / name).read_bytes()
        assert (aside / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(ValueError, match="holds 2 rounds, and rounds is 1"):
        sample("a")
    (whole / "synthesis.json").unlink()
    with pytest.raises(ValueError, match="says what it was sampled with"):
        sample("b", rounds=2)


def test_an_unfinished_synthesis_is_not_trained_on(
    chat_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    class Killed(BaseException): ...

    def kill(_: str) -> None:
        raise Killed

    target = FrozenTarget(chat_folder, torch.device("cpu"))
    config = SynthesisConfig(rounds=2, batch_size=4, seq_len=48)
    with pytest.raises(Killed):
        synthesize(target, tokenizer, tmp_path, config, STOPS, 0, kill)
    with pytest.raises(FileNotFoundError, match="the synthesis is not done"):
        load_rows(tmp_path, "train")
    synthesize(target, tokenizer, tmp_path, config, STOPS, 0, lambda _: None)
    assert load_rows(tmp_path, "train").num_rows == 8


def test_held_out_rows_begin_with_questions_that_no_training_row_is_given(
    tokenizer: PreTrainedTokenizerFast,
):
    script = read_script(tokenizer, STOPS)
    config = SynthesisConfig(batch_size=400, seq_len=4096, plain_fraction=0.3)

    def texts(split: Split) -> tuple[Starts, list[str]]:
        starts = make_starts(tokenizer, script, config, random.Random(1), split)
        rows = zip(starts.tokens.tolist(), starts.lens.tolist(), strict=True)
        return starts, [str(tokenizer.decode(row[:length])) for row, length in rows]

    def asked(all_texts: list[str]) -> list[str]:
        turns = [text.split("<|im_start|>user\n")[1] for text in all_texts if "assistant" in text]
        return [turn.split("<|im_end|>")[0] for turn in turns]

    held_out, aside = texts("held_out")
    train, given = texts("train")
    assert set(held_out.roles.tolist()) == {Role.ANSWER}
    assert all(map(is_reserved, asked(aside)))
    assert len(asked(given)) > 100
    assert not any(map(is_reserved, asked(given)))
    # A plain opening has one greedy continuation: it is always sampled.
    plain = train.roles == Role.PLAIN
    assert int(plain.sum()) > 50
    assert train.temperatures[plain].unique().tolist() == [1.0]
    assert len(train.temperatures[~plain].unique()) == 3


def test_a_template_without_a_system_role_has_no_other_system_prompts(
    tokenizer: PreTrainedTokenizerFast,
):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + TEMPLATE
    )
    script = read_script(strict, STOPS)
    assert script.other_systems == ()
    assert script.before_user == read_script(tokenizer, STOPS).before_user
    config = SynthesisConfig(batch_size=50, system_fraction=1.0)
    starts = make_starts(strict, script, config, random.Random(0))
    assert "system" not in str(strict.decode(starts.tokens.flatten()))
    assert len(read_script(tokenizer, STOPS).other_systems) > 1


def test_commands_from_target_to_draft(chat_folder: Path, tmp_path: Path):
    run, runner = tmp_path / "run", CliRunner()
    sizes = "--steps 4 --seqs 4 --anchors 4 --rounds 1 --sample-batch 8 --seq-len 64 --held-out 4"
    shape = "--layers 1 --block-size 3 --markov-rank 4 --taps 0,2 --device cpu"
    words = [str(run), "--model", str(chat_folder), *sizes.split(), *shape.split()]
    result = runner.invoke(make_app("train"), ["train", *words])
    assert result.exit_code == 0, result.output
    draft = load_file(run / "draft" / "model.safetensors")
    assert draft["markov_head.markov_w1.weight"].shape == (261, 4)
    assert (run / "metrics.png").stat().st_size > 1000
    followed = read_recipe(run / "run.toml", {})
    assert (followed.training.steps, followed.synthesis.seq_len) == (4, 64)
    assert followed.draft["target_layer_ids"] == (0, 2)
    assert followed.draft["mask_token_id"] == 4
    # The recipe that was written is the run's: with it there is nothing left to do.
    words = [str(run), "--model", str(chat_folder), "--config", str(run / "run.toml")]
    again = runner.invoke(make_app("train"), ["train", *words, "--device", "cpu"])
    assert again.exit_code == 0, again.output
    assert "resuming at step 4" in again.output
    out = tmp_path / "int8"
    words = [str(out), "--source", str(run), "--format", "int8"]
    result = runner.invoke(make_app("export"), ["export", *words])
    assert result.exit_code == 0, result.output
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.int8
    words = [str(tmp_path / "full"), "--source", str(out), "--model", str(chat_folder)]
    result = runner.invoke(make_app("export"), ["export", *words])
    assert result.exit_code == 0, result.output
    full = load_file(tmp_path / "full" / "model.safetensors")
    assert full["lm_head.weight"].dtype == torch.bfloat16
    assert full.keys() == draft.keys()


def test_eagle3_from_a_recipe_on_states_that_are_kept(chat_folder: Path, tmp_path: Path):
    run, runner = tmp_path / "run", CliRunner()
    recipe = Path(__file__).parents[2] / "recipes" / "eagle3.toml"
    sizes = "--steps 3 --seqs 4 --anchors 4 --rounds 1 --sample-batch 8 --seq-len 64 --held-out 2"
    words = [str(run), "--model", str(chat_folder), "--config", str(recipe), *sizes.split()]
    words += ["--device", "cpu", "--set", "data.features=cached", "--set", "optim.ema=0.9"]
    result = runner.invoke(make_app("train"), ["train", *words])
    assert result.exit_code == 0, result.output
    assert "nothing is measured on 2 held-out rows: a measure takes 4" in result.output
    assert "train: states of 8 rows" in result.output
    assert (run / "features" / "held_out_000.safetensors").exists()
    draft = load_file(run / "draft" / "model.safetensors")
    assert draft["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * draft["norm.weight"].shape[0]
    config = read_json(run / "draft" / "config.json")
    assert (config["architectures"], config["ttt_length"]) == (["Qwen3Eagle3Model"], 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--taps", "one"], "--taps must be numbers"),
        (["--taps", "3,9"], "layer 9 is not one of 4"),
        (["--rounds", "1", "--sample-batch", "2", "--seq-len", "64"], "a step needs 32"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: list[str], message: str, chat_folder: Path, tmp_path: Path
):
    base = [str(tmp_path), "--model", str(chat_folder), "--device", "cpu", "--held-out", "0"]
    if "--rounds" not in words:
        words = [*words, "--rounds", "1", "--sample-batch", "2", "--seq-len", "32"]
    result = CliRunner().invoke(make_app("train"), ["train", *base, *words])
    assert result.exit_code == 2
    assert message in result.output
