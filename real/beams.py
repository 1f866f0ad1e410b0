"""Beam search over the rows of a plan: which continuations live on, which end, which beams lose.

A step of a group considers every continuation of every live beam, ranked by summed log-probability. The rules are those
of Hugging Face's `generate` with `early_stopping=True`:

- a stop token among the best `beam_width` continuations is a finished hypothesis, further down it is nothing;
- the best `beam_width` continuations without a stop token are the next live beams;
- the search ends when `beam_width` hypotheses are finished: the beams that still live are dropped in that step. Those
  that finish together in it are all kept, so up to 2 * beam_width - 1 hypotheses are there to choose from.

What ends a sequence is the core's to know: a finished hypothesis is a token of an Outcome that is a stop token. The
length limits are the core's too; beams reach them together.

The sums are this module's own memory, the one exception to "the inputs of a step come from the plan alone": sequences
that fork off get their ids from the core, later. So a group's sums are kept in the order in which its rows come next:
first the beams that go on in their own sequence, in row order, then the forks, in the order of (parent row, fork).
Each row's newest token and position are checked against what was said of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.plan import Outcome, ScheduledSequence
from testbed.request import SamplingParams

MAX_GROUPS = 2**14  # groups remembered; see BeamSearch
MAX_SCORED_ELEMENTS = 2**22  # rows x vocabulary that are ranked at a time: bounds the memory of their copies


class BeamInputs(NamedTuple):
    """The beams among the rows that sample, and how many continuations of each are looked at."""

    rows: Tensor  # int64 [num_beams], indices into the rows that sample
    num_candidates: int


class Candidates(NamedTuple):
    """The best continuations of each beam, best first."""

    log_probs: Tensor  # float32 [num_beams, num_candidates]
    token_ids: Tensor  # int64 [num_beams, num_candidates]


class Continuation(NamedTuple):
    """One beam and one token more. Sorts best first; ties by row, then by token."""

    negative_score: float
    row: int  # index into the group's rows
    token: int


class LiveBeams(NamedTuple):
    """A group between two steps: its rows, in the order in which they come next."""

    position: int  # of the newest token of each
    tokens: list[int]  # the newest of each
    scores: list[float]  # summed log-probabilities of each, the newest token's included
    num_finished: int


def is_beam(row: ScheduledSequence) -> bool:
    """Whether the row's next token is searched for, not drawn."""
    return row.sampling.beam_width > 0 and not row.forced


def beam_inputs(sampled: Sequence[ScheduledSequence]) -> BeamInputs | None:
    """The beams among the rows that sample, on the host; None when there are none."""
    beams = [(number, row.sampling) for number, row in enumerate(sampled) if is_beam(row)]
    if not beams:
        return None
    # a row's best `width` tokens, and its best `width` that are no stop tokens (EOS is one more), are among these
    needed = [sampling.beam_width + len(sampling.stop_token_ids) + 1 for _, sampling in beams]
    return BeamInputs(torch.tensor([number for number, _ in beams]), max(needed))


class BeamSearch:
    """The live beams of every group.

    A group whose search ends is forgotten at once. One that was aborted or has reached its length limit says nothing of
    it: it is forgotten when MAX_GROUPS other groups have taken a step since its last, which is far more than can be
    alive and wait, and about a kilobyte each. A group id that comes again with a prompt starts anew.
    """

    def __init__(self, eos_token_id: int | None) -> None:
        self._eos_token_id = eos_token_id
        self._groups: OrderedDict[int, LiveBeams] = OrderedDict()  # the least recently stepped first

    def __len__(self) -> int:
        """Groups that are remembered."""
        return len(self._groups)

    def _stop_tokens(self, sampling: SamplingParams) -> tuple[int, ...]:
        """The tokens at which the core ends a sequence."""
        if self._eos_token_id is None or sampling.ignore_eos:
            return sampling.stop_token_ids
        return (*sampling.stop_token_ids, self._eos_token_id)

    def advance(self, rows: Sequence[ScheduledSequence], candidates: Candidates) -> list[Outcome]:
        """One outcome for each beam row of a step, in row order. Waits for the device."""
        log_probs, token_ids = candidates.log_probs.tolist(), candidates.token_ids.tolist()
        outcomes: list[Outcome] = []
        seen: list[int] = []
        for group_id, members in groupby(rows, key=lambda row: row.group_id):
            assert group_id not in seen, f"the beams of group {group_id} do not stand together"
            seen.append(group_id)
            group = list(members)
            part = slice(len(outcomes), len(outcomes) + len(group))
            outcomes += self._advance_group(group, log_probs[part], token_ids[part])
        return outcomes

    def _advance_group(
        self, rows: list[ScheduledSequence], log_probs: list[list[float]], token_ids: list[list[int]]
    ) -> list[Outcome]:
        sampling = rows[0].sampling
        width, stops = sampling.beam_width, self._stop_tokens(sampling)
        before = self._recall(rows)
        ranked = sorted(
            Continuation(-(before.scores[row] + log_prob), row, token)
            for row in range(len(rows))
            for log_prob, token in zip(log_probs[row], token_ids[row], strict=True)
        )
        finished = [each for each in ranked[:width] if each.token in stops]
        num_finished = before.num_finished + len(finished)
        is_over = num_finished >= width
        live = [] if is_over else [each for each in ranked if each.token not in stops][:width]
        # of each beam, what goes on comes first: it keeps the sequence and its blocks
        living = [[each for each in live if each.row == row] for row in range(len(rows))]
        ending = [[each for each in finished if each.row == row] for row in range(len(rows))]
        after = [best[0] for best in living if best] + [each for best in living for each in best[1:]]
        if width > 1:
            self._remember(
                rows[0].group_id,
                LiveBeams(
                    before.position + 1,
                    [each.token for each in after],
                    [-each.negative_score for each in after],
                    num_finished,
                ),
            )
        return [
            _outcome(row.seq_id, [each.token for each in (*living[index], *ending[index])])
            for index, row in enumerate(rows)
        ]

    def _recall(self, rows: list[ScheduledSequence]) -> LiveBeams:
        """The group's sums, in the order of its rows; a prompt starts a search.

        One beam alone is compared with nothing: it is not remembered, and starts anew with each step.
        """
        row = rows[0]
        if row.num_samples > 1 or row.sampling.beam_width == 1:
            assert len(rows) == 1, f"group {row.group_id} starts a search from {len(rows)} rows"
            return LiveBeams(row.start + row.num_tokens - 1, [row.tokens[-1]], [0.0], num_finished=0)
        known = self._groups.get(row.group_id)
        assert known is not None, f"group {row.group_id} goes on with beams that are not known"
        assert [row.tokens[-1] for row in rows] == known.tokens, (
            f"group {row.group_id} comes back with other beams, or in another order"
        )
        assert all(row.start + row.num_tokens == known.position + 1 for row in rows), (
            f"the beams of group {row.group_id} are not of one length"
        )
        return known

    def _remember(self, group_id: int, beams: LiveBeams) -> None:
        self._groups.pop(group_id, None)
        if not beams.tokens:
            return
        self._groups[group_id] = beams
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)


def best_continuations(logits: Tensor, inputs: BeamInputs) -> Candidates:
    """The best next tokens of each beam. logits: float32 [num_rows, vocab]. Does not wait for the device."""
    vocab_size = logits.shape[-1]
    num_candidates = min(inputs.num_candidates, vocab_size)
    parts = []
    for rows in torch.split(inputs.rows, max(1, MAX_SCORED_ELEMENTS // vocab_size)):
        chosen = logits[rows]  # [at most that many, vocab]
        best = chosen.topk(num_candidates, dim=-1)  # [at most that many, num_candidates]
        parts.append(Candidates(best.values - chosen.logsumexp(dim=-1, keepdim=True), best.indices))
    return Candidates(torch.cat([part.log_probs for part in parts]), torch.cat([part.token_ids for part in parts]))


def _outcome(seq_id: int, tokens: list[int]) -> Outcome:
    return Outcome(seq_id, tuple(tokens[:1]), forks=tuple(tokens[1:]), dropped=not tokens)
