"""The linear cost model: its terms, its fit to measured steps, and the files of fits."""

import json
import math

import numpy as np
import pytest
from hypothesis import given

from sim.cost.base import attention_pairs_doubled
from sim.cost.config import LinearConfig
from sim.cost.linear import COEFFICIENTS, FORMAT, LinearCost, fit_linear, load_linear, save_fit
from testbed.core.outcome import Spans
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from tests.cost.shapes import decode, prefill, shapes

NANO = LinearConfig(100e-9, 3e-9, 5e-9, 7e-9, 2e-9, 11e-9, 13e-9)  # whole ns, so sums can be checked by hand


def test_the_linear_price_is_the_sum_of_its_terms():
    cost = LinearCost(NANO)
    shape = BatchShape(2, 30, (PrefillChunk(10, 4), PrefillChunk(0, 3)), 4, 1, 2, 3)
    pairs = (4 * 10 + 10) + 6
    assert attention_pairs_doubled(shape) == 2 * pairs
    assert cost.price(shape) == Spans(swap_ns=33 + 39, forward_ns=100 + 7 * 3 + 2 * 5 + 30 * 7 + pairs * 2)


@given(shapes)
def test_linear_prices_are_positive_integers(shape):
    for config in (NANO, LinearConfig(), LinearConfig(0, 0, 0, 0, 0, 0, 0)):
        spans = LinearCost(config).price(shape)
        assert all(type(part) is int and part >= 0 for part in spans)
        assert spans.total_ns >= (not shape.is_empty)


@given(shapes)
def test_the_terms_of_a_linear_price_add_up_to_it(shape):
    for config in (NANO, LinearConfig(), LinearConfig(0, 0, 0, 0, 0, 0, 0), LinearConfig(3.3e-10, 0, 1.7e-10)):
        cost = LinearCost(config)
        parts = cost.breakdown(shape)
        assert all(type(part) is int and part >= 0 for part in parts.values())
        assert sum(parts.values()) == cost.price(shape).total_ns


def test_splitting_a_prompt_into_chunks_keeps_its_pairs():
    whole = attention_pairs_doubled(prefill(1000))
    parts = BatchShape(0, 0, (PrefillChunk(0, 300), PrefillChunk(300, 300), PrefillChunk(600, 400)), 1)
    assert attention_pairs_doubled(parts) == whole == 1000 * 1001


@pytest.mark.parametrize("window", [None, 64, 20_000])
def test_a_linear_prompt_has_the_pairs_that_its_window_leaves(window):
    pairs = sum(min(position + 1, window or position + 1) for position in range(8192))
    cost = LinearCost(LinearConfig(0, 0, 0, 0, 2e-9, 0, 0), window)
    assert cost.price(prefill(8192)) == Spans(forward_ns=2 * pairs)
    assert cost.breakdown(prefill(8192))["prefill_attention"] == 2 * pairs


def test_a_linear_fit_counts_the_pairs_that_a_window_leaves():
    shapes = [prefill(16 * n) for n in range(1, 60)]
    cost = LinearCost(LinearConfig(1e-3, 1e-6, 0, 0, 1e-7, 0, 0), 64)
    steps = [(shape, cost.price(shape).total_ns) for shape in shapes]
    fit = fit_linear(steps, sliding_window=64)
    assert fit.config.per_prefill_attention_pair_s == pytest.approx(1e-7, rel=1e-3)
    assert fit.p90_relative_error < 1e-5 < fit_linear(steps).p90_relative_error


def measured(config: LinearConfig, noise: float = 0.0, num: int = 120) -> list[tuple[BatchShape, int]]:
    rng = np.random.default_rng(5)
    cost = LinearCost(config)
    steps = []
    for i in range(num):
        num_decodes = int(rng.integers(0, 64)) if i % 3 else 0
        prefills = () if i % 3 == 1 else (PrefillChunk(int(rng.integers(0, 2000)), int(rng.integers(1, 1000))),)
        context = num_decodes * int(rng.integers(1, 3000))
        shape = BatchShape(num_decodes, context, prefills, num_decodes, *(int(n) for n in rng.integers(0, 20, 3)))
        steps.append((shape, round(cost.price(shape).total_ns * (1 + noise * float(rng.standard_normal())))))
    return steps


def test_a_fit_finds_the_coefficients_again():
    fit = fit_linear(measured(LinearConfig()))
    for name in COEFFICIENTS:
        assert getattr(fit.config, name) == pytest.approx(getattr(LinearConfig(), name), rel=1e-3)
    assert fit.p90_relative_error < 1e-5
    assert (fit.num_steps, fit.num_folds) == (120, 5)


def test_the_error_of_a_noisy_fit_is_that_of_the_noise():
    fit = fit_linear(measured(LinearConfig(), noise=0.1))
    assert fit.median_relative_error == pytest.approx(0.1 * 0.6745, rel=0.3)
    assert fit.p90_relative_error == pytest.approx(0.1 * 1.645, rel=0.3)
    assert fit_linear(measured(LinearConfig(), noise=0.1)) == fit


def test_what_was_never_measured_costs_nothing():
    steps = [(decode(n, 100 * n), 10**6 + n * 1000) for n in range(1, 40)]
    fit = fit_linear(steps)
    assert fit.config.per_swapped_block_s == fit.config.per_prefill_token_s == 0
    assert LinearCost(fit.config).price(decode(50, 100)).forward_ns == pytest.approx(1_050_000, rel=0.01)


def test_impossible_fits_are_refused():
    with pytest.raises(ConfigError, match="at least 14 measured steps, found 3; profile more"):
        fit_linear(measured(LinearConfig(), num=3))
    with pytest.raises(ConfigError, match="measured step 20 took 0 ns; it must be above 0"):
        fit_linear([*measured(LinearConfig(), num=20), (decode(1), 0)])
    with pytest.raises(ConfigError, match="num_folds is 1; it must be from 2"):
        fit_linear(measured(LinearConfig(), num=20), num_folds=1)


def test_a_fit_is_saved_and_loaded_exactly(tmp_path):
    fit = fit_linear(measured(LinearConfig(), noise=0.1))
    save_fit(fit, tmp_path / "fit.json", model="tiny", device="cpu")
    assert load_linear(tmp_path / "fit.json") == fit.config
    document = json.loads((tmp_path / "fit.json").read_text())
    assert document["about"] == {"model": "tiny", "device": "cpu"}
    assert document["p90_relative_error"] == fit.p90_relative_error
    loaded = LinearCost(LinearConfig(path=str(tmp_path / "fit.json")))
    assert loaded.price(decode(3)) == LinearCost(fit.config).price(decode(3))


def test_a_fit_goes_with_the_window_of_its_steps_only(tmp_path):
    for window in (None, 64):
        save_fit(fit_linear(measured(LinearConfig()), sliding_window=window), tmp_path / f"{window}.json")
        LinearCost(LinearConfig(path=str(tmp_path / f"{window}.json")), window)
    with pytest.raises(
        ConfigError, match=r"64\.json was fitted with sliding_window 64, and the run has null; set cache\."
    ):
        LinearCost(LinearConfig(path=str(tmp_path / "64.json")))
    with pytest.raises(
        ConfigError, match=r"None\.json was fitted with sliding_window null, and the run has 32; fit this"
    ):
        LinearCost(LinearConfig(path=str(tmp_path / "None.json")), 32)
    document = json.loads((tmp_path / "64.json").read_text())
    del document["sliding_window"]
    (tmp_path / "64.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="'sliding_window' is 'missing'"):
        load_linear(tmp_path / "64.json", 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no file at .*; `make demo` writes one"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: nested too deeply"),
        ("[]", r"is not a JSON object, but \[\]"),
        ({"format": "x"}, "its 'format' is 'x'; expected 'testbed linear cost 2': fit it again"),
        ({"sliding_window": "8"}, "'sliding_window' is '8'; it must be a number of tokens or null"),
        ({"sliding_window": True}, "'sliding_window' is True"),
        ({"coefficients": {}}, "'coefficients' must hold exactly base_s, "),
        ({"base_s": "1"}, "base_s is '1'; it must be a number"),
        ({"base_s": -1}, r"cost\.base_s is -1; it must be from 0"),
        ({"base_s": math.nan}, r"cost\.base_s is nan"),
        ({"base_s": 10**400}, r"cost\.base_s is a whole number of about 401 digits; it must be from 0 to 1e6 seconds"),
        ({"sliding_window": 10**400}, r"'sliding_window' is 1000.*\.\.\..*000; it must be a number of tokens"),
    ],
)
def test_bad_files_are_refused(tmp_path, change, message):
    file = tmp_path / "fit.json"
    if isinstance(change, str):
        file.write_text(change)
    elif change is not None:
        document = {"format": FORMAT, "coefficients": dict.fromkeys(COEFFICIENTS, 0.5), "sliding_window": None}
        where = document if change.keys() & document.keys() else document["coefficients"]
        file.write_text(json.dumps(where.update(change) or document))
    with pytest.raises(ConfigError, match=message):
        load_linear(file)


def test_impossible_coefficients_are_refused():
    for name in COEFFICIENTS:
        with pytest.raises(ConfigError, match=rf"cost\.{name} is -0\.1; it must be from 0 to 1e6 seconds"):
            LinearConfig(**{name: -0.1})
