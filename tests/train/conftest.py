"""A tiny random target with sharp opinions, and rows that it wrote greedily."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from emberline.train.config import DraftConfig
from emberline.train.dataset import Role, TokenRows
from emberline.train.target import FrozenTarget, Lockstep

VOCAB = 64


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> FrozenTarget:
    return FrozenTarget(target_folder, torch.device("cpu"))


@pytest.fixture(scope="session")
def rows(target: FrozenTarget) -> TokenRows:
    """[16, 40] greedy continuations of different first tokens."""
    tokens = torch.zeros(16, 40, dtype=torch.int64)
    tokens[:, 0] = torch.arange(4, 20)
    lockstep = Lockstep(target, 16, 40)
    for position in range(39):
        tokens[:, position + 1] = lockstep.forward(tokens[:, position], position).argmax(-1)
    return TokenRows(tokens.int(), torch.full_like(tokens, int(Role.ANSWER)).to(torch.uint8))


@pytest.fixture
def draft(target: FrozenTarget) -> DraftConfig:
    return DraftConfig.for_target(
        target.config, mask_token_id=3, block_size=4, num_hidden_layers=2, markov_rank=8
    )
