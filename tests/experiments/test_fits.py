"""The fits that come with the testbed: of its models, made from the profiles beside them, and taken without a path."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.fits import FOLDER, fit_of
from experiments.wiring.costs import build_cost
from sim.cost.calibrated import CalibratedCost
from sim.cost.calibration import calibrate
from sim.cost.calibration_file import load_calibration
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.specs.profiles import read_profile

FITS = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", FITS, ids=lambda file: file.stem)
def test_each_is_the_fit_of_its_profile_and_of_the_model_that_it_names(file):
    fit, profile = load_calibration(file), read_profile(file.with_suffix(".parquet"))
    assert profile.manifest == fit.manifest
    assert file == fit_of(fit.manifest.model["name"], fit.manifest.device)
    again = calibrate(profile, fit.num_folds)
    for shape in (
        BatchShape(1, 500, (), 1),
        BatchShape(64, 64_000, (), 64),
        BatchShape(20, 9_000, (PrefillChunk(0, 512),), 21),
    ):
        expected = CalibratedCost(fit).price(shape)
        assert CalibratedCost(again).price(shape).total_ns == pytest.approx(expected.total_ns, rel=1e-3)
    config = compose_config([f"model={fit.manifest.model['name']}", f"device={fit.manifest.device}", "cost=calibrated"])
    assert build_cost(config).price(shape) == expected


def test_a_run_takes_it_by_model_and_device(tmp_path):
    options = ["model=qwen3_8b", "device=h100", "cost=calibrated", "trace.num_requests=4"]
    assert main(["run", *options, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["cost"], manifest["cost_notes"]) == ("calibrated", [])


def test_what_is_not_there_is_one_line_with_what_is(capsys):
    with pytest.raises(ConfigError, match=r"no fit for qwen3_8b on a100 comes with the testbed \(there are qwen3_0"):
        fit_of("qwen3_8b", "a100")
    assert main(["run", "cost=calibrated", "device=b200"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_changed_model_is_refused():
    config = compose_config(["model=qwen3_8b", "cost=calibrated", "cache.block_size=32"])
    with pytest.raises(Exception, match="measured with block_size 16, and the run has 32"):
        build_cost(replace(config))
