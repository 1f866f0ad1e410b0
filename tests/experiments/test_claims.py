"""The bench of claims finds the error rates that normal values must have, and that skewed ones cannot."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.bench import claims


@pytest.fixture
def normal(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Of 400 traces, in which sarathi is 2 % better and fewer slots 5 % worse in truth, give or take 4 %."""
    monkeypatch.setattr(claims, "DRAWS", 300)
    rng, shape = np.random.default_rng(5), (len(claims.METRICS), 400)
    changes = {"base": 0.0, "sarathi": -0.02, "fewer slots": 0.05, "random": 0.0, "again": 0.0}
    return {name: 0.5 * np.exp(change + 0.03 * rng.normal(size=shape)) for name, change in changes.items()}


def test_of_normal_values_claims_are_false_and_intervals_miss_as_often_as_they_say(normal):
    false, claimed, held, equal = claims._shares(normal, 5)
    assert false.any(axis=0).mean() == pytest.approx(0.05, abs=0.02), "in any metric of a report, not in each"
    assert claimed[:, 1].mean() > claimed[:, 0].mean() > false.mean()
    assert np.nanmean(held) == pytest.approx(0.95, abs=0.015)
    assert equal.max() < 0.025


def test_what_happens_in_few_traces_is_missed_by_few_replicates(normal):
    normal["fewer slots"] = normal["base"] * np.where(np.arange(400) % 20, 1.0, 2.0)
    _, _, held, equal = claims._shares(normal, 3)
    assert held[:, 1].max() < 0.3, "19 of 20 traces show nothing"
    assert equal[:, 1].min() > 0.7, "and are said to be alike"
