"""Tokens are made when somebody reads them, once, and are then what they would have been at once."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.backend import SimBackend
from sim.driver import run
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.core.serve import serve
from testbed.traces.arrange import arrange
from testbed.traces.inbox import TraceInbox
from testbed.traces.lazy_tokens import LazyTokens
from testbed.traces.schema import Span, TraceRequest
from tests.sim.kit import VOCAB_SIZE, Instants, constant
from tests.testbed.core_kit import make_scheduler
from tests.testbed.stepping import step

IDS = array("i", range(100, 110))


class Maker:
    """Counts how often tokens are made."""

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self.num_calls = 0

    def __call__(self) -> array[int]:
        self.num_calls += 1
        return self.tokens[:]


@given(
    num_head=st.none() | st.integers(0, 10),
    index=st.integers(-10, 9)
    | st.builds(slice, *[st.none() | st.integers(-12, 12)] * 2, st.sampled_from((None, 1, 2))),
)
def test_they_read_as_an_array_does(num_head: int | None, index: int | slice) -> None:
    lazy = LazyTokens(10, lambda: IDS[:], None if num_head is None else IDS[:num_head])
    assert lazy[index] == IDS[index]
    assert (len(lazy), list(lazy)) == (10, list(IDS))
    assert lazy == IDS == lazy
    assert lazy != IDS[1:]
    assert lazy == LazyTokens(10, lambda: IDS[:])


def test_the_head_is_read_without_making_the_rest() -> None:
    make = Maker(IDS)
    lazy = LazyTokens(10, make, IDS[:4])
    assert (len(lazy), lazy[:4], lazy[:0]) == (10, IDS[:4], IDS[:0])
    assert make.num_calls == 0
    assert lazy[:5] == IDS[:5]
    assert lazy[7] == 107
    assert make.num_calls == 1


@pytest.mark.parametrize("max_model_len", [100, 12])
def test_a_sequence_has_the_tokens_of_its_request_once_it_is_asked(max_model_len: int) -> None:
    prompt, output = Maker(IDS), Maker(array("i", [7, 8, 9]))
    lazy = Request("a", LazyTokens(10, prompt, IDS[:4]), forced_output=LazyTokens(3, output))
    made = Request("a", IDS, forced_output=output.tokens)
    assert lazy == made
    prompt.num_calls = output.num_calls = 0
    lazy = Request("a", LazyTokens(10, prompt, IDS[:4]), forced_output=LazyTokens(3, output))
    one, other = Sequence(0, lazy, max_model_len), Sequence(0, made, max_model_len)
    assert (one.num_tokens, one.token_limit) == (other.num_tokens, other.token_limit)
    assert one.first_tokens(4)[:4] == IDS[:4]
    assert (prompt.num_calls, output.num_calls) == (0, 0)
    assert one.tokens == other.tokens
    one.tokens.append(1)
    assert (one.tokens, len(one.tokens), len(lazy.prompt_token_ids)) == (other.tokens, 10, 10), "a copy"
    assert (prompt.num_calls, output.num_calls) == (1, 1)


class Kept(Instants):
    """Keeps the requests, to look at their tokens when the run is over."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def arrived(self, request: Request, now_ns: int, step: int) -> None:
        super().arrived(request, now_ns, step)
        self.requests.append(request)


def made_in_a_run(rows: list[TraceRequest]) -> list[int]:
    """How long the prompts and outputs are whose tokens a simulated run has made."""
    kept = Kept()
    scheduler = make_scheduler(num_blocks=40, block_size=16)  # of about 9 each: what ended is evicted
    run(serve(TraceInbox(arrange("x", rows), VOCAB_SIZE), scheduler, kept), SimBackend(constant()))
    assert len(kept.end) == len(rows)
    tokens = [part for one in kept.requests for part in (one.prompt_token_ids, one.forced_output)]
    assert all(isinstance(part, LazyTokens) for part in tokens)
    return [len(part) for part in tokens if part is not None and not repr(part).startswith("LazyTokens(")]


def test_a_simulated_run_makes_no_tokens_of_prompts_that_share_nothing() -> None:
    rows = [TraceRequest(str(i), i * 10**9, (Span(i, 0, 100 + i),), Span(i, 100 + i, 30)) for i in range(20)]
    assert made_in_a_run(rows) == []
    again = TraceRequest("again", 10**12, rows[-1].prompt, rows[-1].output)
    assert made_in_a_run([*rows, again]) == [119, 30, 119, 30]  # who has the prefix, who finds it


@pytest.mark.parametrize("num_emitted", [0, 2])
def test_a_request_that_ends_early_makes_no_prompt(num_emitted: int) -> None:
    prompt = Maker(array("i", range(2, 10)))
    request = Request("a", LazyTokens(8, prompt), forced_output=LazyTokens(10, Maker(IDS)))
    scheduler = make_scheduler(caching=False)
    scheduler.add(request)
    for _ in range(num_emitted):
        step(scheduler)
    finished = scheduler.abort("a", 9)
    assert finished is not None
    assert list(finished.output_token_ids) == list(IDS[:num_emitted])
    assert prompt.num_calls == 0
