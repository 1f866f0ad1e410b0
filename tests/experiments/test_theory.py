"""Queueing theory through the command line's own wiring: presets, configuration, records on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import simulate
from testbed.traces.generators import LengthConfig, SyntheticConfig, generate
from tests.sim.queueing import lindley_waits

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
