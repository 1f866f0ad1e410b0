"""`testbed bench vllm` without vLLM: what it says of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.load import load_run
from experiments.bench.vllm import ALL_AT_ONCE, ENGINE, SHARED, VLLM, Bench, _values
from experiments.configuration.compose import compose_config
from experiments.observe.importing import import_log
from testbed.errors import TestbedError
from tests.experiments.test_observe import LOGS


def test_a_metric_that_a_run_has_not_is_no_zero(tmp_path: Path) -> None:
    """Of this one, requests were aborted before their first token: the mean TTFT is not known."""
    import_log(LOGS / "sync.jsonl.gz", tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert _values([run], "tpot_s.mean")[0] > 0
    with pytest.raises(TestbedError, match=rf"^{tmp_path / 'run'} has no ttft_s\.mean: "):
        _values([run], "ttft_s.mean")


def test_the_settings_of_its_runs_fit_together(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_requests=3)
    for backend in (VLLM, ENGINE, ["backend=sim"]):
        config = compose_config([f"model.path={bench.model}", *SHARED, *backend, *ALL_AT_ONCE])
        assert (config.model.path, config.model.dtype) == (str(bench.model), "float32")
