"""What sampling costs beside a greedy row: counted again here, and held against timings that others published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.configuration.compose import compose_config
from sim.cost.config import RooflineConfig
from sim.cost.drawing import Drawing, filters
from sim.cost.roofline import RooflineCost
from testbed.core.plan import BatchShape
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec

DRAWN = SamplingParams(temperature=1.0)
NUCLEUS = SamplingParams(temperature=0.7, top_p=0.9)
LIKELIEST = SamplingParams(temperature=0.7, top_k=50)
BOTH = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
FLOOR_NS, VOCAB, NS_PER_BYTE = 1000, 1000, 0.25


def ns(sampling: SamplingParams | None, num_rows: int, filtering: str = "select") -> float:
    return Drawing(sampling, filtering, VOCAB, 100, floor_ns=FLOOR_NS, ns_per_byte=NS_PER_BYTE).ns(num_rows)


def passes(num_kernels: int, elements: int, num_rows: int, num_bytes: int = 0) -> float:
    """Of so many kernels that read and write so many elements of 4 bytes for each logit, and so many bytes."""
    return num_kernels * FLOOR_NS + num_rows * VOCAB * (4 * elements + num_bytes) * NS_PER_BYTE


@pytest.mark.parametrize("filtering", ["select", "sort"])
def test_a_greedy_row_has_nothing_to_add_whatever_its_filters(filtering):
    beams = SamplingParams(beam_width=2, temperature=0.7, top_p=0.9)
    for greedy in (None, SamplingParams(), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)):
        assert ns(greedy, 7, filtering) == 0
    assert not filters(SamplingParams(top_p=0.5, top_k=3))
    assert not filters(beams)
    assert ns(beams, 7, filtering) == ns(SamplingParams(logprobs=1), 7), (
        "beams need log-probabilities, and draw nothing"
    )


def test_draws_penalties_and_log_probabilities_are_counted_by_their_operators():
    """Of vLLM 0.14: each operator reads and writes whole rows of float32, or of what it counts in."""
    temperature, softmax, noise, race = 2, 3, 1, 3
    assert ns(DRAWN, 7) == passes(5, temperature + softmax + noise + race, 7)
    # int64 counts of prompt and output: zeroed, compared; then masks, which three penalties look at
    counts = 2 * (8 + 8 + 1)
    repetition, frequency, presence = 1 + 1 + 8, 8 + 4 + 8 + 4, 1 + 4 + 4 + 8
    penalised = passes(15, 0, 7, counts + repetition + frequency + presence)
    for asked in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}):
        assert ns(SamplingParams(**asked), 7) == penalised
        assert ns(replace(BOTH, **asked), 7) == ns(BOTH, 7) + penalised
    probabilities, greatest, compared_and_filled = 3, 1, 14
    assert ns(replace(DRAWN, min_p=0.1), 7) - ns(DRAWN, 7) == passes(
        5, probabilities + greatest, 7, compared_and_filled
    )
    log_softmax, top_k, rank = 3, 3, 1
    assert ns(SamplingParams(logprobs=0), 7) == passes(10, log_softmax + top_k + rank, 7)


def test_filters_by_a_sort_come_before_the_draw_and_others_do_both():
    plain = ns(DRAWN, 64)
    for filtering in ("sort", "select"):
        assert ns(BOTH, 64, filtering) > max(ns(NUCLEUS, 64, filtering), ns(LIKELIEST, 64, filtering))
    for sampling in (NUCLEUS, LIKELIEST, BOTH):
        assert ns(sampling, 64, "sort") > plain
    assert ns(LIKELIEST, 64, "sort") == plain + passes(12, 0, 64, 35)  # torch.topk; no sort
    both_sorted = passes(1, 2, 64) + passes(4, 7, 64) + passes(60, 0, 64, 400) + passes(8, 0, 64, 45)
    assert ns(BOTH, 64, "sort") == both_sorted
    sweep = 100 * VOCAB * 4 * NS_PER_BYTE
    for sampling, num_sweeps in ((NUCLEUS, 2), (LIKELIEST, 6), (BOTH, 8), (replace(DRAWN, top_k=1), 6)):
        assert ns(sampling, 64) == passes(1, 2, 64) + passes(10, 0, 64, 20) + num_sweeps * sweep


def test_rows_cost_alike_beside_what_a_step_costs():
    for sampling in (DRAWN, NUCLEUS, BOTH):
        one, two, many = (ns(sampling, rows) for rows in (1, 2, 101))
        assert many - one == pytest.approx(100 * (two - one))


# ms by (rows, vocabulary). vLLM's pull request 33538, the PyTorch column; H100 by the request before it, 25824
H100_SORTED = {
    "top_p": {(48, 32768): 0.350, (56, 32768): 0.393, (512, 32768): 2.252, (1024, 32768): 4.236,
              (512, 131072): 8.787, (1024, 131072): 16.312},
    "both": {(48, 32768): 0.481, (56, 32768): 0.594, (512, 32768): 2.572, (1024, 32768): 5.040,
             (512, 131072): 10.756, (1024, 131072): 17.452},
}  # fmt: skip
# pull request 40376, the PyTorch and the FlashInfer column; it names no card: the former is an H200's, if any of ours
H200_SORTED = {
    "top_p": {(64, 32768): 0.370, (128, 32768): 0.626, (512, 32768): 1.694, (64, 131072): 1.005, (128, 131072): 2.318,
              (512, 131072): 6.150},
    "both": {(64, 32768): 0.401, (128, 32768): 0.662, (64, 131072): 1.074, (128, 131072): 2.399},
}  # fmt: skip
H200_SELECTED = {
    "top_p": {(64, 32768): 0.048, (128, 32768): 0.046, (64, 131072): 0.106, (128, 131072): 0.139, (512, 131072): 0.372},
    "top_k": {(128, 32768): 0.059, (512, 32768): 0.129, (64, 131072): 0.163, (128, 131072): 0.198,
              (512, 131072): 0.488},
    "both": {(64, 32768): 0.068, (128, 32768): 0.074, (64, 131072): 0.199, (128, 131072): 0.267},
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "filtering", "timed", "most", "median"),
    [
        ("h100", "sort", H100_SORTED, 0.26, 0.07),
        ("h200", "sort", H200_SORTED, 0.27, 0.07),
        ("h200", "select", H200_SELECTED, 0.2, 0.1),
    ],
)
def test_published_timings_are_met(device, filtering, timed, most, median):
    spec = compose_config([f"device={device}"]).device
    memory = 1e9 / (spec.memory_bytes_per_s * spec.memory_efficiency)
    errors = []
    for which, points in timed.items():
        for (rows, vocab), measured_ms in points.items():
            sampling = {"top_p": NUCLEUS, "top_k": LIKELIEST, "both": BOTH}[which]
            beside = replace(sampling, top_p=1.0, top_k=0)  # temperature, and a draw, which FlashInfer's kernels do
            asked, rest = (
                Drawing(of, filtering, vocab, spec.num_sms, floor_ns=spec.kernel_floor_ns, ns_per_byte=memory).ns(rows)
                for of in (sampling, beside)
            )
            if filtering == "select":
                rest = spec.kernel_floor_ns + rows * vocab * 8 * memory
            errors.append(abs((asked - rest) / 1e6 / measured_ms - 1))
    assert max(errors) < most
    assert sorted(errors)[len(errors) // 2] < median


@pytest.mark.parametrize("filtering", ["sort", "select"])
def test_a_step_that_samples_pays_for_it_and_no_other(filtering):
    device = DeviceSpec("d", kernel_floor_ns=900, kernel_factor=2.0, num_sms=100)
    model = ModelSpec("any")
    greedy, drawing = (
        RooflineCost(model, device, RooflineConfig(filtering=filtering), sampling=sampling) for sampling in (None, BOTH)
    )
    memory = 1e9 / (device.memory_bytes_per_s * device.memory_efficiency)
    alone = Drawing(BOTH, filtering, model.vocab_size, 100, floor_ns=device.kernel_floor_ns, ns_per_byte=memory)
    shape = BatchShape(32, 3200, (), 32)
    parts, plain = drawing.breakdown(shape), greedy.breakdown(shape)
    assert parts["drawing"] == pytest.approx(device.kernel_factor * alone.ns(32), abs=1)
    assert parts | {"drawing": 0} == plain
    assert drawing.price(shape).sample_ns == parts["sampler"] + parts["drawing"]
    assert tuple(greedy.price(shape))[:4] == tuple(drawing.price(shape))[:4]
    silent = BatchShape(32, 3200, (), 0)
    assert drawing.price(silent) == greedy.price(silent)


def test_filtering_has_two_ways():
    with pytest.raises(ConfigError, match=r"cost\.filtering is 'quick'; choose one of select, sort"):
        RooflineConfig(filtering="quick")
