"""Oracles: what they say of a sequence's output length, and that they say it again."""

from __future__ import annotations

import math
from array import array
from statistics import fmean, stdev
from typing import Any

import pytest

from testbed.core.limits import Limits
from testbed.core.request import Request, SamplingParams
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from testbed.policies.context import LengthOracle, PolicyContext
from testbed.policies.oracle import Binned, Noisy, NoOracle, Perfect
from tests.testbed.core_kit import make_blocks

MAX_MODEL_LEN = 4096


def bound(oracle: Any, seed: int = 1) -> Any:
    oracle.bind(PolicyContext(make_blocks(), Limits(8, 64, MAX_MODEL_LEN, 0, 1), oracle, None, seed))
    return oracle


def make_seq(output: int | None, *, prompt: int = 10, request_id: str = "r", max_tokens: int | None = None) -> Sequence:
    forced = None if output is None else array("i", range(output))
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(request_id, array("i", range(prompt)), forced_output=forced, sampling=sampling)
    return Sequence(0, request, MAX_MODEL_LEN)


def test_the_perfect_oracle_knows_forced_outputs_and_limits() -> None:
    oracle = bound(Perfect())
    assert oracle.predict(make_seq(7)) == 7
    assert oracle.predict(make_seq(7, max_tokens=3)) == 7, "what is forced is emitted"
    assert oracle.predict(make_seq(None, max_tokens=3)) == 3
    assert oracle.predict(make_seq(None)) == MAX_MODEL_LEN - 10
    assert oracle.predict(make_seq(None, prompt=4000, max_tokens=500)) == 96, "the model's length ends it"
    assert oracle.predict(make_seq(5, prompt=MAX_MODEL_LEN)) == 1, "one token is always emitted"


def test_no_oracle_has_no_opinion() -> None:
    assert NoOracle().predict(make_seq(7)) is None


def test_noise_is_log_normal_with_median_one_and_at_least_one_token() -> None:
    oracle = bound(Noisy(sigma=0.5))
    ids = [f"r{index}" for index in range(4000)]
    logs = [math.log(oracle.predict(make_seq(1000, request_id=request_id)) / 1000) for request_id in ids]
    assert abs(fmean(logs)) < 0.03
    assert abs(stdev(logs) - 0.5) < 0.03
    ones = [bound(Noisy(sigma=3.0)).predict(make_seq(1, request_id=request_id)) for request_id in ids[:200]]
    assert min(ones) == 1
    assert all(isinstance(length, int) for length in ones)


def test_without_noise_the_noisy_oracle_is_perfect() -> None:
    assert [bound(Noisy(sigma=0)).predict(make_seq(n)) for n in (1, 2, 999)] == [1, 2, 999]


def test_noise_depends_on_seed_and_request_alone() -> None:
    def predictions(oracle: LengthOracle, ids: list[str]) -> dict[str, int | None]:
        return {request_id: oracle.predict(make_seq(500, request_id=request_id)) for request_id in ids}

    ids = [f"r{index}" for index in range(20)]
    forwards = predictions(bound(Noisy()), ids)
    assert predictions(bound(Noisy()), ids[::-1]) == forwards, "not on the order of asking"
    assert predictions(bound(Noisy(), seed=2), ids) != forwards
    assert predictions(bound(Noisy(seed=1), seed=9), ids) == forwards, "its own seed goes before the run's"
    rebound = bound(bound(Noisy(), seed=2))
    assert predictions(rebound, ids) == forwards, "it follows the run that it is bound to"


def test_noise_is_the_same_on_every_machine() -> None:
    oracle = bound(Noisy(sigma=0.5), seed=0)
    assert [oracle.predict(make_seq(100, request_id=f"r{index}")) for index in range(6)] == [106, 53, 346, 103, 95, 84]


def test_bins_round_up_to_their_edges() -> None:
    oracle = bound(Binned())
    assert [oracle.predict(make_seq(n)) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]
    oracle = bound(Binned(first=10, ratio=10))
    assert [oracle.predict(make_seq(n)) for n in (1, 10, 11, 101)] == [10, 10, 100, 1000]
    oracle = bound(Binned(edges=[5, 50]))
    assert [oracle.predict(make_seq(n)) for n in (1, 5, 6, 50, 51)] == [5, 5, 50, 50, 50]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Noisy(sigma=-0.1), r"scheduler\.oracle\.sigma is -0\.1; it must be"),
        (lambda: Noisy(sigma=float("nan")), r"scheduler\.oracle\.sigma is nan"),
        (lambda: Noisy(seed=-1), r"scheduler\.oracle\.seed is -1"),
        (lambda: Binned(edges=[]), r"scheduler\.oracle\.edges is \[\]"),
        (lambda: Binned(edges=[4, 4]), r"scheduler\.oracle\.edges is \[4, 4\]"),
        (lambda: Binned(edges=[0, 4]), r"scheduler\.oracle\.edges"),
        (lambda: Binned(first=0), r"scheduler\.oracle\.first is 0"),
        (lambda: Binned(ratio=1), r"scheduler\.oracle\.ratio is 1"),
    ],
)
def test_bad_parameters_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
