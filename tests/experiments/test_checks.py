"""Every run's summary holds the checks of its records, on either backend; one that fails is told loudly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.load import load_run
from analysis.measures.checks import CHECKS
from analysis.measures.notes import BUSY
from analysis.reports.report import report_from_folders
from experiments import simulate
from experiments.runs.run import execute
from testbed.policies.compositions.unified import Unified
from tests.analysis.runs import change_columns
from tests.experiments.kit import BACKENDS, SHORT, TIGHT, TINY, Say, config_of, trace_of


class LateStarter(Unified):
    """Serves nothing in the first millisecond, although requests wait."""

    def compose(self, step: Any) -> None:
        if step.now_ns >= 1_000_000:
            super().compose(step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_under_pressure_passes_every_check_exactly(backend: tuple[str, ...], tmp_path: Path) -> None:
    result = execute(config_of((*TINY, *SHORT, *backend), **TIGHT), tmp_path / "run")
    assert result.summary["preemptions"]["total"] > 0
    checks = json.loads((tmp_path / "run" / "summary.json").read_text())["checks"]
    assert {name: check["holds"] for name, check in checks.items()} == dict.fromkeys(CHECKS, True), checks
    littles_law = checks["littles_law"]
    assert littles_law["ns_in_system_by_steps"] == littles_law["ns_in_system_by_requests"]
    assert littles_law["mean_in_system"] == pytest.approx(
        littles_law["arrival_rate_per_s"] * littles_law["mean_sojourn_s"], rel=1e-12
    )
    work = checks["work_conserved"]
    assert work["num_needed_tokens_least"] == work["num_needed_tokens_most"] == work["num_computed_tokens"]
    assert not [note for note in result.notes if note.kind != BUSY]  # which is no check of ours


def test_a_failed_check_is_printed_logged_and_warned_of_and_the_run_stands(tmp_path: Path, say: Say) -> None:
    scheduler = {"composition": {"_target_": f"{__name__}.LateStarter"}, "max_num_seqs": 8}
    said = say("run", *TINY, *SHORT, "trace.rate=4000", "cost=constant", "cost.step_s=1e-4",
        f"scheduler.composition={{_target_: {__name__}.LateStarter}}", f"hydra.run.dir={tmp_path / 'run'}",
    ).success()  # fmt: skip
    assert "note         CHECK FAILED: no idle engine while requests are in the system" in said
    assert "CHECK FAILED" in (tmp_path / "run" / "run.log").read_text()
    rows = [{"request_id": f"r{i}", "arrival_time": i / 2000, "prompt_tokens": 4, "output_tokens": 2} for i in range(4)]
    with pytest.warns(RuntimeWarning, match="CHECK FAILED"):
        simulate(trace_of(tmp_path, rows), scheduler=scheduler, cost={"name": "constant", "step_s": 1e-4})


@pytest.mark.usefixtures("unrendered")
def test_a_report_says_first_which_records_are_wrong(tmp_path: Path) -> None:
    for seed in (0, 1):
        assert execute(config_of(seed=seed), tmp_path / str(seed)).exit_status == 0
    wrong = load_run(tmp_path / "1").steps.num_decode_tokens + 1
    change_columns(tmp_path / "1" / "steps.parquet", num_decode_tokens=wrong)
    (tmp_path / "1" / "summary.json").unlink()
    assert load_run(tmp_path / "1").summary["checks"]["work_conserved"]["holds"] is False
    text = report_from_folders([tmp_path], tmp_path / "report.html").with_suffix(".md").read_text()
    before, _, rest = text.partition("**Before you read on**")[2].partition("## Setup")
    assert before.split("\n- ")[1].startswith("1: CHECK FAILED: conservation of work: steps computed")
    assert "CHECK FAILED" not in rest
    assert "| records | poor | " in text
    assert "conservation of work: FAILS" in rest
