"""The offline front door: load an engine, generate, score. No HTTP, no event loop."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from emberline.config import EngineConfig
from emberline.encoding import (
    Message,
    Prompt,
    chat_ids,
    encode,
    encode_pairs,
    encode_prediction,
)
from emberline.engine.build import build_engine
from emberline.engine.detokenizer import TokenText
from emberline.engine.engine import Engine
from emberline.engine.garbage import CollectorAside
from emberline.engine.grammar import GrammarCompiler
from emberline.engine.logprob_run import join_logprobs
from emberline.engine.resolve import resolve_config
from emberline.hub import (
    ModelError,
    generation_stop_ids,
    load_tokenizer,
    resolve_draft,
    resolve_model,
)
from emberline.machine_costs import costs_for, report_given
from emberline.refusals import one_of
from emberline.scores import Scores, make_scores, num_alternatives, scoring_params
from emberline.types import (
    FinishReason,
    InvalidRequest,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with the text side of its model."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    token_text: TokenText
    name: str


def load_engine(
    model: str | None = None,
    draft: str | None = None,
    config: EngineConfig | None = None,
    *,
    progress: bool = True,
    found: Callable[[Path, str], None] = lambda folder, name: None,  # noqa: ARG005
) -> LoadedEngine:
    """Resolve a model and its draft, and build the engine.

    Args:
        model: folder, `.gguf` file or Hugging Face id; None is the embedded default.
        draft: folder or id; None is the draft shipped for the default model, "none" is no draft.
        config: settings; defaults fit a small CPU machine.
        progress: whether to show progress bars for slow parts.
        found: told the model's folder and name before anything is read.

    Raises:
        emberline.hub.ModelError: a file is missing, truncated or foreign.
    """
    config = resolve_config(config or EngineConfig())  # before anything is fetched
    folder = resolve_model(model, progress=progress)
    found(folder.path, folder.name)
    wants_draft = config.speculation.drafter == "auto"
    draft_folder = resolve_draft(draft, folder) if wants_draft else None
    tokenizer = load_tokenizer(folder.path)
    engine = build_engine(
        folder.path,
        draft_folder,
        config,
        eos_ids=generation_stop_ids(folder.path),
        name=folder.name,
        find_costs=lambda engine: costs_for(engine, folder.path, draft_folder, progress=progress),
    )
    given = config.speculation.step_costs
    if given is not None:
        report_given(engine, Path(given), folder.path, draft_folder, progress=progress)
    try:
        engine.grammars = GrammarCompiler(
            tokenizer, engine.vocab_size, engine.parts.eos_ids, config.grammar_backend
        )
    except ImportError as problem:
        raise ModelError(
            f"grammar_backend {config.grammar_backend} is not installed ({problem}): "
            f"pip install 'emberline[{config.grammar_backend}]'"
        ) from problem
    return LoadedEngine(engine, tokenizer, TokenText(tokenizer), folder.name)


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] | None  # one a token, if asked
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    error: str | None  # why, where `finish_reason` is ERROR; what came before it is kept
    num_prompt_tokens: int
    stats: SpeculationStats


class LLM:
    """Generate and score from Python.

    >>> llm = LLM()                                    # doctest: +SKIP
    >>> llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text
    """

    def __init__(
        self,
        model: str | None = None,
        draft: str | None = None,
        config: EngineConfig | None = None,
        *,
        progress: bool = True,
    ) -> None:
        loaded = load_engine(model, draft, config, progress=progress)
        self.engine = loaded.engine
        self.tokenizer = loaded.tokenizer
        self.token_text = loaded.token_text
        self.name = loaded.name
        self._ids = itertools.count()
        self._mail: dict[str, list[RequestOutput]] = {}  # unread outputs of what runs

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        predictions: Sequence[Prompt | None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt; the outer list follows `prompts`, the inner has `n` choices.

        Args:
            prompts: texts, or token ids.
            params: options of all, or of each.
            predictions: what each answer will probably be, to draft from; it changes no answer.

        Raises:
            InvalidRequest: a prompt or its options can never run; nothing was started then.
        """
        check_prompts(prompts, "prompts")
        options = self._options(prompts, params)
        if predictions is None:
            predictions = [None] * len(prompts)
        if len(predictions) != len(prompts):
            message = f"{len(predictions)} predictions for {len(prompts)} prompts"
            raise InvalidRequest(message, "predictions")
        requests: list[list[Request]] = []
        for prompt, option, prediction in zip(prompts, options, predictions, strict=True):
            with one_of(len(requests), len(prompts)):
                requests.append(self._requests(prompt, option, prediction))
        done = self._run([request for group in requests for request in group])
        return [[done[request.request_id] for request in group] for group in requests]

    def _requests(
        self, prompt: Prompt, option: SamplingParams, prediction: Prompt | None
    ) -> list[Request]:
        """One a choice, all of which can run."""
        ids, predicted = self.encode(prompt), encode_prediction(self.tokenizer, prediction)
        choices = [
            Request(
                f"llm-{next(self._ids)}",
                ids,
                option,
                prediction=predicted,
                choice=choice,
                stream=False,
            )
            for choice in range(option.n)
        ]
        self.engine.validate(choices[0], has_text=True)
        return choices

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, one output a step. Closing the iterator aborts the request."""
        request = Request(f"llm-{next(self._ids)}", self.encode(prompt), one_choice(params))
        self._add(request)
        finished = False
        try:
            while not finished:
                for output in self._next_outputs(request.request_id):
                    finished = output.finished
                    yield output
        finally:
            if finished:
                del self._mail[request.request_id]
            else:
                self._drop([request.request_id])

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation with the model's own chat template.

        Raises:
            InvalidRequest: there is no message, or more than one choice is asked for.
        """
        option = one_choice(params)
        return self.generate([self.chat_ids(messages)], option)[0][0]

    def score(self, texts: Sequence[Prompt], top: int = 0, start: int = 0) -> list[Scores]:
        """Raw log-probabilities of every token of `texts`, nothing generated.

        Args:
            texts: texts, or token ids.
            top: alternatives of every position; -1 is the whole vocabulary.
            start: first position that is scored. Position 0 never has a value.

        Raises:
            InvalidRequest: a text, `top` or `start` can never be scored; nothing was started then.
        """
        check_prompts(texts, "texts")
        ids = [self.encode(text) for text in texts]
        return self._score(ids, top, [start] * len(ids))

    def score_continuations(
        self, pairs: Sequence[tuple[Prompt, Prompt]], top: int = 0
    ) -> list[Scores]:
        """Raw log-probabilities of continuations, given their prompts: pairs of (prompt, text).

        A result's arrays cover both, its `start` is the continuation's first token and `sum` and
        `mean` are the continuation's. The two are tokenised apart: a space between them belongs
        to the continuation. A prompt that was computed before is found in the prefix cache.

        Raises:
            InvalidRequest: a prompt or a continuation has no token, or can never be scored.
        """
        ids, starts = encode_pairs(self.tokenizer, pairs)
        return self._score(ids, top, starts)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a plain prompt, with whatever special tokens the tokenizer adds."""
        return encode(self.tokenizer, prompt)

    def chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises:
            InvalidRequest: there is no message.
        """
        return chat_ids(self.tokenizer, messages)

    def _score(
        self, texts: Sequence[tuple[int, ...]], top: int, starts: Sequence[int]
    ) -> list[Scores]:
        width = num_alternatives(top, self.engine.vocab_size)
        pairs = list(zip(texts, starts, strict=True))
        answers = self.generate(
            texts, [scoring_params(len(ids), width, start) for ids, start in pairs]
        )
        return [
            make_scores(ids, answer.prompt_logprobs, top=width, start=start, error=answer.error)
            for (ids, start), (answer,) in zip(pairs, answers, strict=True)
        ]

    def _options(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in params):
            raise InvalidRequest("params must be SamplingParams, one or a list of them", "params")
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(params)} params for {len(prompts)} prompts", "params")
        return list(params)

    def _run(self, requests: list[Request]) -> dict[str, Completion]:
        """Feed the engine as its queue has room, until all are done."""
        pending, mine = deque(requests), {request.request_id for request in requests}
        done: dict[str, Completion] = {}
        max_queue = self.engine.config.scheduler.max_queue
        try:
            with CollectorAside() as collector:
                while len(done) < len(requests):
                    if pending:
                        room = max_queue - self.engine.snapshot().num_waiting
                        for _ in range(min(room, len(pending))):
                            self._add(pending.popleft())
                    for request_id in self._step():
                        if request_id in mine:
                            done[request_id] = join_outputs(self._mail.pop(request_id))
                    collector.set_aside()
        finally:
            self._drop([request_id for request_id in mine if request_id in self._mail])
        return done

    # Every step goes through here: streams and calls may overlap, each reads its own mail.

    def _add(self, request: Request) -> None:
        self.engine.add(request, self.token_text.stream(request.params))
        self._mail[request.request_id] = []

    def _step(self) -> list[str]:
        """One step; the requests whose last output has come with it."""
        outputs = [output for output in self.engine.step() if output.request_id in self._mail]
        for output in outputs:
            self._mail[output.request_id].append(output)
        return [output.request_id for output in outputs if output.finished]

    def _next_outputs(self, request_id: str) -> list[RequestOutput]:
        """What has come for a request, stepping the engine if nothing has."""
        if not self._mail[request_id]:
            self._step()
        outputs, self._mail[request_id] = self._mail[request_id], []
        return outputs

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Abort what is not finished and forget its mail."""
        for request_id in request_ids:
            del self._mail[request_id]
            self.engine.abort(request_id)


def join_outputs(outputs: Sequence[RequestOutput]) -> Completion:
    """The whole answer from its deltas, the last of which ends it."""
    last = outputs[-1]
    assert last.finish_reason is not None
    prompt_scores = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    return Completion(
        text="".join(o.text for o in outputs),
        token_ids=tuple(i for o in outputs for i in o.token_ids),
        logprobs=join_logprobs(outputs),
        prompt_logprobs=prompt_scores[0] if prompt_scores else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        num_prompt_tokens=last.num_prompt_tokens,
        stats=last.stats,
    )


def check_prompts(prompts: Sequence[Prompt], param: str) -> None:
    """Raise `InvalidRequest` for what is no list, a lone text too: Python takes it for one."""
    if isinstance(prompts, str) or not isinstance(prompts, Collection):
        raise InvalidRequest(f"{param} must be a list of {param}: wrap one in [...]", param)


def one_choice(params: SamplingParams | None) -> SamplingParams:
    """The options of a call that gives one answer.

    Raises:
        InvalidRequest: they ask for several.
    """
    params = params or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params must be SamplingParams", "params")
    if params.n != 1:
        raise InvalidRequest(f"n is {params.n}, but this gives one answer: use generate", "n")
    return params
