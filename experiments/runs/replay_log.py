"""A real run's own side: the trace at the replay's speed, and what the manifest says of its clock and its host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from real.clocks import RealTimeClock
from real.config import RealConfig
from real.replay import CoreWait, HostTimes, ReplayLag, core_wait_notes
from real.vllm.config import VllmConfig
from testbed.errors import ConfigError
from testbed.traces.schema import Trace
from testbed.traces.transforms import speed_up


def at_speed(trace: Trace, speed: float) -> Trace:
    """The trace as it is replayed; what a run folder keeps is the trace itself. Raises ConfigError."""
    if speed == 1:
        return trace
    try:
        return speed_up(trace, speed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("factor", "backend.speed", 1)) from None


def check_profile(config: RunConfig) -> None:
    """Raises ConfigError where steps are to be traced that no engine of ours makes."""
    if config.record.profile is None:
        return
    if not isinstance(config.backend, RealConfig):
        raise ConfigError(
            f"record.profile is {config.record.profile!r}, but only backend=real has steps to trace; set it to null"
        )
    if config.backend.num_replicas > 1:
        raise ConfigError(
            "record.profile traces the engine of this process, and each of backend.num_replicas has its own; set it to "
            "null, or run one engine"
        )


def traced(config: RunConfig, backend: Any, folder: Path) -> tuple[Any, Callable[[], None]]:
    """The backend as it is driven, under the profiler in the steps that record.profile names; and what ends both."""
    steps = config.record.profiled_steps
    if steps is None:
        return backend, backend.close
    from real.step_trace import StepTrace

    trace = StepTrace(backend, folder, *steps)

    def close() -> None:
        trace.close()
        backend.close()

    return trace, close


NO_REPLAY: dict[str, Any] = {"replay": None, "host": None}  # what the manifest of a simulated run has of it


class ReplayLog:
    """What is measured beside the records. lags: a `Recorder` of each engine; host: the driver's."""

    def __init__(self, options: RealConfig | VllmConfig, num_engines: int = 1, *, clock: RealTimeClock) -> None:
        self._options, self._clock = options, clock
        self.lags = [ReplayLag() for _ in range(num_engines)]
        self.host = HostTimes()
        self._core_wait = CoreWait()

    def describe(self) -> dict[str, Any]:
        """Two sections of the manifest."""
        pace = {"pace": self._options.pace, "speed": self._options.speed, "probe": self._clock.describe()}
        lag, waited = ReplayLag.of_all(self.lags), self._core_wait.share()
        return {
            "replay": pace | lag.describe() | {"notes": [*lag.notes(), *core_wait_notes(waited)]},
            "host": self.host.describe() | {"core_wait_share": waited},
        }


def warnings_of(manifest: dict[str, Any]) -> list[str]:
    """What makes a run's numbers doubtful: prices outside their range, a machine that did not keep pace or was busy."""
    return [*manifest["cost_notes"], *(manifest["replay"] or {}).get("notes", [])]
