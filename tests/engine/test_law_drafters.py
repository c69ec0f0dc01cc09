"""The law again, with drafters that are models: what they say of their draws is what they did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, KVSpec
from emberline.drafters import Drafter, Eagle3Drafter, StandaloneDrafter
from emberline.drafters.eagle3_backbone import Eagle3Backbone, Eagle3Config
from emberline.models.decoder import Decoder
from emberline.models.decoder_config import DecoderConfig
from emberline.models.rotary import RopeTable
from emberline.models.weights import Weights
from emberline.types import SamplingParams
from emberline.verify.planner import VerifyAll

from support.doubles import Prefix
from support.law import PAGE, Speculation, assert_lawful

VOCAB, WIDTH, HEAD_DIM, NUM_PAGES = 3, 8, 4, 4096
KV_SHAPE = {"dtype": torch.float64, "device": "cpu", "num_pages": NUM_PAGES, "page_size": PAGE}


class Caught:
    """A drafter in steps that begin in the middle: it observes what came before, then drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.max_draft_tokens = drafter.max_draft_tokens
        self.taps: tuple[int, ...] = ()
        self.kv_spec: KVSpec | None = None
        generator = torch.Generator().manual_seed(1)
        self.states = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)

    def propose(self, context: DraftContext) -> DraftProposal:
        lens = context.positions
        req = torch.repeat_interleave(torch.arange(len(lens)), lens)
        positions = torch.cat([torch.arange(length) for length in lens.tolist()])
        tokens = context.history[context.req_index]
        self.drafter.observe(
            CommittedTokens(
                lens=lens,
                page_table=context.page_table,
                token_ids=tokens[req, positions],
                following_ids=tokens[req, positions + 1],
                positions=positions,
                slot_mapping=context.page_table[req, 0] * PAGE + positions,
                req_index=context.req_index[req],
                taps=self.states[tokens[req, positions]] if self.drafter.taps else None,
            )
        )
        return self.drafter.propose(context)

    def observe(self, committed: CommittedTokens) -> None:
        pass


class RandomWeights(Weights):
    """Whatever tensor is asked for, at the size that is asked for."""

    def __init__(self) -> None:
        super().__init__({}, "random")
        self.generator = torch.Generator().manual_seed(2)

    def take(self, name: str, shape: object = None) -> Tensor:
        size = list(shape)  # type: ignore[call-overload]
        tensor = torch.randn(size, generator=self.generator, dtype=torch.float64)
        return 1 + 0.1 * tensor if len(size) == 1 else tensor

    def has(self, name: str) -> bool:
        return "norm" in name


def eagle3() -> Drafter:
    rope = RopeTable(torch.tensor([1.0, 0.1]), 1.0, None)
    config = Eagle3Config(
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope=rope,
        attention_bias=False,
        taps=(0,),
        num_target_layers=None,
        max_draft_tokens=2,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    weights = RandomWeights()
    embedding, head = (weights.take(name, (VOCAB, WIDTH)) for name in ("embedding", "head"))
    backbone = Eagle3Backbone(
        config, weights, embed=lambda ids: embedding[ids], tap_width=WIDTH, **KV_SHAPE
    )
    return Eagle3Drafter(backbone, lambda hidden: 0.5 * hidden @ head.T)


def standalone() -> Drafter:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": PAGE,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        }
    )
    model = Decoder.load(config, RandomWeights(), taps=(), **KV_SHAPE)
    return StandaloneDrafter(model, PAGE, 2)


MODELS: dict[str, Callable[[], Drafter]] = {"eagle3": eagle3, "standalone": standalone}


def no_repeats(output: Prefix) -> set[int]:
    return {0, 1, 2} - set(output[-1:])


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("model", MODELS)
def test_three_tokens_have_the_targets_law(model: str, rule: str) -> None:
    params = SamplingParams(accept=rule, temperature=0.8)  # type: ignore[arg-type]
    assert_lawful(Speculation(Caught(MODELS[model]()), VerifyAll(), params))


@pytest.mark.parametrize("model", MODELS)
def test_under_a_grammar(model: str) -> None:
    params = SamplingParams(accept="rejection")
    assert_lawful(Speculation(Caught(MODELS[model]()), VerifyAll(), params, allowed=no_repeats))


@pytest.mark.parametrize("model", MODELS)
def test_drafts_depend_on_what_was_drawn_before(model: str) -> None:
    """Else the law would be tested with independent draws only."""
    drafter = Caught(MODELS[model]())
    seen: dict[int, Tensor] = {}

    class Fixed:
        """Draws the first slot as told, the second as it comes."""

        def __init__(self, first: int) -> None:
            self.first = first

        def categorical(self, logits: Tensor, keys: object) -> Tensor:
            return torch.full((len(logits),), self.first)

    for first in range(VOCAB):
        context = DraftContext(
            num_drafts=2,
            req_index=torch.tensor([0]),
            anchors=torch.tensor([0]),
            positions=torch.tensor([2]),
            page_table=torch.tensor([[1]]),
            history=torch.tensor([[2, 0, 0]]),
            temperatures=torch.tensor([1.0]),
            seeds=torch.tensor([0]),
            purposes=torch.tensor([1]),
            need_logits=True,
            draws=Fixed(first),  # type: ignore[arg-type]
        )
        logits = drafter.propose(context).logits
        assert logits is not None
        seen[first] = logits[0, 1].softmax(-1)
    assert (seen[0] - seen[1]).abs().max() > 0.02
    assert (seen[1] - seen[2]).abs().max() > 0.02
