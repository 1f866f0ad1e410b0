"""The simulator takes every sampling parameter: what is drawn decides nothing where outputs are forced."""

from __future__ import annotations

from testbed.core.request import GREEDY, SamplingParams
from testbed.traces.arrange import arrange
from testbed.traces.schema import Span, Trace, TraceRequest
from tests.sim.kit import STEP_NS, Records, recorded
from tests.testbed.core_kit import make_limits, make_scheduler

DRAWN = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3,
    repetition_penalty=1.2, logit_bias={1: 2.0}, min_tokens=5, stop="end", stop_token_ids=(4,), seed=3,
)  # fmt: skip


def trace() -> Trace:
    """Prompts that share their first 24 tokens, in more blocks than there are."""
    rows = [
        TraceRequest(f"r{i}", i * STEP_NS, (Span(99, 0, 24), Span(i, 0, 3 + i)), Span(200 + i, 0, 30)) for i in range(8)
    ]
    return arrange("shared", rows)


def simulated(sampling: SamplingParams) -> Records:
    scheduler = make_scheduler("unified", num_blocks=40, caching=True, limits=make_limits(budget=32, model_len=256))
    return recorded(scheduler, trace(), sampling=sampling)


def test_what_is_drawn_decides_nothing():
    plain, drawn = simulated(GREEDY), simulated(DRAWN)
    assert drawn.steps.equals(plain.steps)
    assert drawn.requests.equals(plain.requests)
    assert plain.requests.num_cached_tokens.max() == 24
    assert plain.requests.num_preemptions.sum() > 0


def test_prompts_that_are_scored_are_computed_whole_here_too():
    scored = simulated(SamplingParams(prompt_logprobs=2))
    assert scored.requests.num_cached_tokens.max() == 0
    assert scored.steps.digest.iloc[-1] == simulated(SamplingParams(prompt_logprobs=0)).steps.digest.iloc[-1]
