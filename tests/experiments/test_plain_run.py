"""A run that asks nothing of Hydra is composed without its app: to the same configuration, in the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from experiments import app
from experiments.cli import main

RUN = ["trace.num_requests=3", "trace.rate=2.5", "cache.num_gpu_blocks=500", "scheduler=vllm_v0", "seed=3"]


def test_the_configuration_is_that_of_hydras_own_app(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = []
    for name, more in (("plain", []), ("app", ["hydra.job.name=other"])):
        arguments = [*RUN, f"hydra.run.dir={tmp_path / name}", *more]
        assert (app._plain(arguments) is None) == (name == "app")
        assert main(["run", *arguments]) == 0
        assert (tmp_path / name / "done").exists()
        kept.append(yaml.safe_load((tmp_path / name / "config.yaml").read_text()))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("item", ["-m", "--info", "hydra.mode=MULTIRUN", "+hydra.job.env_set={A: b}", "--cfg=job"])
def test_what_asks_for_more_is_left_to_hydra(item: str) -> None:
    assert app._plain([*RUN, item]) is None
