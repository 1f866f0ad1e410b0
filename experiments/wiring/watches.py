"""Recorders that a configuration asks for: a user's composition held to its limits, status lines."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.configuration.config import RunConfig
from experiments.wiring import build
from experiments.wiring.foreign import PolicyError, own_classes
from testbed.core.commands import StepView
from testbed.core.limits import Limits
from testbed.core.plan import BatchPlan
from testbed.core.scheduler import Scheduler
from testbed.records.recorders import NoRecords

if TYPE_CHECKING:
    from real.text.status import CacheHits, StatusLine


class BatchLimits(NoRecords):
    """Holds a user's batch composition to the limits of a step, which ours keep by themselves. A `Recorder`.

    A prompt alone, and decodes alone, may exceed the token budget, as with ours: there is nothing to leave out.
    """

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name = limits, name

    def committed(self, step: StepView) -> None:
        self.check(step.plan)

    def check(self, plan: BatchPlan) -> None:
        """Raises PolicyError, naming the composition, for a step beyond them."""
        shape, limits = plan.shape, self._limits
        for what, num, key in (
            ("sequences", shape.num_decodes + len(shape.prefills), "max_num_seqs"),
            ("tokens", shape.num_tokens, "max_num_batched_tokens"),
        ):
            most = getattr(limits, key)
            is_alone = key == "max_num_batched_tokens" and (
                not shape.prefills or len(shape.prefills) + shape.num_decodes == 1
            )
            if num > most and not is_alone:
                raise PolicyError(
                    f"{self._name} computes {num} {what} in step {plan.step}, and scheduler.{key} is {most}; "
                    "look at step.token_budget and step.num_running before you admit"
                )


def batch_limits(config: RunConfig) -> list[BatchLimits]:
    """One where the composition is a class of the user's."""
    named = [name for name in own_classes(config) if name.startswith("scheduler.composition=")]
    return [BatchLimits(build.limits(config), name) for name in named]


def status_lines(interval_s: float | None, schedulers: Sequence[Scheduler]) -> list[list[StatusLine]]:
    """The status line of each engine, on standard error and in the log; none where no interval is set."""
    if interval_s is None:
        return [[] for _ in schedulers]
    labels = [f"engine {number}: " if len(schedulers) > 1 else "" for number in range(len(schedulers))]
    return [[_status_line(interval_s, *each)] for each in zip(schedulers, labels, strict=True)]


def _status_line(interval_s: float, scheduler: Scheduler, label: str) -> StatusLine:
    from tqdm import tqdm  # not at the top, as above

    from real.text.status import CacheHits, StatusLine

    blocks, log = scheduler.blocks, logging.getLogger("testbed")

    def hits() -> CacheHits:
        return CacheHits(blocks.prefixes.num_queried_tokens, blocks.prefixes.num_hit_tokens)

    def say(line: str) -> None:
        log.info("status: %s%s", label, line)
        tqdm.write(label + line, file=sys.stderr)

    return StatusLine(interval_s, (blocks.num_gpu_blocks, blocks.num_cpu_blocks), hits, say)
