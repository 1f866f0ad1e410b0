"""A request becomes a sequence; its states follow one table and its length one limit."""

from __future__ import annotations

from itertools import product

import pytest

from testbed.errors import IllegalTransitionError, RequestError
from testbed.request import SamplingParams
from testbed.sequence import Sequence, SequenceState
from tests.testbed.core_kit import make_request

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


def test_prefilling_lasts_until_only_the_newest_emitted_token_is_left() -> None:
    seq = Sequence(0, make_request("a", 4), 100)
    seen = []
    for num_computed in range(4):
        seq.num_computed_tokens = num_computed
        seen.append(seq.is_prefilling)
    assert seen == [True] * 4  # the last token of a prompt belongs to it
    seq.tokens.extend((7, 8))
    for num_computed, expected in ((4, True), (5, False)):  # after a preemption the output is computed again
        seq.num_computed_tokens = num_computed
        assert seq.is_prefilling is expected


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
