"""A run of decode steps is priced at once, and to the ns as step by step."""

from collections.abc import Callable
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.backend import SimBackend, SimWork
from sim.cost.base import CostModel, DecodePricer, later_decode
from sim.cost.calibrated import CalibratedCost
from sim.cost.constant import ConstantConfig, ConstantCost
from sim.cost.linear import LinearConfig, LinearCost
from sim.cost.roofline import RooflineConfig, RooflineCost
from testbed.core.plan import BatchPlan, BatchShape, Spans
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec
from tests.cost.test_calibrated import KNOWN

MODEL = ModelSpec("m", num_hidden_layers=3)
FEW_KV_HEADS = ModelSpec("few", num_attention_heads=64, num_key_value_heads=1, num_hidden_layers=3)
DEVICE = DeviceSpec("d")
SLOW = DeviceSpec("slow", flops_per_s=5e12)  # decode attention bound by arithmetic
CPU = DeviceSpec("cpu", kind="cpu", flops_per_s=4e11, memory_bytes_per_s=4e10)


class Whimsical:
    """A user's own model, with price alone, whose every span depends on the context."""

    def price(self, shape: BatchShape) -> Spans:
        context = shape.decode_context_tokens
        return Spans(context % 3, context % 5, context % 7, context, context % 11)


MODELS: dict[str, CostModel] = {
    "constant": ConstantCost(ConstantConfig()),
    "linear": LinearCost(LinearConfig()),
    "free": LinearCost(LinearConfig(0, 0, 0, 0, 0, 0, 0)),
    "roofline": RooflineCost(MODEL, DEVICE),
    "eager": RooflineCost(MODEL, DEVICE, RooflineConfig(cuda_graphs=False)),
    "bound by arithmetic": RooflineCost(FEW_KV_HEADS, SLOW),
    "eager, bound by arithmetic": RooflineCost(FEW_KV_HEADS, SLOW, RooflineConfig(cuda_graphs=False)),
    "ranks": RooflineCost(MODEL, DEVICE, tensor_parallel_size=4),
    "cpu": RooflineCost(MODEL, CPU),
    "calibrated": CalibratedCost(KNOWN),
    "own": Whimsical(),
}
BACKENDS = {id(model): SimBackend(model) for model in MODELS.values()}


def priced(model: CostModel, shape: BatchShape, num_steps: int, limit_ns: int | None = None) -> SimWork:
    return BACKENDS[id(model)].start(BatchPlan(0, num_steps, shape, tuple, None), limit_ns)


@pytest.mark.parametrize("name", MODELS)
@given(
    num_decodes=st.integers(1, 700),
    context_each=st.integers(1, 20_000),
    extra=st.integers(0, 5000),
    num_steps=st.integers(1, 60),
    all_sample=st.booleans(),
    percent=st.integers(0, 110),
)
def test_a_run_is_priced_as_its_steps_are(name, num_decodes, context_each, extra, num_steps, all_sample, percent):
    model = MODELS[name]
    shape = BatchShape(num_decodes, num_decodes * context_each + extra, (), num_decodes if all_sample else 0)
    run = list(priced(model, shape, num_steps).spans)
    assert run == [model.price(later_decode(shape, index)) for index in range(num_steps)]
    assert all(type(spans) is Spans and all(type(part) is int for part in spans) for spans in run)
    if isinstance(model, DecodePricer):
        assert model.price_decodes(shape, num_steps) == (run[0], [spans.forward_ns for spans in run])
    whole = priced(model, shape, num_steps)
    limit_ns = max(1, sum(whole.durations_ns) * percent // 100)
    for _ in range(2):  # knowing what a step lasts or not
        cut = priced(model, shape, num_steps, limit_ns)
        assert list(cut.spans) == run[: len(cut.spans)]
        assert list(cut.durations_ns) == list(whole.durations_ns)[: len(cut.durations_ns)]
        assert sum(cut.durations_ns) >= min(limit_ns, sum(whole.durations_ns))


def test_ours_price_runs_at_once_and_a_users_need_not():
    assert {name for name, model in MODELS.items() if not isinstance(model, DecodePricer)} == {"own"}


def test_only_decodes_are_a_run():
    with pytest.raises(AssertionError, match="not a run of decodes"):
        priced(MODELS["roofline"], BatchShape(1, 9, (), 1, 0, 0, 2), 2)


def test_a_long_run_is_priced_faster_than_its_steps():
    shape, num_steps = BatchShape(200, 200_000, (), 200), 5_000
    model = MODELS["roofline"]
    shapes = [later_decode(shape, index) for index in range(num_steps)]
    at_once = _best_s(lambda: list(priced(model, shape, num_steps).spans))
    one_by_one = _best_s(lambda: [model.price(one) for one in shapes])
    assert at_once < one_by_one / 2  # about a fifth, the spans of each step included


def _best_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        began = perf_counter()
        work()
        seconds.append(perf_counter() - began)
    return min(seconds)
