"""What the tests of groups (samples and beams) share."""

from __future__ import annotations

from testbed.core.outcome import Finished, FinishReason, Outcome
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from tests.testbed.core_kit import make_request, make_scheduler
from tests.testbed.stepping import add

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def out(seq_id: int, *tokens: int, forks: tuple[int, ...] = (), dropped: bool = False) -> Outcome:
    return Outcome(seq_id, tokens, None, forks, dropped)


def members(scheduler: Scheduler) -> dict[int, list[int]]:
    """Output tokens by sequence id."""
    return {seq.seq_id: list(seq.output_token_ids) for seq in scheduler.unfinished()}


def outputs_of(finished: Finished) -> list[list[int]]:
    """Of its sequences, in the order they ended."""
    return [list(one.token_ids) for one in finished.completions]


def beams(width: int = 2, num_tokens: int = 3, **options: object) -> Scheduler:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    add(scheduler, make_request("a", 6, None, sampling=SamplingParams(beam_width=width, max_tokens=num_tokens)))
    return scheduler
