"""What a comparison says, as lines of Markdown."""

from __future__ import annotations

import pandas as pd

from experiments.console import milliseconds, percent, table
from experiments.fidelity.comparing import Compared, Comparison
from experiments.fidelity.fitting import KEYS, Fit

_WORDS = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "mean": "mean", "p50": "P50", "p90": "P90",
    "p99": "P99", "requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s",
}  # fmt: skip


def metric_name(path: str) -> str:
    """`ttft_s.p99` as TTFT P99."""
    return " ".join(_WORDS[part] for part in path.split(".") if part != "throughput")


def comparison_lines(found: Comparison) -> list[str]:
    """Errors by load, what was fitted, rankings."""
    lines: list[str] = []
    for one in found.loads:
        lines += [*_load(one), ""]
    if found.fit is not None:
        lines += [*_fitted(found.fit), ""]
        for one in found.loads:
            lines += [*_second_half(one), ""]
    for names, frame in found.rankings:
        lines += [f"## Ranking of {names}", "", _ranking(frame), ""]
    return lines[:-1]


def _load(one: Compared) -> list[str]:
    lines = [
        f"## {one.load.name}",
        "",
        f"{one.load.source}, {len(one.matched)} requests matched one to one; {one.used}",
    ]
    lines += [f"note: {note}" for note in (*one.load.notes, *one.notes)]
    if one.again:
        names = ", ".join(again.name for again in (one.load, *one.again))
        lines.append(f"measured: the mean of {names}; spread: the largest over the smallest, minus 1")
    headers = ["metric", "measured", "simulated", "error %", *(["spread %"] if one.again else [])]
    rows = []
    for row in one.errors.to_dict("records"):
        path = str(row["metric"])
        cells = [_value(path, row["real"]), _value(path, row["sim"]), percent(row["error"])]
        spread = [percent(one.noise.get(path), signed=False)] if one.again else []
        unit = "" if path.startswith("throughput") else ", ms"
        rows.append([metric_name(path) + unit, *cells, *spread])
    whose = f", of {one.load.name}" if one.again else ""
    lines += ["", table(headers, rows), "", f"Single requests{whose}:", "", _requests(one.requests)]
    if one.steps is not None:
        lines += [
            "", f"Steps of the same shape, {one.steps.num_compared} of {one.steps.num_steps} measured ones:", "",
            _steps(one.steps.by_region, "region"), "", _steps(one.steps.by_decodes, "decode steps of up to"),
        ]  # fmt: skip
    return lines


def _value(path: str, value: float) -> str:
    if path.startswith("throughput"):
        return "–" if value != value else f"{value:.4g}"
    return milliseconds(value)


def _requests(frame: pd.DataFrame) -> str:
    rows = [
        [_WORDS[str(row["metric"])], str(row["num"]), percent(row["median_error"]),
         percent(row["abs_error_p90"], signed=False), percent(row["abs_error_p99"], signed=False)]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    return table(["latency", "requests", "median error %", "P90 of absolute error %", "P99"], rows)


def _steps(frame: pd.DataFrame, what: str) -> str:
    rows = [
        [str(row["group"]), str(row["num_steps"]), milliseconds(row["measured_s"]), milliseconds(row["sim_s"]),
         percent(row["error"])]
        for row in frame.to_dict("records")
    ]  # fmt: skip
    return table([what, "steps", "measured, ms", "simulated, ms", "median error %"], rows)


def _fitted(fit: Fit) -> list[str]:
    found = fit.found
    scored = ", ".join(
        f"{num} of {name} ({'all' if name in fit.not_apart else 'that ended before the last one came'})"
        for name, num in fit.num_scored.items()
    )
    lines = [
        "## Fitted", "",
        f"On the first half of each run's requests by arrival, scored: {scored}. Squared log errors of mean TPOT and "
        f"E2E: {found.losses[0]:.3g} as given, {found.losses[1]:.3g} fitted, in {fit.num_simulations} simulations.", "",
    ]  # fmt: skip
    if fit.not_apart:
        lines[-1:] = [
            f"note: too few of {', '.join(fit.not_apart)} had ended by then, so all of the half is scored; the second "
            "half's arrivals and lengths are load, and what was measured there is not looked at", "",
        ]  # fmt: skip
    rows = []
    for name, value in found.fitted.items():
        texts = [f"{number:.0f}" if name == "host" else f"{number:.3f}" for number in (found.given[name], value)]
        rows.append([f"{name}: device.{KEYS[name]}", *texts])
    return [*lines, table(["scalar", "as given", "fitted"], rows), *(f"\nnote: {note}" for note in found.notes)]


def _second_half(one: Compared) -> list[str]:
    assert one.second is not None
    given, fitted = one.second
    rows = [
        [metric_name(str(a["metric"])) + ", ms", milliseconds(a["real"]), percent(a["error"]), percent(b["error"])]
        for a, b in zip(given.to_dict("records"), fitted.to_dict("records"), strict=True)
    ]
    headers = ["metric", "measured", "as given, error %", "fitted, error %"]
    return [f"### {one.load.name}: second half, which nothing was fitted to", "", table(headers, rows)]


def _ranking(frame: pd.DataFrame) -> str:
    rows = []
    for row in frame.to_dict("records"):
        tau, num_apart = row["kendall_tau"], row["num_told_apart"]
        is_tie = tau is None or tau != tau  # all equal on one side: nobody is best
        same = "–" if is_tie or not row["winner_is_clear"] else "yes" if row["same_winner"] else "no"
        rows.append([
            metric_name(str(row["metric"])), "a tie" if is_tie else f"{tau:+.2f}" if num_apart else "–",
            "–" if is_tie else str(row["real_winner"]), "–" if is_tie else str(row["sim_winner"]), same,
            f"{row['num_same_order']} of {num_apart}" if num_apart else "none told apart",
        ])  # fmt: skip
    headers = ["metric", "Kendall's tau", "measured best", "simulated best", "same", "pairs in order, of those apart"]
    return table(headers, rows)
