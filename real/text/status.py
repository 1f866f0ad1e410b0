"""How it goes, while it goes: a status line every few seconds, and rates beside a progress bar. Recorders, both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tqdm import tqdm

from testbed.core.commands import StepView
from testbed.core.outcome import Finished
from testbed.records.recorders import NoRecords

BAR_INTERVAL_NS = 200_000_000  # rates of the bar are of about this long


class CacheHits(NamedTuple):
    """The prefix cache so far, in tokens."""

    num_queried: int
    num_hit: int


class StatusLine(NoRecords):
    """Says one line about the steps of the last `interval_s` seconds of the run's clock.

    pools: how many GPU and CPU blocks there are. cache_hits: asked when a line is due. say: takes the line.
    """

    def __init__(
        self,
        interval_s: float,
        pools: tuple[int, int],
        cache_hits: Callable[[], CacheHits],
        say: Callable[[str], None],
    ) -> None:
        self._interval_ns = int(interval_s * 1e9)
        self._pools = pools
        self._cache_hits = cache_hits
        self._say = say
        self._hits = cache_hits()
        self._since_ns: int | None = None
        self._num_prompt = self._num_generated = 0

    def committed(self, step: StepView) -> None:
        if self._since_ns is None:
            self._since_ns = step.plan_ns
        self._num_prompt += _num_prompt_tokens(step)
        self._num_generated += _num_generated_tokens(step)
        if step.end_ns - self._since_ns >= self._interval_ns:
            self._say(self._line(step, (step.end_ns - self._since_ns) / 1e9))
            self._since_ns = step.end_ns
            self._num_prompt = self._num_generated = 0

    def _line(self, step: StepView, span_s: float) -> str:
        before, self._hits = self._hits, self._cache_hits()
        num_queried = self._hits.num_queried - before.num_queried
        hit_rate = f"{(self._hits.num_hit - before.num_hit) / num_queried:.1%}" if num_queried else "-"
        gpu = _usage(step.free_gpu_blocks, self._pools[0])
        return (
            f"prompt {self._num_prompt / span_s:,.1f} tok/s, generation {self._num_generated / span_s:,.1f} tok/s; "
            f"running {step.num_running}, waiting {step.num_waiting}, swapped {step.num_swapped}; "
            f"KV blocks in use: GPU {gpu}, CPU {_usage(step.free_cpu_blocks, self._pools[1])}; prefix hits {hit_rate}"
        )


class ThroughputBar(NoRecords):
    """Finished requests, with live prefill and decode rates; silent when standard error is no terminal."""

    def __init__(self, total: int, label: str = "generate") -> None:
        self._bar: tqdm[Any] = tqdm(
            total=total, desc=label, unit="req", disable=None, leave=False, delay=0.5, miniters=0
        )
        self._since_ns: int | None = None
        self._num_prompt = self._num_generated = 0

    def committed(self, step: StepView) -> None:
        if self._bar.disable:
            return
        if self._since_ns is None:
            self._since_ns = step.plan_ns
        self._num_prompt += _num_prompt_tokens(step)
        self._num_generated += _num_generated_tokens(step)
        span_ns = step.end_ns - self._since_ns
        if span_ns >= BAR_INTERVAL_NS:
            prefill, decode = (1e9 * num / span_ns for num in (self._num_prompt, self._num_generated))
            self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)
            self._bar.update(0)
            self._since_ns = step.end_ns
            self._num_prompt = self._num_generated = 0

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._bar.update(len(finished))

    def close(self) -> None:
        self._bar.close()


def _num_prompt_tokens(step: StepView) -> int:
    """Prompt tokens computed, those computed again after a preemption included."""
    return step.plan.shape.num_prefill_tokens


def _num_generated_tokens(step: StepView) -> int:
    return len(step.emitters)


def _usage(num_free: int, num_blocks: int) -> str:
    return f"{1 - num_free / num_blocks:.1%}" if num_blocks else "none"
