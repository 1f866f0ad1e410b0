"""What sampling costs beside a greedy row: counted again here, and held against timings that others published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.configuration.compose import compose_config
from sim.cost.config import RooflineConfig
from sim.cost.drawing import Drawing
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

DEVICE = DeviceSpec("d", memory_bytes_per_s=1e12, memory_efficiency=0.5, kernel_floor_ns=1000, num_sms=100)
DRAWN = SamplingParams(temperature=1.0)
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.9)
BOTH = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)


def ns(sampling: SamplingParams | None, num_rows: int, filtering: str = "select", device: DeviceSpec = DEVICE) -> float:
    return Drawing(sampling, filtering, 1000, device).ns(num_rows)


@pytest.mark.parametrize("filtering", ["select", "sort"])
def test_a_greedy_row_has_nothing_to_add_whatever_its_filters(filtering):
    for greedy in (None, SamplingParams(), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)):
        assert ns(greedy, 7, filtering) == 0
        assert Drawing(greedy, filtering, 1000, DEVICE).is_plain
    assert not Drawing(DRAWN, filtering, 1000, DEVICE).is_plain


def test_a_draw_is_counted_by_its_operators():
    """vLLM: temperature (reads, writes), softmax (reads twice, writes), noise (writes), race (reads two, writes), its
    argmax; the greedy argmax is not there. Half of 1e12 B/s is 500 bytes a ns."""
    passes = {"temperature": 2, "softmax": 3, "noise": 1, "race": 3}
    assert ns(DRAWN, 7) == pytest.approx(5 * 1000 + 7 * 1000 * 4 * sum(passes.values()) / 500)


def test_what_is_asked_for_adds_up():
    plain, rows = ns(DRAWN, 64), 64
    penalised = ns(replace(DRAWN, repetition_penalty=1.1), rows) - plain
    assert penalised == ns(SamplingParams(presence_penalty=0.5), rows)  # a greedy row has it too
    assert ns(replace(BOTH, repetition_penalty=1.1), rows) == pytest.approx(ns(BOTH, rows) + penalised)
    assert ns(replace(DRAWN, min_p=0.1), rows) > plain
    assert ns(replace(DRAWN, logprobs=3), rows) - plain == ns(SamplingParams(logprobs=3), rows) > 0


def test_rows_are_swept_side_by_side_until_multiprocessors_run_out():
    beside = [ns(NUCLEUS, rows) - ns(DRAWN, rows) for rows in (1, 100, 101, 200)]
    assert beside[0] == beside[1]
    assert beside[2] == beside[3] == pytest.approx(2 * beside[0] - 12 * 1000)


# ms of torch.sort and what follows it, (rows, vocabulary): vLLM's pull request 33538, its PyTorch column
SORTED_MS = {
    "top_p": {(56, 32768): 0.393, (512, 32768): 2.252, (1024, 32768): 4.236, (512, 131072): 8.787,
              (1024, 131072): 16.312},
    "both": {(512, 32768): 2.572, (1024, 32768): 5.040, (512, 131072): 10.756, (1024, 131072): 17.452},
}  # fmt: skip
# ms of FlashInfer's kernels: pull request 40376
SELECTED_MS = {
    "top_p": {(64, 131072): 0.106, (128, 131072): 0.139, (512, 131072): 0.372},
    "top_k": {(64, 131072): 0.163, (128, 131072): 0.196, (512, 131072): 0.488},
    "both": {(64, 131072): 0.199, (128, 131072): 0.264, (512, 131072): 0.488},
}


@pytest.mark.parametrize(("filtering", "timed", "within"), [("sort", SORTED_MS, 0.11), ("select", SELECTED_MS, 0.28)])
def test_published_timings_are_met(filtering, timed, within):
    device = compose_config(["device=h100"]).device
    filters = {"top_p": NUCLEUS, "top_k": replace(DRAWN, top_k=50), "both": BOTH}
    for which, points in timed.items():
        for (rows, vocab), measured_ms in points.items():
            asked, drawn = (Drawing(of, filtering, vocab, device) for of in (filters[which], DRAWN))
            error = (asked.ns(rows) - drawn.ns(rows)) / 1e6 / measured_ms - 1
            assert abs(error) < within, (which, rows, vocab, error)


def test_a_step_that_samples_pays_for_it_and_no_other():
    model = ModelSpec("any")
    greedy, drawing = (
        RooflineCost(model, DEVICE, RooflineConfig(filtering="sort"), sampling=sampling) for sampling in (None, BOTH)
    )
    shape = BatchShape(32, 3200, (), 32)
    more = drawing.price(shape).sample_ns - greedy.price(shape).sample_ns
    assert more == pytest.approx(Drawing(BOTH, "sort", model.vocab_size, DEVICE).ns(32), abs=1)
    assert drawing.breakdown(shape)["sampler"] == drawing.price(shape).sample_ns
    assert tuple(greedy.price(shape))[:4] == tuple(drawing.price(shape))[:4]
    silent = BatchShape(32, 3200, (), 0)
    assert drawing.price(silent) == greedy.price(silent)


def test_filtering_has_two_ways():
    with pytest.raises(ConfigError, match=r"cost\.filtering is 'quick'; choose one of select, sort"):
        RooflineConfig(filtering="quick")
