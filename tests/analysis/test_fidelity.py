"""Simulated against real runs: matching, signed errors, rankings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations, product
from types import SimpleNamespace
from typing import cast

import numpy as np
import pandas as pd
import pytest

from analysis import format as fmt
from analysis.comparison import fidelity
from analysis.comparison.arms import infer_arms
from analysis.comparison.pairs import Pair, infer_pairs
from analysis.comparison.wording import winner_text
from analysis.load import Run, load_run, load_sweep
from analysis.measures.statistics import spread
from analysis.plots.fidelity_plots import study_figure
from analysis.reports import tables
from analysis.reports.fidelity_findings import alike_said, fidelity_findings, pace_said, too_noisy, winners
from analysis.reports.fidelity_section import _rankings
from analysis.reports.parts import ReportInput
from testbed.errors import RunFolderError
from testbed.records.schema import STEP_COLUMNS
from tests.analysis.runs import change_config, change_manifest, requests_of, simulate, table, write_folder, write_run

S = 10**9


def run_of(folder, first_tokens, fingerprint="f", digest=None):
    rows = [{"token_ns": [t, t + S], "finish_ns": t + S, "finish_reason": "stop"} for t in first_tokens]
    manifest = simulate(num_requests=2)[2] | {"trace": {"fingerprint": fingerprint}, "digest": digest or folder.name}
    return load_run(write_folder(folder, requests_of(*rows), table([], STEP_COLUMNS), manifest, {}))


def policies(folder, times):
    """A simulated and a real run of each policy, whose only request has its first token after these seconds."""
    return {
        name: (run_of(folder / f"s{name}", [sim * S]), run_of(folder / f"r{name}", [int(real * S)]))
        for name, (sim, real) in times.items()
    }


def test_errors_are_signed_and_relative_to_the_real_run(tmp_path):
    sim, real = run_of(tmp_path / "sim", [1 * S, 3 * S]), run_of(tmp_path / "real", [2 * S, 3 * S])
    table_ = fidelity.error_table(sim, real).set_index("metric")
    assert table_.loc["ttft_s.mean", "error"] == pytest.approx(2.0 / 2.5 - 1)
    assert table_.loc["tpot_s.p99", "error"] == 0
    requests = fidelity.request_errors(fidelity.match_requests(sim, real)).set_index("metric")
    assert requests.loc["ttft_s", "median_error"] == pytest.approx(-0.25)
    assert requests.loc["ttft_s", "num"] == 2
    part = fidelity.part_errors(sim, real, ["r0"]).set_index("metric")["error"]
    assert (part["ttft_s.mean"], part["tpot_s.p90"], part["itl_s.p50"], part["e2e_s.p99"]) == (-0.5, 0, 0, -1 / 3)
    worst = fidelity.worst_errors([fidelity.error_table(*runs) for runs in ((sim, real), (real, sim), (sim, sim))])
    assert (worst["ttft_s.mean"], worst["itl_s.mean"]) == (0.25, 0)
    of_nothing = fidelity.error_table(sim, run_of(tmp_path / "at once", [0, 0])).set_index("metric")
    assert of_nothing.loc["ttft_s.mean", "real"] == 0
    assert math.isnan(of_nothing.loc["ttft_s.mean", "error"])


def test_only_the_same_requests_of_the_same_trace_are_matched(tmp_path):
    sim = run_of(tmp_path / "sim", [S, S])
    with pytest.raises(RunFolderError, match="different traces"):
        fidelity.match_requests(sim, run_of(tmp_path / "other", [S, S], "g"))
    with pytest.raises(RunFolderError, match="1 requests are in one run only, the first r2"):
        fidelity.match_requests(sim, run_of(tmp_path / "more", [S, S, S]))


def test_ranking_agreement(tmp_path):
    pairs = policies(tmp_path, {"a": (1, 1), "b": (2, 3), "c": (3, 2)})
    row = fidelity.ranking_agreement(pairs, ["ttft_s.mean"]).iloc[0]
    assert (row.sim_winner, row.real_winner, row.same_winner, row.regret) == ("a", "a", True, 0.0)
    assert row.kendall_tau == pytest.approx(1 / 3)
    assert row.real_spread == pytest.approx(2.0)
    assert (row.num_told_apart, row.num_same_order) == (3, 2)
    for times, regret, is_clear in (
        ({"a": (2, 1), "b": (1, 3), "c": (3, 3)}, 2.0, True),  # the others are as slow as each other
        ({"a": (2, 1), "b": (1, 1.01), "c": (3, 3)}, pytest.approx(0.01), False),
        ({"a": (2, 0), "b": (1, 1), "c": (3, 3)}, None, True),  # no share of 0
    ):
        row = fidelity.ranking_agreement(
            policies(tmp_path / f"{is_clear}{regret is None}", times), ["ttft_s.mean"]
        ).iloc[0]
        assert (row.sim_winner, row.regret, row.winner_is_clear) == ("b", regret, is_clear)


def test_where_several_are_best_in_the_simulator_none_is_picked(tmp_path):
    pairs = policies(tmp_path, {"a": (1, 1), "b": (1, 3), "c": (3, 2)})
    for order in ("abc", "bac"):
        ranking = fidelity.ranking_agreement({name: pairs[name] for name in order}, ["ttft_s.mean"])
        row = ranking.iloc[0]
        assert (row.sim_winner, row.real_winner, bool(row.same_winner)) == ("", "a", False)
        assert [winner_text(one) for one in (row.sim_winner, row.real_winner, None)] == ["several", "a", "–"]
        (said,) = winners({"": ranking}, {})
        assert "picks the real engine's best policy in 0 of the 1 metrics" in said
        assert said.endswith("not in mean TTFT (where several are best).")


def test_a_tie_in_the_simulator_is_not_the_real_order(tmp_path):
    pairs = policies(tmp_path, {"a": (1, 1), "b": (1, 3)})
    row = fidelity.ranking_agreement(pairs, ["ttft_s.mean"]).iloc[0]
    assert (row.num_policies, row.num_told_apart, row.num_same_order) == (2, 1, 0)


def test_policies_that_decided_alike_in_the_simulator_are_one(tmp_path):
    """The engine tells a, b and c apart by their times, but a and b are the same to the simulator."""
    pairs = policies(tmp_path, {"a": (1, 1), "b": (1, 3), "c": (3, 4)})
    pairs["b"][0].manifest["digest"] = pairs["a"][0].manifest["digest"]
    ranking = fidelity.ranking_agreement(pairs, ["ttft_s.mean"])
    row = ranking.iloc[0]
    assert (row.sim_winner, row.real_winner, row.num_policies, row.num_told_apart) == ("a = b", "a = b", 2, 1)
    both = {name: pairs[name] for name in "ab"}
    ranking = fidelity.ranking_agreement(both, ["ttft_s.mean"])
    assert (ranking.iloc[0].num_told_apart, bool(ranking.iloc[0].winner_is_clear)) == (0, False)
    assert list(winners({"": ranking}, {})) == []
    told = "In the simulation these took the same decisions, so there is nothing to rank: a and b"
    assert alike_said(pairs) == [f"{told}."]
    both["b"][1].summary["preemptions"]["total"] = 2
    assert alike_said(both) == [f"{told} (the engine preempted there, and the simulation did not)."]
    assert alike_said({name: pairs[name] for name in "bc"}) == []
    found = fidelity_findings(
        [Pair(name, *runs) for name, runs in both.items()], _errors(both), {"": ranking}, 0.02, {}
    )
    assert found[0].startswith(told)
    assert not [text for text in found if "apart by more than" in text]


def test_a_few_repeats_bound_the_noise_by_more_than_their_own_spread(tmp_path):
    runs = [run_of(tmp_path / str(i), [int(seconds * S)]) for i, seconds in enumerate((4, 4.4, 4, 4, 4))]
    limits = [fidelity.noise_limits([runs[:num]]).get("ttft_s.mean") for num in range(1, 6)]
    assert limits == [None, pytest.approx(1.1**4.577 - 1, abs=1e-3), pytest.approx(1.1**1.55 - 1, abs=1e-3),
                      pytest.approx(1.1**1.146 - 1, abs=1e-3), pytest.approx(0.1)]  # fmt: skip
    assert fidelity.noise_limits([runs[:2], runs[2:4], runs[:2], runs[2:4]])["ttft_s.mean"] == pytest.approx(0.1)


def _errors(pairs):
    return {name: fidelity.error_table(*runs) for name, runs in pairs.items()}


def test_policies_closer_than_the_real_engines_own_noise_are_not_told_apart(tmp_path):
    first, again = run_of(tmp_path / "first", [4 * S]), run_of(tmp_path / "again", [5 * S])
    noise = fidelity.real_noise([(first, again)])
    assert noise["ttft_s.mean"] == pytest.approx(0.25)
    # a and b are 20 %, b and c 25 % apart on the real engine
    pairs = policies(tmp_path, {"a": (10, 4), "b": (8, 4.8), "c": (9, 6)})
    row = fidelity.ranking_agreement(pairs, ["ttft_s.mean"], noise).iloc[0]
    assert (row.num_told_apart, row.num_same_order) == (1, 0)
    assert (row.sim_winner, row.real_winner, row.regret) == ("b", "a", pytest.approx(0.2))
    with pytest.raises(RunFolderError, match="different traces"):
        fidelity.real_noise([(first, run_of(tmp_path / "other", [S], "g"))])


def test_the_mean_of_equal_real_runs_counts(tmp_path):
    runs = [run_of(tmp_path / str(seconds), [seconds * S]) for seconds in (6, 4, 8)]
    row = fidelity.error_table(*runs).set_index("metric").loc["ttft_s.mean"]
    assert (row.sim, row.real, row.error) == (6, 6, 0)
    other = [run_of(tmp_path / f"other{seconds}", [seconds * S]) for seconds in (5, 5)]
    (ranking,) = fidelity.ranking_agreement({"a": runs, "b": other}, ["ttft_s.mean"]).itertuples()
    assert (ranking.real_winner, ranking.num_same_order) == ("b", 1), "6 s against 5 s, although one repeat took 4 s"
    assert fidelity.real_noise([runs[1:], other[:1]])["ttft_s.mean"] == 1.0


def test_the_engines_noise_is_the_same_whichever_repeat_is_the_first(tmp_path):
    runs = [run_of(tmp_path / str(seconds), [seconds * S]) for seconds in (2, 1, 8)]
    found = [fidelity.real_noise([order])["ttft_s.mean"] for order in permutations(runs)]
    assert found == [7.0] * 6, "8 s against 1 s, whoever is first"
    assert fidelity.real_noise([runs[:1]]) == {}, "without a repeat nothing is known"
    assert (spread([0.0, 0.0]), spread([0.0, 1.0])) == (0.0, math.inf)


def test_where_the_engine_tells_no_policy_apart_neither_tau_nor_the_best_is_shown(tmp_path):
    pairs = policies(tmp_path, {"a": (1, 4), "b": (2, 5)})
    shown = {}
    for noise in (0.1, 0.5):
        ranking = fidelity.ranking_agreement(pairs, ["ttft_s.mean"], {"ttft_s.mean": noise})
        (row,) = tables.ranking_table(ranking, "").rows
        shown[noise] = row[2].text, row[3].text, row[-1].text
    assert shown[0.1] == ("1", "1 of 1", "yes")
    assert shown[0.5] == (fmt.NOTHING, "none told apart", fmt.NOTHING)


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"prompt_tokens": 300}, ["prompt_tokens = default, seed 0", "prompt_tokens = 300, seed 0"]),
        ({}, ["6.66 requests/s, seed 0", f"6.66 requests/s, seed 0 (trace {'f' * 16})"]),
    ],
)
def test_policies_are_ranked_on_each_trace_also_at_one_rate_and_seed(tmp_path, settings, labels):
    for number, backend, chunked in product((0, 1), ("sim", "real"), (False, True)):
        run = write_run(tmp_path / f"{number}-{backend}-{chunked}", backend, chunked=chunked, num_requests=30)
        if number:
            change_manifest(run, trace=load_run(run).manifest["trace"] | {"fingerprint": "f" * 16})
            change_config(run, **{f"trace__{name}": value for name, value in settings.items()})
    runs = load_sweep(tmp_path).runs
    arms = infer_arms([run for run in runs if run.is_simulated])
    assert [*_rankings(ReportInput(arms, infer_pairs(runs)))] == labels


def test_a_simulated_run_matches_itself_exactly(tmp_path):
    run = load_run(write_run(tmp_path / "run", num_requests=20))
    assert (fidelity.error_table(run, run)["error"] == 0).all()


def test_a_figure_of_a_study_has_room_for_long_rows_and_says_where_bars_are_cut():
    errors = dict.fromkeys(("e2e_mean", "ttft_mean", "itl_mean"), 0.1)
    names = {key: key for key in errors}
    runs = {f"6{i}-mistral-nemo-12b-tp2-general-lite-2-{i}": errors for i in range(2)}
    words = "scheduler=vllm_v1 backend.frontend_ns=7000000 cost=tables cost.source=a/path/that/is/long.parquet seed=3"
    rows = {"this simulator (9)": errors, f"this simulator, {words} (9)": errors}
    figure = study_figure(runs, rows, names)
    figure.draw_without_rendering()
    left, right = figure.axes
    assert all(axes.get_window_extent().width > 0.15 * figure.bbox.width for axes in (left, right))
    label = right.get_yticklabels()[1].get_text()
    assert len(label.splitlines()) == 4
    assert label.endswith("(9)")
    assert "cut" not in right.get_xlabel()
    assert [text.get_text().rpartition("-")[2] for text in left.get_yticklabels()] == ["0", "1"]
    more = {**rows, **{f"{words} {i}": {**errors, "ttft_mean": 8.53} for i in range(8)}}
    taller = study_figure(runs, more, names)
    assert taller.get_figheight() > 2 * figure.get_figheight()
    assert "cut at 100" in taller.axes[1].get_xlabel()
    assert " 853, cut" in [text.get_text() for text in taller.axes[1].texts]


# --- the machine itself ---


def with_steps(paces: Sequence[float]) -> Run:
    """A run of 3,000 steps, half of them decodes and half mixed, of 1 ms times the pace of their part of the run."""
    lasts = np.repeat(np.asarray(paces) * 1e6, 3_000 // len(paces)).astype(np.int64)
    ends, decodes = np.cumsum(lasts), np.full(len(lasts), 8)
    prefill = np.where(np.arange(len(lasts)) % 2, 64, 0)
    frame = pd.DataFrame({
        "start_ns": ends - lasts, "end_ns": ends, "num_decode_tokens": decodes, "num_prefill_tokens": prefill,
        "decode_context_tokens": decodes * 100,
    })  # fmt: skip
    return cast(Run, SimpleNamespace(steps=frame))


def test_the_error_of_a_step_is_signed_and_relative_to_the_measured_one() -> None:
    outliers = [1.0, 1.0, 2.0], [1.25, 4.0, 1.25]  # which move no median
    steps = fidelity.step_errors(*map(with_steps, outliers))
    assert steps is not None
    assert steps.by_region["group"].tolist() == ["decode", "mixed"]
    for column, value in (("sim_s", 0.001), ("measured_s", 0.00125), ("error", -0.2)):
        assert steps.by_region[column].tolist() == pytest.approx([value] * 2)


@pytest.mark.parametrize(
    ("paces", "is_uneven", "kind"),
    [
        ([1.0, 1.05, 0.97], False, ""),
        ([1.0, 1.0, 1.3], True, ""),  # most of it was as fast as it was fitted
        ([1.3, 1.28, 1.31], False, "slower"),
        ([0.75, 0.8, 0.77], False, "faster"),
        ([1.2, 1.6, 1.4], True, "slower"),
    ],
)
def test_a_machine_that_was_not_as_fast_as_when_it_was_fitted_is_told(paces, is_uneven, kind) -> None:
    steps = fidelity.step_errors(with_steps([1.0]), with_steps(paces))
    assert steps is not None
    said = pace_said(steps, is_fitted=True, is_scaled=False)
    assert any("in some parts of this run as in others" in text for text in said) == is_uneven
    assert [f"the machine was {kind} than" in text for text in said if "every kind" in text] == [True] * bool(kind)
    assert len(said) == is_uneven + bool(kind)
    assert "every kind" not in " ".join(pace_said(steps, is_fitted=False, is_scaled=False)), "nothing was fitted"


@pytest.mark.parametrize(("pace", "prefills_ns"), [(1.0, 400_000), (1.15, 700_000)])
def test_kinds_of_steps_that_are_off_by_different_amounts_are_the_simulators_own(pace: float, prefills_ns: int) -> None:
    real = with_steps([pace])
    real.steps["end_ns"] += np.where(real.steps["num_prefill_tokens"] > 0, prefills_ns, 0)
    assert pace_said(fidelity.step_errors(with_steps([1.0]), real), is_fitted=True, is_scaled=False) == ()


def test_who_scales_times_by_a_probe_is_not_told_to() -> None:
    steps = fidelity.step_errors(with_steps([1.0]), with_steps([1.3, 1.8]))
    for is_scaled in (False, True):
        said = pace_said(steps, is_fitted=True, is_scaled=is_scaled)
        assert ["probe_scaled" in text for text in said] == [not is_scaled] * 2
        assert ("probe_scaled" in too_noisy({"ttft_s.p50": 0.8}, is_scaled=is_scaled)[0]) is not is_scaled


def test_contexts_that_grow_within_a_cell_are_no_uneven_machine() -> None:
    """A batch that decodes to its end: cells are powers of two wide, and its steps take longer and longer."""
    grows = with_steps(np.linspace(1.0, 1.6, 30).tolist())
    steps = fidelity.step_errors(grows, grows)
    assert steps is not None
    assert steps.paces.max() > 1.3 * steps.paces.min()
    assert pace_said(steps, is_fitted=True, is_scaled=False) == ()


def test_of_few_steps_no_pace_is_told() -> None:
    few = with_steps([1.5])
    few.steps = few.steps[:400]
    steps = fidelity.step_errors(with_steps([1.0]), few)
    assert steps is not None
    assert len(steps.paces) == 0
    assert pace_said(steps, is_fitted=True, is_scaled=False) == pace_said(None, is_fitted=True, is_scaled=False) == ()
