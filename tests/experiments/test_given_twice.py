"""A key that a command gives twice is refused, whether by itself or in a mapping: only the last would count."""

from __future__ import annotations

import pytest

from experiments.cli import main
from experiments.configuration.overrides import refuse_repeated


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "trace.rate=1", "+trace.rate=2"], "trace.rate is given 2 times, and only the last would count; give "),
        (["run", "-m", "seed=0,1", "seed=2"], "seed is given 2 times, and only the last would count; give it once"),
        (
            ["run", "--config-dir=.", "--config-dir=.."],
            "hydra.searchpath is given 2 times, and only the last would count; in place of several --config-dir give "
            "\"hydra.searchpath=['file:",
        ),
        (["run", "from=a", "from=b"], "from is given 2 times, and only the last would count; give it once"),
        (
            ["run", "experiment=watermark", "experiment=demo"],
            "experiment is given 2 times, and only the last would count; lay several over one another as "
            "experiment=[watermark,demo]",
        ),
        (["capacity", "++trace.rate=1,2"], "trace.rate has several values; it is what is searched: give one, to "),
        (["capacity", "seed=0,1", "seed=2"], "seed is given 2 times, and only the last would count; give it once"),
        (["trace", "freeze", "a.parquet", "trace.rate=1", "rate=2"], "trace.rate is given 2 times, and only the last "),
        (["calibrate", "profile", "--out=a.parquet", "seed=1", "+seed=2"], "seed is given 2 times, and only the last "),
        (["calibrate", "seed=1", "seed=2"], "seed is given 2 times, and only the last would count; give it once"),
        (["fidelity", "a", "seed=1", "seed=2"], "seed is given 2 times, and only the last would count; give it once"),
        *[
            ([*command, *given], f"{key} is given 2 times, and only the last would count; give it once")
            for command in (["run"], ["run", "-m", "seed=0,1"], ["fidelity", "a"], ["capacity"])
            for key, *given in (
                ("cache.watermark", "cache={watermark: 0.1}", "cache.watermark=0.2"),
                ("cache.watermark", "++cache.watermark=0.2", "++cache={block_size: 8, watermark: 0.1}"),
                (
                    "scheduler.kv_rules.allocate",
                    "scheduler={kv_rules: {allocate: whole}}",
                    "scheduler.kv_rules.allocate=chunk",
                ),
                (
                    "scheduler.kv_rules.allocate",
                    "scheduler.kv_rules={allocate: whole}",
                    "scheduler={kv_rules: {allocate: chunk}}",
                ),
                ("scheduler.victim", "scheduler={victim: {_target_: b.c}}", "scheduler.victim={_target_: b.d}"),
                ("report.plots", "report={plots: [{_target_: b.c, a: 1}]}", "report.plots=[]"),
            )
        ],
        (
            ["run", "-m", "cache={watermark: 0.1},{watermark: 0.2}", "cache.watermark=0.3"],
            "cache.watermark is given 2 ",
        ),
        (
            ["run", "-m", "cache=choice({watermark: 0.1},{})", "cache.watermark=1"],
            "cache.watermark is given 2 times, and ",
        ),
        (["fidelity", "a", "--beside", "cache.watermark=0.1 'cache={watermark: 1}'"], "cache.watermark is given 2 "),
    ],
)
def test_a_key_that_is_given_twice_is_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"error: {expected}")


def test_a_mapping_may_stand_beside_keys_that_it_does_not_give() -> None:
    given = [
        "scheduler={kv_rules: {allocate: whole}}", "scheduler.kv_rules.full_length_must_fit=true",
        "scheduler.queue_order={_target_: mine.Order, x: 1}", "scheduler.queue_order.x=2", "cache=default",
        "cache.block_size=8", "trace={transforms: [{name: thin, fraction: 0.9}, {name: thin, fraction: 0.8}]}",
        "report.question='{a: 1, a: 2}'", "cost={step_s: 1},{step_s: 2}", "record={}", "slo=",
    ]  # fmt: skip
    refuse_repeated(given)
