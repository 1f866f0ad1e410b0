"""The clocks of a run: they start at 0, can be read and waited on, and are called before each step. No torch."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from real.config import RealConfig
from real.vllm.config import VllmConfig
from testbed.core.outcome import Spans
from testbed.errors import ConfigError

SLEEP_SLICE_S = 0.05  # longest sleep, so that an interrupt or a debugger does not wait longer
SPIN_NS = 200_000  # the last part of a wait is spun, as a sleep oversleeps by about 100 us
PROBE_EVERY_NS = 20_000_000  # between probes; or ten times the duration of a probe, if that is longer
NUM_FOR_REFERENCE = (10, 200)  # the least and the most probes for the reference
REFERENCE_NS = 1_000_000_000  # no more probes than the least once they have taken this long together
NUM_FOR_RATE = 3  # the rate follows from the median of this many last probes, as an interrupt can lengthen one


class Clock(Protocol):
    """The run's time, in ns since `start`."""

    def start(self) -> None: ...
    def now_ns(self) -> int: ...
    def wait_until(self, until_ns: int) -> None: ...

    def before_step(self) -> float:
        """Is called when a step is about to begin. Returns the factor for spans that the engine measures in it."""
        ...


class RealTimeClock:
    """Waits by sleeping, and spins for the last SPIN_NS. read_ns, sleep: the machine's clock, for tests."""

    def __init__(
        self, read_ns: Callable[[], int] = time.perf_counter_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._read_ns, self._sleep = read_ns, sleep
        self._origin_ns = read_ns()

    def start(self) -> None:
        self._origin_ns = self._read_ns()

    def now_ns(self) -> int:
        return self._read_ns() - self._origin_ns

    def wait_until(self, until_ns: int) -> None:
        while (left_ns := until_ns - SPIN_NS - self.now_ns()) > 0:
            self._sleep(min(left_ns / 1e9, SLEEP_SLICE_S))
        while self.now_ns() < until_ns:
            pass

    def before_step(self) -> float:
        return 1.0

    def describe(self) -> dict[str, Any] | None:
        """Returns for the manifest how time was scaled; None: it was not."""
        return None


class SkippingClock(RealTimeClock):
    """Waits by moving the clock forward: steps take their real time, idle time takes none."""

    def wait_until(self, until_ns: int) -> None:
        self._origin_ns -= max(0, until_ns - self.now_ns())


class ProbeScaledClock(RealTimeClock):
    """Time as on a machine of constant speed, on which `probe`, a small piece of the engine's own work, takes
    `probe_ns`. Every PROBE_EVERY_NS the probe runs before a step, and later time is scaled by its duration. The clock
    stands while the probe runs, and idle time takes none. probe_ns: None: measured at the first `start`.

    A probe is run twice, and the second run is timed: then the caches hold its own data, whatever ran before.
    """

    def __init__(
        self, probe: Callable[[], None], probe_ns: int | None = None,
        read_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:  # fmt: skip
        super().__init__(read_ns)
        self.probe_ns = probe_ns
        self._probe = probe
        self._rate, self._now_ns, self._read_at_ns = 1.0, 0, 0  # rate: ns of this clock per ns of the machine's
        self._probed_at_ns = 0
        self._took_ns = array("q")

    def start(self) -> None:
        if self.probe_ns is None:
            self.probe_ns = self._reference_ns()
        while len(self._took_ns) < NUM_FOR_RATE:
            self._look()
        self._now_ns, self._read_at_ns = 0, self._read_ns()

    def _reference_ns(self) -> int:
        least, most = NUM_FOR_REFERENCE
        took_ns: list[int] = []
        while len(took_ns) < least or (len(took_ns) < most and 2 * sum(took_ns) < REFERENCE_NS):
            took_ns.append(self._timed())
        return round(median(took_ns))

    def now_ns(self) -> int:
        return self._now_ns + round((self._read_ns() - self._read_at_ns) * self._rate)

    def wait_until(self, until_ns: int) -> None:
        self._now_ns += max(0, until_ns - self.now_ns())

    def before_step(self) -> float:
        if self._read_ns() - self._probed_at_ns >= max(PROBE_EVERY_NS, 10 * self._took_ns[-1]):
            self._look()
        return self._rate

    def _look(self) -> None:
        """Measures how fast the machine is; the clock stands meanwhile."""
        assert self.probe_ns is not None
        self._now_ns, self._read_at_ns = self.now_ns(), self._read_ns()
        self._took_ns.append(self._timed())
        self._rate = self.probe_ns / median(self._took_ns[-NUM_FOR_RATE:])
        self._read_at_ns = self._probed_at_ns = self._read_ns()

    def _timed(self) -> int:
        self._probe()
        began_ns = self._read_ns()
        self._probe()
        return max(1, self._read_ns() - began_ns)

    def describe(self) -> dict[str, Any] | None:
        """Returns probe_ns, and the durations of the run's probes relative to it: at 1.2 they took a fifth longer."""
        ordered = sorted(self._took_ns)
        at = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
        return {
            "probe_ns": self.probe_ns,
            "num_probes": len(ordered),
            "slowness": {
                name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] / self.probe_ns
                for name, share in at.items()
                if ordered and self.probe_ns
            },
        }


def scaled(spans: Spans, rate: float) -> Spans:
    """Converts spans that were measured on the machine's clock to a clock of another rate."""
    if rate == 1.0:
        return spans
    return Spans(*(int(getattr(spans, name) * rate) for name in Spans.FIELDS))


def make_clock(config: RealConfig | VllmConfig, engine: object = None) -> RealTimeClock:
    """Creates the clock for config.pace. engine: has the probe of `probe_scaled`; raises ConfigError without one."""
    if config.pace == "probe_scaled":
        probe = getattr(engine, "probe", None)
        if probe is None:
            raise ConfigError(
                "backend.pace=probe_scaled needs one engine in this process, on a CPU, without ranks, and of vLLM one "
                "that plans no step ahead; choose another backend.pace"
            )
        return ProbeScaledClock(probe, config.probe_ns)
    return SkippingClock() if config.pace == "as_fast_as_possible" else RealTimeClock()
