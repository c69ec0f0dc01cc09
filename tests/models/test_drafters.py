"""What every drafter must hold to, and what the checkpoint loader must refuse.

A new drafter joins by one row in `CASES`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.batch import CommittedTokens, DraftProposal, KVSpec, Purpose
from emberline.drafters import DRAFTERS, Drafter, NGramDrafter
from emberline.drafters.checkpoint import read_draft_config
from emberline.models.weights import ModelError

from support.drafter_world import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LENGTHS,
    RANK,
    TAPS,
    TARGET_LAYERS,
    VOCAB,
    WIDE,
    TinyTarget,
    World,
    load,
)
from support.tiny_eagle3 import eagle3_config, eagle3_tensors


def draft_config(**changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 256,
        "layer_types": ["full_attention"] * LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "target_layer_ids": list(TAPS),
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return {name: value for name, value in {**raw, **changes}.items() if value is not None}


def draft_tensors(head: str | None = "vanilla", *, bias: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    shapes = {"fc": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    outs = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    biases: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        for name, out in outs.items():
            shapes[f"{at}self_attn.{name}_proj"] = (out, HIDDEN)
        shapes[f"{at}self_attn.o_proj"] = (HIDDEN, HEADS * HEAD_DIM)
        if bias:
            for name, out in {**outs, "o": HIDDEN}.items():
                biases[f"{at}self_attn.{name}_proj.bias"] = random(out)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}self_attn.{name}"] = (HEAD_DIM,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[at + name] = (HIDDEN,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}mlp.{name}"] = (WIDE, HIDDEN)
        shapes[f"{at}mlp.down_proj"] = (HIDDEN, WIDE)
    if head is not None:
        shapes["markov_head.markov_w1"] = shapes["markov_head.markov_w2"] = (VOCAB, RANK)
        shapes["confidence_head.proj"] = (1, HIDDEN + RANK)
        biases["confidence_head.proj.bias"] = random(1)
    if head == "gated":
        shapes["markov_head.gate_proj"] = (RANK, HIDDEN + RANK)
        biases["markov_head.gate_proj.bias"] = random(RANK)
    if head == "rnn":
        shapes["markov_head.joint_proj"] = (3 * RANK, 2 * RANK + HIDDEN)
        biases["markov_head.joint_proj.bias"] = random(3 * RANK)
    tensors = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 1:
            tensors[name] = 1 + tensor
    return {**tensors, **biases}


DFLASH = {"markov_rank": 0, "enable_confidence_head": False}
ZLAB: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "markov_rank": None,
    "markov_head_type": None,
    "enable_confidence_head": None,
    "confidence_head_with_markov": None,
    "target_layer_ids": None,
    "mask_token_id": None,
    "dflash_config": {"target_layer_ids": list(TAPS), "mask_token_id": VOCAB - 1},
}
CASES: dict[str, Callable[[Path], Drafter]] = {
    "dspark": lambda path: load(path, draft_config(), draft_tensors()),
    "dspark-gated": lambda path: load(path, draft_config(), draft_tensors("gated")),
    "dspark-rnn": lambda path: load(path, draft_config(), draft_tensors("rnn")),
    "dspark-bias": lambda path: load(
        path, draft_config(attention_bias=True), draft_tensors(bias=True)
    ),
    "dspark-short": lambda path: load(path, draft_config(), draft_tensors(), num_draft_tokens=2),
    "dspark-bfloat16": lambda path: load(
        path, draft_config(), draft_tensors(), dtype=torch.bfloat16
    ),
    "dflash": lambda path: load(path, draft_config(**DFLASH), draft_tensors(None)),
    "dflash-shifted": lambda path: load(path, draft_config(**ZLAB), draft_tensors(None)),
    "eagle3": lambda path: load(path, eagle3_config(), eagle3_tensors()),
    "eagle3-two": lambda path: load(
        path, eagle3_config(num_hidden_layers=2), eagle3_tensors(num_layers=2)
    ),
    "eagle3-bfloat16": lambda path: load(
        path, eagle3_config(), eagle3_tensors(), dtype=torch.bfloat16
    ),
    "ngram": lambda _path: NGramDrafter(num_draft_tokens=4, min_match=1),
}


@pytest.fixture(params=CASES)
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    return CASES[request.param](tmp_path / "draft")


EVERYONE, MIXED = [0, 1, 2, 3], [0.0, 0.7, 1.0, 1.3]


def assert_same_rows(ours: DraftProposal, row: int, theirs: DraftProposal, other: int) -> None:
    assert ours.num_drafted[row] == theirs.num_drafted[other]
    assert torch.equal(ours.token_ids[row], theirs.token_ids[other])
    for name in ("logits", "confidence"):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left[row], right[other], atol=1e-5, rtol=0)


def test_every_algorithm_is_covered(tmp_path: Path) -> None:
    assert {name.split("-")[0] for name in CASES} == set(DRAFTERS)
    for name, build in CASES.items():
        assert type(build(tmp_path / name)) is DRAFTERS[name.split("-")[0]]


def test_proposal_has_the_promised_shape(drafter: Drafter) -> None:
    proposal = World(drafter).observe_all().propose(EVERYONE, MIXED)
    most = drafter.max_draft_tokens
    assert proposal.token_ids.shape == (4, most)
    assert proposal.token_ids.dtype == proposal.num_drafted.dtype == torch.int64
    assert ((proposal.token_ids >= 0) & (proposal.token_ids < VOCAB)).all()
    assert ((proposal.num_drafted >= 0) & (proposal.num_drafted <= most)).all()
    if proposal.logits is not None:
        assert proposal.logits.shape == (4, most, VOCAB)
        assert proposal.logits.dtype == torch.float32
        assert proposal.logits.isfinite().all()
    if proposal.confidence is not None:
        assert proposal.confidence.shape == (4, most)
        assert proposal.confidence.dtype == torch.float32
        assert ((proposal.confidence >= 0) & (proposal.confidence <= 1)).all()


def test_q_is_what_was_drawn_from(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    proposal = world.propose(EVERYONE, MIXED)
    if proposal.logits is None:
        assert not world.draws.seen  # a point mass needs no randomness
        return
    drawn = {}
    for logits, keys, ids in world.draws.seen:
        for row in range(len(ids)):
            key = (int(keys.seeds[row]), int(keys.positions[row]), int(keys.purposes[row]))
            assert key not in drawn, "two draws shared their noise"
            drawn[key] = (logits[row], int(ids[row]))
    assert len(drawn) == 3 * drafter.max_draft_tokens
    for req in EVERYONE:
        for slot in range(drafter.max_draft_tokens):
            logits, token = proposal.logits[req, slot], int(proposal.token_ids[req, slot])
            if MIXED[req] == 0:
                assert token == int((logits == logits.max()).nonzero()[0])
                continue
            purpose = Purpose.TARGET if req % 2 else Purpose.DRAFT
            from_logits, drawn_id = drawn[req * 1000 + 17, LENGTHS[req] + slot + 1, int(purpose)]
            assert torch.equal(from_logits, logits)
            assert drawn_id == token


def test_logits_only_when_somebody_reads_them(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    full = world.propose(EVERYONE, MIXED)
    bare = world.propose(EVERYONE, MIXED, need_logits=False)
    assert bare.logits is None
    assert torch.equal(bare.token_ids, full.token_ids)


def test_result_ignores_neighbours_and_page_ids(drafter: Drafter) -> None:
    together = World(drafter).observe_all().propose(EVERYONE, MIXED)
    other = World(drafter, page_seed=9).observe_all()
    for reqs in ([0], [1], [2], [3], [2, 0], [3, 1]):
        proposal = other.propose(reqs, [MIXED[req] for req in reqs])
        for row, req in enumerate(reqs):
            assert_same_rows(proposal, row, together, req)


def test_temperature_of_a_neighbour_changes_nothing(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    mixed, greedy = world.propose(EVERYONE, MIXED), world.propose(EVERYONE, [0.0] * 4)
    assert_same_rows(mixed, 0, greedy, 0)
    assert_same_rows(mixed, 2, world.propose(EVERYONE, [0.0, 0.0, 1.0, 0.0]), 2)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_context_in_chunks_is_the_context_at_once(drafter: Drafter, chunk: int) -> None:
    at_once = World(drafter).observe_all().propose(EVERYONE, MIXED)
    chunked = World(drafter, page_seed=5).observe_all(chunk).propose(EVERYONE, MIXED)
    for req in EVERYONE:
        assert_same_rows(chunked, req, at_once, req)


def test_what_lies_past_the_anchor_is_not_read(drafter: Drafter) -> None:
    world = World(drafter).observe_all()
    clean = world.propose(EVERYONE, MIXED)
    for req, length in enumerate(LENGTHS):
        world.tokens[req, length + 1 :] = 0
        junk = torch.full((12, len(TAPS) * HIDDEN), 1e3)
        world.observe(req, length, length + 12, junk)
    dirty = world.propose(EVERYONE, MIXED)
    for req in EVERYONE:
        assert_same_rows(dirty, req, clean, req)


def test_context_is_read(drafter: Drafter) -> None:
    if not drafter.taps:
        pytest.skip("has no context but the token list")
    world = World(drafter).observe_all()
    before = world.propose([2], [0.0])
    world.observe(2, 0, 1, torch.full((1, len(TAPS) * HIDDEN), -1.0))
    after = world.propose([2], [0.0])
    assert before.logits is not None
    assert after.logits is not None
    assert not torch.allclose(before.logits, after.logits, atol=1e-4)


def test_observing_nothing_is_allowed(drafter: Drafter) -> None:
    World(drafter).observe(0, 0, 0)


# What the block drafters promise beyond that.


def test_fewer_drafts_are_a_prefix(tmp_path: Path) -> None:
    whole = World(CASES["dspark"](tmp_path / "a")).observe_all().propose(EVERYONE, MIXED)
    short = World(CASES["dspark-short"](tmp_path / "b")).observe_all().propose(EVERYONE, MIXED)
    assert torch.equal(short.token_ids, whole.token_ids[:, :2])
    assert short.logits is not None
    assert whole.logits is not None
    torch.testing.assert_close(short.logits, whole.logits[:, :2])
    with pytest.raises(ModelError, match=r"in \[1, 5\].*got 6"):
        load(tmp_path / "c", draft_config(), draft_tensors(), num_draft_tokens=6)


def test_shifted_slots_are_the_same_slots_one_later(tmp_path: Path) -> None:
    anchor = World(CASES["dflash"](tmp_path / "a")).observe_all().propose(EVERYONE, [0.0] * 4)
    shifted = World(CASES["dflash-shifted"](tmp_path / "b")).observe_all()
    assert shifted.drafter.max_draft_tokens == BLOCK - 1
    assert torch.equal(shifted.propose(EVERYONE, [0.0] * 4).token_ids, anchor.token_ids[:, 1:])


class DoubleTarget(TinyTarget):
    """In float64, where what two row counts round differently is far under a tolerance."""

    def __init__(self, min_rows: int) -> None:
        super().__init__()
        self.min_rows = min_rows

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.matrix.double().T


def test_padding_slots_are_not_seen(tmp_path: Path) -> None:
    a, b = (
        World(
            load(
                tmp_path / str(min_rows),
                draft_config(),
                draft_tensors(),
                DoubleTarget(min_rows),
                dtype=torch.float64,
            )
        )
        .observe_all()
        .propose(EVERYONE, MIXED)
        for min_rows in (1, 8)
    )
    for req in EVERYONE:
        assert_same_rows(a, req, b, req)


def test_coupling_is_a_purpose_not_a_seed(tmp_path: Path) -> None:
    world = World(CASES["dflash"](tmp_path)).observe_all()
    apart = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.DRAFT)]))
    coupled = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.TARGET)]))
    assert torch.equal(apart.logits, coupled.logits)
    assert not torch.equal(apart.token_ids, coupled.token_ids)


def test_confidence_without_the_previous_token(tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :HIDDEN]
    narrow = World(load(tmp_path / "narrow", draft_config(), tensors)).observe_all()
    wide = World(CASES["dspark"](tmp_path / "wide")).observe_all()
    for world, same in ((narrow, True), (wide, False)):
        a, b = (world.propose([1], [2.0], seeds=torch.tensor([seed])) for seed in (1, 2))
        assert not torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.confidence, b.confidence) is same


def test_confidence_head_is_optional(tmp_path: Path) -> None:
    tensors = {n: t for n, t in draft_tensors().items() if not n.startswith("confidence")}
    drafter = load(tmp_path, draft_config(enable_confidence_head=False), tensors)
    assert World(drafter).observe_all().propose([0], [0.0]).confidence is None


TEMPERATURES = (0.5, 2.0, 1.0, 0.25, 4.0)


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_calibration_divides_each_position_s_logit(
    tmp_path: Path, num_draft_tokens: int | None
) -> None:
    def propose(name: str, temperatures: tuple[float, ...] | None) -> DraftProposal:
        drafter = load(tmp_path / name, draft_config(), draft_tensors(),
                       num_draft_tokens=num_draft_tokens, temperatures=temperatures)  # fmt: skip
        return World(drafter).observe_all().propose(EVERYONE, MIXED)

    plain, ones = propose("plain", None), propose("ones", (1.0,) * BLOCK)
    calibrated = propose("calibrated", TEMPERATURES)
    assert plain.confidence is not None
    assert ones.confidence is not None
    assert calibrated.confidence is not None
    assert torch.equal(ones.confidence, plain.confidence)
    used = torch.tensor(TEMPERATURES)[: plain.confidence.shape[1]]
    expected = torch.sigmoid(torch.logit(plain.confidence) / used)
    torch.testing.assert_close(calibrated.confidence, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(calibrated.confidence, plain.confidence, atol=1e-2)
    # The drafts and what they were drawn from are untouched.
    assert torch.equal(calibrated.token_ids, plain.token_ids)
    assert torch.equal(calibrated.logits, plain.logits)


def test_a_calibration_of_another_block_is_refused(tmp_path: Path) -> None:
    for num_draft_tokens in (None, 2):
        with pytest.raises(ModelError, match=r"with 2 temperatures, but its block has 5 drafts"):
            load(tmp_path, draft_config(), draft_tensors(), num_draft_tokens=num_draft_tokens,
                 temperatures=(1.0, 2.0))  # fmt: skip


def test_a_calibration_without_confidences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="calibrated, but without confidences"):
        load(tmp_path, draft_config(**DFLASH), draft_tensors(None), temperatures=TEMPERATURES)


def same_drafts(ours: Drafter, theirs: Drafter) -> bool:
    a, b = (World(d).observe_all().propose(EVERYONE, MIXED) for d in (ours, theirs))
    assert a.logits is not None
    assert b.logits is not None
    return torch.equal(a.token_ids, b.token_ids) and torch.allclose(a.logits, b.logits, atol=1e-5)


@pytest.mark.parametrize("prefix", ["module.", "draft_model.", "module.model.", "model."])
def test_wrapper_prefixes_are_stripped(tmp_path: Path, prefix: str) -> None:
    named = {prefix + name: tensor for name, tensor in draft_tensors().items()}
    plain = CASES["dspark"](tmp_path / "plain")
    assert same_drafts(load(tmp_path / "named", draft_config(), named), plain)


def test_specforge_config_and_legacy_names(tmp_path: Path) -> None:
    nested = ("target_layer_ids", "mask_token_id", "markov_rank", "enable_confidence_head")
    raw = draft_config()
    raw["dflash_config"] = {name: raw.pop(name) for name in nested} | {"projector_type": "dspark"}
    raw["architectures"] = ["DSparkDraftModel"]
    heads = ("markov_head", "confidence_head")
    named = {
        f"logit_head.{name}" if name.startswith(heads) else name: tensor
        for name, tensor in draft_tensors().items()
    }
    plain = CASES["dspark"](tmp_path / "plain")
    assert same_drafts(load(tmp_path / "specforge", raw, named), plain)


def test_int8_tensors_are_dequantised(tmp_path: Path) -> None:
    packed, plain = draft_tensors(), draft_tensors()
    for name in ("fc.weight", "layers.1.mlp.down_proj.weight", "markov_head.markov_w2.weight"):
        scale = packed[name].abs().amax(1) / 127
        packed[name] = (packed[name] / scale[:, None]).round().to(torch.int8)
        packed[name + "_scale"] = scale
        plain[name] = packed[name].float() * scale[:, None]
    quantised = load(tmp_path / "int8", draft_config(), packed)
    assert same_drafts(quantised, load(tmp_path / "float", draft_config(), plain))


def test_own_embedding_and_head(tmp_path: Path) -> None:
    target, plain = TinyTarget(), CASES["dspark"](tmp_path / "plain")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.matrix}
    copied = load(tmp_path / "copied", draft_config(), {**draft_tensors(), **copies}, target)
    assert same_drafts(copied, plain)
    # A copy is not kept: what drafts is the target's own.
    target.matrix = target.matrix.roll(1, 0)
    assert not same_drafts(copied, plain)
    for name, tensor in copies.items():
        other = {name: tensor.roll(1, 0)}
        own = load(tmp_path / name, draft_config(), {**draft_tensors(), **other})
        assert not same_drafts(own, plain)


def test_config_alone_tells_taps_block_and_kv(tmp_path: Path) -> None:
    CASES["dflash-shifted"](tmp_path)
    config = read_draft_config(tmp_path)
    assert config.taps == TAPS
    assert config.max_draft_tokens == BLOCK - 1
    assert config.kv_spec == KVSpec(LAYERS, KV_HEADS, HEAD_DIM)


CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown class": ({"architectures": ["BertModel"]}, "BertModel is not a draft"),
    "no class": ({"architectures": None}, "None is not a draft"),
    "gemma": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4 backbone is not supported"),
    "eagle": ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-3"),
    "domino class": ({"architectures": ["DominoDraftModel"]}, "Domino"),
    "domino": ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
    "speculators": ({"speculators_model_type": "dspark"}, "speculators dialect"),
    "deepseek": ({"dspark_block_size": 5}, "DeepSeek-V4"),
    "causal": ({"dflash_config": {"causal": True}}, "causal block"),
    "sliding": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    "sliding flag": (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 64},
        "sliding-window",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "growing rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "change with the length",
    ),
    "no rope": ({"rope_parameters": None}, "'rope_theta' is missing"),
    "no mask": ({"mask_token_id": None}, "'mask_token_id' is missing"),
    "no block": ({"block_size": None}, "'block_size' is missing"),
    "no taps": ({"target_layer_ids": []}, "rise strictly"),
    "unsorted taps": ({"target_layer_ids": [1, 1, 3]}, "rise strictly"),
    "taps too deep": ({"target_layer_ids": [0, 1, 4]}, "beyond 4 layers"),
    "shifted markov": ({"architectures": ["DFlashDraftModel"]}, "predicts nothing at the anchor"),
    "other vocabulary": ({"vocab_size": 41}, "vocabulary"),
    "other width": ({"hidden_size": 16, "num_attention_heads": 2}, "hidden size of 16"),
    "other depth": ({"num_target_layers": 6}, "target of 6 layers, not of 4"),
    "fewer taps": ({"target_layer_ids": [1, 3]}, "do not fill fc.weight's 96 columns"),
    "head missing": ({}, "markov_head.markov_w1.weight' is missing"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_config_refusals_say_why(tmp_path: Path, case: str) -> None:
    changes, reason = CONFIG_REFUSALS[case]
    tensors = draft_tensors(None if case == "head missing" else "vanilla")
    with pytest.raises(ModelError) as raised:
        load(tmp_path, draft_config(**changes), tensors)
    assert reason in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_taps_deeper_than_this_target(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="taps layer 5, the target has 4 layers"):
        load(
            tmp_path,
            draft_config(num_target_layers=None, target_layer_ids=[0, 1, 5]),
            draft_tensors(),
        )


TENSOR_REFUSALS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "left over": ({"extra.weight": torch.zeros(2)}, "extra.weight"),
    "reduced": ({"d2t": torch.zeros(20, dtype=torch.int64)}, "reduced draft vocabularies"),
    "reduced head": ({"lm_head.weight": torch.zeros(20, HIDDEN)}, "reduced draft vocabularies"),
    "w1 rows": ({"markov_head.markov_w1.weight": torch.zeros(41, RANK)}, "vocabulary of 41"),
    "misshapen": ({"norm.weight": torch.zeros(HIDDEN + 1)}, "'norm.weight' has shape"),
    "confidence": ({"confidence_head.proj.weight": torch.zeros(1, 7)}, "confidence_head"),
    "no scale": ({"fc.weight": torch.zeros(HIDDEN, 96, dtype=torch.int8)}, "needs its scales"),
    "twice": ({"model.norm.weight": torch.zeros(HIDDEN)}, "two tensors are called 'norm.weight'"),
}


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_tensor_refusals_say_why(tmp_path: Path, case: str) -> None:
    changes, reason = TENSOR_REFUSALS[case]
    with pytest.raises(ModelError) as raised:
        load(tmp_path, draft_config(), {**draft_tensors(), **changes})
    assert reason in str(raised.value)


def test_shifted_class_with_a_markov_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="predicts nothing at the anchor"):
        load(tmp_path, draft_config(**ZLAB), draft_tensors())


def test_block_draft_needs_taps(tmp_path: Path) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    committed = CommittedTokens(*[nothing] * 7, None)
    with pytest.raises(ValueError, match="needs the target's taps"):
        CASES["dflash"](tmp_path).observe(committed)
