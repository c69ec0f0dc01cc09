"""Grammars: what may come next in an answer, and what may follow which drafts.

Owns the walk along a run of drafts, the masks on the way, and the memory of compiled grammars. Must
not know what compiles them, how drafts are made or judged, nor where a grammar came from.

A window's entry i is masked as if the drafts 1 .. i before it had been emitted. Drafts are drawn
under the same masks, so that they are ones the target may take; those of a drafter that knows no
masks (a lookup) go up to the first that may not come, which is rejected. What ends the answer is
the model's own EOS, allowed by the grammar where it is satisfied: stops need no rule of their own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from emberline.batch import DraftProposal
from emberline.config import GrammarBackend
from emberline.types import Grammar, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHED_GRAMMARS = 64
CACHED_SOURCES = 2**22  # characters of them together
MAX_SOURCE = 2**20  # characters of one


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def allowed(self) -> Tensor:
        """Ids that may come next, EOS among them where the answer may end: [V] bool, on the CPU.

        None of them once the grammar is too complex to go on.
        """
        ...

    def consume(self, token_id: int) -> bool:
        """Go on by a token; whether it was allowed. One that was not changes nothing."""
        ...

    def copy(self) -> Matcher:
        """Another one at the same place; what happens to the one does not touch the other."""
        ...


class Compiled(Protocol):
    """A grammar that has been compiled."""

    @property
    def broken(self) -> bool:
        """Whether a matcher of it has failed: it must be compiled anew for the next request."""
        ...

    def matcher(self) -> Matcher:
        """A matcher at its start."""
        ...


class Backend(Protocol):
    """What compiles grammars for one tokenizer, from several threads."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile; `InvalidRequest` quoting the compiler where that fails."""
        ...


class GrammarCompiler:
    """Compiles grammars for one tokenizer and remembers them. Safe to use from several threads.

    Args:
        tokenizer: the model's.
        vocab_size: V of its logits; more than the tokenizer has where they are padded.
        eos_ids: the ids that end an answer.
        backend: which library compiles.

    Raises:
        ImportError: the backend is not installed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int,
        eos_ids: Collection[int],
        backend: GrammarBackend = "llguidance",
    ) -> None:
        self._backend = _make_backend(backend, tokenizer, vocab_size, sorted(eos_ids))
        self._can_end = bool(eos_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()

    def known(self, grammar: Grammar) -> Compiled | None:
        """A grammar that has been compiled already; never waits."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                return None
            if found.broken:
                del self._compiled[grammar]
                return None
            self._compiled.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled now or before. A big one takes seconds.

        Raises:
            InvalidRequest: it does not compile; the message quotes the compiler.
        """
        found = self.known(grammar)
        if found is not None:
            return found
        # Outside the lock: nobody must wait for somebody else's big grammar.
        found = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = found
            sizes = {known: len(known.source) for known in self._compiled}
            while len(sizes) > CACHED_GRAMMARS or sum(sizes.values()) > CACHED_SOURCES:
                oldest, _ = self._compiled.popitem(last=False)
                del sizes[oldest]
        return found

    def _compile(self, grammar: Grammar) -> Compiled:
        if len(grammar.source) > MAX_SOURCE:
            message = f"the grammar has {len(grammar.source)} characters; the limit is {MAX_SOURCE}"
            raise InvalidRequest(message, "grammar")
        if not self._can_end:
            raise InvalidRequest("this model has no token that ends an answer", "grammar")
        return self._backend.compile(grammar)


def _make_backend(
    name: GrammarBackend,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    eos_ids: Sequence[int],
) -> Backend:
    if name == "xgrammar":
        from emberline.engine.xgrammar_backend import XGrammar

        return XGrammar(tokenizer, vocab_size, eos_ids)
    from emberline.engine.llguidance_backend import LLGuidance

    return LLGuidance(tokenizer, vocab_size, eos_ids)


class Walk:
    """A copy of one matcher along a run of drafts: the request's own never sees them.

    Each mask on the way is computed once.
    """

    def __init__(self, matcher: Matcher, eos_ids: frozenset[int]) -> None:
        self._start = matcher
        self._eos_ids = eos_ids
        self._matcher = matcher
        self._path: list[int] = []
        self._masks: list[Tensor | None] = []  # entry k: after k drafts; None: they end it

    def allowed(self, drafts: Sequence[int]) -> Tensor | None:
        """What may follow these drafts, [V] bool; None if they end the answer or break rules."""
        if not self._masks or self._path[: len(drafts)] != list(drafts)[: len(self._path)]:
            self._matcher, self._path = self._start.copy(), []
            self._masks = [self._matcher.allowed()]
        for draft in drafts[len(self._path) :]:
            self._path.append(draft)
            self._masks.append(self._after(draft))
        return self._masks[len(drafts)]

    def num_judged(self, drafts: Sequence[int]) -> int:
        """How many drafts are worth judging: up to the one that ends the answer or may not come.

        That one is judged too, and rejected if it may not come. To leave it out would be to let a
        draft's value decide whether it is verified, and then the token in its place would have to
        come from the residual of what it was drawn from, not from p.
        """
        self.allowed(drafts)
        ends = (k for k in range(1, len(drafts)) if self._masks[k] is None)
        return next(ends, len(drafts))

    def _after(self, draft: int) -> Tensor | None:
        over = self._masks[-1] is None or draft in self._eos_ids
        return None if over or not self._matcher.consume(draft) else self._matcher.allowed()


class StepGrammar:
    """The grammars of one step's B requests.

    Args:
        matchers: None for requests that none binds, or that emit nothing in this step.
        eos_ids: what ends an answer.
        device: of the step's tensors.
    """

    def __init__(
        self, matchers: Sequence[Matcher | None], eos_ids: frozenset[int], device: torch.device
    ) -> None:
        self._walks = [Walk(m, eos_ids) if m is not None else None for m in matchers]
        self._device = device

    def of(self, reqs: Sequence[int]) -> RowConstraint:
        """What binds the drafts of some requests."""
        return RowConstraint([self._walks[req] for req in reqs], self._device)

    def cut(self, proposal: DraftProposal) -> Tensor:
        """[B] drafts of a proposal up to the one that may not come, or that ends the answer."""
        lens = proposal.num_drafted.tolist()
        for req, walk in enumerate(self._walks):
            if walk is not None and lens[req]:
                lens[req] = walk.num_judged(proposal.token_ids[req, : lens[req]].tolist())
        return torch.tensor(lens, dtype=torch.int64, device=self._device)

    def masks(self, proposal: DraftProposal | None, num_admitted: Tensor) -> list[Tensor | None]:
        """What the entries of each window may be: B of [1 + admitted, V] bool, None = anything."""
        found: list[Tensor | None] = []
        for req, (walk, num) in enumerate(zip(self._walks, num_admitted.tolist(), strict=True)):
            if walk is None:
                found.append(None)
                continue
            drafts = proposal.token_ids[req, :num].tolist() if proposal is not None else []
            rows = [walk.allowed(drafts[:k]) for k in range(num + 1)]
            # After a draft that ends the answer or is rejected anything goes: nobody reads it.
            free = torch.ones_like(rows[0])  # type: ignore[arg-type]
            found.append(torch.stack([free if r is None else r for r in rows]).to(self._device))
        return found


class RowConstraint:
    """`DraftConstraint` of the requests that draft."""

    def __init__(self, walks: Sequence[Walk | None], device: torch.device) -> None:
        self._walks = walks
        self._device = device

    def mask(self, logits: Tensor, drafts: Sequence[Tensor]) -> Tensor:
        """See `DraftConstraint`. A run that has ended, or that nothing may follow, is left free."""
        runs = torch.stack(list(drafts), dim=1).tolist() if drafts else [[]] * len(self._walks)
        masked = logits.clone()
        for row, (walk, run) in enumerate(zip(self._walks, runs, strict=True)):
            allowed = walk.allowed(run) if walk is not None else None
            if allowed is not None and bool(allowed.any()):
                masked[row].masked_fill_(~allowed.to(self._device), -torch.inf)
        return masked
