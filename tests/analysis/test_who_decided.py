"""Runs in vLLM under this testbed's scheduler and under vLLM's own: arms of one experiment, by names that say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.comparison.arms import infer_arms
from analysis.comparison.groups import experiments
from analysis.load import load_run, load_sweep
from analysis.reports.report import report_from_folders
from testbed.errors import RunFolderError
from tests.analysis.runs import simulate, write_folder

_OWN_RULE = {"_target_": "testbed.policies.compositions.unified.Unified", "own_victim_ends_round": True}


def write_in_vllm(
    folder: Path, decides: str, scheduler: str = "vllm_v1", seed: int = 0, composition: object = "unified"
) -> Path:
    """composition: of vLLM's own scheduler, by the rule of the version that ran."""
    requests, steps, manifest = simulate(seed=seed, num_requests=20)
    config = {
        "backend": {"name": "vllm", "decides": decides, "enforce_eager": True}, "seed": 0,
        "scheduler": {"name": scheduler, "composition": composition}, "trace": {"seed": seed},
    }  # fmt: skip
    manifest |= {"backend": "vllm", "scheduler": scheduler, "cost": None, "attention": "vllm"}
    return write_folder(folder, requests, steps, manifest, config)


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize("composition", ["unified", _OWN_RULE])
def test_both_are_arms_of_one_report(tmp_path: Path, composition: object) -> None:
    ours = write_in_vllm(tmp_path / "ours", "testbed")
    own = write_in_vllm(tmp_path / "own", "vllm", composition=composition)
    out = report_from_folders([ours, own], tmp_path / "report.html")
    said = out.with_suffix(".md").read_text()
    assert "How does vLLM's own scheduler differ from the testbed's scheduler on the same trace?" in said
    assert "left out" not in said


def test_among_several_policies_the_preset_is_named_first(tmp_path: Path) -> None:
    write_in_vllm(tmp_path / "1", "testbed")
    write_in_vllm(tmp_path / "2", "testbed", "sarathi", composition="decode_first")
    write_in_vllm(tmp_path / "3", "vllm", composition=_OWN_RULE)
    (together,) = experiments(load_sweep(tmp_path).runs)
    assert [arm.name for arm in infer_arms(together)] == [
        "vllm_v1, the testbed's scheduler", "sarathi, the testbed's scheduler", "vllm_v1, vLLM's own scheduler",
    ]  # fmt: skip


def test_on_different_traces_they_are_not_compared(tmp_path: Path) -> None:
    """As an ablation over several traces would be."""
    ours = write_in_vllm(tmp_path / "ours", "testbed")
    own = write_in_vllm(tmp_path / "own", "vllm", seed=1)
    with pytest.raises(RunFolderError, match=r"the arms ran different traces \(other trace.seed\)"):
        report_from_folders([ours, own], tmp_path / "report.html")


def test_what_keeps_runs_of_one_trace_apart_is_named(tmp_path: Path) -> None:
    """A simulation of vLLM's own by the rule of its version is paired with that; the testbed's has none."""
    ours = write_in_vllm(tmp_path / "ours", "testbed")
    own = write_in_vllm(tmp_path / "own", "vllm", composition=_OWN_RULE)
    requests, steps, manifest = simulate(num_requests=20)
    config = load_run(own).config | {"backend": {"name": "sim"}}
    sim = write_folder(tmp_path / "sim", requests, steps, manifest, config)
    with pytest.raises(RunFolderError, match=r"another experiment .* \(other scheduler\.composition"):
        report_from_folders([own, sim, ours], tmp_path / "report.html")
