"""Preemption in a step, by recompute or by swap, and the end of sequences that can never continue.

Owns the lists of these sequences; releases their blocks through the block manager.
"""

from __future__ import annotations

from testbed.blocks.kv_sequence import num_distinct
from testbed.blocks.manager import BlockManager
from testbed.core.batch import Batch
from testbed.core.plan import RESET, Ignored, Pair, Preemption, PreemptionMode
from testbed.core.policies import Policies
from testbed.core.running import Running
from testbed.core.sequence import Sequence
from testbed.core.state import SequenceState
from testbed.core.waiting import Waiting


class Preempting:
    """The preemptions of one step. A sequence represents its group. holds: victims are requeued only after the step."""

    def __init__(
        self, batch: Batch, blocks: BlockManager, running: Running, waiting: Waiting, policies: Policies, *, holds: bool
    ) -> None:
        self.preempted: tuple[Preemption, ...] = ()
        self.preempted_for: tuple[str | None, ...] = ()  # for each of them, the request whose growth needed the blocks
        self.num_reset = 0  # how many of them, at the front, were preempted by a reset
        self.swap_out: tuple[Pair, ...] = ()
        self.held: tuple[Sequence, ...] = ()  # victims that return to the queue after the step is decided
        self.ignored: list[Ignored] = []  # lists: a burst of requests that can never run ends in one step
        self.ended: list[tuple[Sequence, str]] = []  # ignored sequences, with the reason
        self._batch, self._blocks, self._running, self._waiting = batch, blocks, running, waiting
        self._policies, self._holds = policies, holds

    def preempt(self, seq: Sequence, grower: Sequence | None = None) -> None:
        """Preempts a running sequence, in the policy's mode if memory allows. grower: the one that needs its blocks."""
        assert seq.state is SequenceState.RUNNING, f"the victim is not among the running sequences: {seq}"
        blocks, whose = self._blocks, None if grower is None else grower.request_id
        was_scheduled = self._withdraw(seq)
        for one in seq.together:
            if one.may_fork and one.num_placeholders:  # it forks only while it runs: this token is sampled again later
                one.give_up_flight()
                self._running.note_prefill(one)
        wish = self._policies.mode(seq, num_distinct([one.block_table for one in seq.together]))
        wants_swap = (wish is PreemptionMode.SWAP and seq.num_computed_tokens > 0) or _is_search(seq)
        # its table may hold merged blocks of this step, which other rows compute only after the swap-out
        can_swap = not (was_scheduled and blocks.prefixes.merged is not None)
        if wants_swap and can_swap and blocks.swapping.can_swap_out(seq.together):
            self._swap_out(seq, whose)
        else:
            self._recompute(seq, whose)

    def reset(self) -> None:
        """Discards all KV: running and swapped-out sequences are recomputed, whatever mode the policy prefers. The last
        one is preempted first, so that the queue has them in running order."""
        for seq in reversed([*self._running.swapped.values(), *self._running.in_order]):
            self._running.stop(seq)
            self._recompute(seq, RESET)
        self._blocks.prefixes.reset(self._waiting)
        self.num_reset = len(self.preempted)

    def give_up(self, seq: Sequence) -> None:
        """Ends a running sequence as ignored: it finds no free blocks although nothing else runs."""
        blocks = self._blocks
        reason = (
            f"{seq.num_tokens} tokens find no room to go on although nothing else runs: {blocks.num_free_blocks} "
            f"of {blocks.num_gpu_blocks} KV blocks are free (growth_test={blocks.rules.growth_test})"
        )
        self._withdraw(seq)
        self._free_and_end(seq, reason)

    def give_up_swapped(self, seq: Sequence) -> None:
        """Ends a swapped-out sequence as ignored: its blocks can never fit into the pool again."""
        blocks = self._blocks
        reason = (
            f"{num_distinct([one.cpu_table for one in seq.together])} swapped-out KV blocks, room to grow and a "
            f"watermark of {blocks.watermark_blocks} exceed the pool of {blocks.num_gpu_blocks}"
        )
        self._running.stop(seq)
        self._free_and_end(seq, reason)

    def end(self, seq: Sequence, reason: str) -> None:
        """Reports a sequence and its siblings as ignored. They must hold no blocks and be in no queue."""
        self.ignored.append(Ignored(seq.seq_id, seq.request_id, reason))
        self.ended.extend([(one, reason) for one in seq.together])

    def _withdraw(self, seq: Sequence) -> bool:
        """Stops a victim and removes its rows from the batch. Returns whether it was already scheduled in this step."""
        was_scheduled = False
        for one in seq.together:
            if self._batch.remove(one):
                self._blocks.prefixes.withdraw(one, one.num_computed_tokens)
                was_scheduled = True
        self._running.stop(seq)
        return was_scheduled

    def _recompute(self, seq: Sequence, whose: str | None) -> None:
        """Frees the blocks and requeues each member of the group separately. Several beams end as ignored instead."""
        if _is_search(seq):
            self._free_and_end(seq, _lost_beams_reason(seq, self._blocks, is_reset=whose == RESET))
            return
        for one in reversed(seq.together):
            self._note(one, PreemptionMode.RECOMPUTE, whose)
            self._blocks.free(one)
            one.restart()
            one.enter(SequenceState.WAITING)
            one.part()
            if self._holds:
                self.held += (one,)
            else:
                self._waiting.push_back(one)

    def _swap_out(self, seq: Sequence, whose: str | None) -> None:
        for one in seq.together:
            self._note(one, PreemptionMode.SWAP, whose)
        self.swap_out += self._blocks.swapping.swap_out(seq.together)
        self._running.swap_out(seq)

    def _note(self, seq: Sequence, mode: PreemptionMode, whose: str | None) -> None:
        self.preempted += (Preemption(seq.seq_id, seq.request_id, mode, seq.num_computed_tokens),)
        self.preempted_for += (whose,)
        seq.num_preemptions += 1

    def _free_and_end(self, seq: Sequence, reason: str) -> None:
        for one in seq.together:
            self._blocks.free(one)
            one.give_up_flight()
            one.enter(SequenceState.WAITING)
        self.end(seq, reason)


def _is_search(seq: Sequence) -> bool:
    """Whether it represents several beams, which cannot be recomputed separately."""
    return seq.siblings is not None and seq.group is not None and seq.group.is_beam


def _lost_beams_reason(seq: Sequence, blocks: BlockManager, *, is_reset: bool) -> str:
    if is_reset:
        return f"{len(seq.together)} beams, which cannot be recomputed, lost their KV to a reset of the prefix cache"
    return (
        f"{len(seq.together)} beams were preempted, which cannot be recomputed, and the CPU pool of "
        f"{blocks.num_cpu_blocks} blocks had no room to swap them out "
        f"({blocks.num_free_cpu_blocks} free); raise cache.num_cpu_blocks"
    )
