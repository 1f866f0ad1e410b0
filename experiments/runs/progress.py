"""Progress of a run. This module is compiled, as it is called at each step."""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar

from testbed.core.commands import Recorder
from testbed.core.outcome import Finished


class Progress(Recorder):
    """Shows finished requests, rate and time left on standard error: a bar on a terminal, else a line every LINE_S
    seconds."""

    LINE_S: ClassVar[float] = 30.0

    def __init__(self, total: int | None, label: str) -> None:
        self._total, self._label, self._num = total, label, 0
        self._began = time.monotonic()
        self._next = self._began + self.LINE_S
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # not at the top: only needed on a terminal

            self._bar = tqdm(total=total, desc=label, unit="req", leave=False, delay=0.5)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        self._num += len(finished)
        if self._bar is not None:
            self._bar.update(len(finished))
        elif time.monotonic() >= self._next:
            self._next += self.LINE_S
            print(self._line(time.monotonic() - self._began), file=sys.stderr, flush=True)

    def _line(self, spent_s: float) -> str:
        of = "" if self._total is None else f" of {self._total:,}"
        left = "" if self._total is None else f", {(self._total - self._num) * spent_s / self._num:.0f} s left"
        rate = self._num / spent_s
        shown = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return f"{self._label}: {self._num:,}{of} requests in {spent_s:.0f} s, {shown} req/s{left}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
