"""Conformance with recorded runs of an independent DSpark implementation (`tests/golden`).

The target is plain transformers, run once over the recorded sequence: greedy verification only
ever needs the target's logits and layer outputs along the text that was really emitted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from emberline.batch import CommittedTokens, DraftContext, DraftProposal, KVSpec
from emberline.drafters import Drafter
from emberline.drafters.checkpoint import load_drafter, read_draft_config
from emberline.ops.kernels import Kernels, plain_kernels
from emberline.sampling.keys import KeyedDraws

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = ("vanilla", "gated", "rnn", "dflash", "eagle3")
PAGE_SIZE = 16
PAGES_PER_REQ = 8
MAX_LEN = PAGE_SIZE * PAGES_PER_REQ


class TransformersTarget:
    """Just enough of the target protocol to load a draft, on the reference modelling code."""

    row_granule = 8
    max_model_len = MAX_LEN

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.kv_spec = KVSpec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(token_ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.get_output_embeddings()(hidden).float()

    def run(self, token_ids: list[int], taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [L, V] and the tapped layers' raw outputs [L, A]."""
        states: dict[int, torch.Tensor] = {}
        hooks = [
            self.model.model.layers[tap].register_forward_hook(
                lambda _module, _args, output, tap=tap: states.__setitem__(tap, output)
            )
            for tap in taps
        ]
        logits = self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, torch.cat([logits[:, :0], *[states[tap][0] for tap in taps]], dim=-1)


@dataclass
class Run:
    """One prompt on its way: what is committed, and what every step did."""

    index: int
    logits: torch.Tensor
    taps: torch.Tensor
    tokens: list[int]
    num_prompt: int
    limit: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    draft_logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        # The recorder goes on as long as the anchor's position is within its output.
        return len(self.tokens) - 1 - self.num_prompt >= self.limit


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(GOLDEN / "target")


def extend(target: TransformersTarget, tokens: list[int], count: int) -> list[int]:
    """Greedy continuation: the last block of a recorded run reaches past its recorded output."""
    for _ in range(count):
        tokens = [*tokens, int(target.run(tokens, ())[0][-1].argmax())]
    return tokens


def observe(drafter: Drafter, run: Run, page_table: torch.Tensor, start: int, end: int) -> None:
    positions = torch.arange(start, end)
    following = torch.tensor([*run.tokens, 0])[start + 1 : end + 1]
    drafter.observe(
        CommittedTokens(
            lens=torch.tensor([end - start]),
            page_table=page_table[run.index][None],
            token_ids=torch.tensor(run.tokens[start:end]),
            following_ids=following,
            positions=positions,
            slot_mapping=page_table[run.index, positions // PAGE_SIZE] * PAGE_SIZE
            + positions % PAGE_SIZE,
            req_index=torch.full((end - start,), run.index),
            taps=run.taps[start:end],
        )
    )


def propose(drafter: Drafter, runs: list[Run], page_table: torch.Tensor) -> DraftProposal:
    index = torch.tensor([run.index for run in runs])
    history = torch.zeros(len(page_table), MAX_LEN, dtype=torch.int64)
    for run in runs:
        history[run.index, : len(run.tokens)] = torch.tensor(run.tokens)
    return drafter.propose(
        DraftContext(
            num_drafts=drafter.max_draft_tokens,
            req_index=index,
            anchors=torch.tensor([run.tokens[-1] for run in runs]),
            positions=torch.tensor([len(run.tokens) - 1 for run in runs]),
            page_table=page_table[index],
            history=history,
            temperatures=torch.zeros(len(runs)),
            seeds=torch.zeros(len(runs), dtype=torch.int64),
            purposes=torch.ones(len(runs), dtype=torch.int64),
            need_logits=True,
            draws=KeyedDraws(),
        )
    )


def commit(
    drafter: Drafter, run: Run, page_table: torch.Tensor, proposal: DraftProposal, row: int
) -> None:
    drafts = proposal.token_ids[row].tolist()
    start = len(run.tokens)
    choices = run.logits.argmax(-1)[start - 1 :].tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    run.steps.append(
        {
            "start": start - 1,
            "anchor": run.tokens[-1],
            "draft": drafts,
            "confidence": None
            if proposal.confidence is None
            else proposal.confidence[row].tolist(),
            "accepted": accepted,
            "next_token": choices[accepted],
        }
    )
    run.draft_logits.append(proposal.logits[row])
    run.tokens.extend([*drafts[:accepted], choices[accepted]])
    observe(drafter, run, page_table, start - 1, start + accepted)


def speculate(
    kind: str, target: TransformersTarget, together: bool, kernels: Kernels | None
) -> tuple[list[Run], Any]:
    folder = GOLDEN / kind
    trace = json.loads((folder / "trace.json").read_text())["traces"]
    taps = read_draft_config(folder).taps
    runs = []
    for index, recorded in enumerate(trace):
        prompt, output = recorded["prompt_ids"], recorded["output_ids"]
        whole = extend(target, prompt + output, 8)
        logits, states = target.run(whole, taps)
        first = int(logits[len(prompt) - 1].argmax())
        runs.append(Run(index, logits, states, [*prompt, first], len(prompt), len(output)))
    num_pages = 1 + len(runs) * PAGES_PER_REQ
    drafter = load_drafter(
        folder,
        target,
        dtype=torch.float32,
        device="cpu",
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_draft_tokens=None,
        kernels=kernels,
    )
    shuffled = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
    page_table = shuffled.view(len(runs), PAGES_PER_REQ)
    for run in runs:
        observe(drafter, run, page_table, 0, run.num_prompt // 2)
        observe(drafter, run, page_table, run.num_prompt // 2, run.num_prompt)
    for group in [runs] if together else [[run] for run in runs]:
        while active := [run for run in group if not run.done]:
            proposal = propose(drafter, active, page_table)
            for row, run in enumerate(active):
                commit(drafter, run, page_table, proposal, row)
    return runs, trace


@pytest.mark.parametrize(
    ("together", "kernels"),
    [(False, None), (True, None), (True, plain_kernels())],
    ids=["alone", "batched", "kernels"],
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_run_is_the_recorded_one(
    kind: str, together: bool, kernels: Kernels | None, target: TransformersTarget
) -> None:
    runs, trace = speculate(kind, target, together, kernels)
    tensors = load_file(GOLDEN / kind / "trace.safetensors")
    assert len(runs) == 5
    for run, recorded in zip(runs, trace, strict=True):
        output = run.tokens[run.num_prompt :]
        assert output[: run.limit] == recorded["output_ids"]
        assert len(run.steps) == len(recorded["steps"])
        for ours, theirs in zip(run.steps, recorded["steps"], strict=True):
            confidence, expected = ours.pop("confidence"), theirs.pop("confidence", None)
            assert ours == theirs
            assert (confidence is None) == (expected is None)
            if expected is not None:
                assert confidence == pytest.approx(expected, abs=1e-4)
        assert [s["accepted"] + 1 for s in run.steps] == recorded["accept_lengths"]
        for step in (0, 1) if kind != "eagle3" else ():  # its recorder kept no logits
            expected = tensors[f"p{run.index}.s{step}.draft_logits"]
            torch.testing.assert_close(run.draft_logits[step], expected, atol=1e-3, rtol=0)


@torch.inference_mode()
def test_target_logprobs_are_the_recorded_ones(target: TransformersTarget) -> None:
    for kind in KINDS:
        tensors = load_file(GOLDEN / kind / "trace.safetensors")
        trace = json.loads((GOLDEN / kind / "trace.json").read_text())["traces"]
        for index, recorded in enumerate(trace):
            tokens = recorded["prompt_ids"] + recorded["output_ids"]
            logprobs = target.run(tokens, ())[0][:-1].log_softmax(-1)
            ours = logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
            torch.testing.assert_close(ours, tensors[f"p{index}.token_logprobs"], atol=1e-4, rtol=0)
