"""Output of a sweep while its points run, on any machine: a line for each point, and on a terminal a progress bar."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.console import from_here, go_on_unheard
from experiments.sweeps.points import Board, Outcome

_EVERY_S = 0.2


class Followed:
    """Reads the board in a thread until `stop` or the end of the context. outcomes: all outcomes read so far."""

    def __init__(self, board: Board, num_points: int) -> None:
        self._board, self._num_points = board, num_points
        self.outcomes: list[Outcome] = []
        self._bar: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    @property
    def num_done(self) -> int:
        """The points that the same command skips. A run may be whole although Ctrl-C came before its sweep went on."""
        return sum((Path(outcome.folder) / "done").exists() for outcome in self.outcomes if outcome.folder)

    def __enter__(self) -> Followed:
        if sys.stderr.isatty():
            from tqdm import tqdm  # not at the top: only needed on a terminal

            # smoothing=0: the rate is the mean over all points, since they end in bursts
            self._bar = tqdm(total=self._num_points, desc="sweep", unit="point", leave=False, smoothing=0)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Reads the last outcomes and closes the bar. A second call does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._look()
        if self._bar is not None:
            self._bar.close()

    def _follow(self) -> None:
        pause_s = _EVERY_S
        while not self._stopped.wait(pause_s):
            began = time.monotonic()
            try:
                self._look()
            except OSError:  # the folder is gone, or the disk full that the output is written to: `stop` meets it again
                return
            pause_s = max(_EVERY_S, 50 * (time.monotonic() - began))  # at most 2 %: a point may run in this process

    def _look(self) -> None:
        news = self._board.news()
        self.outcomes += news
        for outcome in news:
            if outcome.status != "interrupted":
                label = f"{outcome.label}: " if outcome.label else ""
                self._say(f"{outcome.status:<12} {label}{outcome.message or from_here(outcome.folder)}")
        if self._bar is not None:
            failed = sum(outcome.status == "failed" for outcome in self.outcomes)
            running = self._board.num_taken - len(self.outcomes)
            self._bar.set_postfix_str(f"{running} running, {failed} failed", refresh=False)
            self._bar.update(len(news))
            self._bar.refresh()

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        try:
            print(line, flush=self._bar is not None)
        except BrokenPipeError:  # `| head`: the points still run
            go_on_unheard()
