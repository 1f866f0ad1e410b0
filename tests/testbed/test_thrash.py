"""Sequences that take blocks from each other for ever are named; those that get on, however slowly, are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import StepResult
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import LivelockError
from testbed.policies.victim import MostBlocks, VictimChoice
from tests.testbed.core_kit import make_limits, make_request, make_scheduler
from tests.testbed.test_serve import ListInbox, abort, arrive, drive


def scheduler_of(victims: Callable[[], VictimChoice], num_blocks: int = 11) -> Scheduler:
    """Two prompts of 36 tokens fit in one by one, not together, and are computed in chunks of 4 tokens, a block."""
    return make_scheduler(
        limits=make_limits(threshold=4),
        num_blocks=num_blocks,
        caching=False,
        rules=KVRules(allocate="chunk"),
        victims=victims(),
    )


def test_prompts_that_preempt_each_other_for_ever_are_a_livelock_that_names_them() -> None:
    inbox = ListInbox(arrive("done", 0), arrive("a", 100, prompt=36), arrive("b", 100, prompt=36))
    with pytest.raises(LivelockError, match=r"nowhere: a, b; 200 times .*cache\.num_gpu_blocks.*scheduler\.victim"):
        drive(inbox, scheduler_of(MostBlocks))
    assert [name for name, _ in inbox.ended] == ["done"]


def test_while_something_is_still_to_come_they_go_on_and_it_may_free_them() -> None:
    late_ns = 10 * 10 * Thrash.MAX_RETURNS
    inbox = ListInbox(arrive("a", 0, prompt=36), arrive("b", 0, prompt=36), abort("a", late_ns))
    log, _ = drive(inbox, scheduler_of(MostBlocks))
    assert [name for name, _ in inbox.ended] == ["a", "b"]
    assert len(log.steps) > 4 * Thrash.MAX_RETURNS
    assert inbox.ended[1][1] < late_ns + 200


@pytest.mark.parametrize("gets_on", ["emits", "ends"])
def test_the_count_starts_again_with_every_token_and_every_end(gets_on: str) -> None:
    scheduler = scheduler_of(MostBlocks)
    for name in "ab":
        scheduler.add(make_request(name, 36, 2))
    preempting = None
    while preempting is None:
        plan = scheduler.plan(0)
        scheduler.commit(StepResult(0), 0)
        preempting = plan if plan.preempted else None
    assert not scheduler.emitters
    thrash = Thrash()
    for _ in range(3):
        for _ in range(Thrash.MAX_RETURNS):
            assert thrash.committed(preempting, scheduler, has_ended=False) is None
        assert thrash.is_watching
        if gets_on == "emits":
            scheduler._progress.emitters = scheduler.unfinished()
        assert thrash.committed(preempting, scheduler, has_ended=gets_on == "ends") is None
        assert not thrash.is_watching
        scheduler._progress.emitters = []
    for _ in range(Thrash.MAX_RETURNS):
        thrash.committed(preempting, scheduler, has_ended=False)
    assert thrash.committed(preempting, scheduler, has_ended=False) is not None
