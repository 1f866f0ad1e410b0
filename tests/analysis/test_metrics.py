"""Metrics against numbers worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.comparison.compare import metric_of
from analysis.measures.metrics import LATENCIES, itl_pooled, jain_index, request_metrics
from analysis.measures.slo import SLO, meets_slo
from analysis.measures.summary import summarise
from analysis.measures.survival import distribution, km_quantiles
from testbed.errors import ConfigError
from testbed.records.schema import REQUEST_COLUMNS, STEP_COLUMNS
from tests.analysis.runs import requests_of as requests
from tests.analysis.runs import simulate, table

S = 10**9
NO_STEPS = table([], STEP_COLUMNS)
finite = st.floats(0, 1e6, allow_nan=False)


FINISHED = {"arrival_ns": 1 * S, "token_ns": [3 * S, 4 * S, 7 * S], "finish_ns": 7 * S, "finish_reason": "length"}


def step(start, end, **values):
    base = {"free_gpu_blocks": 10, "num_running": 0, "num_waiting": 0, "num_swapped": 0, "num_prefill_tokens": 0}
    parts = dict.fromkeys(("schedule_ns", "prepare_ns", "swap_ns", "forward_ns", "sample_ns"), 0)
    return base | parts | {"start_ns": int(start * S), "end_ns": int(end * S), "num_decode_tokens": 0} | values


def test_latencies_of_one_request():
    row = request_metrics(requests(FINISHED | {"first_scheduled_ns": 2 * S})).iloc[0]
    assert row.ttft_s == 2
    assert row.e2e_s == 6
    assert row.queueing_s == 1
    assert row.tpot_s == 2  # (7 - 3) / 2
    assert row.tpot_incl_first_s == 2  # (7 - 1) / 3
    assert row.itl_max_s == 3
    assert row.normalised_latency_s == 2


def test_a_single_token_has_no_tpot_and_no_gap():
    row = request_metrics(requests(FINISHED | {"token_ns": [3 * S]})).iloc[0]
    assert np.isnan(row.tpot_s)
    assert np.isnan(row.itl_max_s)
    assert row.tpot_incl_first_s == 2
    assert row.normalised_latency_s == row.e2e_s == 6
    row = request_metrics(requests(FINISHED | {"token_ns": [3 * S, 6 * S]})).iloc[0]
    assert (row.tpot_s, row.itl_max_s, row.normalised_latency_s) == (3, 3, 3), "two tokens have one gap"


def test_pooled_gaps_never_cross_requests():
    table_ = requests(FINISHED, {"token_ns": []}, {"token_ns": [9 * S]}, {"token_ns": [1 * S, 3 * S]})
    assert itl_pooled(table_).tolist() == [1.0, 3.0, 2.0]
    assert request_metrics(table_).itl_max_s.tolist()[0::3] == [3.0, 2.0]
    assert itl_pooled(table_.to_pandas()).tolist() == [1.0, 3.0, 2.0]
    assert itl_pooled(table_.slice(1)).tolist() == [2.0]


def test_without_token_times_tpot_comes_from_its_column():
    row = {"first_token_ns": 3 * S, "num_output_tokens": 3, "num_token_steps": 3, "tpot_s": 2.0, "token_ns": None}
    bare = requests(FINISHED | row | {"finish_ns": 9 * S})
    metrics = request_metrics(bare).iloc[0]
    assert metrics.tpot_s == 2
    assert metrics.tpot_incl_first_s == 2
    assert np.isnan(metrics.itl_max_s)
    aborted = requests(FINISHED | row, row | {"finish_ns": 9 * S, "finish_reason": "abort"})
    for summary in (summarise(bare, NO_STEPS, {}), summarise(aborted, NO_STEPS, {})):
        for name in ("itl_s", "itl_max_s"):
            none = {"count": 0, "num_censored": 0, "mean": None} | dict.fromkeys(("p50", "p90", "p95", "p99"))
            assert summary[name] == none, "nor is a gap that an abort left open a mean of gaps"
        assert summary["num_steps"] is None, "not recorded"


def test_derived_columns_of_the_records_agree():
    records, _, _ = simulate(num_requests=25)
    metrics, frame = request_metrics(records), records.to_pandas()
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        np.testing.assert_allclose(metrics[name], frame[name], rtol=1e-12)


def test_unfinished_and_aborted_requests_are_censored_and_counted():
    rows = requests(
        FINISHED,
        {"arrival_ns": 2 * S, "token_ns": [5 * S]},
        {"arrival_ns": 4 * S, "finish_ns": 6 * S, "finish_reason": "abort"},
        {"arrival_ns": 4 * S, "finish_ns": 4 * S, "finish_reason": "ignored"},
    )
    summary = summarise(rows, table([step(1, 10)], STEP_COLUMNS), {})
    assert summary["finish_reasons"] == {"stop": 0, "length": 1, "abort": 1, "ignored": 1, "unfinished": 1}
    assert summary["e2e_s"]["count"] == 1
    assert summary["e2e_s"]["num_censored"] == 2
    assert summary["e2e_s"]["mean"] is None
    assert summary["e2e_s"]["p99"] is None
    assert summary["e2e_s"]["mean_at_least"] == pytest.approx((6 + 8 + 2) / 3)
    assert summary["ttft_s"]["count"] == 2
    assert summary["ttft_s"]["num_censored"] == 1
    itl = summary["itl_s"]
    assert (itl["count"], itl["num_censored"]) == (2, 1)  # the open gap from 5 s to 10 s
    assert (itl["mean_at_least"], itl["p50"]) == (3, pytest.approx(3))  # gaps of 1, 3 and at least 5 s
    alone = summarise(requests(FINISHED), table([step(1, 10)], STEP_COLUMNS), {})["itl_s"]
    assert (alone["mean"], alone["p50"], alone["p90"], alone["count"]) == (2, 2, pytest.approx(2.8), 2)


def test_requests_that_had_not_arrived_yet_are_not_sent():
    rows = requests(FINISHED, {"arrival_ns": 50 * S, "queued_ns": None})
    summary = summarise(rows, table([step(1, 8)], STEP_COLUMNS), {})
    assert summary["num_requests"] == 1
    assert summary["num_not_sent"] == 1


def test_attainment_is_over_requests_sent():
    rows = requests(
        FINISHED,
        FINISHED | {"token_ns": [6 * S, 7 * S]},
        FINISHED | {"token_ns": [3 * S]},
        {"arrival_ns": 1 * S, "token_ns": [2 * S]},
    )
    slo = {"ttft_s": 2.0, "tpot_s": 2.0}
    assert meets_slo(rows, SLO(**slo)).tolist() == [True, False, True, False]
    summary = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, slo)["slo"]
    assert summary["attainment"] == 0.5
    assert summary["goodput_per_s"] == 2 / 8
    low, high = summary["attainment_ci95"]
    assert 0 < low < 0.5 < high < 1
    assert summarise(rows, NO_STEPS, {}, SLO())["slo"] is None


def test_requests_of_a_class_keep_its_limits_and_others_the_general_ones():
    """TTFT is 2 s and E2E 6 s of each of them."""
    batch, other = {"tenant": "batch", "priority": 1}, FINISHED | {"tenant": None}
    rows = requests(other, other | {"priority": 1}, FINISHED | {"tenant": "batch"}, FINISHED | batch)

    def met(*classes, **limits):
        return meets_slo(rows, SLO.parse(limits | {"classes": classes})).tolist()

    assert met({"tenant": "batch", "ttft_s": None, "e2e_s": 6.0}, ttft_s=1.0) == [False, False, True, True]
    assert met({"tenant": "batch", "e2e_s": 5.0}, ttft_s=2.0) == [True, True, False, False], "TTFT is limited still"
    assert met({"priority": 1, "ttft_s": 1.0}) == [True, False, True, False]
    assert met({**batch, "ttft_s": 1.0}, {"tenant": "batch", "ttft_s": 2.0}, ttft_s=1.5) == [False, False, True, False]
    assert met({"tenant": "none", "ttft_s": 1.0}) == [False, False, True, True]
    given = {"ttft_s": 1.0, "classes": [{"tenant": "batch", "e2e_s": 5.0}, {"tenant": "chat", "ttft_s": None}]}
    assert str(SLO.parse(given)).replace("\xa0", " ") == (
        "TTFT ≤ 1.00 s; tenant batch: TTFT ≤ 1.00 s and E2E ≤ 5.00 s; tenant chat: no limit"
    )
    summary = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, given)
    assert [(item["name"], item["num_requests"]) for item in summary["slo"]["classes"]] == [
        ("tenant batch", 2), ("tenant chat", 0)
    ]  # fmt: skip
    several = {"classes": [{**batch, "e2e_s": 5.0}, {"tenant": "batch", "e2e_s": 6.0}, {**batch, "e2e_s": 7.0}]}
    summary = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, several)
    assert [item["num_requests"] for item in summary["slo"]["classes"]] == [1, 1, 0], "each by the first that it is of"
    assert SLO.parse({"classes": [{"tenant": "batch", "ttft_s": None}]}) is None


def test_less_of_every_latency_of_a_summary_is_better():
    """So each has a name, a unit and a better direction in plots, not those of reports only."""
    summary = summarise(requests(FINISHED), table([step(1, 11)], STEP_COLUMNS), {})
    names = [name for name, value in summary.items() if isinstance(value, dict) and "p95" in value]
    assert {*LATENCIES, "itl_s"} - {"lateness_s"} == set(names)
    found = [metric_of(f"{name}.p95") for name in names]
    assert [metric.path for metric in found if metric.better != -1 or "_" in metric.label] == []


def test_throughput_has_the_stated_time_base():
    summary = summarise(requests(FINISHED), table([step(1, 11)], STEP_COLUMNS), {})
    assert summary["duration_s"] == 10
    assert "first arrival" in summary["time_base"]
    rates = summary["throughput"]
    assert (rates["requests_per_s"], rates["output_tokens_per_s"], rates["prompt_tokens_per_s"]) == (0.1, 0.3, 1.0)
    assert (rates["total_tokens_per_s"], rates["offered_per_s"]) == (1.3, None), "one request has no rate"
    three = requests(*[FINISHED | {"arrival_ns": at * S} for at in (1, 2, 5)])
    for warmup_s, offered in ((0.0, 2 / 4), (1.0, 1 / 3), (2.0, None)):
        summary = summarise(three, table([step(1, 11)], STEP_COLUMNS), {}, warmup_s=warmup_s)
        assert summary["throughput"]["offered_per_s"] == offered


def test_throughput_counts_every_token_of_sequences_that_emit_together():
    group = FINISHED | {"num_output_tokens": 6, "num_token_steps": 3}
    steps = table([step(1, 11)], STEP_COLUMNS)
    unrecorded = group | {"token_ns": None, "first_token_ns": 3 * S, "tpot_s": 2.0}
    for rows in (requests(group), requests(unrecorded)):
        assert summarise(rows, steps, {})["throughput"]["output_tokens_per_s"] == 0.6
    late = FINISHED | {"arrival_ns": 5 * S, "token_ns": [6 * S], "finish_ns": 6 * S}
    rates = summarise(requests(group, late), steps, {}, warmup_s=3.0)["throughput"]
    assert rates["output_tokens_per_s"] == 3 / 2  # to the end of the only one that came: two at 4 s, one at 6 s
    late |= {"token_ns": None, "first_token_ns": 6 * S, "num_output_tokens": 1, "num_token_steps": 1}
    rates = summarise(requests(unrecorded, late, *[{"arrival_ns": 5 * S}] * 2), steps, {}, warmup_s=3.0)["throughput"]
    assert rates["output_tokens_per_s"] == 5 / 7  # half never end; evenly spaced: two each at 3, 5 and 7 s


def test_occupancy_is_time_weighted_and_zero_while_idle():
    rows = requests(
        {"arrival_ns": 0, "token_ns": [1 * S, 2 * S], "finish_ns": 2 * S, "finish_reason": "length"},
        {"arrival_ns": 6 * S, "queued_ns": 6 * S, "token_ns": [8 * S], "finish_ns": 8 * S, "finish_reason": "stop"},
    )
    steps = [
        step(0, 1, free_gpu_blocks=6, num_running=1, forward_ns=S // 2),
        step(1, 2, free_gpu_blocks=4, num_running=1, forward_ns=2 * S),
        step(6, 8, free_gpu_blocks=8, num_running=1),
    ]
    summary = summarise(rows, table(steps, STEP_COLUMNS), {"num_gpu_blocks": 10})
    assert summary["kv"]["utilisation_mean"] == pytest.approx((0.4 + 0.6 + 2 * 0.2) / 8)
    assert summary["kv"]["utilisation_peak"] == pytest.approx(0.6)
    assert summary["mean_running"] == 0.5
    assert summary["busy_share"] == 0.5
    time = summary["time_s"]
    assert (time["forward"], time["other"], time["overlap"], time["idle"]) == (2.5, 2.5, 1.0, 4.0)


def test_gaps_between_steps_hold_the_last_state_while_work_remains():
    rows = requests({"token_ns": [1 * S, 4 * S], "finish_ns": 4 * S, "finish_reason": "length"})
    steps = [step(0, 1, num_running=1), step(3, 4, num_running=1)]
    assert summarise(rows, table(steps, STEP_COLUMNS), {})["mean_running"] == 1.0


def test_hits_preemptions_and_fairness():
    rows = requests(
        FINISHED | {"num_prompt_tokens": 100, "num_cached_tokens": 40, "num_preemptions": 2, "tenant": "a"},
        FINISHED | {"num_prompt_tokens": 300, "num_recomputed_tokens": 32, "tenant": "b"},
        {"num_prompt_tokens": 999, "tenant": "b"},
    )
    steps = table([step(1, 8, num_prefill_tokens=316, num_decode_tokens=4)], STEP_COLUMNS)
    summary = summarise(rows, steps, {})
    assert summary["prefix_hit_rate"] == 0.1  # the third was never admitted
    assert summary["preemptions"]["total"] == 2
    assert summary["preemptions"]["recomputed_share"] == 0.1
    without_steps = summarise(rows, NO_STEPS, {})["preemptions"]["recomputed_share"]
    assert without_steps == 32 / (100 - 40 + 300 + 2 + 2 + 32), "of each output all but the last token is computed"
    assert (summary["preemptions"]["total"], summary["preemptions"]["requests_share"]) == (2, 1 / 3)
    assert summary["fairness"]["jain_service"] == pytest.approx((103 + 303) ** 2 / (2 * (103**2 + 303**2)))
    assert summary["fairness"]["max_min_service_gap_tokens"] == 0, "they never waited beside one another"
    assert summarise(requests(FINISHED), steps, {})["fairness"] is None


def test_a_deadline_is_met_by_a_request_that_is_complete_at_its_client_by_then():
    """FINISHED ends at 7 s."""
    rows = requests(
        FINISHED | {"deadline_ns": 7 * S}, FINISHED | {"deadline_ns": 7 * S - 1},
        FINISHED | {"deadline_ns": 7 * S, "first_sent_ns": 4 * S, "last_sent_ns": 7 * S + 1},
        FINISHED | {"deadline_ns": 9 * S, "finish_reason": "abort"}, {"deadline_ns": 99 * S}, FINISHED,
    )  # fmt: skip
    found = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {})["deadlines"]
    assert (found["num"], found["num_met"], found["met"]) == (5, 1, 0.2)
    assert found["met_ci95"][0] < 0.2 < found["met_ci95"][1]
    slo = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, {"lateness_s": 0.0})["slo"]
    assert slo["num_met"] == 2, "one without a deadline is not late"
    late = requests(FINISHED | {"deadline_ns": 5 * S})
    assert [meets_slo(late, SLO(lateness_s=limit)).tolist() for limit in (1.9, 2.0)] == [[False], [True]]
    assert summarise(requests(FINISHED), table([step(1, 9)], STEP_COLUMNS), {})["deadlines"] is None


def test_a_limit_on_gaps_is_refused_where_no_token_has_an_instant():
    """Each request would keep it, as one of a single token does."""
    single = FINISHED | {"num_token_steps": 1, "token_ns": None}
    assert meets_slo(requests(single), SLO(itl_max_s=1.0)).tolist() == [True]
    without = requests(FINISHED, FINISHED | {"num_token_steps": 3, "token_ns": None})
    with pytest.raises(ConfigError, match=r"slo\.itl_max_s is 9, and the run has no token times: .*token_times=true"):
        meets_slo(without, SLO(itl_max_s=9.0))


def test_warm_up_cut_drops_early_arrivals_and_moves_the_time_base():
    rows = requests(FINISHED, FINISHED | {"arrival_ns": 5 * S, "token_ns": [6 * S], "finish_ns": 6 * S})
    summary = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, warmup_s=3.0)
    assert summary["num_requests"] == 1
    assert summary["num_in_warmup"] == 1
    assert summary["duration_s"] == 5
    assert summary["ttft_s"]["mean"] == 1
    assert summary["throughput"]["output_tokens_per_s"] == 2 / 2  # tokens at 4 and 6 s, when half have ended
    assert "without the first 3 s" in summary["time_base"]


def test_of_a_step_that_the_warm_up_cuts_only_the_rest_is_in_the_time_base():
    """FINISHED comes at 1 s, so that the time base is from 4 s to 9 s; the first step has spent a half before it."""
    steps = table([step(2, 6, forward_ns=3 * S, swap_ns=S // 2), step(7, 9, forward_ns=S)], STEP_COLUMNS)
    summary = summarise(requests(FINISHED), steps, {}, warmup_s=3.0)
    time = {name: spent for name, spent in summary["time_s"].items() if spent}
    assert time == {"forward": 2.5, "swap": 0.25, "other": 1.25, "idle": 1.0}
    assert sum(time.values()) == summary["duration_s"]


def test_goodput_is_of_the_requests_that_throughput_counts():
    """All but the last come in the first 3 s; the second, which keeps the SLO, and the third end after them. The fourth
    ends at 6 s, as half of those that came then have, and the fifth later."""
    kept = FINISHED | {"arrival_ns": 2 * S, "token_ns": [int(2.5 * S)], "finish_ns": 4 * S}
    early = kept | {"arrival_ns": 1 * S, "finish_ns": 3 * S - 1}
    last = kept | {"arrival_ns": 5 * S, "token_ns": [5 * S], "finish_ns": 6 * S}
    rows = requests(early, kept, FINISHED | {"finish_ns": 5 * S}, last, last | {"finish_ns": 7 * S})
    summary = summarise(rows, table([step(1, 9)], STEP_COLUMNS), {}, {"ttft_s": 1.0}, warmup_s=3.0)
    assert summary["duration_s"] == 5
    assert summary["throughput"]["requests_per_s"] == 3 / 2
    assert summary["slo"]["goodput_per_s"] == 2 / 2
    assert (summary["slo"]["num_met"], summary["num_requests"]) == (2, 2)


def served(*ends_s, arrivals_s=(1, 2, 3, 4)):
    rows = [FINISHED | {"arrival_ns": a * S, "token_ns": [e * S], "finish_ns": e * S, "num_output_tokens": 1}
            for a, e in zip(arrivals_s, ends_s, strict=True)]  # fmt: skip
    return summarise(requests(*rows), table([step(1, 20)], STEP_COLUMNS), {})["throughput"]


def test_rates_are_of_the_time_in_which_requests_come():
    """However long the last request takes: a run that only drains serves nothing more of its load."""
    for last_s in (5, 20):
        rates = served(2, 3, 4, last_s)
        assert (rates["duration_s"], rates["requests_per_s"], rates["output_tokens_per_s"]) == (3, 1.0, 1.0)
    slow = served(5, 7, 9, 20)
    assert (slow["duration_s"], slow["requests_per_s"]) == (6, 2 / 6), "until half have ended, at 7 s"
    at_once = served(5, 7, 9, 20, arrivals_s=(1, 1, 1, 1))
    assert (at_once["duration_s"], at_once["requests_per_s"]) == (19, 4 / 19)


def test_simulated_records_pass_every_check_and_the_summary_is_json():
    records, steps, manifest = simulate(num_requests=80, rate=12, num_blocks=120)
    summary = summarise(records, steps, manifest, {"ttft_s": 0.5})
    assert [check["holds"] for check in summary["checks"].values()] == [True, True, True], summary["checks"]
    assert summary["preemptions"]["total"] > 0
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_an_empty_run_summarises_to_nothing_known():
    summary = summarise(table([], REQUEST_COLUMNS), NO_STEPS, {})
    assert summary["num_requests"] == 0
    assert summary["ttft_s"]["mean"] is None
    json.dumps(summary, allow_nan=False)


def test_pandas_and_arrow_give_one_answer():
    records, steps, manifest = simulate(num_requests=30, stop_s=2.0)
    assert summarise(records, steps, manifest) == summarise(records.to_pandas(), steps.to_pandas(), manifest)


def test_frames_of_the_wrong_kind_are_refused():
    with pytest.raises(TypeError, match="DataFrame"):
        summarise([], pa.table({}), {})


@given(st.lists(finite, min_size=1, max_size=30))
def test_jain_is_between_one_over_n_and_one(values):
    index = jain_index(np.array(values))
    assert index is None or 1 / len(values) - 1e-9 <= index <= 1
    assert jain_index(np.full(len(values), 3.5)) == pytest.approx(1.0)


@given(st.lists(finite, min_size=1, max_size=40))
def test_kaplan_meier_without_censoring_is_the_plain_quantile(values):
    result = km_quantiles(np.array(values), np.empty(0), [0.5, 0.9, 0.99])
    np.testing.assert_allclose(result, np.quantile(values, [0.5, 0.9, 0.99]))


@given(st.lists(finite, min_size=2, max_size=40), st.lists(finite, min_size=1, max_size=10))
def test_censoring_never_lowers_a_quantile(values, censored):
    everything = np.quantile(values + censored, [0.25, 0.5, 0.9])
    for known, bound in zip(
        km_quantiles(np.array(values), np.array(censored), [0.25, 0.5, 0.9]), everything, strict=True
    ):
        assert known is None or known >= bound - 1e-9 * (1 + abs(bound))


def test_kaplan_meier_by_hand():
    result = distribution(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0]))
    # F: 0.2, 0.4, then 1 of 2 at risk at 4: 0.7. So 2 is at (0.4 - 0.2) / 0.8, 4 from 0.4 / 0.8 to (0.7 - 0.2) / 0.8
    assert result["p50"] == pytest.approx(4.0)
    assert km_quantiles(np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0]), [0.375]) == [pytest.approx(3.0)]
    assert result["p90"] is None
    assert result["mean"] is None
    assert result["mean_at_least"] == 3.0
