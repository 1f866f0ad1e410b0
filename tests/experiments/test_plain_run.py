"""A run that asks nothing of Hydra is composed without its app: to the same configuration, in the same folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from experiments import app
from experiments.cli import main
from experiments.recorders import Progress
from tests.experiments.kit import TINY, say

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


def test_where_there_is_no_terminal_a_long_run_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", *TINY, "trace.num_requests=20", f"hydra.run.dir={tmp_path / 'a'}")
    assert " requests in " not in say(capsys, *run).err
    monkeypatch.setattr(Progress, "LINE_S", 0.0)
    said = say(capsys, *run, "overwrite=true").err
    assert re.search(r"^sim: \d+ of 20 requests in 0 s, [\d,]+ req/s, 0 s left$", said, re.MULTILINE), said
