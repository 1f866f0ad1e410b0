"""Sequences that take blocks from each other for ever are named; those that get on, however slowly, are not."""

from __future__ import annotations

import pytest

from testbed.blocks.config import KVRules
from testbed.core.outcome import StepResult
from testbed.core.scheduler import Scheduler
from testbed.core.thrash import Thrash
from testbed.errors import LivelockError
from testbed.policies.victim import MostBlocks
from tests.testbed.core_kit import make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.test_serve import ListInbox, abort, arrive, drive


def make_world(num_blocks: int = 11) -> Scheduler:
    """Two prompts of 36 tokens fit in one by one, not together, and are computed in chunks of 4 tokens, a block."""
    blocks, limits = (
        make_blocks(num_blocks=num_blocks, caching=False, rules=KVRules(allocate="chunk")),
        make_limits(threshold=4),
    )
    return make_scheduler(limits=limits, blocks=blocks, victims=MostBlocks())


def test_prompts_that_preempt_each_other_for_ever_are_a_livelock_that_names_them() -> None:
    inbox = ListInbox(arrive("done", 0), arrive("a", 100, prompt=36), arrive("b", 100, prompt=36))
    with pytest.raises(LivelockError, match=r"nowhere: a, b; 200 times .*cache\.num_gpu_blocks.*scheduler\.victim"):
        drive(inbox, make_world())
    assert [name for name, _ in inbox.ended] == ["done"]


def test_while_something_is_still_to_come_they_go_on_and_it_may_free_them() -> None:
    late_ns = 10 * 10 * Thrash.MAX_RETURNS
    inbox = ListInbox(arrive("a", 0, prompt=36), arrive("b", 0, prompt=36), abort("a", late_ns))
    log, _ = drive(inbox, make_world())
    assert [name for name, _ in inbox.ended] == ["a", "b"]
    assert len(log.steps) > 4 * Thrash.MAX_RETURNS
    assert inbox.ended[1][1] < late_ns + 200


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_event_starts_the_count_again_as_it_may_free_them(name: str) -> None:
    late_ns = 10 * 10 * 10 * Thrash.MAX_RETURNS
    for at_ns in range(late_ns, late_ns + 400, 20):
        inbox = ListInbox(arrive("a", 0, prompt=150), arrive("b", 0, prompt=150), abort(name, at_ns))
        drive(inbox, make_world(num_blocks=41))
        assert len(inbox.ended) == 2, f"aborted at {at_ns}: the other one goes on, in chunks that emit nothing at first"


@pytest.mark.parametrize("gets_on", ["emits", "ends"])
def test_the_count_starts_again_with_every_token_and_every_end(gets_on: str) -> None:
    stuck = make_world()
    stuck.add(make_request("a", 36, 2))
    stuck.add(make_request("b", 36, 2))
    preempting = None
    while preempting is None:
        plan = stuck.plan(0)
        stuck.commit(StepResult(0), 0)
        preempting = plan if plan.preempted else None
    assert not stuck.emitters
    later = stuck
    if gets_on == "emits":  # another one stands for it as it is when it has emitted
        later = make_scheduler()
        later.add(make_request("c", 1, 2))
        later.plan(0)
        later.commit(StepResult(0), 0)
        assert later.emitters
    thrash = Thrash()
    for _ in range(3):
        for _ in range(Thrash.MAX_RETURNS):
            thrash.committed(preempting, stuck, has_ended=False)
            assert thrash.message is None
        thrash.committed(preempting, later, has_ended=gets_on == "ends")
    for _ in range(Thrash.MAX_RETURNS):
        thrash.committed(preempting, stuck, has_ended=False)
    assert thrash.message is None
    thrash.committed(preempting, stuck, has_ended=False)
    assert thrash.message is not None
