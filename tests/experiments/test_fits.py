"""The fits that come with the testbed: of its models, made from the profiles beside them, and taken without a path."""

from __future__ import annotations

import json

import pytest
from xxhash import xxh64_hexdigest

from analysis.reports.report import report_from_folders
from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.fits import FOLDER, fit_of
from experiments.wiring.costs import build_cost, unread_settings
from sim.cost.calibrated import CalibratedCost
from sim.cost.calibration import calibrate
from sim.cost.calibration_file import load_calibration
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError
from testbed.specs.profiles import read_profile

FITS = sorted(FOLDER.glob("*.json"))
assert len(FITS) >= 2


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


@pytest.mark.usefixtures("unrendered")
def test_a_run_takes_it_by_model_and_device(tmp_path):
    options = ["model=qwen3_8b", "device=h100", "cost=calibrated", "trace.num_requests=4"]
    assert main(["run", *options, f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["cost"], manifest["cost_notes"]) == ("calibrated", [])
    assert manifest["cost_error"]["median"] == pytest.approx(0.0186, abs=1e-3)
    digest = xxh64_hexdigest(fit_of("qwen3_8b", "h100").read_bytes())
    assert manifest["cost_fit"] == {"file": "qwen3_8b-h100.json", "digest": digest}
    page = report_from_folders([tmp_path / "run"], tmp_path / "page.html").with_suffix(".md").read_text()
    assert "| step times | good | fitted to measured steps; those left out of the fit are 1.9 % off" in page


@pytest.mark.usefixtures("unrendered")
def test_shared_reads_for_which_a_fit_has_no_saving_are_told(tmp_path):
    shared = ["trace.num_requests=6", "trace.rate=50", "trace.num_system_prompts=1", "trace.system_prompt_tokens=64"]
    for given, told in ((["cost.repeated_saving=0.5"], False), ([], True)):
        folder = tmp_path / str(told)
        options = ["model=qwen3_8b", "device=h200", "cost=calibrated", *shared, *given]
        assert main(["run", *options, f"hydra.run.dir={folder}"]) == 0
        notes = json.loads((folder / "manifest.json").read_text())["cost_notes"]
        assert [note.split(":")[0] for note in notes] == ["SHARED READS"] * told
        page = report_from_folders([folder], tmp_path / f"{told}.html").with_suffix(".md").read_text()
        assert ("| cost model | calibrated, cost.repeated_saving=0.5 |" in page) is not told
        assert ("; that shared reads save 50.0 % is given, not fitted |" in page.replace("\u00a0", " ")) is not told


def test_what_shared_reads_save_can_be_given():
    shape = BatchShape(8, 80_000, (), 8, longest_decode_context=10_000, repeated_context_tokens=50_000)
    options = ["model=qwen3_8b", "device=h200", "cost=calibrated"]
    free, half, plain = (build_cost(compose_config([*options, *given])) for given in (
        ["cost.repeated_saving=1"], ["cost.repeated_saving=0.5"], []))  # fmt: skip
    token_ns = plain.calibration.coefficients.decode_context_token
    saved = [plain.price(shape).forward_ns - one.price(shape).forward_ns for one in (half, free)]
    assert saved == pytest.approx([25_000 * token_ns, 50_000 * token_ns], abs=2)
    with pytest.raises(ConfigError, match=r"cost.repeated_saving is 1\.5; it must be null, or a share from 0 to 1"):
        compose_config([*options, "cost.repeated_saving=1.5"])


def test_what_is_not_there_is_one_line_with_what_is(say):
    with pytest.raises(ConfigError, match=r"no fit for qwen3_8b on a100 comes with the testbed \(there are qwen3_0"):
        fit_of("qwen3_8b", "a100")
    assert say("run", "cost=calibrated", "device=b200").error()


def test_a_changed_model_is_refused():
    config = compose_config(["model=qwen3_8b", "cost=calibrated", "cache.block_size=32"])
    with pytest.raises(ConfigError, match="measured with block_size 16, and the run has 32"):
        build_cost(config)
    config = compose_config(["model=qwen3_8b", "cost=calibrated", "model.num_hidden_layers=35"])
    with pytest.raises(ConfigError, match="num_hidden_layers 36"):
        build_cost(config)


def test_what_a_fit_does_not_read_is_noted():
    config = compose_config(["model=qwen3_8b", "cost=calibrated", "device.kernel_factor=5", "sampling.temperature=1"])
    said = "does not change the step times of cost=calibrated"
    assert unread_settings(config) == [f"sampling {said}", f"device.kernel_factor {said}"]
    read = compose_config(["model=qwen3_8b", "cost=calibrated", "device.memory_bytes=40000000000"])
    assert unread_settings(read) == []


def test_a_fit_and_its_profile_are_told_apart(say):
    fit, profile = FITS[0], FITS[0].with_suffix(".parquet")
    assert f"if it is a fit, give it as cost.path={fit}" in say("calibrate", "fit", str(fit)).error()
    gone = "cost.profile is gone: `testbed calibrate fit <profile>.parquet --out <fit>.json`"
    assert gone in say("run", "cost=calibrated", f"cost.profile={profile}").error()
    told = f"if it is a profile: `testbed calibrate fit {profile} --out"
    assert told in say("run", "cost=calibrated", f"cost.path={profile}").error()
