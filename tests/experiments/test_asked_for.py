"""What the user asked for by name is had, or refused under the name that was typed."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from experiments.commands import app
from experiments.configuration.compose import compose_config
from experiments.sweeps import sweep
from real.config import RealConfig
from testbed.errors import ConfigError
from tests.experiments.kit import SHORT, TINY, Say


def test_a_gpu_that_is_not_there_is_refused_where_it_was_asked_for(tmp_path: Path, say: Say) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    real = ("backend=real", *TINY, *SHORT, f"hydra.run.dir={tmp_path / 'run'}")
    assert "device=h100: this machine has no GPU that torch can use" in say("run", *real, "device=h100").error()
    sweep = (*real[:-1], "device=h100", "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path / 's'}")
    assert "this machine has no GPU that torch can use" in say("run", *sweep).error()
    assert "contradict each other" in say("run", *real, "device=a100", "backend.device=cpu").error()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        compose_config(["backend=real", "model=tiny", "device=h200"])
    assert say("run", *real).status == 0, "a device that nobody chose is no demand"


def test_a_cpu_that_was_asked_for_is_taken_although_there_is_a_gpu() -> None:
    real = ["backend=real", "model=tiny"]
    for chosen, expected in (([*real, "device=cpu"], "cpu"), (real, "auto")):
        backend = compose_config(chosen).backend
        assert isinstance(backend, RealConfig)
        assert backend.device == expected


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trace.prompt.value=-1", "trace.prompt.value is -1.0; it must be 1 to"),
        ("trace.output.min_tokens=0", "trace.output.min_tokens is 0; it must be 1 to"),
        ("trace.turn_prompt={value: 0}", "trace.turn_prompt.value is 0"),
        ("trace.turn_prompt={value: x}", "trace.turn_prompt.value is 'x'; it must be a number"),
        (
            "trace.turn_prompt={max_tokens: 1.5}",
            "trace.turn_prompt.max_tokens is 1.5; it must be a whole number or null",
        ),
        ("trace.turn_prompt={kind: null}", "trace.turn_prompt.kind is null; it must be a string"),
    ],
)
def test_a_length_is_named_as_it_was_typed(say: Say, override: str, said: str) -> None:
    assert say("run", override).error().startswith(said)


@pytest.mark.parametrize(
    ("settings", "num"), [(["model=qwen3_0.6b"], 1), (["model=tiny"], 0), (["model=qwen3_0.6b", "backend=sim"], 0)]
)
def test_a_large_model_on_a_cpu_is_said_before_it_starts(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, settings: list[str], num: int
) -> None:
    pytest.importorskip("torch")

    def start(*_: object, **__: object) -> NoReturn:
        raise ConfigError("started")

    monkeypatch.setattr(app, "execute", start)
    monkeypatch.setattr(sweep, "_launched", start)
    note = "the engine runs on a CPU: qwen3_0.6b, of 596 million parameters, may take hours; to try it out,"
    for words in (["run"], ["run", "-m", "seed=0,1", f"hydra.sweep.dir={tmp_path}"]):
        said = say(*words, "backend=real", "device=cpu", *settings)
        assert (said.out, said.err) == (f"note         {note} set model=tiny\n" * num, "error: started\n")
