"""From a decided step to the plan that a backend executes."""

from __future__ import annotations

from testbed.core.fast_forward import num_steps_ahead
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk, ScheduledSequence
from testbed.core.running import Core
from testbed.core.step import Step


def make_plan(step: Step, core: Core, *, record_decisions: bool, max_steps: int = 1) -> BatchPlan:
    """The plan of a step. Its rows are made when a device asks for them; a simulator never does."""
    decoded, decodes = step.decoded, core.decodes
    num_decodes = num_samples = len(decoded)
    context = decodes.context_tokens if decoded is decodes.members else sum([seq.num_tokens for seq in decoded])
    prefills: tuple[PrefillChunk, ...] = ()
    has_beams = False
    if step.rows:
        as_decodes, row_context, prefills, row_samples, has_beams = _row_shapes(step, core.blocks.sliding_window)
        num_decodes, context, num_samples = num_decodes + as_decodes, context + row_context, num_samples + row_samples
    copies = core.blocks.copies.pairs
    if copies:
        copies = _last_into_each(core.blocks.copies.take())
    swap_in = step.swap_in and _last_into_each(step.swap_in)
    shape = BatchShape(num_decodes, context, prefills, num_samples, len(step.swap_out), len(swap_in), len(copies))
    return BatchPlan(  # by position, which is faster
        core.num_steps,
        num_steps_ahead(step, core, max_steps) if max_steps > 1 else 1,
        shape,
        lambda: _rows(step),
        _num_scheduled(step) if record_decisions else None,
        tuple(step.admitted),
        tuple(step.preempted),
        tuple(step.swap_out),
        tuple(swap_in),
        tuple(step.swapped_in),
        tuple(copies),
        tuple(step.ignored),
        step.blocked_by,
        has_beams,
    )


def _row_shapes(step: Step, window: int | None) -> tuple[int, int, tuple[PrefillChunk, ...], int, bool]:
    """Of the rows: those that are decodes, and the positions that these attend to; the prefills; how many sample;
    whether there are beams."""
    num_decodes = context = num_samples = 0
    prefills: list[PrefillChunk] = []
    has_beams = False
    for seq, start, num_tokens in step.rows:
        if num_tokens == 1 and start >= seq.num_prompt_tokens:
            num_decodes += 1
            context += start + 1 if window is None else min(start + 1, window)
        else:
            prefills.append(PrefillChunk(start if window is None else min(start, window - 1), num_tokens))
        num_samples += start + num_tokens == seq.num_tokens
        has_beams = has_beams or (seq.group is not None and seq.group.is_beam)
    return num_decodes, context, tuple(prefills), num_samples, has_beams


def _last_into_each(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of the moves into one block the last: its first taker found its content elsewhere and gave it back."""
    sources = {destination: source for source, destination in pairs}
    return [(source, destination) for source, destination in pairs if sources[destination] == source]


def _num_scheduled(step: Step) -> tuple[tuple[str, int], ...]:
    decoded = [(seq.request.request_id, 1) for seq in step.decoded]
    return (*decoded, *((seq.request.request_id, num_tokens) for seq, _, num_tokens in step.rows))


def _rows(step: Step) -> tuple[ScheduledSequence, ...]:
    assert not step.is_over, "a plan's rows are valid until it is committed"
    table, make = step.blocks.table, ScheduledSequence
    decodes: list[ScheduledSequence] = []
    for seq in step.decoded:
        end, seq_id = seq.num_tokens, seq.seq_id
        token = seq.tokens[end - 1 : end]
        sampling = seq.request.sampling
        known = seq.tokens[:end] if sampling.needs_history else ()
        decodes.append(
            make(
                seq_id, end - 1, 1, token, True, seq.is_forced, table(seq_id), sampling, 1, seq_id,
                seq.num_prompt_tokens, known, seq.score,
            )
        )  # fmt: skip
    return *decodes, *(
        make(
            seq.seq_id,
            start,
            num_tokens,
            seq.tokens[start : start + num_tokens],
            start + num_tokens == seq.num_tokens,
            seq.is_forced,
            table(seq.seq_id),
            seq.request.sampling,
            seq.num_samples,
            seq.seq_id if seq.group is None else seq.group.group_id,
            seq.num_prompt_tokens,
            seq.known_tokens(0, seq.num_tokens) if seq.request.sampling.needs_history else (),
            seq.score,
            0 if seq.group is None else len(seq.group.finished),
        )
        for seq, start, num_tokens in step.rows
    )
