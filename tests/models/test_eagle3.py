"""What EAGLE-3 promises beyond the conformance of every drafter: its options, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from emberline.batch import CommittedTokens, KVSpec, Purpose
from emberline.drafters import Eagle3Drafter
from emberline.drafters.checkpoint import read_draft_config
from emberline.models.weights import ModelError

from support.drafter_world import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTHS,
    TAPS,
    VOCAB,
    TinyTarget,
    World,
    load,
)
from support.tiny_draft import draft_config, draft_tensors
from support.tiny_eagle3 import STEPS, eagle3_config, eagle3_tensors

EPS = 1e-6
GREEDY = [0.0] * 4
EVERYONE = [0, 1, 2, 3]

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "two layers": ({"num_hidden_layers": 2}, {"num_layers": 2}),
    "three layers": ({"num_hidden_layers": 3}, {"num_layers": 3}),
    "no qk norm": ({}, {"qk_norm": False}),
    "bias": ({"attention_bias": True}, {"bias": True}),
    "norm before residual": ({"norm_before_residual": True}, {}),
    "norm of all taps": ({"norm_before_fc": True}, {"whole_norm": True}),
    "norm of each tap": ({"fc_norm": True}, {"tap_norms": True}),
    "normed output": ({"norm_output": True}, {}),
    "everything": (
        {
            "num_hidden_layers": 2,
            "attention_bias": True,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "fc_norm": True,
            "norm_output": True,
        },
        {"num_layers": 2, "bias": True, "whole_norm": True, "tap_norms": True},
    ),
    "reduced vocabulary": ({"draft_vocab_size": 17}, {"draft_vocab": 17}),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor, position: int) -> Tensor:
    """[heads, head_dim] at a position, by the definition: pairs (i, i + half) turn together."""
    half = HEAD_DIM // 2
    angle = position * 10000.0 ** (-torch.arange(half).double() / half)
    left, right = x[:, :half], x[:, half:]
    return torch.cat(
        (left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()), -1
    )


class ByHand:
    """One sequence in float64, an entry at a time, straight from the description."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.t = {name: x.double() for name, x in tensors.items()}
        target = TinyTarget()
        self.embedding = target.embedding.double()
        self.head = target.matrix.double()
        self.kv: list[list[tuple[Tensor, Tensor]]] = [
            [] for _ in range(config["num_hidden_layers"])
        ]

    def fused(self, taps: Tensor) -> Tensor:
        taps = taps.double()
        if self.config.get("norm_before_fc"):
            taps = norm(taps, self.t["input_norm.weight"])
        if self.config.get("fc_norm"):
            parts = taps.split(HIDDEN)
            names = [f"fc_norm.{i}.weight" for i in range(len(TAPS))]
            normed = [norm(part, self.t[n]) for part, n in zip(parts, names, strict=True)]
            taps = torch.cat(normed)
        return self.t["fc.weight"] @ taps

    def entry(self, hidden: Tensor, token: int, position: int) -> Tensor:
        """Append the entry (hidden, token); its output [D]."""
        for layer, kv in enumerate(self.kv):
            at = f"layers.{layer}."
            if layer == 0:
                normed = norm(hidden, self.t[at + "hidden_norm.weight"])
                embedded = norm(self.embedding[token], self.t[at + "input_layernorm.weight"])
                read = torch.cat((embedded, normed))
                hidden = normed if self.config.get("norm_before_residual") else hidden
            else:
                read = norm(hidden, self.t[at + "input_layernorm.weight"])
            hidden = hidden + self.attention(at, read, position, kv)
            normed = norm(hidden, self.t[at + "post_attention_layernorm.weight"])
            gate, up = (self.t[f"{at}mlp.{n}_proj.weight"] @ normed for n in ("gate", "up"))
            hidden = hidden + self.t[at + "mlp.down_proj.weight"] @ (F.silu(gate) * up)
        return hidden

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.t[name + ".weight"] @ x + self.t.get(name + ".bias", torch.zeros(1).double())

    def attention(
        self, at: str, read: Tensor, position: int, kv: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        q, k, v = (self.linear(f"{at}self_attn.{n}_proj", read).view(-1, HEAD_DIM) for n in "qkv")
        if f"{at}self_attn.q_norm.weight" in self.t:
            q = norm(q, self.t[f"{at}self_attn.q_norm.weight"])
            k = norm(k, self.t[f"{at}self_attn.k_norm.weight"])
        kv.append((rotated(k, position), v))
        share = HEADS // KV_HEADS
        keys = torch.stack([k for k, _ in kv]).repeat_interleave(share, 1)  # [n, heads, head_dim]
        values = torch.stack([v for _, v in kv]).repeat_interleave(share, 1)
        scores = torch.einsum("hd,nhd->hn", rotated(q, position), keys) / HEAD_DIM**0.5
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()
        return self.linear(f"{at}self_attn.o_proj", mixed)

    def logits(self, output: Tensor) -> Tensor:
        normed = norm(output, self.t["norm.weight"])
        if "d2t" not in self.t:
            return self.head @ normed
        ids = torch.arange(len(self.t["d2t"])) + self.t["d2t"].long()
        logits = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        logits[ids] = self.t["lm_head.weight"] @ normed
        return logits

    def draft(self, tokens: list[int], taps: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Greedy drafts after `tokens`, of which all but the last have taps."""
        anchor = len(tokens) - 1
        for t in range(anchor):
            output = self.entry(self.fused(taps[t]), tokens[t + 1], t)
        drafts, rows = [], []
        for k in range(count):
            rows.append(self.logits(output))
            drafts.append(int(rows[-1].argmax()))
            hidden = output
            if self.config.get("norm_output"):
                hidden = norm(output, self.t["norm.weight"])
            output = self.entry(hidden, drafts[-1], anchor + k)
        return drafts, torch.stack(rows)


@pytest.mark.parametrize("option", OPTIONS)
def test_drafts_are_those_of_the_description(tmp_path: Path, option: str) -> None:
    changes, built = OPTIONS[option]
    config, tensors = eagle3_config(**changes), eagle3_tensors(**built)
    world = World(load(tmp_path, config, tensors)).observe_all(chunk=9)
    proposal = world.propose(EVERYONE, GREEDY)
    assert proposal.logits is not None
    assert proposal.confidence is None
    for req, length in enumerate(LENGTHS):
        tokens = world.tokens[req, : length + 1].tolist()
        drafts, logits = ByHand(config, tensors).draft(tokens, world.taps[req], STEPS)
        assert proposal.token_ids[req].tolist() == drafts
        torch.testing.assert_close(proposal.logits[req].double(), logits, atol=2e-4, rtol=0)


def test_options_change_what_is_drafted(tmp_path: Path) -> None:
    """Each is compared with a description that could have left it out."""
    plain = World(load(tmp_path / "plain", eagle3_config(), eagle3_tensors())).observe_all()
    expected = plain.propose(EVERYONE, GREEDY).logits
    for name in ("norm_before_residual", "norm_output"):
        other = load(tmp_path / name, eagle3_config(**{name: True}), eagle3_tensors())
        logits = World(other).observe_all().propose(EVERYONE, GREEDY).logits
        assert not torch.allclose(expected, logits, atol=1e-2), name


def test_a_reduced_vocabulary_is_drawn_from_only(tmp_path: Path) -> None:
    tensors = eagle3_tensors(draft_vocab=17)
    known = set((torch.arange(17) + tensors["d2t"]).tolist())
    world = World(load(tmp_path, eagle3_config(draft_vocab_size=17), tensors)).observe_all()
    proposal = world.propose(EVERYONE, [2.0] * 4)
    assert proposal.logits is not None
    unknown = torch.tensor([i not in known for i in range(VOCAB)])
    assert proposal.logits[..., unknown].eq(-torch.inf).all()
    assert proposal.logits[..., ~unknown].isfinite().all()
    for seed in range(20):
        drawn = world.propose([1], [2.0], seeds=torch.tensor([seed])).token_ids
        assert set(drawn.flatten().tolist()) <= known


def test_own_tables_of_another_width(tmp_path: Path) -> None:
    """A draft narrower than its target needs an embedding and a head of its own."""
    narrow = HIDDEN // 2
    tensors = eagle3_tensors(width=narrow)
    config = eagle3_config(hidden_size=narrow)
    with pytest.raises(
        ModelError, match=r"hidden size of 16, the target's embedding has 32.*embed"
    ):
        load(tmp_path / "without", config, tensors)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, narrow)
    tensors["lm_head.weight"] = torch.randn(VOCAB, narrow)
    drafter = load(tmp_path / "with", config, tensors)
    proposal = World(drafter).observe_all().propose(EVERYONE, GREEDY)
    assert proposal.token_ids.shape == (4, STEPS)


class NarrowEmbeddings(TinyTarget):
    """A target whose embedding and head are half as wide as its layers, as some OPT models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = self.embedding[:, : HIDDEN // 2]
        self.matrix = self.matrix[:, : HIDDEN // 2]


def test_taps_are_as_wide_as_the_targets_layers(tmp_path: Path) -> None:
    """Not as its embedding: a draft of the embedding's width shares both tables."""
    narrow = HIDDEN // 2
    config, tensors = eagle3_config(hidden_size=narrow), eagle3_tensors(width=narrow)
    drafter = load(tmp_path / "narrow", config, tensors, NarrowEmbeddings())
    proposal = World(drafter).observe_all().propose(EVERYONE, GREEDY)
    assert proposal.logits is not None
    assert proposal.logits.isfinite().all()
    with pytest.raises(ModelError, match=r"hidden size of 32, the target's embedding has 16"):
        load(tmp_path / "eagle3", eagle3_config(), eagle3_tensors(), NarrowEmbeddings())
    with pytest.raises(ModelError, match=r"hidden size of 32, the target's embedding has 16"):
        load(tmp_path / "block", draft_config(), draft_tensors(), NarrowEmbeddings())


def test_fewer_drafts_are_a_prefix_and_more_go_on(tmp_path: Path) -> None:
    drafts = {}
    for count in (2, None, 9):
        drafter = load(
            tmp_path / str(count), eagle3_config(), eagle3_tensors(), num_draft_tokens=count
        )
        drafts[count] = World(drafter).observe_all().propose(EVERYONE, [0.0, 0.7, 1.0, 1.3])
        assert drafter.max_draft_tokens == (count or STEPS)
    assert torch.equal(drafts[2].token_ids, drafts[9].token_ids[:, :2])
    assert torch.equal(drafts[None].token_ids, drafts[9].token_ids[:, :STEPS])


def test_a_depth_below_the_maximum_changes_no_draft(tmp_path: Path) -> None:
    world = World(load(tmp_path, eagle3_config(), eagle3_tensors())).observe_all()
    whole = world.propose(EVERYONE, GREEDY)
    short = world.propose(EVERYONE, GREEDY, num_drafts=2)
    assert torch.equal(short.logits, whole.logits[:, :2])


def test_drafting_leaves_no_trace(tmp_path: Path) -> None:
    """What is drafted stands beside the pages: only commits write there."""
    drafter = load(tmp_path, eagle3_config(), eagle3_tensors())
    assert isinstance(drafter, Eagle3Drafter)
    world = World(drafter).observe_all()
    before = [(pool.keys.clone(), pool.values.clone()) for pool in drafter.kv_pools]
    first = world.propose(EVERYONE, GREEDY)
    for pool, (keys, values) in zip(drafter.kv_pools, before, strict=True):
        assert torch.equal(pool.keys, keys)
        assert torch.equal(pool.values, values)
    assert torch.equal(world.propose(EVERYONE, GREEDY).token_ids, first.token_ids)


def test_an_entry_knows_the_token_after_it(tmp_path: Path) -> None:
    """Why a match is shortened: the same tokens before another one have other entries."""
    drafter = load(tmp_path, eagle3_config(), eagle3_tensors())
    assert drafter.kv_spec == KVSpec(1, KV_HEADS, HEAD_DIM, lookahead=1)
    world = World(drafter).observe_all()
    before = world.propose([1], [0.0])
    world.tokens[1, LENGTHS[1]] += 1  # the anchor: the last entry's own token
    world.tokens %= VOCAB
    assert torch.equal(world.propose([1], [0.0]).logits, before.logits)
    world.observe(1, LENGTHS[1] - 1, LENGTHS[1])
    assert not torch.allclose(world.propose([1], [0.0]).logits, before.logits, atol=1e-3)


def test_requests_are_observed_together_as_alone(tmp_path: Path) -> None:
    drafter = load(tmp_path, eagle3_config(num_hidden_layers=2), eagle3_tensors(2))
    alone = World(drafter).observe_all().propose(EVERYONE, GREEDY)
    world = World(load(tmp_path, eagle3_config(num_hidden_layers=2), eagle3_tensors(2)))
    world.observe_together()
    together = world.propose(EVERYONE, GREEDY)
    assert torch.equal(together.token_ids, alone.token_ids)
    torch.testing.assert_close(together.logits, alone.logits, atol=1e-5, rtol=0)


def test_coupling_is_a_purpose(tmp_path: Path) -> None:
    world = World(load(tmp_path, eagle3_config(), eagle3_tensors())).observe_all()
    apart = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.DRAFT)]))
    coupled = world.propose([0], [1.0], purposes=torch.tensor([int(Purpose.TARGET)]))
    assert torch.equal(apart.logits[:, 0], coupled.logits[:, 0])
    assert not torch.equal(apart.token_ids, coupled.token_ids)


def test_config_alone_tells_taps_and_drafts(tmp_path: Path) -> None:
    load(tmp_path, eagle3_config(), eagle3_tensors())
    config = read_draft_config(tmp_path)
    assert config.taps == TAPS
    assert config.max_draft_tokens == STEPS


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "no steps": ({"ttt_length": 0}, {}, "ttt_length must be at least 1"),
    "unsorted taps": ({"target_layer_ids": [1, 1, 3]}, {}, "rise strictly"),
    "taps too deep": ({"target_layer_ids": [0, 1, 4]}, {}, "beyond 4 layers"),
    "activation": ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
    "capped head": (
        {"final_logit_softcapping": 30.0},
        {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)},
        "final_logit_softcapping 30.0 with a head of its own",
    ),
    "logit scale": ({"logit_scale": 0.5}, {}, "logit_scale 0.5"),
    "part of a head": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5"),
    "window": ({"sliding_window": 64}, {}, "sliding_window 64"),
    "other vocabulary": ({"vocab_size": 41}, {}, "vocabulary of 41, the target has 40"),
    "other depth": ({"num_target_layers": 6}, {}, "target of 6 layers, not of 4"),
    "fewer taps": ({"target_layer_ids": [1, 3]}, {}, "do not fill fc.weight's 96 columns"),
    "no map": ({"draft_vocab_size": 20}, {}, "vocabulary of 20 of 40 ids needs the map d2t"),
    "parallel": ({}, {"mask_hidden": torch.zeros(1, 1, 96)}, "P-EAGLE"),
    "left over": ({}, {"extra.weight": torch.zeros(2)}, "extra.weight"),
    "missing": ({}, {"layers.0.hidden_norm.weight": None}, "layers.0.hidden_norm.weight"),
    "missing norm": ({"norm_before_fc": True}, {}, "input_norm.weight"),
    "narrow": ({}, {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}, "q_proj"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_why(tmp_path: Path, case: str) -> None:
    changes, replaced, reason = REFUSALS[case]
    tensors = {**eagle3_tensors(), **replaced}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ModelError) as raised:
        load(tmp_path, eagle3_config(**changes), kept)
    assert reason in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("d2t", "reason"),
    [
        ([30] * 17, "d2t leads to id 46, the target's vocabulary has 40"),
        ([1, 0, *[0] * 15], "names a target id twice"),
    ],
)
def test_a_map_that_leads_astray_is_refused(tmp_path: Path, d2t: list[int], reason: str) -> None:
    tensors = eagle3_tensors(draft_vocab=17) | {"d2t": torch.tensor(d2t)}
    with pytest.raises(ModelError, match=reason):
        load(tmp_path, eagle3_config(draft_vocab_size=17), tensors)


def test_a_calibration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="calibrated, but without confidences"):
        load(tmp_path, eagle3_config(), eagle3_tensors(), temperatures=(1.0,) * STEPS)


def test_taps_are_needed(tmp_path: Path) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs the target's taps"):
        load(tmp_path, eagle3_config(), eagle3_tensors()).observe(
            CommittedTokens(*[nothing] * 7, None)
        )
