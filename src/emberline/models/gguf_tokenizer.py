"""Tokenizer files of a model folder from the vocabulary inside a GGUF file.

Owns the choice of pre-tokenizer, the special tokens, the stop ids and the files
``tokenizer.json`` and ``tokenizer_config.json``. It must not know the model's architecture. A
pre-tokenizer that is not in the table is refused: a near miss tokenizes most text correctly and
silently gives other ids for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from emberline.models.weights import ModelError

__all__ = ["save_tokenizer", "special_ids", "stop_ids"]

# The published split patterns of each family, named as llama.cpp names them in the file.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_QWEN2 = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _SYMBOLS, _SPACES))
_LLAMA3 = "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_TEKKEN = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _SPACES,
    )
)
SPLIT_PATTERNS = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "tekken": _TEKKEN,
}
GPT2_STYLE = ("gpt-2", "default")  # the pattern is the one built into ByteLevel
DIGIT_STYLE = ("smollm", "starcoder")  # GPT-2's, after every digit is set apart
NFC_STYLE = ("qwen2", "deepseek-r1-qwen")
WHOLE_WORD_STYLE = ("llama-bpe", "llama3", "tekken")  # a word in the vocabulary is not merged

# Control tokens that end a turn whatever the file's eos id is: chat files name only one.
END_OF_TURN = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
    }
)
SPM_SPACE = "\u2581"
ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Ids of bos, eos, unk and pad, those that the file names and the vocabulary holds."""
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    found = {
        short: metadata.get(f"tokenizer.ggml.{long}_token_id") for short, long in ID_KEYS.items()
    }
    return {key: int(i) for key, i in found.items() if i is not None and 0 <= i < num_tokens}


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every id that ends a generation, the file's own eos first."""
    tokens, types = _vocabulary(metadata)
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    turns = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == TokenType.CONTROL and token in END_OF_TURN
    ]
    ids = dict.fromkeys([int(i) for i in named if i is not None] + turns)
    return [i for i in ids if 0 <= i < len(tokens)]


def save_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` that transformers opens as is.

    Raises:
        ModelError: the vocabulary is absent, or of a kind whose exact rules are not known here.
    """
    tokens, types = _vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types)
    else:
        raise ModelError(
            f"tokenizer model {model!r} of this GGUF file is not supported (gpt2 and llama are)"
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
            or (kind == TokenType.UNKNOWN and model == "llama")
        ]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"the vocabulary of {len(tokens)} tokens names some of them twice")
    _post_process(tokenizer, metadata, tokens, bytes_first=model == "gpt2")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = _tokenizer_config(metadata, tokens)
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("this GGUF file carries no vocabulary; use the folder of the model")
    types = metadata.get("tokenizer.ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens but {len(types)} token types in the GGUF file")
    return tokens, types


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("this GGUF file has a byte-level vocabulary but no merges")
    # A merge is "left right"; in these vocabularies a piece never holds a plain space.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=pre in WHOLE_WORD_STYLE))
    if pre in NFC_STYLE:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str | None) -> pre_tokenizers.PreTokenizer:
    if pre in GPT2_STYLE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in DIGIT_STYLE:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if pre in SPLIT_PATTERNS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_PATTERNS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(sorted((*SPLIT_PATTERNS, *GPT2_STYLE, *DIGIT_STYLE)))
    raise ModelError(
        f"pre-tokenizer {pre!r} of this GGUF file is not known here ({known} are); "
        f"use the Hugging Face folder of the model"
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError("this GGUF file has a sentencepiece vocabulary but no scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = special_ids(metadata).get("unk", 0)
    bpe = BPE(
        vocab,
        _merges_from_scores(vocab, scores, types),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPM_SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPM_SPACE), spaces]) if prefix else spaces
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPM_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_from_scores(
    vocab: Mapping[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, best score of the whole first.

    Sentencepiece merges whichever neighbours form the best-scored piece, which is the same as
    trying merges in this order.
    """
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for piece, i in vocab.items():
        if types[i] != TokenType.NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], i, vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _adds(metadata: Mapping[str, Any], which: str) -> bool:
    """Whether encoding adds bos or eos; files that do not say follow llama.cpp's defaults."""
    said = metadata.get(f"tokenizer.ggml.add_{which}_token")
    if said is not None:
        return bool(said)
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return which == "bos" and (
        sentencepiece or metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "tekken")
    )


def _post_process(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], bytes_first: bool
) -> None:
    ids = special_ids(metadata)
    head, tail = (
        [tokens[ids[which]]] if which in ids and _adds(metadata, which) else []
        for which in ("bos", "eos")
    )
    # Offsets must cover the leading space of a word, so that offset mappings tile the text.
    steps: list[processors.PostProcessor] = (
        [processors.ByteLevel(trim_offsets=False)] if bytes_first else []
    )
    if head or tail:
        template = processors.TemplateProcessing(
            single=[*head, "$A", *tail],
            pair=[*head, "$A", *tail, *(f"{token}:1" for token in head), "$B:1"]
            + [f"{token}:1" for token in tail],
            special_tokens=[(token, tokens.index(token)) for token in {*head, *tail}],
        )
        steps.append(template)
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def _tokenizer_config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture", "")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{architecture}.context_length", 2**31 - 1),
    }
    for short, i in special_ids(metadata).items():
        config[f"{short}_token"] = tokens[i]
    template = metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    return config
