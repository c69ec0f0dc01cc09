"""Prompts to token ids: plain text, ids, conversations. Off the event loop when long.

Owns tokenising, chat templates and what an echoed prompt looks like. Must not know sampling,
the engine's queue or response shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from emberline.encoding import check_conversation, template_source
from emberline.engine.detokenizer import TokenText
from emberline.refusals import one_of
from emberline.server.chat_body import Message
from emberline.server.lark import named_tokens
from emberline.server.prompt_limit import TextBound, text_bound
from emberline.server.turns import LONG_WORK, off_loop
from emberline.types import InvalidRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

ENDING = 64
"""Characters of a conversation's end that are kept: enough for what its template has opened."""

# What a template's rendering takes besides its own arguments.
TEMPLATE_NAMES = frozenset({"messages", "conversations", "self"})


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, and the bytes that each adds to an echoed text."""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...] = ()  # one a token, only where an echo was asked for
    ending: str = ""  # of a conversation: the last characters of its text

    @property
    def text(self) -> str:
        """The echoed text."""
        return b"".join(self.pieces).decode("utf-8", "replace")


class PromptEncoder:
    """Turns what a client sent into token ids within the model's limits."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        token_text: TokenText,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._text = token_text
        self._backend = _backend_of(tokenizer)
        self._template = template_source(tokenizer)
        self._reserved = TEMPLATE_NAMES.union(
            inspect.signature(tokenizer.apply_chat_template).parameters
        )

    @cached_property
    def named_tokens(self) -> Mapping[str, int]:
        """The tokens that a grammar takes for names, not for text."""
        return named_tokens(self.tokenizer)

    @cached_property
    def _bound(self) -> TextBound | None:
        """How much text a token can stand for; looks at every token, so not before a need."""
        return text_bound(self.tokenizer, self._text, self.vocab_size)

    async def prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        add_special_tokens: bool,
        echo: bool,
        skip_special_tokens: bool,
    ) -> list[EncodedPrompt]:
        """One encoded prompt for each that the client sent.

        Raises:
            InvalidRequest: a prompt is empty, too long, or holds an id that does not exist.
        """
        if not prompts:
            raise InvalidRequest("prompt is empty: give a text or token ids", "prompt")

        def encode(index: int, item: str | Sequence[int]) -> EncodedPrompt:
            with one_of(index, len(prompts)):
                if isinstance(item, str):
                    return self._from_text(item, add_special_tokens, echo)
                return self._from_ids(item, echo, skip_special_tokens)

        return await off_loop(
            sum(map(len, prompts)), lambda: [encode(*numbered) for numbered in enumerate(prompts)]
        )

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        param: str = "messages",
    ) -> EncodedPrompt:
        """A conversation through the model's own chat template.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages or arguments, or it
                does not show the tools, or what the messages say of earlier calls and reasoning.
        """
        taken = self._reserved.intersection(template_kwargs)
        if taken:
            message = f"chat_template_kwargs may not set {sorted(taken)[0]}"
            raise InvalidRequest(message, "chat_template_kwargs")
        if not self.tokenizer.chat_template:
            message = "this model has no chat template: use /v1/completions"
            raise InvalidRequest(message, param)
        rendered = [message.rendered() for message in messages]
        try:
            check_conversation(rendered, self._template)
        except InvalidRequest as problem:
            raise _as_sent(problem, messages) from None

        def encode() -> EncodedPrompt:
            text = self._render(rendered, add_generation_prompt, template_kwargs, tools, param)
            self._check_length(text, param)
            ids = self._checked(self.encode(text, False), param)
            return EncodedPrompt(ids, ending=text[-ENDING:])

        size = sum(len(message["content"] or "") for message in rendered)
        return await off_loop(size + sum(len(str(tool)) for tool in tools), encode)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        param: str,
    ) -> str:
        shown = {"tools": list(tools)} if tools else {}

        def render(arguments: Mapping[str, Any]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
            )
            return text

        try:
            text = render({**template_kwargs, **shown})
        except Exception as problem:  # templates are programs: they raise what they like
            # Only what a template says itself is meant for clients: a subclass is the library's.
            reason = f": {problem}" if type(problem) is TemplateError else ""
        else:
            if not shown or _raises(lambda: render(template_kwargs)):
                return text
            if text != render(template_kwargs):
                return text
            message = "this model's chat template does not show tools to the model: leave them out"
            raise InvalidRequest(message, "tools")
        what, field = "messages", param
        if template_kwargs and not _raises(lambda: render(shown)):
            what, field = "chat_template_kwargs", "chat_template_kwargs"
        elif shown and not _raises(lambda: render(template_kwargs)):
            what, field = "tools", "tools"
        raise InvalidRequest(f"the chat template refused these {what}{reason}", field)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with or without what the tokenizer adds round it.

        A batch, even of one text, goes to threads of the tokenizer's own, which takes longer than a
        short text does; but it needs no interpreter meanwhile.
        """
        ids: list[int]
        if self._backend is None:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        elif len(text) <= LONG_WORK:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            [encoded] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            ids = encoded.ids
        return ids

    async def prediction(self, text: str) -> tuple[int, ...]:
        """Token ids of what an answer will probably be.

        Raises:
            InvalidRequest: it is longer than any answer can be.
        """

        def encode() -> tuple[int, ...]:
            if not text:
                return ()
            self._check_length(text, "prediction", "prediction")
            return self._checked(self.encode(text, False), "prediction", "prediction")

        return await off_loop(len(text), encode)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write a word, at the start of a text and behind a space.

        Raises:
            InvalidRequest: a word is nothing but white space.
        """

        def sequences(word: str) -> Iterator[tuple[int, ...]]:
            bare = word.lstrip()
            if not bare:
                raise InvalidRequest("bad_words holds a word of white space only", "bad_words")
            alone = tuple(self.encode(bare, False))
            spaced = tuple(self.encode(" " + bare, False))
            yield alone
            if spaced[-len(alone) :] != alone:  # else forbidding the one forbids the other
                yield spaced

        def encode() -> tuple[tuple[int, ...], ...]:
            return tuple(dict.fromkeys(ids for word in words for ids in sequences(word)))

        return await off_loop(sum(map(len, words)), encode)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` for an id outside the vocabulary."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            outside = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            message = f"{param} holds token id {outside}, outside [0, {self.vocab_size})"
            raise InvalidRequest(message, param)

    def _checked(
        self, token_ids: Sequence[int], param: str = "prompt", what: str = "prompt"
    ) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequest(f"the {what} is empty: give at least one token", param)
        self.check_ids(token_ids, param)
        if len(token_ids) > self.max_model_len:
            raise InvalidRequest(
                f"the {what} has {len(token_ids)} tokens; the context length is "
                f"{self.max_model_len}: shorten it",
                param,
            )
        return tuple(token_ids)

    def _check_length(self, text: str, param: str, what: str = "prompt") -> None:
        """Refuse a text that can never fit before the work of tokenising it."""
        if len(text) <= LONG_WORK or self._bound is None:
            return
        size, limit = self._bound.num_bytes(text), self._bound.token_bytes
        if size > limit * self.max_model_len:
            raise InvalidRequest(
                f"the {what} has {size} bytes; no token covers more than {limit} and the context "
                f"length is {self.max_model_len} tokens, so it cannot fit: shorten it",
                param,
            )

    def _from_text(self, text: str, add_special_tokens: bool, echo: bool) -> EncodedPrompt:
        self._check_length(text, "prompt")
        if not echo:
            return EncodedPrompt(self._checked(self.encode(text, add_special_tokens)))
        encoding = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_special_tokens_mask=True
        )
        token_ids = self._checked(encoding["input_ids"])
        # Special tokens written in the text are shown, those that the tokenizer added are not.
        pieces = [
            b"" if added else self._text.bytes_of(token_id)
            for token_id, added in zip(token_ids, encoding["special_tokens_mask"], strict=True)
        ]
        if b"".join(pieces) == b" " + text.encode():
            first = next(i for i, piece in enumerate(pieces) if piece)
            pieces[first] = pieces[first][1:]  # sentencepiece's dummy prefix
        return EncodedPrompt(token_ids, tuple(pieces))

    def _from_ids(
        self, token_ids: Sequence[int], echo: bool, skip_special_tokens: bool
    ) -> EncodedPrompt:
        ids = self._checked(token_ids)
        if not echo:
            return EncodedPrompt(ids)
        hidden = self._text.special_ids if skip_special_tokens else frozenset()
        return EncodedPrompt(
            ids, tuple(b"" if i in hidden else self._text.bytes_of(i) for i in ids)
        )


def _as_sent(problem: InvalidRequest, messages: Sequence[Message]) -> InvalidRequest:
    """A refusal of reasoning that names it as the client did."""
    for index, message in enumerate(messages):
        if problem.param == f"messages[{index}].reasoning_content" and message.reasoning:
            return InvalidRequest(str(problem), f"messages[{index}].reasoning")
    return problem


def _raises(work: Callable[[], object]) -> bool:
    try:
        work()
    except Exception:  # as above: whatever a template raises
        return True
    return False


def _backend_of(tokenizer: PreTrainedTokenizerBase) -> Backend | None:
    """What encodes one text for the tokenizer; None: it has nothing of the kind."""
    backend: Backend | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        tokenizer("")  # so that the backend neither cuts nor pads, whatever its file says
    return backend
