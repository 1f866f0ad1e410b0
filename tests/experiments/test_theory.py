"""Queueing theory through the command line's own wiring: presets, configuration, records on disk, the table."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from analysis.measures.queueing import lindley_waits
from experiments import simulate
from experiments.bench import theory
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate

NUM_REQUESTS = 120
STEP_NS = 10_000_000


@pytest.mark.parametrize("preset", ["vllm_v1", "vllm_v0", "vllm_v0_chunked", "sarathi", "orca", "static"])
def test_a_presets_waits_are_lindleys_where_it_serves_one_at_a_time(preset: str, tmp_path: Path) -> None:
    config = SyntheticConfig(
        num_requests=NUM_REQUESTS,
        rate=15.0,
        prompt=LengthConfig("constant", 1),
        output=LengthConfig("uniform", min_tokens=1, max_tokens=9),
    )
    trace = generate(config, seed=2)
    run = simulate(
        trace,
        folder=tmp_path / preset,
        scheduler={"name": preset, "max_num_seqs": 1},
        cost={"name": "constant", "step_s": STEP_NS / 1e9},
    )
    requests = run.requests.set_index("request_id").loc[[row.request_id for row in trace]]
    waits = (requests["first_scheduled_ns"] - requests["arrival_ns"]).tolist()
    services = [(row.num_output_tokens or 0) * STEP_NS for row in trace]
    assert waits == lindley_waits([row.arrival_ns for row in trace], services)
    assert max(waits) > 0
    assert {check["holds"] for check in run.summary["checks"].values()} == {True}


def test_the_table_has_a_row_for_every_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert theory.main(["--replications", "3", "--recursions", "3", "--requests", "200"]) == 0
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(("| M/D/1", "| M/G/1"))]
    assert len(rows) == sum(len(case.formulas()) for case in theory.CASES)
    for number, row in zip(count(), rows, strict=False):
        assert len(row) == 9, f"row {number}"
        assert row[-2] in ("3 of 3", "–"), f"row {number}: {row}"
        if row[-2] != "–":  # the same waits by both ways
            assert row[-1].startswith(f"{row[3]} ({row[4]})"), f"row {number}: {row}"
    assert f"of {len(rows)} formulas lie inside" in out
