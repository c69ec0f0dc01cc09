"""What a request has to say: everything that has come to it since it last said something.

Must not know steps, or when requests end.
"""

from __future__ import annotations

from collections.abc import Callable

from emberline.engine.logprob_run import join_runs
from emberline.engine.request_state import RequestState
from emberline.types import RequestOutput, SpeculationStats


def delta(state: RequestState, clock: Callable[[], float], *, final: bool = False) -> RequestOutput:
    """What was added to a request since its last output, text included."""
    prompt_scores = None
    if state.prompt_scores is not None and not (state.prompt_reported or state.scores_prompt):
        prompt_scores = tuple(state.prompt_scores)
        state.prompt_reported = True
    records = None
    if state.request.params.logprobs is not None:
        records, state.held_records = join_runs(state.held_records), []
    token_ids = state.token_ids
    new_ids = tuple(token_ids[state.num_reported :])
    state.num_reported = len(token_ids)
    text = ""
    if state.text is not None:
        if not state.is_watched:
            state.text.extend(new_ids)
        text = state.text.take(final=final)
    return RequestOutput(  # by place: by name takes half as long again
        state.request.request_id,
        new_ids,
        records,
        text,
        prompt_scores,
        None,
        None,
        None,
        state.num_prompt,
        state.num_cached or 0,
        len(token_ids) - state.num_prompt,
        state.waited(clock),
        SpeculationStats(state.steps.copy()),
    )
