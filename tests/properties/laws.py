"""Laws that every plan keeps: the queue's order, the watermark, the budgets, the shape. And every end of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.core.outcome import Finished, FinishReason
from testbed.core.plan import BatchPlan, PreemptionMode, ScheduledSequence

if TYPE_CHECKING:
    from tests.properties.members import Job, Member
    from tests.properties.shadow import Shadow

Rows = tuple[ScheduledSequence, ...]


def check_admissions(shadow: Shadow, plan: BatchPlan) -> None:
    """Before the model follows the plan: who was admitted, in which order. The victims' places in the queue too."""
    setup = shadow.setup
    idle = not any(member.place == "running" for member in shadow.members.values())
    victims = [shadow.members[item.seq_id] for item in plan.preempted if item.mode is PreemptionMode.RECOMPUTE]
    victims = shadow.lost + victims
    if setup.rules.victims_return == "this_step":
        _put_back(shadow, victims)
    ended = {item.seq_id for item in plan.ignored}
    entering = [shadow.members[item.seq_id] for item in plan.admitted]
    assert len({member.seq_id for member in entering}) == len(entering)
    if setup.queue == "fcfs":
        passed = [member for member in shadow.queue if member.seq_id not in ended]
        may_defer = setup.composition == "decode_first" and setup.limits.max_num_partial_prefills > 1
        wanted = [one for one in passed if one in entering] if may_defer else passed[: len(entering)]
        assert [one.seq_id for one in entering] == [one.seq_id for one in wanted], "not first come, first served"
    for member in entering:
        assert member in shadow.queue, f"{member.seq_id} was admitted and did not wait"
        shadow.queue.remove(member)
    for member in [one for one in shadow.queue if one.seq_id in ended]:
        shadow.queue.remove(member)
    if setup.rules.victims_return == "next_step":
        _put_back(shadow, victims)
    _check_watermark(shadow, plan, idle, entering)
    if shadow.queue and not (setup.rules.victims_return == "next_step" and shadow.queue[0] in victims):
        assert plan.blocked_by is not None, "nobody says why the head waits"
    if not shadow.queue and setup.queue == "fcfs":
        assert plan.blocked_by is None or ended, f"nobody waits, and is blocked by {plan.blocked_by}"


def _put_back(shadow: Shadow, victims: list[Member]) -> None:
    for member in victims:
        shadow.queue.appendleft(member)


def _check_watermark(shadow: Shadow, plan: BatchPlan, was_idle: bool, entering: list[Member]) -> None:
    """The last admission leaves the watermark free; nothing takes blocks after it."""
    rules, blocks = shadow.setup.rules, shadow.scheduler.blocks
    if not entering:
        return
    last = entering[-1]
    is_idle = was_idle and len(entering) == 1 and not plan.swapped_in
    if is_idle and not rules.watermark_when_idle:
        return
    num_preempted = last.num_preempted + sum(1 for item in plan.preempted if item.seq_id == last.seq_id)
    if num_preempted and not rules.watermark_for_resumed:
        return
    if (plan.preempted or plan.ignored) and len(entering) == 1:  # they may have been all that ran
        return
    assert blocks.num_free_blocks >= blocks.watermark_blocks, "an admission went below the watermark"


def check_steps_of_their_own(shadow: Shadow, plan: BatchPlan) -> None:
    """Before the model follows the plan: what a step does not do together with something else."""
    setup = shadow.setup
    places = [member.place for member in shadow.members.values()]
    assert not (plan.preempted and plan.swapped_in), "swaps in what it took away, or takes away what it swapped in"
    may_go_on = setup.options.get("admits_after_preemption") or setup.composition == "prefill_decode_split"
    if not setup.has_preemptive_queue and not may_go_on:
        assert not (plan.preempted and plan.admitted), "admits in a step that preempted"
    if setup.composition == "static":
        assert not (plan.admitted and ("running" in places or "swapped" in places)), "a batch is not over"
    if setup.composition == "prefill_first":
        assert not (plan.admitted and "swapped" in places), "what is swapped out comes first"


def check_shape(shadow: Shadow, plan: BatchPlan, rows: Rows) -> None:
    """The integers that a cost model prices are what the rows say."""
    decodes = [row for row in rows if row.num_tokens == 1 and row.start >= shadow.members[row.seq_id].job.num_prompt]
    is_decode = {row.seq_id for row in decodes}
    shape = plan.shape
    assert len({row.seq_id for row in rows}) == len(rows), "two rows of one sequence"
    assert shape.num_decodes == len(decodes)
    window = shadow.setup.window or 1 << 40
    assert shape.decode_context_tokens == sum(min(row.start + 1, window) for row in decodes)
    assert [tuple(chunk) for chunk in shape.prefills] == [
        (min(row.start, window - 1), row.num_tokens) for row in rows if row.seq_id not in is_decode
    ]
    assert shape.num_samples == sum(row.samples for row in rows)
    assert shape.num_tokens == sum(row.num_tokens for row in rows)
    assert shape.num_blocks_swapped_out == len(plan.swap_out)
    assert shape.num_blocks_swapped_in == len(plan.swap_in)
    assert shape.num_blocks_copied == len(plan.copies)
    names = [shadow.members[row.seq_id].job.request.request_id for row in rows]
    assert plan.num_scheduled == [(name, row.num_tokens) for name, row in zip(names, rows, strict=True)]
    if plan.admitted and shadow.setup.composition in ("prefill_first", "prefill_decode_split"):
        assert all(shadow.members[row.seq_id].is_prefilling for row in rows), "prompts and decodes in one batch"
    _check_beams(shadow, plan, rows)


def _check_beams(shadow: Shadow, plan: BatchPlan, rows: Rows) -> None:
    """The rows of a search stand together, in the order of its beams, and are all of them."""
    of_beams = [shadow.members[row.seq_id] for row in rows if shadow.members[row.seq_id].job.is_beam]
    assert plan.has_beams == bool(of_beams)
    order = [row.seq_id for row in rows]
    for job in dict.fromkeys(member.job for member in of_beams):
        own = [member.seq_id for member in job.members]
        first = order.index(own[0])
        assert order[first : first + len(own)] == own, "the rows of a search are apart"


def check_budgets(shadow: Shadow, plan: BatchPlan, rows: Rows) -> None:
    """max_num_batched_tokens and max_num_seqs.

    Exceptions that the compositions state: a prompt that exceeds the budget alone (prefill_first: one that was
    preempted before; iteration_level and static: any) may be a batch of its own; the token budget of prefill_first and
    prefill_decode_split limits prompts only; prefill_decode_split caps batches, not the running set.
    """
    limits, setup = shadow.setup.limits, shadow.setup
    running = [member for member in shadow.members.values() if member.place == "running"]
    if setup.composition == "prefill_decode_split":
        assert len(rows) <= limits.max_num_seqs
    else:
        units = {member.unit[0].seq_id: member for member in running}
        assert sum(member.num_seqs for member in units.values()) <= limits.max_num_seqs
    num_tokens = sum(row.num_tokens for row in rows)
    if num_tokens <= limits.max_num_batched_tokens:
        return
    prompts = [row for row in rows if shadow.members[row.seq_id].is_prefilling]
    if not prompts and setup.composition in ("prefill_first", "prefill_decode_split"):
        return
    may_exceed = setup.composition in ("prefill_first", "iteration_level", "static")
    assert may_exceed, f"{num_tokens} tokens in a step"
    assert len(rows) == len(prompts) == 1, f"{num_tokens} tokens in {len(rows)} rows"
    if setup.composition == "prefill_first":
        assert shadow.members[prompts[0].seq_id].num_preempted, "a new prompt beyond the budget"


def check_finished(job: Job, finished: Finished, max_model_len: int) -> None:
    """Each request ends exactly once, with the outputs of all its sequences that were not dropped."""
    assert finished.request is job.request
    assert finished.reason is job.reason, f"{finished.reason} instead of {job.reason}"
    assert finished.reason is not FinishReason.DROPPED, "a request that has no output at all"
    assert (finished.message != "") == (finished.reason in (FinishReason.IGNORED, FinishReason.ABORT))
    assert finished.num_output_tokens == sum(map(len, job.outputs))
    assert list(finished.output_token_ids) == job.outputs[0]
    if job.width > 1:
        assert [list(one.token_ids) for one in finished.completions] == job.outputs
    forced = job.request.forced_output
    if job.is_forced and forced is not None:
        whole = list(forced)[: job.max_output(max_model_len)]
        for output, reason in zip(job.outputs, job.reasons, strict=True):
            assert output == whole[: len(output)], "not the tokens that were forced"
            assert reason in (FinishReason.IGNORED, FinishReason.ABORT) or output == whole, "not all of them"
    if finished.reason in (FinishReason.STOP, FinishReason.LENGTH) and not job.is_beam:
        assert len(job.outputs) == job.width, "a group delivers as many outputs as it has members"
