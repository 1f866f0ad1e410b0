"""A plan as bytes: only what the ranks other than the driver's need of it.

Each rank computes hidden states and its part of the logits. Only the first rank samples; every sampled token is in the
next plan. So rows are sent without the fields that only a sampler reads, as plain tuples: pickling whole rows takes
from 1.5 times as long (decodes of 63 blocks) to 11 times (of one block, a seed in each row). A row whose prompt is
scored is marked, because scoring needs more logits from all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from testbed.core.plan import BatchPlan, BatchShape, ScheduledSequence
from testbed.core.request import SamplingParams
from testbed.made_rows import MadeRows

COMPUTE_ONLY = SamplingParams()
SCORES_PROMPT = SamplingParams(prompt_logprobs=0)
NO_SHAPE = BatchShape(0, 0, (), 0)


def pack(plan: BatchPlan, rows: Sequence[ScheduledSequence]) -> bytes:
    """Returns the plan as bytes. rows: those of the plan."""
    sent = []
    for row in rows:
        num_scored = row.num_prompt_tokens if row.sampling.prompt_logprobs is not None else 0
        tokens, table = list(row.tokens), list(row.block_table)
        sent.append((row.seq_id, row.start, row.num_tokens, tokens, row.samples, table, num_scored))
    return pickle.dumps((sent, plan.swap_out, plan.swap_in, plan.copies))


def unpack(message: bytes) -> BatchPlan:
    """Returns a plan with the same work. Its rows are forced and greedy."""
    sent, swap_out, swap_in, copies = pickle.loads(message)
    rows = [
        ScheduledSequence(
            seq_id, start, num_tokens, tokens, samples, True, table,
            SCORES_PROMPT if num_scored else COMPUTE_ONLY,
            num_prompt_tokens=num_scored,
            history=(0,) * num_scored,  # only the scored positions matter here, not the tokens
        )
        for seq_id, start, num_tokens, tokens, samples, table, num_scored in sent
    ]  # fmt: skip
    return BatchPlan(0, NO_SHAPE, MadeRows(tuple(rows)), swap_out=swap_out, swap_in=swap_in, copies=copies)
