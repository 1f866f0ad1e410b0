"""What a question names that the report does not compare."""

from __future__ import annotations

from analysis.comparison.compare import P99_ITL
from analysis.reports.asked import absent, is_asked, names_arm


def test_what_the_question_names_and_the_report_lacks_is_said_with_what_gives_it() -> None:
    begin = "The question names what is not compared here: "
    assert absent("Which keeps the SLO, by goodput and P99 TTFT?", has_slo=True) == []
    (said,) = absent("Which keeps the SLO, by goodput?", has_slo=False)
    assert said == f"{begin}SLO and goodput (give an SLO, as --slo ttft_s=0.5)."
    (said,) = absent("Goodput, the P95 TTFT, or queueing?", has_slo=False)
    in_summary = "P95 and queueing (--metric adds them, as queueing_s.p99)"
    assert said == f"{begin}goodput (give an SLO, as --slo ttft_s=0.5); {in_summary}."
    assert absent("Which has the lower P99 ITL?", has_slo=False) == []
    (said,) = absent("Which has the lower P99 ITL?", has_slo=False, has_gaps=False)
    assert said == f"{begin}ITL (of runs with record.token_times=true)."
    for words in ("Does it stall less?", "How long between tokens?", "What is the TBT?", "Is the mean ITL lower?"):
        (said,) = absent(words, has_slo=False, has_gaps=False)
        assert said == f"{begin}ITL (of runs with record.token_times=true)."
    assert absent("Which meets its deadlines?", has_slo=False) == []
    (said,) = absent("Which meets its deadlines?", has_slo=False, has_deadlines=False)
    assert said == f"{begin}deadlines (of requests that have one, as by trace.deadline_s)."
    (said,) = absent("Is the mean ITL lower?", has_slo=False)
    assert said == f"{begin}mean ITL (--metric adds them, as queueing_s.p99)."
    (said,) = absent("Is mean ITL traded for P99 TTFT?", has_slo=False)
    assert said == f"{begin}mean ITL (--metric adds them, as queueing_s.p99)."
    assert absent("Is P99 ITL traded for the mean TTFT?", has_slo=False) == []
    assert absent("Which is fairest?", has_slo=False) == []
    (said,) = absent("What does fairness cost?", has_slo=False, has_tenants=False)
    assert said == f"{begin}fairness (of runs whose requests have several tenants, as by trace.tenants)."
    for words in ("Which hits the deadline?", "A fairly good title to install?"):
        assert absent(words, has_slo=True, has_gaps=False, has_tenants=False) == []
    assert not is_asked(P99_ITL, "Which installation has this title?")
    assert is_asked(P99_ITL, "Which stalls?")
    (said,) = absent("P75, P99, P99.9 or P90 TTFT on a P100?", has_slo=False)
    of_table = "P75 and P99.9 (to be taken from the requests.parquet of each run)"
    assert said == f"{begin}P90 (--metric adds them, as queueing_s.p99); {of_table}.", "summaries have four percentiles"


def test_an_arm_is_asked_for_by_the_level_that_sets_it_apart() -> None:
    base = "queue order fcfs, watermark 0"
    for arm, question, is_named in (
        ("queue order edf, watermark 0", "Does EDF meet more deadlines than fcfs?", True),
        ("queue order edf, watermark 0", "Does edf_chat, or 0?", False),
        ("queue order edf_chat, watermark 0", "Does edf?", False),
        ("queue order fcfs, watermark 5", "Is 0.5 better than fcfs?", False),
        ("queue order fcfs, watermark 5", "Is 5 better than fcfs?", True),
    ):
        assert names_arm(arm, base, question) is is_named, (arm, question)
