"""What a user's own cost model is told of the run, if it has a method `bind(context)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.cost.base import CostModel
from sim.cost.roofline import KVLayout
from testbed.core.sampling import SamplingParams
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec


class CostContext(NamedTuple):
    """cost: makes one of our own cost models for the same run, by its name and its keys, as `cost("roofline")` or
    `cost("calibrated", path="fit.json")`; it raises a ConfigError as `cost.…` of a command does. seed: the run's.
    sampling: of every request; device: each of the `tensor_parallel_size` ones."""

    model: ModelSpec
    device: DeviceSpec
    seed: int
    cost: Callable[..., CostModel]
    tensor_parallel_size: int
    kv_layout: KVLayout
    sampling: SamplingParams
