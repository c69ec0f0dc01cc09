"""A tiny random target that chats: byte tokens, special ones, a template that ends its turns."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<spare_1>", "<spare_2>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STOPS = (2, 0)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|endoftext|>", "<spare_1>", "<spare_2>"],
        chat_template=TEMPLATE,
    )


def make_chat_target(
    folder: Path, scale: float = 0.02, hidden_size: int = 16, context_len: int = 256
) -> Path:
    """A model folder. A larger `scale` of the weights gives sharper opinions."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_len,
        initializer_range=scale,
        bos_token_id=1,
        eos_token_id=list(STOPS),
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
