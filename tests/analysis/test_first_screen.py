"""The first screen answers in few sentences, the largest effects first."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import format as fmt
from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import (
    DEADLINES,
    FAIRNESS,
    LATENCY,
    P99_ITL,
    RATES,
    SLO_METRICS,
    Comparison,
    Metric,
    compare,
    mean_over_replicates,
    metric_of,
)
from analysis.comparison.effects import Compared, Effect, Interaction
from analysis.load import load_run
from analysis.measures.slo import SLO
from analysis.measures.statistics import Estimate
from analysis.reports.figures import telling
from analysis.reports.first_screen import MAX_SENTENCES, answer, conditions
from analysis.reports.keeping_slo import is_chosen
from analysis.reports.observed import observed
from tests.analysis.runs import write_runs

BASE = [Arm("base", {}, ())]


def row(arm: str, index: int, change: float, *, claimed: bool = True) -> Comparison:
    said = ("higher" if change > 0 else "lower") if claimed else "inside the noise"
    return Comparison(arm, LATENCY[index], 1.0, Estimate(change, change, change, 5, "paired t", "log_ratio"), said)


def chosen(rows: list[Comparison], *labels: str) -> list[Comparison]:
    """The rows, with the metrics of these labels as the user's choice."""
    return [replace(row, metric=replace(row.metric, is_chosen=row.metric.label in labels)) for row in rows]


def goodput_chosen(arm: str) -> Comparison:
    """What makes the SLO a choice of the user's: goodput, of which nothing is known."""
    return Comparison(arm, replace(SLO_METRICS[1], is_chosen=True), None, None, "unknown")


def test_effects_are_told_by_their_size_and_no_more_than_five_sentences() -> None:
    names = [f"arm {index}" for index in range(9)]
    rows = [row(name, 0, -0.1 * (index + 1)) for index, name in enumerate(names)] + [row("arm 8", 1, 0.3)]
    said = answer([Compared("", BASE, rows, ())], None)
    assert len(said) == MAX_SENTENCES
    assert said[0].startswith("arm 8 against base: better in mean TTFT (−59")
    assert "worse in P99 TTFT (+35" in said[0]
    assert [text.split(" against")[0] for text in said[:4]] == ["arm 8", "arm 7", "arm 6", "arm 5"]
    assert said[4] == "5 more differences are in the tables."
    (only,) = answer([Compared("", BASE, rows, ())], None, most=1)
    assert only == f"{said[0].removesuffix('.')}; 8 more differences are in the tables."


def test_arms_with_equal_changes_share_a_sentence() -> None:
    rows = [row(name, 0, change) for name, change in {"a": -0.1, "b": -0.3, "c": -0.1}.items()]
    groups = [Compared("", BASE, rows, ())]
    assert [text.partition(":")[0] for text in answer(groups, None)] == ["b against base", "a and c against base"]
    groups += [Compared("9 requests/s", groups[0].arms, [row("a", 0, 0.2)], ())]
    first, *_ = answer(groups, None)
    assert first.startswith("a against base turns with the load: mean TTFT is worse (+22\u00a0%) at 9 requests/s, ")
    for names, what in ((("x", "y"), "trace"), (("y, rate = 5", "y, rate = 9"), "load")):
        traces = [Compared(f"trace = {at}", one.arms, one.rows, ()) for at, one in zip(names, groups, strict=True)]
        first, *_ = answer(traces, None)
        assert first.startswith(f"a against base turns with the {what}: mean TTFT is worse (+22\u00a0%) at trace = y, ")


def test_what_is_inside_the_noise_is_no_answer() -> None:
    assert answer([Compared("", BASE, [row("a", 0, 0.2, claimed=False)], ())], None) == [
        "Nothing that was compared differs beyond the noise."
    ]
    both = [row("a", 0, 0.2, claimed=False), row("b", 0, 0.2)]
    assert answer([Compared("9 requests/s", BASE, both, ())], None) == [
        "At 9 requests/s, b against base: worse in mean TTFT (+22\u00a0%, to 1.00\u00a0s).",
        "a against base shows no difference beyond the noise.",
    ]


def test_what_only_the_correction_keeps_from_a_claim_is_not_called_noise() -> None:
    interval = Estimate(0.5, 0.1, 0.9, 5, "paired t", "log_ratio")
    open_ = replace(row("a", 0, 0.5), estimate=interval, verdict="undecided", p_corrected=0.055)
    rows = [open_, replace(open_, metric=LATENCY[1], verdict="inside the noise"), replace(open_, arm="b")]
    said = answer([Compared("", BASE, rows, ())], None)
    assert said == [
        "Mean TTFT of a against base (+65\u00a0% [+11,\u00a0+146], corrected p = 0.055) and 1 other change are "
        "undecided: more replicates or longer traces would tell.",
        "Nothing else that was compared differs beyond the noise.",
    ]
    effects = [Effect("x.a", 0, 1, open_, (("base", "a"),), None)]
    (averaged, *_) = answer([Compared("", BASE, rows[:1], effects)], None)
    assert averaged.startswith("Mean TTFT of a 1 instead of 0, on average (+65")
    (_, beside) = answer([Compared("", BASE, [open_, row("b", 0, 0.7)], ())], None)
    assert beside == "a against base shows no difference beyond the noise; mean TTFT (+65\u00a0%) is undecided."
    untested = replace(open_, metric=LATENCY[2], verdict="unknown")
    (little,) = answer([Compared("", BASE, [*rows[:2], untested], ())], None)
    assert little.endswith("no difference beyond the noise in the rest; mean TTFT (+65\u00a0%) is undecided.")
    (told, *_) = answer([Compared("", BASE, chosen([open_, row("a", 2, 0.3)], "mean TTFT"), ())], None)
    assert told.endswith("; undecided in mean TTFT (+65\u00a0%).")


def test_that_effects_are_averages_is_said_once() -> None:
    effects = [
        Effect("x.a", 0, level, row(str(level), 0, 0.1, claimed=False), (("base", "a"), ("b", "ab")), None)
        for level in (1, 2)
    ]
    *_, said = answer([Compared("", BASE, [row("c", 1, 0.5)], effects)], None)
    assert said == (
        "On average over the other factors, a 1 instead of 0 and a 2 instead of 0 show no difference beyond the noise."
    )


def test_what_is_equivalent_is_not_called_noise() -> None:
    equal = replace(row("a", 0, 0.05), verdict="equivalent")
    for others, text in (([], "±10 %"), ([row("a", 1, 0.2, claimed=False)], "the noise or ±10 %")):
        (said,) = answer([Compared("", BASE, [equal, *others], ())], None, margin=0.1)
        assert said == f"Nothing that was compared differs beyond {text}."
    told = answer([Compared("", BASE, chosen([equal, row("a", 1, 0.3)], "mean TTFT"), ())], None, 0.1)
    assert told[0].endswith("no difference beyond ±10 % in mean TTFT.")


def test_every_metric_that_the_user_chose_is_told() -> None:
    rows = [row("a", index, 0.1 + 0.1 * index) for index in range(4)]
    (said,) = answer([Compared("", BASE, chosen(rows, *(one.metric.label for one in rows)), ())], None)
    assert all(f"{LATENCY[index].label} (+" in said for index in range(4))


def test_what_has_a_claim_at_one_load_is_not_called_without_a_difference() -> None:
    groups = [
        Compared("9 requests/s", BASE, [row("a", 0, 0.2, claimed=False)], ()),
        Compared("20 requests/s", BASE, [row("a", 0, -0.4)], ()),
    ]
    said, quiet = answer(groups, None)
    assert said.startswith("At 20 requests/s, a against base: better")
    assert quiet == "At 9 requests/s, a against base shows no difference beyond the noise."


def test_arms_with_claims_of_the_metrics_that_the_user_chose_come_first() -> None:
    rows = [row("a", 2, 0.6), row("b", 0, 0.1)]
    groups, of_ttft = ([Compared("", BASE, each, ())] for each in (rows, chosen(rows, "mean TTFT")))
    assert [text.split(" ")[0] for text in answer(groups, None)] == ["a", "b"]
    assert [text.split(" ")[0] for text in answer(of_ttft, None)] == ["b", "a"]


def test_arms_are_ranked_by_the_metrics_that_the_user_chose() -> None:
    rows = [row("a", 4, -0.3), row("a", 1, 2.0), row("b", 4, -0.8)]  # of mean E2E, and a's P99 TTFT
    groups, of_e2e = ([Compared("", BASE, each, ())] for each in (rows, chosen(rows, "mean E2E")))
    assert [text.split(" ")[0] for text in answer(groups, None)] == ["a", "b"]
    assert [text.split(" ")[0] for text in answer(of_e2e, None)] == ["b", "a"]
    of_deadlines = replace(rows[2], metric=replace(DEADLINES, is_chosen=True), verdict="inside the noise")
    (said,) = answer([Compared("", groups[0].arms, [row("b", 0, -0.8), of_deadlines], ())], None)
    assert said.endswith("; no difference beyond the noise in deadlines met.")


@pytest.mark.parametrize(
    ("metrics", "is_of_slo"),
    [
        ((), None),
        (("mean TTFT",), False),
        (("mean TTFT", "SLO attainment"), True),
        (("goodput", "mean TTFT"), True),
    ],
)
def test_the_slo_comes_last_where_the_user_chose_other_metrics_only(metrics: tuple[str, ...], is_of_slo: bool) -> None:
    rows = [row("a", 0, 0.1), *(replace(row("a", 0, 0.1), metric=metric) for metric in SLO_METRICS)]
    assert is_chosen([Compared("", BASE, chosen(rows, *metrics), ())]) is is_of_slo


def test_what_is_better_at_one_load_and_worse_at_another_is_told_first() -> None:
    changes = {"9 requests/s": 0.1, "12 requests/s": -0.05, "20 requests/s": -0.4}
    groups = [Compared(load, BASE, [row("a", 0, change), row("b", 0, 0.6)], ()) for load, change in changes.items()]
    said = answer(groups, None)
    assert len(said) == MAX_SENTENCES
    assert said[0].replace("\u00a0", " ") == (
        "a against base turns with the load: mean TTFT is worse (+11 %) at 9 requests/s, and better (−33 %) at "
        "20 requests/s."
    )
    of_ttft = [group._replace(rows=chosen([*group.rows], "mean TTFT")) for group in groups]
    assert "turns" in answer(of_ttft, None)[0]
    of_tpot = Compared("30", BASE, chosen([row("b", 2, 0.1)], "mean TPOT"), ())
    assert "turns" in answer([*groups, of_tpot], None)[1]
    assert not any("turns" in text for text in answer(groups[1:], None))
    assert not any("turns" in text for text in said[1:])


def test_what_two_arms_share_is_said_once() -> None:
    names = {
        "srpt, caching on, watermark 0.1": "srpt, watermark 0.1 against fcfs, watermark 0 (both caching on)",
        "fcfs, caching on, watermark 0.1": "watermark 0.1 against watermark 0 (both fcfs, caching on)",
        "srpt, watermark 0": "srpt, watermark 0 against fcfs, caching on, watermark 0",
        "srpt, caching off, watermark 1": "srpt, caching off, watermark 1 against fcfs, caching on, watermark 0",
    }
    base = [Arm("fcfs, caching on, watermark 0", {}, ())]
    for name, said in names.items():
        (text,) = answer([Compared("", base, [row(name, 0, -0.1)], ())], None)
        assert text.partition(":")[0] == said


def test_an_average_that_hides_two_signs_is_told_by_cells() -> None:
    ends = (row("b 0", 0, -0.2, claimed=False), row("b 1", 0, 0.01, claimed=False))
    interaction = Interaction(ends, Estimate(0.2, 0.1, 0.3, 5, "paired t", "log_ratio"))
    effect = Effect("x.a", 0, 1, row("1", 0, -0.1), (("base", "a"), ("b", "ab")), interaction)
    (said,) = answer([Compared("", BASE, [row("a", 0, -0.1)], [effect])], None)
    assert said.replace("\u00a0", " ") == (
        "a 1 instead of 0: mean TTFT is inside the noise with b 0 (−18 %) and inside the noise with b 1 (+1.0 %)."
    )
    quiet = Effect("x.a", 0, 1, row("1", 4, 0.01, claimed=False), effect.pairs, None)
    quiet = replace(quiet, comparison=chosen([quiet.comparison], "mean E2E")[0])
    (of_e2e,) = answer([Compared("", BASE, [row("a", 0, -0.1)], [effect, quiet])], None)
    none = "; on average over the other factors, no difference beyond the noise in mean E2E."
    assert of_e2e == f"{said.removesuffix('.')}{none}", "the metric that the user chose is told"


def test_no_interval_is_no_equality() -> None:
    rows = [Comparison("a", metric, 1.0, None, "unknown") for metric in LATENCY]
    (said,) = answer([Compared("", BASE, rows, ())], None)
    assert said == "There is too little data for a claim: too few replicates, or too few requests of one."


def test_what_has_no_interval_is_not_called_equal_where_the_rest_is() -> None:
    """Of one trace a mean has an interval, and neither a rate nor a short tail has."""
    unknown = Estimate(-0.04, -math.inf, math.inf, 1, "paired t", "log_ratio")
    rows = [row("a", 0, 0.001, claimed=False), Comparison("a", LATENCY[3], 1.0, unknown, "unknown")]
    (said,) = answer([Compared("", BASE, rows, ())], None)
    assert said.startswith("There is too little data for a claim")
    name = LATENCY[3].label
    assert said.endswith(f"too few requests of one, in {name}; no difference beyond the noise in the rest.")


def test_one_metric_without_an_interval_hides_no_comparison() -> None:
    """P99 ITL of one trace never has an interval."""
    unknown = Estimate(-0.001, -math.inf, math.inf, 1, "paired t", "log_ratio")
    quiet = [row("b", 0, 0.001, claimed=False), Comparison("b", P99_ITL, 1.0, unknown, "unknown")]
    untested = "P99 ITL (\u22120.1\u00a0%) has no interval"
    (said,) = answer([Compared("", BASE, quiet, ())], None)
    assert said == f"Nothing that was compared differs beyond the noise; {untested}."
    *_, last = answer([Compared("", BASE, [row("a", 0, -0.1), *quiet], ())], None)
    assert last == f"b against base shows no difference beyond the noise; {untested}."
    both = [*quiet, *(replace(one, arm="c") for one in quiet)]
    (said,) = answer([Compared("", BASE, both, ())], None)
    assert said == "Nothing that was compared differs beyond the noise; P99 ITL has no interval."


def test_metrics_that_the_user_chose_and_no_change_of_which_was_tested(arms: list[Arm]) -> None:
    unknown = Estimate(-0.5, -math.inf, math.inf, 1, "paired t", "log_ratio")
    rows = [Comparison("a", metric, 1.0, unknown, "unknown") for metric in (P99_ITL, *RATES)]
    rows += [row("a", 0, -0.1), Comparison("b", P99_ITL, 1.0, unknown, "identical")]

    def told(rows: list[Comparison], *metrics: Metric) -> list[str]:
        said = observed([Compared("", arms, rows, ())], metrics, None)
        return [metric.label for metric in metrics if any(metric.label in text for text in said)]

    assert told(rows, P99_ITL, LATENCY[0]) == ["P99 ITL"]
    assert told(rows, *RATES) == ["requests/s", "output tokens/s"]
    assert told(rows, LATENCY[0]) == []
    assert told([*rows, replace(rows[0], arm="c", verdict="lower")], P99_ITL) == []


def test_of_what_has_no_interval_the_first_sentence_has_the_values(arms: list[Arm]) -> None:
    unknown = Estimate(-0.5, -math.inf, math.inf, 1, "paired t", "log_ratio")
    hit_rate = metric_of("prefix_hit_rate")
    chosen = (hit_rate, P99_ITL, *RATES, *FAIRNESS)
    rows = [Comparison(arms[1].name, metric, 1.0, unknown, "unknown") for metric in chosen]
    itl_s = {arm.name: mean_over_replicates(arm, P99_ITL) or 0.0 for arm in arms}
    low, high = (f"{fmt.seconds(itl_s[name])} with {name}" for name in sorted(itl_s, key=lambda name: itl_s[name]))
    text = f"P99 ITL {low} and {high}"
    more = " (more replicates give an interval)"
    begin = "Observed in the mean over 5 replicates, without an interval:"
    alone = [Compared("", arms, rows, ())]
    assert observed(alone, [P99_ITL], None) == [f"{begin} {text}{more}."]
    groups = [Compared(f"{rate} requests/s", arms, rows, ()) for rate in range(5)]
    (said,) = observed(groups, [P99_ITL], None)
    at = "; ".join(f"at {rate} requests/s: {low} and {high}" for rate in range(3))
    assert said == f"{begin} P99 ITL {at}; 2 more loads are in the tables{more}."
    (said,) = observed([Compared("", arms[:1], (), ())], [P99_ITL], None)
    assert said == f"{begin} P99 ITL {fmt.seconds(itl_s[arms[0].name])} with {arms[0].name}."
    hits = [fmt.share(mean_over_replicates(arm, hit_rate)) for arm in arms]
    assert hits[0] == hits[1], "the same prompts"
    both = f"prefix hit rate {hits[0]} with {arms[0].name} and {arms[1].name}"
    assert observed(alone, [hit_rate], None) == [f"{begin} {both}{more}."]
    many = [replace(arm, name=f"{arm.name} {index}") for index in range(3) for arm in arms]
    (said,) = observed([Compared("", many, (), ())], [hit_rate], None)
    assert said.endswith(f"{hits[0]} with every arm.")
    assert observed(alone, [DEADLINES, LATENCY[0]], None) == []
    assert observed(alone, [], None) == []
    (said,) = observed(alone, FAIRNESS, None)
    assert said.startswith(f"{begin} service gap of tenants ")
    assert "; Jain's index" in said
    (said,) = observed(alone, chosen, None)
    assert re.search(r"; \d more metrics? (is|are) in the tables\.$", said)


def test_one_arm_at_many_loads_is_described_at_the_first_few(arms: list[Arm]) -> None:
    groups = [Compared(f"{rate} requests/s", arms[:1], (), ()) for rate in range(7)]
    said = answer(groups, None, most=MAX_SENTENCES)
    assert len(said) == MAX_SENTENCES
    none = "No other arm ran on its traces, so nothing is compared."
    assert [none in text for text in said] == [False] * 4 + [True]
    assert said[4].endswith(f"served. 2 more loads are in the tables. {none}")
    (only,) = answer(groups[:1], None)
    assert only.endswith("served. No other arm ran on its trace, so nothing is compared.")
    (values,) = observed(groups[:4], [P99_ITL], None)
    assert values.endswith("; 1 more load is in the tables.")


def test_whether_the_slo_is_kept_is_said_first(arms: list[Arm]) -> None:
    names = [arm.name for arm in arms]
    rows = [*(row(names[1], index, 0.3) for index in range(6)), goodput_chosen(names[1])]

    def first(slo: SLO, load: str = "", arms: list[Arm] = arms) -> str:
        said = answer([Compared(load, arms, rows, ())], slo)
        assert len(said) == 2
        return said[0].replace("\u00a0", " ")

    everyone = f"{names[0]} and {names[1]} both keep the SLO for 100 % of the requests"
    assert first(SLO(ttft_s=1e6)) == f"{everyone} in the mean over 5 replicates."
    one = [Arm(arm.name, arm.levels, arm.runs[:num]) for arm, num in zip(arms, (1, 2), strict=True)]
    assert first(SLO(ttft_s=1e6), arms=one) == f"{everyone} in the mean over 1 to 2 replicates."
    one = [Arm(arm.name, arm.levels, arm.runs[:1]) for arm in arms]
    assert first(SLO(ttft_s=1e6), arms=one) == f"{everyone}."
    assert first(SLO(ttft_s=0.0)) == "No request keeps the SLO in any arm."
    assert first(SLO(ttft_s=0.0), "9 requests/s") == "At 9 requests/s, no request keeps the SLO in any arm."
    between = first(SLO(ttft_s=0.05, tpot_s=0.02))
    assert all(name in between for name in names)
    assert "of the requests" in between


def test_the_attainment_of_many_arms_names_the_first(arms: list[Arm]) -> None:
    other = replace(arms[1], name="other", runs=arms[1].runs[1:2])
    many = [*(replace(arms[0], name=f"arm {num}") for num in range(9)), other]
    slo = SLO(ttft_s=0.05, tpot_s=0.02)
    first, *_ = answer([Compared("", many, [row("other", 0, 0.3), goodput_chosen("other")], ())], slo)
    assert "arm 0, arm 1, arm 2, arm 3 and 5 more" in first
    assert "arm 4" not in first


def test_attainment_is_told_of_few_loads_and_arms(arms: list[Arm]) -> None:
    some = [[replace(arm, runs=arm.runs[:num]) for arm in arms] for num in range(1, 6)]  # means over as many replicates
    rows = [row(arms[1].name, 0, 0.3), goodput_chosen(arms[1].name)]
    groups = [Compared(f"{rate} requests/s", few, rows, ()) for rate, few in enumerate(some)]
    said = answer(groups, SLO(ttft_s=1e6))
    assert len(said) == MAX_SENTENCES
    assert said[0].count("100") == 4
    assert said[0].endswith("; 1 more load is in the tables.")
    alike = [Compared(f"{rate} requests/s", arms, groups[0].rows, ()) for rate in range(6)]
    text = f"{arms[0].name} and {arms[1].name} both keep the SLO for 100\u00a0% of the requests"
    first, *_ = answer(alike, SLO(ttft_s=1e6))
    assert first.startswith("At 0 requests/s, 1 requests/s, 2 requests/s, ")
    assert first.endswith(f" and 5 requests/s, {text} in the mean over 5 replicates.")


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    folders = write_runs(tmp_path, chunked=[False, True], seed=[*range(5)], num_requests=30)
    return infer_arms([*map(load_run, folders)])


def test_runs_beyond_capacity_count_where_both_arms_ran_their_trace(arms: list[Arm]) -> None:
    slow, fast = arms
    for run in slow.runs[:2]:
        run.summary["steadiness"] = {"is_outrun": True}
    some = [replace(slow, runs=slow.runs[1:4]), replace(fast, runs=fast.runs[1:])]
    assert conditions("", some) == ["over all runs (1 of 6 are beyond capacity)"]
    assert conditions("", [replace(slow, runs=slow.runs[:4]), some[1]]) == conditions("", some)


def test_an_attainment_changes_by_a_hundred_points_at_most(arms: list[Arm]) -> None:
    two = [replace(arm, runs=arm.runs[:2]) for arm in arms]
    for arm, shares in zip(two, ((0.0, 0.1), (0.2, 0.9)), strict=True):
        for run, share in zip(arm.runs, shares, strict=True):
            run.summary["slo"] = {"attainment": share}
    (row,) = compare(two, two[0], [SLO_METRICS[0]])
    assert row.estimate is not None
    assert (row.estimate.low, row.estimate.high) == (-1, 1)


def test_that_nothing_differs_is_said_with_the_conditions_under_which_it_is_so(arms: list[Arm]) -> None:
    first, other = [replace(arm, runs=arm.runs[:1]) for arm in arms]
    first.runs[0].summary["steadiness"] = {"is_outrun": True}
    quiet, claimed = row(other.name, 0, 0.1, claimed=False), row("b", 0, 0.3)
    at = f"Beyond the capacity of {first.name}, on this one trace"
    (said,) = answer([Compared("9 requests/s", [first, other], [quiet], ())], None)
    assert said == f"{at}, nothing that was compared differs beyond the noise."
    *_, said = answer([Compared("9 requests/s", [first, other], [quiet, claimed], ())], None)
    assert said == f"{at}, {other.name} against {first.name} shows no difference beyond the noise."


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ((), ["mean TTFT", "P99 TPOT", "P99 ITL", "goodput"]),
        (("mean E2E", "P99 E2E"), ["P99 TPOT", "mean E2E", "P99 E2E", "P99 ITL"]),
        (("mean TPOT", "P99 TPOT", "goodput"), ["mean TPOT", "P99 TPOT", "P99 ITL", "goodput"]),
    ],
)
def test_the_figure_shows_the_metrics_that_the_answer_is_about(metrics: tuple[str, ...], shown: list[str]) -> None:
    claimed = {"P99 TPOT": 0.3, "P99 ITL": 0.9}
    rows = [
        Comparison(
            "b", metric, 1.0, Estimate(size := claimed.get(metric.label, 0.0), size, size, 3, "paired t", "log_ratio"),
            "higher" if size else "inside the noise",
        )
        for metric in (*LATENCY, *RATES, *SLO_METRICS)
    ]  # fmt: skip
    paths = telling(Compared("", (), chosen(rows, *metrics), ()))
    assert [row.metric.label for row in rows if row.metric.path in paths] == shown
