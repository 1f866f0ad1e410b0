"""What tenants got while they waited beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.measures import fairness as module
from analysis.measures.fairness import fairness
from analysis.reading import request_columns
from analysis.reading.request_columns import Requests
from analysis.reports.report import report_from_folders
from experiments import simulate
from tests.analysis.runs import requests_of

S = 10**9


def in_turn(order: str, at_ns: int = 0) -> Requests:
    """One a second, 50 tokens of prompt and 50 of output; all came at `at_ns`. order: the tenants, as served."""
    sizes = {"num_prompt_tokens": 50, "num_output_tokens": 50}
    rows = [
        {"tenant": tenant, "arrival_ns": at_ns, "first_scheduled_ns": at_ns + i * S}
        | {"first_token_ns": at_ns + i * S + S // 2, "finish_ns": at_ns + (i + 1) * S, **sizes}
        for i, tenant in enumerate(order)
    ]
    return Requests.of(requests_of(*rows))


@pytest.mark.parametrize(
    ("order", "gap"),
    [
        ("hhhhhhhhhhll", 900),  # until the last of h begins, both wait
        ("hlhlhhhhhhhh", 100),  # until the second of l begins
        ("hhllhhllhhll", 200),
        ("hhhh" + "l", 300),
        ("hl", 0),  # h does not wait once it is served
    ],
)
def test_the_gap_is_what_one_got_more_while_both_waited(order: str, gap: float) -> None:
    found = fairness(in_turn(order), len(order) * S)
    later = fairness(in_turn(order, 1000 * S), (1000 + len(order)) * S)
    assert found is not None
    assert later is not None
    assert later["max_min_service_gap_tokens"] == pytest.approx(gap, abs=1e-6)
    assert found["max_min_service_gap_tokens"] == pytest.approx(gap, abs=1e-6)
    assert found["mean_ttft_s"] == {
        tenant: pytest.approx(np.mean([i + 0.5 for i, one in enumerate(order) if one == tenant])) for tenant in "hl"
    }


def test_what_was_ignored_or_never_served_waits_as_long_as_it_is_there() -> None:
    """Two tenants that never queue, and one request of each that ended unserved; then one of each that never ended."""
    rows = [
        {"tenant": "hl"[i % 2], "num_prompt_tokens": 10 + 90 * (i % 2), "num_output_tokens": 1}
        | dict.fromkeys(("arrival_ns", "first_scheduled_ns", "first_token_ns"), i * S)
        | {"finish_ns": i * S + S // 2}
        for i in range(100)
    ]
    ended, never = ([{"tenant": tenant, "arrival_ns": 0, "finish_ns": end} for tenant in "hl"] for end in (0, None))
    for more, gap in (([], 0), (ended, 0), (never, 50 * 90 + 11)):
        found = fairness(Requests.of(requests_of(*rows, *more)), 100 * S)
        assert found is not None
        assert found["max_min_service_gap_tokens"] == pytest.approx(gap, abs=1e-6)


def test_what_runs_when_the_run_ends_was_served_evenly_until_then() -> None:
    """h gets ten tokens a second, for 8 s; both wait twice, for 2 s each time."""
    running = {"tenant": "h", "arrival_ns": 0, "first_scheduled_ns": 0, "first_token_ns": 0, "num_output_tokens": 80}
    waiting = [
        {"tenant": tenant, "arrival_ns": begin * S, "finish_ns": (begin + 2) * S} for tenant in "hl" for begin in (0, 3)
    ]
    found = fairness(Requests.of(requests_of(running, *waiting)), 8 * S)
    assert found is not None
    assert found["max_min_service_gap_tokens"] == pytest.approx(20)


def test_who_was_never_served_has_no_mean_ttft() -> None:
    """It would be that of the others, and the starved tenant would look best."""
    served = {"arrival_ns": 0, "first_scheduled_ns": S, "first_token_ns": 2 * S, "finish_ns": 3 * S}
    served |= {"finish_reason": "stop"}
    for reason, mean in (("unfinished", None), ("abort", None), ("ignored", 2.0)):
        waiting = {"tenant": "h", "arrival_ns": 0, "finish_reason": reason}
        rows = requests_of(waiting, served | {"tenant": "h"}, served | {"tenant": "l"})
        found = fairness(Requests.of(rows), 100 * S)
        assert found is not None
        assert found["mean_ttft_s"] == {"h": mean, "l": 2.0}


def test_more_tenants_than_are_compared_have_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENANTS", 2)
    found = fairness(in_turn("abc"), 3 * S)
    assert found is not None
    assert (found["num_tenants"], found["max_min_service_gap_tokens"], found["mean_ttft_s"]) == (3, None, None)


def test_pieces_say_what_the_whole_says(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fairness(in_turn("hhlhlhlhllhh"), 12 * S)
    monkeypatch.setattr(request_columns, "PIECE_ROWS", 5)
    pieces = fairness(in_turn("hhlhlhlhllhh"), 12 * S)
    assert whole is not None
    assert pieces is not None
    assert pieces["max_min_service_gap_tokens"] == pytest.approx(whole["max_min_service_gap_tokens"])
    assert pieces["mean_ttft_s"] == pytest.approx(whole["mean_ttft_s"])
    assert pieces["jain_service"] == whole["jain_service"]


@pytest.mark.usefixtures("unrendered")
def test_a_fair_order_keeps_the_gap_small(tmp_path: Path) -> None:
    """Three of four requests are of one tenant, more than the engine serves; each has its tokens in the end."""
    tenants = [{"name": "heavy", "share": 3}, {"name": "light", "share": 1}]
    trace: dict[str, Any] = {
        "num_requests": 300, "rate": 100.0, "tenants": tenants, "output": {"kind": "constant", "value": 40},
    }  # fmt: skip
    found = {}
    for order in ("fcfs", "vtc"):
        scheduler = {"name": "decode_first", "queue_order": order, "max_num_seqs": 8}
        cost = {"name": "constant", "step_s": 0.01}
        run = simulate(trace, model="tiny", folder=tmp_path / order, scheduler=scheduler, cost=cost)
        found[order] = run.summary["fairness"]
        means = (run.requests.e2e_s / run.requests.num_output_tokens).groupby(run.requests.tenant).mean()
        assert found[order]["jain_normalised_latency"] == pytest.approx(means.sum() ** 2 / (2 * (means**2).sum()))
    page = report_from_folders([tmp_path], tmp_path / "report.html").with_suffix(".md").read_text()
    assert "| service gap of tenants | Jain's index of normalised latency |" in page
    for name in ("heavy", "light"):
        assert "| arm | mean TTFT |" in page.partition(f"**Class tenant {name}**")[2][:100]
    assert page.count("The service gap takes tenants as entitled to equal service while two of them wait") == 1
    assert found["fcfs"]["jain_service"] == found["vtc"]["jain_service"]
    assert found["vtc"]["max_min_service_gap_tokens"] < 0.5 * found["fcfs"]["max_min_service_gap_tokens"]
    assert found["vtc"]["mean_ttft_s"]["light"] < 0.5 * found["fcfs"]["mean_ttft_s"]["light"]
