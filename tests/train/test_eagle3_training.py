"""EAGLE-3 in the trainer: recorded drafts, what a chain may see, learning, export, decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from emberline.config import CacheConfig, EngineConfig, SpeculationConfig
from emberline.engine.build import build_engine
from emberline.train.acceptance import draft_block, measure
from emberline.train.config import DraftConfig, LossConfig, OptimConfig, TrainConfig
from emberline.train.dataset import TokenRows
from emberline.train.eagle3 import Eagle3Model
from emberline.train.export import checkpoint_tensors, read_draft, write_full
from emberline.train.features import make_batch, plan_step
from emberline.train.target import FrozenTarget
from emberline.train.trainer import CHECKPOINT, Trainer
from emberline.types import Request, SamplingParams

from support.engines import run
from support.trained import load_model

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def eagle(target: FrozenTarget) -> DraftConfig:
    return eagle_of(target)


def eagle_of(target: FrozenTarget) -> DraftConfig:
    return DraftConfig.for_target(
        target.config,
        algorithm="eagle3",
        block_size=4,
        num_hidden_layers=1,
        markov_rank=0,
        enable_confidence_head=False,
    )


def fresh(draft: DraftConfig, target: FrozenTarget) -> Eagle3Model:
    model = Eagle3Model(draft)
    model.initialise(target.embedding, seed=0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(10)  # so that every input shows in the output
    return model.requires_grad_(False)


def test_drafts_of_a_recorded_run():
    target = FrozenTarget(GOLDEN / "target", torch.device("cpu"))
    config, tensors = read_draft(GOLDEN / "eagle3")
    assert (config.algorithm, config.block_size) == ("eagle3", 7)
    assert config.step_loss_decay == 0.8
    model = load_model(config, tensors)
    generator, angles = torch.Generator(), model.angles(400)
    for trace in json.loads((GOLDEN / "eagle3" / "trace.json").read_text())["traces"]:
        ids = torch.tensor([trace["prompt_ids"] + trace["output_ids"]])
        taps, _ = target.features(ids, config.target_layer_ids)
        steps = [step for step in trace["steps"] if step["start"] < ids.shape[1]]
        anchors = torch.tensor([step["start"] for step in steps])
        many = [part.expand(len(steps), *part.shape[1:]) for part in (taps, ids)]
        drafts, _ = draft_block(target, model, *many, anchors, 0.0, generator, angles)
        assert drafts.tolist() == [step["draft"] for step in steps]


def test_teacher_forced_chains_are_those_that_draft(
    target: FrozenTarget, eagle: DraftConfig, rows: TokenRows
):
    model = fresh(eagle, target)
    batch, tokens = one_batch(target, eagle, rows)
    angles = model.angles(60)
    blocks = batch.blocks
    hidden = model(batch.taps, batch.embedded, blocks.positions, angles, batch.context)
    hidden = hidden.view(*blocks.labels.shape, -1)
    for seq, chain in ((0, 0), (1, 3), (3, 5)):
        anchor = int(blocks.anchors[seq, chain].clamp(min=1))
        # The target's states from the anchor on are noise: a chain must not read them.
        taps = batch.taps[seq : seq + 1].clone()
        taps[:, anchor:] = torch.randn(taps[:, anchor:].shape)
        embedded = target.embedding[tokens[seq : seq + 1, : anchor + 1]]
        chains = model.begin(taps[:, : anchor + 1], embedded, torch.tensor([[anchor]]), angles)
        for step in range(eagle.block_size):
            token = blocks.previous[seq, chain, step]
            found, chains = model.advance(chains, target.embedding[token][None, None])
            torch.testing.assert_close(found[0, 0], hidden[seq, chain, step], rtol=1e-4, atol=1e-5)


def one_batch(target: FrozenTarget, eagle: DraftConfig, rows: TokenRows) -> Any:
    index, generator = torch.arange(4), torch.Generator().manual_seed(0)
    plan = plan_step(rows, index, eagle, TrainConfig(anchors=6), generator)

    def features(_: torch.Tensor, tokens: torch.Tensor) -> Any:
        return target.features(tokens, eagle.target_layer_ids)

    return make_batch(plan, target, eagle, features), plan.tokens


def test_a_first_token_without_anything_before_it_is_not_trained_on(
    target: FrozenTarget, eagle: DraftConfig, rows: TokenRows
):
    generator = torch.Generator().manual_seed(0)
    plan = plan_step(rows, torch.arange(4), eagle, TrainConfig(anchors=36), generator)
    assert bool((plan.blocks.anchors == 0).any())
    assert not bool(plan.weights[plan.blocks.anchors == 0].any())
    ratios = plan.weights[0, 5] / plan.weights[0, 5, 0]
    assert ratios.tolist() == pytest.approx([1.0, 0.8, 0.64, 0.512])


@pytest.fixture(scope="module")
def trained(
    target: FrozenTarget, rows: TokenRows, tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    few = TokenRows(rows.tokens[:4], rows.roles[:4])
    config = TrainConfig(
        steps=150,
        seqs_per_step=4,
        anchors=24,
        eval_every=150,
        save_every=150,
        loss=LossConfig(0.0, 0.0, soft_ce=1.0),
        optim=OptimConfig(adam_lr=1e-2, warmup=10),
    )
    trainer = Trainer(target, eagle_of(target), config, few, few, tmp_path_factory.mktemp("run"))
    trainer.run()
    return trainer


def test_learns_its_rows_and_decodes_them(target: FrozenTarget, trained: Trainer):
    after = trained.evaluate()
    assert after is not None
    assert min(after["agreement"]) > 0.8
    draft, tensors = read_draft(trained.folder / CHECKPOINT)
    assert draft == trained.draft
    model = load_model(draft, tensors)
    tokens = trained.rows.tokens
    prompts = [row[:8].tolist() for row in tokens]
    for temperature, least in ((0.0, 3.5), (1.0, 1.4)):
        found = measure(target, model, prompts, 20, temperature, ())
        assert sum(one.emitted for one in found) / sum(one.steps for one in found) > least
    greedy = measure(target, model, prompts, 20, 0.0, ())
    assert [list(one.output_ids) for one in greedy] == tokens[:, 8:28].tolist()


def test_exported_draft_serves_as_it_was_trained(
    target: FrozenTarget, target_folder: Path, trained: Trainer, tmp_path: Path
):
    draft, tensors = read_draft(trained.folder / CHECKPOINT)
    write_full(tmp_path, draft, tensors, target.embedding, target.head)
    engine = build_engine(
        target_folder,
        tmp_path,
        EngineConfig(
            dtype="float32",
            threads=1,
            cache=CacheConfig(num_tokens=512),
            speculation=SpeculationConfig(planner="verify_all"),
        ),
        eos_ids=frozenset(),
    )
    tokens, params = trained.rows.tokens, SamplingParams(temperature=0, max_tokens=21)
    requests = [Request(str(n), tuple(tokens[n, :8].tolist()), params) for n in range(4)]
    answers = run(engine, requests)
    assert [answers[str(n)].token_ids for n in range(4)] == tokens[:, 8:29].tolist()
    model = load_model(draft, read_draft(tmp_path)[1])
    begun = [tokens[n, :9].tolist() for n in range(4)]  # the prefill emits a token
    found = measure(target, model, begun, 20, 0.0, ())
    assert engine.snapshot().num_verify_steps == sum(result.steps for result in found)


def test_exported_folder_has_the_names_of_the_dialect(
    target: FrozenTarget, eagle: DraftConfig, tmp_path: Path
):
    model = fresh(eagle, target)
    model.tap_scale.uniform_(0.5, 2.0)
    tensors = checkpoint_tensors(model.state_dict())
    write_full(tmp_path, eagle, tensors, target.embedding, target.head)
    raw = json.loads((tmp_path / "config.json").read_text())
    golden = json.loads((GOLDEN / "eagle3" / "config.json").read_text())
    for name in ("architectures", "ttt_length", "step_loss_decay", "draft_num_hidden_layers"):
        assert type(raw[name]) is type(golden[name]), name
    assert raw["architectures"] == golden["architectures"]
    assert raw["ttt_length"] == eagle.block_size
    assert not {"mask_token_id", "markov_rank", "block_size"} & raw.keys()
    config, own = read_draft(tmp_path)
    assert config == eagle
    assert own.keys() == read_draft(GOLDEN / "eagle3")[1].keys()
