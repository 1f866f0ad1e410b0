"""Values of another type, and keys of another option, are refused in one line: key, value, what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.compose import compose_config, compose_from
from testbed.errors import ConfigError
from tests.experiments.kit import say

WRONG = [
    ("scheduler.max_num_seqs=abc", "scheduler.max_num_seqs is 'abc'; it must be a whole number"),
    ("cache.block_size=1.5", "cache.block_size is '1.5'; it must be a whole number"),
    ("cache.prefix_caching=maybe", "cache.prefix_caching is 'maybe'; it must be true or false"),
    ("sampling.temperature=hot", "sampling.temperature is 'hot'; it must be a number"),
    ("scheduler.max_num_seqs=null", "scheduler.max_num_seqs is null; it must have a value"),
    ("seed=x", "seed is 'x'; it must be a whole number"),
]


@pytest.mark.parametrize(("override", "expected"), WRONG)
def test_a_value_of_another_type_is_named_with_what_was_expected(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config([override])
    assert str(caught.value) == expected


@pytest.mark.parametrize(("override", "expected"), WRONG)
def test_also_over_a_saved_configuration(override: str, expected: str) -> None:
    saved = dict(compose_config([]).raw)
    with pytest.raises(ConfigError) as caught:
        compose_from(saved, [override])
    assert str(caught.value) == expected


def test_a_value_for_a_group_of_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(["trace.prompt=5"])
    assert str(caught.value) == "trace.prompt is '5'; it is a group of keys: set one as trace.prompt.<key>=<value>"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["backend=real", "backend.num_replicas=2"],
            "backend.num_replicas is a key of backend=sim only: replicas are simulated; "
            "leave it out, or choose backend=sim",
        ),
        (
            ["backend=real", "backend.swap_overlap=true"],
            "backend.swap_overlap is a key of backend=sim; leave it out, or choose backend=sim",
        ),
        (
            ["cost=constant", "cost.path=fit.json"],
            "cost.path is a key of cost=tables or calibrated or linear; leave it out, or choose cost=tables",
        ),
        (
            ["trace.spread_batches=true"],
            "trace.spread_batches is a key of trace=mooncake; leave it out, or choose trace=mooncake",
        ),
    ],
)
def test_a_key_of_another_option_names_that_option(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(overrides)
    assert str(caught.value) == expected


def test_an_own_option_of_another_type_names_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.cli import main

    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine.yaml").write_text("defaults: [default]\nprefix_caching: maybe\n")
    run = ["run", "--config-dir", str(tmp_path), "cache=mine", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(run) == 1
    expected = f"{tmp_path}/cache/mine.yaml, line 2: cache.prefix_caching is 'maybe'; it must be true or false"
    assert expected in capsys.readouterr().err


GONE = (
    "error: backend.fast_forward is gone: every step is planned by itself, and as fast in the compiled core; "
    "leave it out\n"
)


@pytest.mark.parametrize(
    ("value", "more"),
    [("true", ()), ("false", ()), ("false", ("backend=real",)), ("false,true", ("--multirun",))],
)
def test_a_setting_that_is_gone_says_why_it_is_not_needed(
    value: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = (f"hydra.run.dir={tmp_path / 'run'}", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    said = say(capsys, "run", f"backend.fast_forward={value}", *more, *folders)
    assert said.status != 0
    assert (said.out, said.err) == ("", GONE)
    assert not (tmp_path / "run").exists()
