"""Progress of a running engine: a status line every few seconds, and a progress bar with rates. Both are Recorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from testbed.blocks.manager import BlockManager
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Finished

BAR_INTERVAL_NS = 200_000_000  # interval of the bar's rates


class Rates:
    """Tokens per second over consecutive steps that together take at least `interval_ns`."""

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._since_ns: int | None = None
        self._num_prompt = self._num_generated = 0

    def add(self, step: StepView) -> tuple[float, float] | None:
        """Adds a step. Returns the rates of prompt tokens (recomputed ones included) and of output tokens; None until
        the interval is over."""
        if self._since_ns is None:
            self._since_ns = step.plan_ns
        self._num_prompt += step.plan.shape.num_prefill_tokens
        self._num_generated += len(step.emitters)
        if step.end_ns - self._since_ns < self._interval_ns:
            return None
        span_s = (step.end_ns - self._since_ns) / 1e9
        rates = self._num_prompt / span_s, self._num_generated / span_s
        self._since_ns, self._num_prompt, self._num_generated = step.end_ns, 0, 0
        return rates


class StatusLine(Recorder):
    """Writes one line about the steps of the last `interval_s` seconds of the run's clock.

    blocks: those of the engine. say: writes the line.
    """

    def __init__(self, interval_s: float, blocks: BlockManager, say: Callable[[str], None]) -> None:
        self._rates = Rates(int(interval_s * 1e9))
        self._blocks = blocks
        self._say = say
        self._hits = self._hits_so_far()

    def committed(self, step: StepView) -> None:
        rates = self._rates.add(step)
        if rates is not None:
            self._say(self._line(step, *rates))

    def _line(self, step: StepView, prompt: float, generation: float) -> str:
        before, self._hits = self._hits, self._hits_so_far()
        num_queried, num_hit = (now - then for now, then in zip(self._hits, before, strict=True))
        hit_rate = f"{num_hit / num_queried:.1%}" if num_queried else "-"
        gpu = _usage(step.free_gpu_blocks, self._blocks.num_gpu_blocks)
        cpu = _usage(step.free_cpu_blocks, self._blocks.num_cpu_blocks)
        return (
            f"prompt {prompt:,.1f} tok/s, generation {generation:,.1f} tok/s; "
            f"running {step.num_running}, waiting {step.num_waiting}, swapped {step.num_swapped}; "
            f"KV blocks in use: GPU {gpu}, CPU {cpu}; prefix hits {hit_rate}"
        )

    def _hits_so_far(self) -> tuple[int, int]:
        """Returns queries and hits of the prefix cache so far, in tokens."""
        prefixes = self._blocks.prefixes
        return prefixes.num_queried_tokens, prefixes.num_hit_tokens


class ThroughputBar(Recorder):
    """A progress bar of finished requests with prefill and decode rates; shown if standard error is a terminal."""

    def __init__(self, total: int) -> None:
        self._bar: tqdm[Any] = tqdm(
            total=total, desc="generate", unit="req", disable=None, leave=False, delay=0.5, miniters=0
        )
        self._rates = Rates(BAR_INTERVAL_NS)

    def committed(self, step: StepView) -> None:
        rates = None if self._bar.disable else self._rates.add(step)
        if rates is not None:
            prefill, decode = rates
            self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s", refresh=False)
            self._bar.update(0)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._bar.update(len(finished))

    def close(self) -> None:
        self._bar.close()


def _usage(num_free: int, num_blocks: int) -> str:
    return f"{1 - num_free / num_blocks:.1%}" if num_blocks else "none"
