"""What is wrong with a step of trace.transforms is said by its place and its own key."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.configuration.compose import compose_config, compose_from
from experiments.wiring.traces import build_source, load_tokenizer
from testbed.errors import ConfigError, TestbedError

SMALL = ["trace=synthetic", "trace.num_requests=20"]
STEP = r"trace\.transforms\[0\] "
LIST = (
    r"trace\.transforms is '.*thin.*'; it must be a list, as in 'trace\.transforms=\[\{name: thin, fraction: 0\.5\}\]'"
)


def message(*overrides: str) -> str:
    with pytest.raises(TestbedError) as caught:
        list(build_source(compose_config([*SMALL, *overrides])))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("{name: scale_rate, factor: -1}", "(scale_rate): factor is -1; it must be a finite number above 0"),
        ("{name: scale_rate, factor: 1e-300}", "(scale_rate): factor is 1e-300; it must be large enough"),
        ("{name: limit, num_requests: 0}", "(limit): num_requests is 0; it must be at least 1"),
        ("{name: window, start_s: 2, end_s: 1}", "(window): end_s is 1; it must be above start_s (2)"),
        ("{name: shift, offset_s: -100}", "(shift): offset_s is -100; it must be at least -"),
        ("{name: arrivals, rate: -1}", "(arrivals): rate is -1; it must be above 0"),
        ("{name: repeat, times: 1000000000}", "(repeat): times is 1000000000; it must be at most "),
        ("{name: merge, path: nosuch.csv}", "(merge): nosuch.csv: does not exist"),
        ("{name: merge, path: x, format: azur}", "(merge): unknown trace format 'azur'; did you mean 'azure'?"),
    ],
)
def test_a_step_is_named_with_its_own_key(step: str, told: str, stream: str) -> None:
    found = message(f"trace.transforms=[{step},{{name: thin, fraction: 0.9}}]", f"trace.stream={stream}")
    assert found.startswith(f"trace.transforms[0] {told}")


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_setting_of_the_group_is_named_with_its_key(stream: str) -> None:
    late = ["trace.rate_scale=1e-300", "trace.transforms=[{name: thin, fraction: 0.9}]", f"trace.stream={stream}"]
    assert message(*late).startswith("trace.rate_scale is 1e-300; it must be large enough")
    assert message("trace.end_s=1e300", f"trace.stream={stream}").startswith("trace.end_s is 1e+300; it must be above")


@pytest.mark.parametrize("value", ["thin", "{name: thin, fraction: 0.5}"])
def test_a_step_that_is_not_in_a_list_is_told_the_form(value: str, tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=LIST):
        compose_config([*SMALL, f"trace.transforms={value}"])
    saved = compose_config(SMALL).raw
    with pytest.raises(TestbedError, match=LIST):
        compose_from(saved, [f"trace.transforms={value}"])


def test_a_damaged_tokenizer_is_told_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for damaged in ('{"a": 1}', "{"):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(str(tmp_path))
        assert str(caught.value).startswith(f"trace.tokenizer: no tokenizer at {tmp_path} (")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no tokenizer at no/where \(no folder, and no Hugging Face name that is "):
        load_tokenizer("no/where")


def test_a_tokenizer_that_is_cached_is_not_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file may be damaged: what the loader says is told."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--model").mkdir()
    with pytest.raises(ConfigError, match=r"no tokenizer at some/model \((?!no folder)"):
        load_tokenizer("some/model")
