"""What no_evict promises, held by a scheduler on a small pool: what has started never stops."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.blocks.config import KVRules
from testbed.core.outcome import FinishReason, Outcome, StepResult
from testbed.core.plan import BatchPlan
from testbed.core.request import SamplingParams
from testbed.core.scheduler import Scheduler
from testbed.policies.admission import NoEvict
from tests.testbed.admission_kit import bound
from tests.testbed.core_kit import ALL_COMPOSITIONS, make_blocks, make_limits, make_request, make_scheduler
from tests.testbed.groups_kit import outputs_of


@dataclass
class Job:
    """A request: `outputs` tokens for each sequence, none more than `declared`. Prompts of a family begin alike."""

    prompt: int
    declared: int
    outputs: list[int]
    family: int


JOBS = st.lists(
    st.builds(
        lambda prompt, declared, shares, family: Job(
            prompt, declared, [max(1, declared * share // 4) for share in shares], family
        ),
        st.integers(1, 30),
        st.integers(1, 20),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def make_world(composition: str, jobs: list[Job], block_size: int, extra: int, rules: KVRules) -> Scheduler:
    """A pool in which each request fits alone, and `extra` blocks more."""
    largest = max(
        job.prompt // block_size + len(job.outputs) * (-(-(job.prompt + job.declared) // block_size)) for job in jobs
    )
    blocks = make_blocks(num_blocks=largest + extra, block_size=block_size, rules=rules)
    scheduler = make_scheduler(
        composition, blocks=blocks, limits=make_limits(seqs=16), admission=bound(NoEvict(), blocks)
    )
    for index, job in enumerate(jobs):
        prompt = range(1000 * job.family, 1000 * job.family + job.prompt)
        sampling = SamplingParams(n=len(job.outputs), max_tokens=job.declared)
        scheduler.add(make_request(str(index), prompt, None, sampling=sampling))
    return scheduler


def drawn(plan: BatchPlan, jobs: list[Job], firsts: dict[int, int]) -> tuple[Outcome, ...]:
    """Each sequence stops by itself when it has its own number of tokens. firsts: the job of a group's first one."""
    outcomes = []
    for row in plan.scheduled:
        if not row.samples:
            continue
        job = jobs[firsts[row.group_id]]
        num_done = row.start + row.num_tokens - row.num_prompt_tokens + 1
        stops = [FinishReason.STOP if num_done == wanted else None for wanted in job.outputs]
        if row.num_samples > 1:
            forks = tuple(range(1, row.num_samples))
            outcomes.append(Outcome(row.seq_id, (0,), stops[0], forks, fork_stops=tuple(stops[1:])))
        else:
            outcomes.append(Outcome(row.seq_id, (num_done,), stops[row.seq_id - row.group_id]))
    return tuple(outcomes)


@pytest.mark.parametrize("composition", ALL_COMPOSITIONS)
@pytest.mark.parametrize("allocate", ["whole", "chunk"])
@given(jobs=JOBS, block_size=st.integers(1, 8), extra=st.integers(0, 12))
def test_no_evict_never_leaves_a_running_sequence_without_room(
    composition: str, allocate: str, jobs: list[Job], block_size: int, extra: int
) -> None:
    rules = KVRules(allocate=allocate)  # type: ignore[arg-type]
    scheduler = make_world(composition, jobs, block_size, extra, rules)
    firsts = {seq.seq_id: int(seq.request_id) for seq in scheduler.unfinished()}
    num_ended = 0
    while scheduler.has_work:
        plan = scheduler.plan(0)
        assert not plan.is_empty
        assert not plan.preempted
        assert not plan.ignored
        finished = scheduler.commit(StepResult(1, drawn(plan, jobs, firsts)), 1)
        scheduler.check_invariants()
        for item in finished:
            job = jobs[int(item.request.request_id)]
            assert sorted(map(len, outputs_of(item))) == sorted(job.outputs)
        num_ended += len(finished)
    assert num_ended == len(jobs)
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_gpu_blocks
