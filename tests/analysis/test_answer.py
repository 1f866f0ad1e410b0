"""What the few sentences of an answer are spent on: claims, and each factor of a design before a second load of one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import pytest

from analysis import format as fmt
from analysis.comparison.arms import Arm, infer_arms
from analysis.comparison.compare import SLO_METRICS, Comparison, mean_over_replicates, metric_of
from analysis.comparison.effects import Compared, Effect
from analysis.load import load_run
from analysis.measures.slo import SLO
from analysis.measures.statistics import Estimate, Verdict
from analysis.reports.first_screen import MAX_SENTENCES, answer
from analysis.reports.report import report_from_folders
from tests.analysis.runs import write_runs
from tests.analysis.test_first_screen import BASE, chosen, row


@pytest.fixture
def arms(tmp_path: Path) -> list[Arm]:
    return infer_arms([*map(load_run, write_runs(tmp_path, chunked=[False, True], seed=[*range(5)], num_requests=30))])


def test_what_the_user_did_not_choose_and_no_claim_tells_apart_is_one_short_sentence_at_the_end(
    arms: list[Arm],
) -> None:
    share = Estimate(-0.2, -0.3, -0.1, 5, "paired t", "difference")
    for limit_s, verdict, is_first in ((0.03, "lower", True), (0.03, "inside the noise", False), (1e6, "lower", False)):
        rows = [row(arms[1].name, 0, 0.3), Comparison(arms[1].name, SLO_METRICS[0], 0.5, share, cast(Verdict, verdict))]
        groups, slo = [Compared("", arms, rows, ())], SLO(ttft_s=limit_s)
        first, *others = answer(groups, slo)
        assert (" keeps the SLO for " in first) is is_first
        if not is_first:
            shares = sorted({fmt.share(mean_over_replicates(arm, SLO_METRICS[0], slo)) for arm in arms})
            claim = ", with no claim of a difference" * (limit_s < 1)
            assert others[-1] == f"Every arm keeps the SLO for {' to '.join(shares)} of the requests{claim}."
    rows = [row(arms[1].name, 0, 0.3)]
    assert answer([Compared("", arms, rows, ())], SLO(ttft_s=1e-9))[-1] == "No request keeps the SLO in any arm."
    alone = answer([Compared("", [arms[0], arms[0]], rows, ())], SLO(ttft_s=0.03))[-1]
    assert alone.endswith(" of the requests."), "equal shares call for no claim"


def test_the_most_goodput_is_named_only_where_it_is_a_claim(arms: list[Arm]) -> None:
    slo, goodput = SLO(ttft_s=0.01), SLO_METRICS[1]
    change = Estimate(0.3, 0.2, 0.4, 5, "paired t", "log_ratio")
    cases: tuple[tuple[Verdict, bool], ...] = (("higher", True), ("inside the noise", False))
    three = [*arms, replace(arms[0], name="third")]
    for (verdict, is_claim), compared in product(cases, (arms, three)):
        rows = chosen([Comparison(arms[1].name, goodput, 4.0, change, verdict)], "goodput")
        said = answer([Compared("", compared, rows, ())], slo)
        is_named = any("serves most within the SLO" in text for text in said)
        assert is_named == (is_claim and compared is three), "of two arms the shares and the claim tell it"
        assert "the SLO" in said[0], "whether it is kept comes first"
        assert len(said) <= MAX_SENTENCES


def test_the_most_goodput_at_each_load_is_told_or_counted_however_few_sentences_there_are(arms: list[Arm]) -> None:
    change = Estimate(0.3, 0.2, 0.4, 5, "paired t", "log_ratio")
    rows = [Comparison(arms[1].name, SLO_METRICS[1], 4.0, change, "higher"), row("b", 0, 0.1)]
    three = [*arms, replace(arms[0], name="third")]
    groups = [Compared(f"{rate} requests/s", three, chosen(rows, "goodput"), ()) for rate in (1, 2, 3)]
    for most, num_left in ((5, 5), (4, 6), (3, 7)):  # of three on goodput and six on arms
        _, first, *_, left, same = answer(groups, SLO(ttft_s=0.01), most=most + 2)
        assert "third took the same decisions as" in same
        assert "serves most within the SLO" in first
        assert left.startswith(f"{num_left} more differences"), left


def test_every_factor_has_a_sentence_before_a_second_one_on_another() -> None:
    """A question of three factors is not answered by two loads of one."""

    def at(load: str, sizes: tuple[float, ...], *metrics: str) -> Compared:
        rows = chosen([row("1", index, size) for index, size in enumerate(sizes)], *metrics)
        effects = [
            Effect(f"x.{name}", 0, 1, one, (("base", name),), None) for name, one in zip("abc", rows, strict=True)
        ]
        return Compared(load, BASE, [row("z", 0, 0.1, claimed=False)], effects)

    def told(*metrics: str) -> list[str]:
        groups = [at("9 requests/s", (0.9, 0.3, 0.1), *metrics), at("20 requests/s", (0.8, 0.4, 0.2), *metrics)]
        return [text.rpartition("other factors, ")[2][:1] for text in answer(groups, None)[:4]]

    assert told() == ["a", "b", "c", "a"]
    assert told("mean TPOT") == ["c", "c", "a", "b"], "the metric that the user chose is that of c"


@pytest.mark.usefixtures("unrendered")
def test_metrics_lead_the_answer_where_they_are_chosen_and_not_by_the_words_of_the_question(tmp_path: Path) -> None:
    write_runs(tmp_path / "runs", chunked=[False, True], seed=[*range(5)], num_requests=30)

    def first(question: str, *metrics: str) -> str:
        page = report_from_folders(
            [tmp_path / "runs"], tmp_path / "r.html", question=question,
            metrics=lambda runs: [metric_of(path) for path in metrics],
        )  # fmt: skip
        text = page.with_suffix(".md").read_text()
        assert question in text
        return text.partition("## Answer")[2].partition("| trust |")[0]

    plain, words = first(""), first("What of P99 ITL, hits and goodput?")
    assert plain == words
    assert "mean E2E" not in plain
    assert "mean E2E" in first("", "e2e_s.mean")
