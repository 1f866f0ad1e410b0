"""Hydra's door to experiments/sweeps/sweep.py: the sweeper that experiments/conf/config.yaml chooses.

It lies here because Hydra takes plugins of this namespace alone. `hydra/sweeper=…` chooses another.
"""

from __future__ import annotations

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PointsSweeper(Sweeper):
    """Leaves out points that were run before, and gives the others to the launcher, several a job.

    params: what an overlay sweeps: {key: values with commas between them}.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keeps what Hydra hands over; the task function is for sweepers that run a point by Hydra's own job."""
        self._context, self._config = hydra_context, config

    def sweep(self, arguments: list[str]) -> Any:
        """Runs the points of these overrides. Raises TestbedError in one line, and KeyboardInterrupt."""
        from experiments.configuration.overrides import not_emptied  # not at the top: a single run needs none of it
        from experiments.sweeps.sweep import run_sweep

        swept = [f"{key}={value}" for key, value in self._params.items()]
        run_sweep(self._context, self._config, [*swept, *not_emptied(arguments)])
