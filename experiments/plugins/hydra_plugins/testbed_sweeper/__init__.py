"""The Hydra plugin for experiments/sweeps/sweep.py: the sweeper that experiments/conf/config.yaml chooses.

It is in this package because Hydra finds plugins only in this namespace.
"""

from __future__ import annotations

from typing import Any, cast

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PointsSweeper(Sweeper):
    """Skips finished points and gives the others to the launcher, several per job.

    params: the sweep of an overlay: {key: comma-separated values}.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps Hydra's context and configuration. task_function: has the overrides of the command; it is not called,
        as points are not jobs of Hydra."""
        self._context, self._config, self._job = hydra_context, config, cast(Any, task_function)

    def sweep(self, arguments: list[str]) -> Any:
        """Runs the points of the command. Raises TestbedError with a one-line message, and KeyboardInterrupt."""
        # not at the top: not needed for a single run
        from experiments.configuration.overrides import over_swept
        from experiments.sweeps.sweep import run_sweep

        run_sweep(self._context, self._config, over_swept(self._params, self._job.of_run))
