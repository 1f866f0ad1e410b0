"""Main effects and interactions of designs whose values are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scipy import stats

from analysis.comparison import effects
from analysis.comparison.arms import Arm, level_groups
from analysis.comparison.compare import LATENCY, SLO_METRICS, Comparison, compare, judge
from analysis.comparison.effects import Compared, Effect, main_effects
from analysis.comparison.wording import change_text
from analysis.load import Run
from analysis.measures.slo import SLO
from analysis.measures.statistics import Estimate
from analysis.reports.cautions import _ambiguous
from analysis.reports.first_screen import answer
from analysis.reports.tables import effects_table

NUM = 6  # replicates


class Known:
    """What effects ask of a run, with one value of each metric."""

    is_simulated = True

    def __init__(self, name: str, seed: int, value: float) -> None:
        self.path, self.fingerprint = Path(f"{name}-{seed}"), f"trace {seed}"
        self.manifest = {"seed": seed, "digest": str(value)}
        self.summary = {
            "num_finished": 1, "finish_reasons": {"ignored": 0}, "e2e_s": {"mean": value}, "preemptions": {"total": 0},
            "steadiness": None,
        }  # fmt: skip
        self.flat_config: dict[str, Any] = {"trace.name": "synthetic", "seed": seed}
        self._value = value

    def summary_under(self, slo: SLO | None) -> dict[str, Any]:
        return {"ttft_s": {"mean": self._value}, "slo": {"goodput_per_s": self._value}}


def design(value_of: Callable[[int, int], float], noise: float, seed: int = 1) -> list[Arm]:
    """Arms of 2 x 3 levels. value_of: of both factors' levels, without noise."""
    rng = np.random.default_rng(seed)
    traces, arms = rng.normal(0, 0.3, NUM), []
    for a in (0, 1):
        for b in (0, 1, 2):
            values = value_of(a, b) * np.exp(traces + rng.normal(0, noise, NUM))
            runs = [Known(f"{a}{b}", number, float(value)) for number, value in enumerate(values)]
            arms.append(Arm(f"a {a}, b {b}", {"x.a": a, "x.b": b}, cast(tuple[Run, ...], tuple(runs))))
    return arms


def with_values(name: str, values: Sequence[float]) -> Arm:
    runs = [Known(name, number, float(value)) for number, value in enumerate(values)]
    return Arm(name, {"scheduler.name": name}, cast(tuple[Run, ...], tuple(runs)))


def notes_of(effect: Effect) -> list[str]:
    """The notes of its cell in a table."""
    ((_, cell),) = effects_table("", [effect], 0.02).rows
    return [note.replace("\u00a0", " ") for note in cell.notes]


def first_effect(arms: list[Arm], metric: Any) -> Effect:
    return next(effect for effect in main_effects(arms, arms[0], [metric]) if effect.factor == "x.a")


def test_factors_that_multiply_do_not_interact() -> None:
    effect = first_effect(design(lambda a, b: 2.0**a * 3.0**b, 0.05), LATENCY[0])
    assert effect.comparison.estimate is not None
    assert effect.comparison.estimate.value == pytest.approx(math.log(2), abs=0.1)
    assert effect.interaction is None
    assert "depends on the other factors" not in notes_of(effect)


def test_a_run_that_is_missing_costs_its_trace_not_the_effect() -> None:
    arms = design(lambda a, b: 2.0**a * 3.0**b, 0.05)

    def without(arm: Arm, *places: int) -> Arm:
        return replace(arm, runs=tuple(run for place, run in enumerate(arm.runs) if place not in places))

    one_missing = first_effect([*arms[:-1], without(arms[-1], 2)], LATENCY[0])
    trace_missing = first_effect([without(arm, 2) for arm in arms], LATENCY[0])
    assert one_missing.comparison == trace_missing.comparison
    assert one_missing.comparison.estimate is not None
    but_one = first_effect([*arms[:-1], without(arms[-1], *range(1, NUM))], LATENCY[0])
    assert but_one.comparison.estimate is None, "one trace is no average over several"


def test_requests_in_common_are_those_of_the_traces_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces that a cell lacks are in no effect, and widen none."""
    asked: set[int] = set()

    def none(runs: Sequence[Run]) -> float:
        asked.add(len(runs))
        return 0.0

    monkeypatch.setattr(effects, "common_share", none)
    arms = design(lambda a, b: 2.0**a * 3.0**b, 0.05)
    first_effect([replace(arms[0], runs=arms[0].runs[:-1]), *arms[1:]], LATENCY[0])  # of every effect
    assert asked == {NUM - 1}


def test_an_effect_that_is_larger_at_one_level_of_another_factor_is_told_with_an_interval() -> None:
    effect = first_effect(design(lambda a, b: 2.0**a * (1.5 if a and b == 2 else 1.0), 0.02), LATENCY[0])
    assert effect.interaction is not None
    (least, most), apart = effect.ends, effect.interaction.estimate
    assert most.arm == "b 2"
    assert least.estimate is not None
    assert most.estimate is not None
    assert (least.estimate.value, most.estimate.value) == pytest.approx((math.log(2), math.log(3)), abs=0.05)
    assert least.verdict == most.verdict == "higher"
    assert apart.low < math.log(1.5) < apart.high
    assert apart.level == pytest.approx(1 - 0.05 / 3), "of three pairs of cells"
    error = (apart.high - apart.value) / stats.t.ppf(0.5 + apart.level / 2, NUM - 1)
    assert apart.p_value == pytest.approx(3 * 2 * stats.t.sf(apart.value / error, NUM - 1))
    *_, about, _, at_most, by = notes_of(effect)
    assert about == "depends on the other factors"
    assert re.fullmatch(r"\+\d+ % with b 2", at_most)
    assert by.startswith("apart by +5")
    two = [arm for arm in design(lambda a, b: 2.0**a * (1.5 if a and b == 2 else 1.0), 0.02) if arm.levels["x.b"]]
    assert first_effect(two, LATENCY[0]).interaction is not None, "of two cells"


def test_a_level_that_stands_for_different_settings_has_no_main_effect() -> None:
    """victim=auto under three queue orders, with another victim; under one of them auto is another one."""
    renamed = {"x.a": "scheduler.victim", "x.b": "scheduler.queue_order"}
    arms = [
        replace(arm, levels={renamed[key]: level for key, level in arm.levels.items()} | {"scheduler.victim": victim})
        for arm in design(lambda a, b: 2.0**a, 0.05)
        if (victim := ("auto", "most_blocks")[int(arm.levels["x.a"])])
    ]
    factors = [{effect.factor for effect in main_effects(arms, arms[0], [LATENCY[0]])}]
    for arm in arms:
        arm.runs[0].manifest["victim_of_auto"] = (
            "lowest_priority" if arm.name.endswith("b 2") else "most_recently_admitted"
        )
    factors += [{effect.factor for effect in main_effects(arms, base, [LATENCY[0]])} for base in (arms[0], arms[-1])]
    assert factors == [{"scheduler.victim", "scheduler.queue_order"}, *[{"scheduler.queue_order"}] * 2]
    (said,) = _ambiguous(arms)
    assert said.startswith(
        "victim auto stands for most_recently_admitted in “a 0, b 0” and “a 0, b 1”; lowest_priority in “a 0, b 2”:"
    )
    assert said.endswith(" no average effect of the victim is given, and that of the queue order includes this change.")
    assert list(_ambiguous(arms[1:3])) == [said.partition(":")[0].replace("“a 0, b 0” and ", "") + "."]
    assert list(_ambiguous(arms[:2])) == []


def test_what_follows_from_a_level_is_no_factor_of_its_own() -> None:
    """Three presets, of which two share a setting: a full design of presets and of another setting is one."""
    arms = design(lambda a, b: 2.0**a * 3.0**b, 0.05)
    presets = [replace(arm, levels={"x.own": arm.levels["x.b"] == 2, **arm.levels}) for arm in arms]
    assert level_groups(presets) == [("x.a",), ("x.b", "x.own")]
    found, known = (main_effects(those, those[0], LATENCY[:1]) for those in (presets, arms))
    assert {(one.factor, one.level): one.comparison for one in found} == {
        (one.factor, one.level): one.comparison for one in known
    }
    both = [replace(arm, levels={**arm.levels, "x.own": arm is arms[-1]}) for arm in arms]  # of both factors together
    assert level_groups(both) == [("x.a",), ("x.b",), ("x.own",)]


def test_cells_are_averaged_trace_by_trace() -> None:
    """In both cells the effect grows from trace to trace, and one cell has its runs in reverse."""
    arms = [
        Arm(
            f"a {a}, b {b}", {"x.a": a, "x.b": b},
            tuple(cast(Run, Known(f"{a}{b}", trace, 2.0 ** (a * (1 + (trace - b * 5) / 10)))) for trace in traces),
        )
        for b, traces in ((0, [0, 1, 2, 3, 4, 5]), (1, [5, 4, 3, 2, 1, 0]))
        for a in (0, 1)
    ]  # fmt: skip
    effect = first_effect(arms, LATENCY[0])
    assert effect.comparison.estimate is not None
    each = [(1 + trace / 10 + 1 + (trace - 5) / 10) / 2 * math.log(2) for trace in range(NUM)]
    assert effect.comparison.estimate.value == pytest.approx(np.mean(each))
    half = effect.comparison.estimate.high - effect.comparison.estimate.value
    assert half == pytest.approx(2.5706 * np.std(each, ddof=1) / math.sqrt(NUM), rel=1e-4)  # Student's t, 5 degrees

    others = [replace(arm, runs=arm.runs[:-1]) for arm in arms]  # as many, but others: without 5, without 0
    shared = first_effect(others, LATENCY[0]).comparison.estimate
    assert shared is not None
    assert shared.num == NUM - 2
    assert shared.value == pytest.approx(np.mean(each[1:-1]))


def test_noise_alone_is_no_interaction() -> None:
    """Of the pairs of cells the most distant is tested, which the correction for their number makes up for."""
    designs = [design(lambda a, b: 1.0, 0.2, seed) for seed in range(60)]
    assert sum(first_effect(arms, LATENCY[0]).interaction is not None for arms in designs) <= 7


def test_a_rate_that_falls_to_zero_has_an_effect_in_its_own_unit() -> None:
    effect = first_effect(design(lambda a, b: 0.0 if a else 4.0, 0.05), SLO_METRICS[1])
    row = effect.comparison
    assert row.estimate is not None
    assert (row.estimate.scale, row.verdict, row.gain) == ("difference", "lower", -math.inf)
    assert row.base == pytest.approx(-row.estimate.value)
    assert effects_table("", [effect], 0.02).rows[0][1].text.startswith("from 4")


@pytest.mark.parametrize(
    ("value_of", "words"),
    [
        (lambda a, b: 2.0 ** (a * (1 - b)), "mean TTFT is better with b 2 (−5X %) and worse with b 0 (+XX %)."),
        (
            lambda a, b: 2.0 ** (a * (b == 0)),
            "mean TTFT is inside the noise with b X (X %) and worse with b 0 (+XX %).",
        ),
    ],
)
def test_an_effect_that_turns_with_another_factor_is_answered_by_cells_and_by_no_average(
    value_of: Callable[[int, int], float], words: str
) -> None:
    arms = design(value_of, 0.03)
    rows = compare(arms, arms[0], LATENCY[:1])
    said = answer([Compared("", arms, rows, main_effects(arms, arms[0], LATENCY[:1]))], None)
    (told,) = [text.replace("\u00a0", " ") for text in said if "a 1 instead of 0" in text]
    pattern = re.escape(f"a 1 instead of 0: {words}").replace("X\\ %", "\\S+\\ %").replace("X", "\\S+")
    assert re.fullmatch(pattern, told), told
    assert not any("against" in text for text in said), "an arm's change is that of a cell"
    turned = first_effect(arms, LATENCY[0])
    even = replace(turned, comparison=replace(turned.comparison, metric=LATENCY[2]), interaction=None)
    (row,) = effects_table("", [turned, even], 0.02).rows
    claims = [note.partition(": ")[2] for note in notes_of(turned)[1:3]]
    assert words.startswith(f"mean TTFT is {claims[0]} with ")
    assert f" and {claims[1]} with " in words
    assert row[1].text == " to ".join(change_text(end) for end in turned.ends)
    assert row[2].notes != row[1].notes


def test_arms_that_decided_alike_are_one_comparison_of_a_metric() -> None:
    rng = np.random.default_rng(3)
    base = rng.uniform(1, 2, NUM)
    one, other = base * np.exp(rng.normal(0.05, 0.05, NUM)), base * np.exp(rng.normal(0.2, 0.05, NUM))
    arms = [with_values(name, values) for name, values in (("base", base), ("one", one), ("other", other))]

    def told(arms: Sequence[Arm]) -> dict[str, float | None]:
        return {row.arm: row.p_corrected for row in compare(arms, arms[0], LATENCY[:1])}

    (row,) = compare(arms[:2], arms[0], LATENCY[:1])
    diff = np.log(one / base)
    assert row.effect == pytest.approx((1 - 3 / 19) * diff.mean() / diff.std(ddof=1)), "with Hedges' correction"
    twice = told([*arms, with_values("one again", one)])
    assert twice == told(arms) | {"one again": twice["one"]}
    assert twice["one"] != told([*arms, with_values("another", one * np.exp(rng.normal(0, 0.01, NUM)))])["one"]


def test_p_values_are_corrected_over_the_arms_of_a_metric_and_then_over_the_metrics_of_an_arm() -> None:
    p_values = {("a", 0): 0.01, ("b", 0): 0.04, ("a", 1): 0.02, ("b", 1): 0.5}
    rows = [
        Comparison(arm, LATENCY[i], 1.0, Estimate(0.2, 0.1, 0.3, 5, "t", "log_ratio", p_value=p), "unknown")
        for (arm, i), p in p_values.items()
    ]
    judged = {(row.arm, row.metric): row for row in judge(rows, 0.02, [row.arm for row in rows])}
    told = {key: (row.verdict, round(row.p_corrected or 0.0, 6)) for key, row in judged.items()}
    assert told == {
        ("a", LATENCY[0]): ("higher", 0.04), ("a", LATENCY[1]): ("higher", 0.04),  # by Holm 0.02 and 0.04
        ("b", LATENCY[0]): ("undecided", 0.08), ("b", LATENCY[1]): ("undecided", 0.5),  # 0.04 and 0.5
    }  # fmt: skip
    measured = judge([replace(row, noise=0.25) for row in rows], 0.02, [row.arm for row in rows])
    assert {row.verdict for row in measured} == {"inside the engine's noise"}, "more replicates would not tell"


def test_the_margin_of_a_share_is_one_of_the_baselines() -> None:
    change = Estimate(0.004, -0.001, 0.009, 5, "t", p_value=0.5)
    rows = [Comparison("a", SLO_METRICS[0], 0.5, change, "unknown", base=base) for base in (0.5, 0.4)]
    assert [judge([row], 0.02, ["a"])[0].verdict for row in rows] == ["equivalent", "inside the noise"]


def test_levels_that_decided_alike_are_one_effect() -> None:
    def effects(num_levels: int) -> list[float | None]:
        arms = design(lambda a, b: 1.05**a * 1.1**b, 0.05)
        arms = [arm for arm in arms if arm.levels["x.b"] < 2]
        again = [Arm(f"{arm.name} again", {**arm.levels, "x.b": 2}, arm.runs) for arm in arms if arm.levels["x.b"] == 1]
        found = main_effects([*arms, *again[: 2 * (num_levels > 2)]], arms[0], LATENCY[:1])
        return [effect.comparison.p_corrected for effect in found]

    a, b, same = effects(3)
    assert b == same == effects(2)[1]
    assert len({a, b}) == 2


def test_an_arm_within_the_margin_of_the_best_is_not_told_apart_from_it() -> None:
    values, noise = np.random.default_rng(1).normal(0, [[0.1], [0.002]], (2, NUM))
    base = np.exp(values)
    arms = [with_values("base", base), with_values("best", 2 * base), with_values("near", 1.94 * base * np.exp(noise))]
    slo = SLO(ttft_s=1.0)
    for margin, is_near in ((0.02, False), (0.1, True)):
        rows = compare(arms, arms[0], SLO_METRICS[1:], margin, slo)
        said = answer([Compared("", arms, rows, ())], slo, margin=margin)
        assert said[0].startswith("best serves most within the SLO")
        assert said[0].endswith("; near is not told apart from it.") is is_near


def test_preemptions_are_counted_over_all_runs_that_a_sentence_is_of() -> None:
    """One of two other arms differs in its preemption mode, too."""
    arms = []
    for place, (name, mode) in enumerate((("a", "recompute"), ("b", "recompute"), ("c", "swap")), 5):
        arm = with_values(name, np.exp(np.arange(NUM) / place))
        for run in arm.runs:
            run.summary.update(preemptions={"total": 2}, num_requests=10)
        arms.append(replace(arm, levels={**arm.levels, "scheduler.preemption": mode}))
    (said,) = answer([Compared("", arms, compare(arms, arms[0], LATENCY[:1], margin=0.5), ())], None, margin=0.5)
    assert said == "Nothing that was compared differs beyond ±50 % (36 preemptions in 180 requests)."
