"""backend=vllm where there is no vLLM: what a run says, and what its own scheduler would be told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.observe.stock import options_of_stock
from tests.experiments.test_observe import lines_of


def test_without_vllm_a_run_says_what_to_install(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is here")
    (tmp_path / "config.json").write_text(json.dumps(lines_of("sync")[0]["model"]["hf_config"]))
    settings = ["run", "backend=vllm", f"model.path={tmp_path}", "device=cpu", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main([*settings, "cache.num_cpu_blocks=0"]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: backend=vllm needs vLLM in this environment")
    assert "\n" not in said
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("scheduler", ["vllm_v1", "vllm_v1_async"])
def test_what_vllms_own_scheduler_is_told(scheduler: str) -> None:
    bounds = ["scheduler.max_num_seqs=3", "cache.num_gpu_blocks=8", "cache.watermark=0"]
    preset = ["backend=vllm", f"scheduler={scheduler}", *bounds]
    assert options_of_stock(compose_config(preset)) == {"scheduling_policy": "fcfs"}
    more = ["scheduler.queue_order=priority", "scheduler.long_prefill_token_threshold=9"]
    told = {"scheduling_policy": "priority", "long_prefill_token_threshold": 9}
    assert options_of_stock(compose_config([*preset, *more])) == told


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("scheduler=sarathi", "scheduler.composition"),
        ("scheduler=vllm_v1_0_8", "scheduler.composition"),
        ("scheduler.queue_order=sjf", "scheduler.queue_order"),
        ("scheduler.victim=least_progress", "scheduler.victim"),
        ("scheduler.kv_rules.allocate=whole", "scheduler.kv_rules"),
        ("cache.watermark=0.1", "cache.watermark"),
        ("cache.isolate_tenants=true", "cache.isolate_tenants"),
    ],
)
def test_what_vllms_own_scheduler_has_not_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, key: str
) -> None:
    """Else a run would bear the name of a policy that had no part in it."""
    folder = tmp_path / "run"
    status = main(["run", "backend=vllm", "backend.decides=vllm", setting, "device=cpu", f"hydra.run.dir={folder}"])
    said = capsys.readouterr().err
    assert status != 0
    assert f"vLLM's own scheduler, which scheduler=vllm_v1 mirrors, has no {key}=" in said
    assert not folder.exists()
