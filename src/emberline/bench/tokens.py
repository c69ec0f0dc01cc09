"""Counting the tokens of texts, for servers that do not say."""

from __future__ import annotations

from pathlib import Path

from emberline.bench.metrics import TokenCounter
from emberline.bench.settings import BenchError


def token_counter(name: str) -> TokenCounter:
    """Tokens of a text by the tokenizer of a folder, a tokenizer.json or a Hugging Face id.

    A text taken apart again may have another number of tokens than the model wrote.

    Raises:
        BenchError: no such tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = (
            Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        )
    except Exception as problem:  # the library raises bare Exceptions
        reason = " ".join(str(problem).split())[:200]
        wanted = "give a folder with a tokenizer.json or a Hugging Face id"
        raise BenchError(f"--tokenizer {name}: {wanted} ({reason})") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
