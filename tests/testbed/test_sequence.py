"""A request becomes a sequence; its states follow one table and its length one limit."""

from __future__ import annotations

from itertools import product

import pytest

from testbed.core.request import SamplingParams
from testbed.core.sequence import Sequence
from testbed.core.state import SequenceState
from testbed.errors import IllegalTransitionError, RequestError
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.stepping import add, step

W, R, S, F = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.FINISHED
LEGAL = {(W, R), (W, F), (R, W), (R, S), (R, F), (S, R), (S, W), (S, F)}


@pytest.mark.parametrize(("before", "after"), product(SequenceState, SequenceState))
def test_only_legal_transitions_are_taken(before: SequenceState, after: SequenceState) -> None:
    seq = Sequence(0, make_request("a", 3), 100)
    seq.state = before
    if (before, after) in LEGAL:
        seq.enter(after)
        assert seq.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"{before.name} does not lead to {after.name}"):
            seq.enter(after)
        assert seq.state is before


@pytest.mark.parametrize(
    ("num_prompt", "forced", "max_tokens", "max_model_len", "expected"),
    [
        (10, 5, None, 100, 15),
        (10, 5, None, 12, 12),  # a forced output is cut at the model's length
        (10, 5, None, 10, 11),  # a prompt of the model's length still emits one token
        (10, None, 5, 100, 15),
        (10, None, 500, 100, 100),
        (10, None, None, 100, 100),
        (10, 5, 2, 100, 15),  # a forced output is not cut by max_tokens
    ],
)
def test_a_sequence_ends_at_its_output_or_at_the_models_length(
    num_prompt: int, forced: int | None, max_tokens: int | None, max_model_len: int, expected: int
) -> None:
    request = make_request("a", num_prompt, forced, sampling=SamplingParams(max_tokens=max_tokens))
    assert Sequence(0, request, max_model_len).token_limit == expected


def test_a_prefill_lasts_from_an_admission_to_the_first_token_that_is_emitted_after_it() -> None:
    scheduler = make_scheduler("unified", num_blocks=4, block_size=2, caching=False, limits=make_limits(budget=3))
    add(scheduler, make_request("b", 2, 5), make_request("a", 2, 5))
    seen = []
    while scheduler.num_steps < 8:
        step(scheduler)
        a = scheduler.unfinished()[-1]
        seen.append((a.state, a.is_prefilling, a.num_computed_tokens, a.num_tokens))
    assert seen == [
        (R, True, 1, 2),  # b's prompt leaves 1 of 3 tokens
        (R, False, 2, 3),
        (R, False, 3, 4),  # 2 blocks each
        (W, False, 0, 4),  # b's position 4 takes a's
        (W, False, 0, 4),  # b ends
        (R, True, 3, 4),  # what was emitted belongs to the prefill now
        (R, False, 4, 5),
        (R, False, 5, 6),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "'a' has an empty prompt"),
        ({"prompt": 1, "output": []}, "'a' forces an empty output"),
        ({"prompt": 1, "arrival_ns": -1}, "'a' arrives at -1 ns"),
    ],
)
def test_a_malformed_request_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_request("a", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}])
def test_malformed_sampling_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**fields)  # type: ignore[arg-type]
