"""A plan as bytes: only what the ranks other than the driver's need of it.

Each rank computes hidden states and its part of the logits. Only the first rank samples; every sampled token is in the
next plan. So rows are sent without the fields that only a sampler reads, as 32-bit integers in this machine's byte
order: per row five numbers, its tokens of this step and its block table; then the swaps and copies. A row whose prompt
is scored is marked, because scoring needs more logits from all ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from testbed.core.plan import BatchPlan, BatchShape, ScheduledSequence
from testbed.core.request import SamplingParams
from testbed.made_rows import MadeRows

ROW_NUMBERS = 5
COMPUTE_ONLY = SamplingParams()
SCORES_PROMPT = SamplingParams(prompt_logprobs=0)
NO_SHAPE = BatchShape(0, 0, (), 0)

Pairs = tuple[tuple[int, int], ...]


def pack(plan: BatchPlan, rows: Sequence[ScheduledSequence]) -> bytes:
    """Returns the plan as bytes. rows: those of the plan."""
    numbers = [len(rows), len(plan.swap_out), len(plan.swap_in), len(plan.copies)]
    for row in rows:
        num_scored = row.num_prompt_tokens if row.sampling.prompt_logprobs is not None else 0
        numbers += (row.start, row.num_tokens, row.samples, len(row.block_table), num_scored)
    for row in rows:
        numbers += row.tokens
        numbers += row.block_table
    for pairs in (plan.swap_out, plan.swap_in, plan.copies):
        for pair in pairs:
            numbers += pair
    return array("i", numbers).tobytes()


def unpack(message: bytes) -> BatchPlan:
    """Returns a plan with the same work. Its rows are numbered from 0, forced, and greedy."""
    numbers = array("i")
    numbers.frombytes(message)
    num_rows, *num_pairs = numbers[:4]
    place = 4 + num_rows * ROW_NUMBERS
    rows = []
    for number in range(num_rows):
        head = 4 + number * ROW_NUMBERS
        start, num_tokens, samples, num_blocks, num_scored = numbers[head : head + ROW_NUMBERS]
        tokens = numbers[place : place + num_tokens]
        table = numbers[place + num_tokens : place + num_tokens + num_blocks]
        place += num_tokens + num_blocks
        row = ScheduledSequence(
            number, start, num_tokens, tokens, bool(samples), True, table,
            SCORES_PROMPT if num_scored else COMPUTE_ONLY,
            num_prompt_tokens=num_scored,
            history=(0,) * num_scored,  # only the scored positions matter here, not the tokens
        )  # fmt: skip
        rows.append(row)
    moves: list[Pairs] = []
    for num in num_pairs:
        ends = numbers[place : place + 2 * num]
        moves.append(tuple(zip(ends[::2], ends[1::2], strict=True)))
        place += 2 * num
    assert place == len(numbers), "a message is as long as it says"
    return BatchPlan(0, NO_SHAPE, MadeRows(tuple(rows)), swap_out=moves[0], swap_in=moves[1], copies=moves[2])
