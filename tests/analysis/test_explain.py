"""Small runs whose requests wait for a known reason: each is told, with who was before them, and for how long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.explain import request
from analysis.explain.decisions import DecidedStep
from analysis.explain.following import Stretch
from analysis.explain.frames import preemptions, stretches, waits
from analysis.explain.request import _pace, computed_again, explain_request
from analysis.explain.taking import Taker
from analysis.explain.waiting import Life
from analysis.explain.whole_run import _longest_chain, _lost_ns, _preempted, explain_run
from analysis.load import load_run
from experiments.runs.run import execute
from testbed.errors import ConfigError, RunFolderError
from tests.experiments.kit import TINY, config_of, trace_of

SECOND = 10**9
CLOCK = (*TINY, "cost=constant", "cost.step_s=1", "record.explain=true")  # step k lasts from second k to k + 1


def row(name: str, prompt: int, output: int, at: float = 0, **more: Any) -> dict[str, Any]:
    return {"request_id": name, "arrival_time": at, "prompt_tokens": prompt, "output_tokens": output, **more}


def run_of(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Path:
    return execute(config_of((*CLOCK, *overrides)), folder / "run", trace=trace_of(folder, rows)).folder


def causes(folder: Path, name: str) -> dict[str, int]:
    """Seconds of a request's waiting by cause."""
    frame = waits(folder)
    sums = frame[frame["request_id"] == name].groupby("cause")["ns"].sum() // SECOND
    return {str(cause): int(num) for cause, num in sums.items()}


CAP = "scheduler.admission={_target_: testbed.policies.admission.MaxRunningRequests, max_requests: 1}"
TWO = [row("a", 12, 9), row("b", 12, 3)]


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (("cache.num_gpu_blocks=5",), "kv_blocks"),
        (("cache.num_gpu_blocks=9", "cache.watermark=0.4"), "kv_blocks"),
        (("scheduler.max_num_seqs=1",), "max_num_seqs"),
        (("scheduler=static", "scheduler.max_num_seqs=1"), "batch"),
        ((CAP,), "admission"),
    ],
)
def test_who_finds_no_room_waits_at_the_head_until_the_other_has_ended(
    tmp_path: Path, overrides: tuple[str, ...], cause: str
) -> None:
    folder = run_of(tmp_path, TWO, *overrides)
    assert set(causes(folder, "b")) <= {cause, "max_num_seqs"}
    assert sum(causes(folder, "b").values()) == 9
    first = stretches(folder, "b").iloc[0]
    assert (first["state"], first["ahead"]) == ("waiting", ("b",))
    assert causes(folder, "a") == {}


@pytest.mark.parametrize(
    ("overrides", "num"),
    [
        (("cache.watermark=0.4",), "3 blocks"),
        (("scheduler.watermark=0.25",), "2 blocks"),
        (("scheduler.watermark=0.4", "scheduler.kv_rules.watermark_extra_blocks=3"), "4 blocks"),
    ],
)
def test_where_blocks_are_free_and_too_few_the_watermark_is_given(
    tmp_path: Path, overrides: tuple[str, ...], num: str
) -> None:
    run = load_run(run_of(tmp_path, [row("a", 13, 3), row("b", 12, 3)], "cache.num_gpu_blocks=8", *overrides))
    text = "its 12 tokens fill 3 and the watermark{}, or room to grow, stays free"
    assert text.format(f" ({num})") in explain_request(run, "b")
    run.config["cache"]["watermark"] = run.config["scheduler"]["watermark"] = None
    assert text.format("") in explain_request(run, "b"), "a log of vLLM has none"
    run.config["scheduler"]["watermark"] = 0.0
    assert "its 12 tokens fill 3 and room to grow stays free" in explain_request(run, "b")


def test_a_prompt_beyond_the_budget_of_a_step_waits_for_the_next(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [row("a", 16, 2), row("b", 16, 2)], "scheduler.max_num_batched_tokens=16")
    assert causes(folder, "b") == {"token_budget": 1}
    assert "most of it went to a (16 tokens)" in explain_request(load_run(folder), "b")


RAG = [row("c", 4, 10, tenant="chat"), row("long", 48, 2, tenant="rag"), row("b", 4, 2, at=0.5, tenant="chat")]


NOTHING: tuple[Any, ...] = ([], [], {}, {}, {}, {})  # of a step: swapped_in, ignored, victims, …


def said_of(folder: Path, *window: float) -> str:
    return explain_run(load_run(folder), Path("runs/my run"), *window).replace("\xa0", " ")


def test_who_took_the_budget_is_named_and_the_slowest_one_s_ttft_is_taken_apart(tmp_path: Path) -> None:
    """Tokens of c, long and b: 4 12 0, 1 15 0, 1 15 0, 1 6 4. Of 48 in the three steps long has 42, and its part of its
    four steps is 12/16 + 2 * 15/16 + 6/11 = 3.17; b comes in the first, waits for two, and has 4/11 of the last."""
    folder = run_of(tmp_path, RAG, "scheduler.max_num_batched_tokens=16")
    said = said_of(folder).splitlines()
    assert said[2].endswith("; `testbed explain 'runs/my run' b`.")
    assert said[3:7] == [
        "The slowest request by TTFT, long (tenant rag, 48 prompt tokens), took 4.00 s: 4.00 s in the steps up to the "
        "first token (estimated by tokens: 3.17 s for the own prompt, 830 ms for others in the same steps).",
        "While others waited for the token budget of a step, long (tenant rag, 48 prompt tokens) took 93.8 % and c "
        "(tenant chat, 4 prompt tokens) took 6.25 % of the tokens computed.",
        "In the steps that ran when requests came, long (tenant rag, 48 prompt tokens) took 75.0 % and c (tenant chat, "
        "4 prompt tokens) took 25.0 % of the tokens computed.",
        "",
    ]
    said = said_of(folder, 0.4, 1.0).splitlines()
    assert said[0].startswith("1 request waited 2.00 s in all, 50.0 % of their time")
    assert said[3:5] == [
        "P99 TTFT was 3.50 s for those that arrived from 0.4 s to 1 s, 3.97 s for the others.",
        "The slowest request by TTFT, b (tenant chat, 4 prompt tokens), took 3.50 s: 500 ms until the step that ran at "
        "arrival had ended, 2.00 s in the queue and 1.00 s in the steps up to the first token (estimated by tokens: "
        "364 ms for the own prompt, 636 ms for others in the same steps).",
    ]
    assert not re.search(r"^- (c|long)", "\n".join(said), re.MULTILINE), "they came before"
    assert "for those that arrived from 0.4 s on, 3.97 s for the others." in said_of(folder, 0.4)
    with pytest.raises(ConfigError, match=r"^no request of runs/my run arrived then: the last came at 0\.5 s$"):
        said_of(folder, 0.6)


def test_who_held_the_blocks_that_others_waited_for_is_named(tmp_path: Path) -> None:
    """From step 1 to 9, in which b waits, a has 12 to 20 tokens and c 4 to 12: 144 and 72."""
    rows = [row("a", 12, 10), row("c", 4, 10), row("b", 40, 2, at=0.5)]
    folder = run_of(tmp_path, rows, "cache.num_gpu_blocks=12", "cache.watermark=0", "cache.prefix_caching=false")
    assert causes(folder, "b") == {"kv_blocks": 9}
    held = "a (12 prompt tokens) took 66.7 % and c (4 prompt tokens) took 33.3 % of the blocks in use."
    assert f"While others waited for KV blocks, {held}" in said_of(folder)
    assert "In the steps that ran" not in said_of(folder), "that was 0.5 s of 9.5 s"


def test_blocks_that_are_held_longer_count_more() -> None:
    """While b waits, a and c hold 8 and 4 tokens for 1 s, and 9 and 5 for 3 s."""
    lives = [Life(name, 0, None, 8) for name in "acb"]
    taker = Taker(0, lives, dict.fromkeys("acb", 0), {})
    for number, (start, end, scheduled) in enumerate(((0, 1, {"a": 8, "c": 4}), (1, 2, {"a": 1, "c": 1}), (2, 5, {}))):
        admitted = dict.fromkeys(scheduled, 0) if not number else {}
        span = (start * SECOND, end * SECOND)
        taker.take(DecidedStep(0, number, *span, 0, 0, "kv_blocks", span[0], 9, scheduled, admitted, *NOTHING))
    assert taker.taken["kv_blocks"] == {"a": (8 + 27) * SECOND, "c": (4 + 15) * SECOND}


def test_in_a_window_only_who_came_then_waits(tmp_path: Path) -> None:
    rows = [row(f"long{at}", 32, 2, at=at) for at in (0, 20)] + [row(f"b{at}", 4, 2, at=at + 0.5) for at in (0, 20)]
    folder = run_of(tmp_path, rows, "scheduler.max_num_batched_tokens=16", "cache.prefix_caching=false")
    assert "budget of a step, long20 (32 prompt tokens) took 100 % of the tokens" in said_of(folder, 20.0)
    assert "budget of a step, long0 (32 prompt tokens) took 50.0 % and long20 (" in said_of(folder)


def test_a_wait_after_the_first_token_is_no_part_of_ttft(tmp_path: Path) -> None:
    rows = [row("a", 12, 16), row("b", 12, 16, at=0.5)]
    folder = run_of(tmp_path, rows, "cache.num_gpu_blocks=8", "cache.watermark=0")
    assert preemptions(folder)["request_id"].tolist() == ["b"]
    assert (
        "The slowest request by TTFT, b (12 prompt tokens), took 1.50 s: 500 ms until the step that ran at arrival had "
        "ended and 1.00 s in the steps up to the first token (estimated by tokens: 923 ms for the own prompt, 76.9 ms "
    ) in said_of(folder)


def test_of_many_that_took_the_budget_half_are_counted_and_their_class_is_named(tmp_path: Path) -> None:
    """Each long prompt fills two steps; then two small ones wait for four: 160 of 176 tokens are of the long."""
    rows = [row(f"long{i}", 32, 1, tenant="rag") for i in range(5)]
    rows += [row(f"s{i}", 4, 1, tenant="chat") for i in range(6)]
    said = said_of(run_of(tmp_path, rows, "scheduler.max_num_batched_tokens=16"))
    assert (
        "token budget of a step, tenant rag took 90.9 % and tenant chat took 9.09 % of the tokens computed; half went "
        "to 3 requests (32 prompt tokens in the median; of all requests 4), most to long0 (tenant rag, 32 prompt "
        "tokens), long1 (tenant rag, 32 prompt tokens) and long2 (tenant rag, 32 prompt tokens)."
    ) in said
    without = [{key: value for key, value in one.items() if key != "tenant"} for one in rows]
    (tmp_path / "none").mkdir()
    said = said_of(run_of(tmp_path / "none", without, "scheduler.max_num_batched_tokens=16"))
    assert "step, half of the tokens computed went to 3 requests (32 prompt tokens in the median; " in said


def test_behind_another_the_head_of_the_queue_is_named(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [*TWO, row("c", 4, 2)], "scheduler.max_num_seqs=1")
    assert stretches(folder, "c")[["state", "ahead", "num_steps"]].to_dict("list") == {
        "state": ["waiting", "waiting", "prefill", "decode"],
        "ahead": [("b",), ("c",), (), ()],
        "num_steps": [9, 3, 1, 1],
    }
    answer = explain_request(load_run(folder), "c").splitlines()
    assert answer[0].replace("\xa0", " ") == (
        "c waited 12.0 s of its 14.0 s in the system (85.7 %): 12.0 s for max_num_seqs (9.00 s behind b and "
        "3.00 s at the head of the queue)."
    )
    assert (
        answer[1].replace("\xa0", " ").startswith("Its longest stretch of waiting for one cause: 9.00 s from 0.0000 s ")
    )
    assert "behind b at the head of the queue, which waited for max_num_seqs" in answer[1]
    assert answer[2] == "It was never preempted."


def test_while_somebody_is_swapped_out_those_who_wait_wait_for_him(tmp_path: Path) -> None:
    more = ("scheduler=vllm_v0", "scheduler.preemption=swap", "cache.num_gpu_blocks=8", "cache.num_cpu_blocks=16",
            "cache.watermark=0")  # fmt: skip
    folder = run_of(tmp_path, [row("a", 12, 16), row("b", 12, 16), row("c", 4, 2, at=6)], *more)
    gone = preemptions(folder)
    assert gone[["request_id", "mode", "for_request_id"]].to_numpy().tolist() == [["b", "swap", "a"]] * len(gone)
    assert gone["caught_up_ns"].tolist() == gone["back_ns"].tolist()
    assert causes(folder, "b") == {"swapped_out": int((gone["back_ns"] - gone["at_ns"]).sum()) // SECOND}
    assert causes(folder, "c")["swapped_first"] > 0
    assert "both swaps took about" in explain_request(load_run(folder), "b")


def test_a_preemption_says_for_whom_and_what_it_cost(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [row("a", 12, 16), row("b", 12, 16)], "cache.num_gpu_blocks=8", "cache.watermark=0")
    gone = preemptions(folder).iloc[0]
    assert (gone["request_id"], gone["for_request_id"], gone["mode"]) == ("b", "a", "recompute")
    table = stretches(folder, "b")
    assert table["state"].tolist() == ["prefill", "decode", "waiting", "waiting", "recompute", "decode"]
    again = table[table["state"] == "recompute"].iloc[0]
    assert gone["caught_up_ns"] == again["end_ns"]
    # at 5 s both hold four of the eight blocks; a ends at 16 s, and one of b's is still there: of 17 tokens 13 are left
    said = explain_request(load_run(folder), "b").replace("\xa0", " ").splitlines()
    assert said[2].startswith(
        "It was preempted once, for the growth of a: 11.0 s until it ran again (40.7 % of its time)"
    )
    assert said[8:11] == [
        "- preempted by recompute in step 5 at 5.0000 s, for the growth of a; 16 tokens lost; ran again 11.0 s later; "
        "12 tokens were computed again, about 923 ms (its share of these steps, by tokens), and was where it had been "
        "after 12.0 s",
        "Decoded in 14 steps, 1.00 s each.",
        "Ended at 27.0000 s as length after 16 output tokens: TTFT 1.00 s, TPOT 1.73 s, E2E 27.0 s.",
    ]
    said = explain_run(load_run(folder)).replace("\xa0", " ").splitlines()
    assert said[0].startswith("2 requests waited 11.0 s in all, 25.6 % of their time in the system: 90.9 % for KV")
    assert " cost 12.0 s until all were where they had been, 27.9 % of their time" in said[1]  # of 16 s + 27 s
    assert "- b, once, for a (1)" in said
    assert said[-3] == "Worst E2E:"
    assert said[-1].startswith("- a: 16.0 s"), "no list has the same two again"


def test_decodes_beside_the_prompts_of_others_are_compared_with_those_alone() -> None:
    """Ten steps took 16 s: two of them 8 s, so the others 1 s each."""
    first, more = (
        Stretch(0, 4, start * SECOND, end * SECOND, "decode", "", num_steps=5, slowed_ns=slowed * SECOND, num_slowed=1,
                num_other_prefill_tokens=tokens, takers=takers)
        for start, end, slowed, tokens, takers in ((0, 9, 5, 200, (("x", 3),)), (9, 16, 3, 100, (("x", 2), ("y", 2))))
    )  # fmt: skip
    apart, waits = _pace([first, more]), Stretch(5, 9, 0, 99 * SECOND, "waiting", "kv_blocks", num_steps=5)
    first.extend(more)
    assert [text.replace("\xa0", " ") for text in _pace([first, waits])] == [
        "Decoded in 10 steps, 1.60 s each; 2 of them also computed 300 tokens of others' prompts and took 4.00 s "
        "against 1.00 s: about 6.00 s in all (the means' difference)."
    ]
    assert (apart, dict(first.takers)) == (_pace([first]), {"x": 5, "y": 2})


def test_of_many_waits_the_longest_are_told_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_SENTENCES", 1)
    monkeypatch.setattr(request, "MAX_ROWS", 2)
    rows = [row("a", 12, 9), row("b", 12, 9), row("c", 12, 3, at=1)]
    run = load_run(run_of(tmp_path, rows, "cache.num_gpu_blocks=9", "cache.prefix_caching=false"))
    said = explain_request(run, "c").replace("\xa0", " ").splitlines()
    assert said[5].startswith("- 4.00 s from 1.0000 s (steps 1 to 4) at the head of the queue, for KV blocks: 1 was")
    assert said[6] == "- 2 shorter waits, 4.00 s in all"
    assert said[-2] == f"{'…':>9} 3 more: analysis.explain.frames.stretches has all"
    assert [one.split()[4] for one in (said[-3], said[-1])] == ["waiting", "decode"]


def test_a_preemption_by_a_reset_of_the_prefix_cache_is_called_so(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [row("a", 12, 16), row("b", 12, 16)], "cache.num_gpu_blocks=8", "cache.watermark=0")
    file = folder / "decisions.jsonl"
    file.write_text(file.read_text().replace('"preempted_for": {"b": "a"}', '"preempted_for": {"b": ""}'))
    gone = preemptions(folder)
    assert set(gone["why"]) == {"reset"}
    assert gone["for_request_id"].isna().all()
    assert "for a reset of the prefix cache" in explain_request(load_run(folder), "b").splitlines()[2]
    assert "for a reset of the prefix cache (" in explain_run(load_run(folder))


def test_who_is_aborted_or_can_never_fit_waits_until_then(tmp_path: Path) -> None:
    rows = [row("a", 12, 9), row("long", 200, 2), row("gone", 12, 3, cancel_after=4.5)]
    folder = run_of(tmp_path, rows, "cache.num_gpu_blocks=8", "cache.watermark=0", "allow_ignored=true")
    assert set(causes(folder, "long")) <= {"never_fits", "kv_blocks"}
    for name in ("long", "gone"):
        facts = load_run(folder).requests.set_index("request_id").loc[name]
        table = stretches(folder, name)
        assert (table["start_ns"].iloc[0], table["end_ns"].iloc[-1]) == (facts["queued_ns"], facts["finish_ns"])
    assert "It had never" not in explain_request(load_run(folder), "gone")
    said = explain_run(load_run(folder))
    assert "\nWorst E2E, of the 2 of 3 requests that ended by stop or length:\n- a" in said
    assert "\nWorst TTFT" not in said, "of the same two"
    assert "\nWorst waiting per output token:\n" in said, "all three have it"


def test_who_can_never_fit_did_not_wait_behind_the_next_that_was_admitted(tmp_path: Path) -> None:
    rows = [row("a", 12, 9), row("long", 200, 2), row("next", 12, 3)]
    more = ("scheduler=vllm_v0", "cache.num_gpu_blocks=5", "cache.watermark=0", "allow_ignored=true")
    folder = run_of(tmp_path, rows, *more)
    assert stretches(folder, "long")[["cause", "ahead"]].to_numpy().tolist() == [["never_fits", ()]]
    assert stretches(folder, "next")["ahead"].iloc[0] == ("next",)
    answer = explain_request(load_run(folder), "long").splitlines()
    assert answer[1].endswith("(step 0) for its own end: it could never fit.")


def test_a_run_without_decisions_says_how_to_have_them(tmp_path: Path) -> None:
    folder = execute(config_of(TINY), tmp_path / "run", trace=trace_of(tmp_path, TWO)).folder
    with pytest.raises(RunFolderError, match=r"no decisions\.jsonl; run it with record\.explain"):
        waits(folder)


def test_decisions_that_do_not_say_for_whom_are_refused(tmp_path: Path) -> None:
    rows = [row("a", 12, 16), row("b", 12, 16)]
    more = ("cache.num_gpu_blocks=8", "cache.watermark=0", "record.explain=false", "record.decisions=true")
    with pytest.raises(RunFolderError, match="does not say for whom"):
        waits(run_of(tmp_path, rows, *more))


def test_damaged_decisions_name_file_and_line(tmp_path: Path) -> None:
    folder = run_of(tmp_path, TWO)
    file = folder / "decisions.jsonl"
    lines = file.read_text().splitlines()
    for bad in ("{", "[]", '{"step": 1}', lines[3]):
        file.write_text("\n".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(RunFolderError, match=r"decisions\.jsonl, line 2"):
            waits(folder)
    file.write_text(lines[0] + "\n")
    with pytest.raises(RunFolderError, match=r"decisions\.jsonl, line 2"):
        waits(folder)


def test_those_preempted_again_that_are_not_named_are_counted() -> None:
    gone = [{"request_id": f"r{i % 7}", "for_request_id": "x", "why": "blocks"} for i in range(14)]
    first, *named, rest, _ = _preempted(pd.DataFrame(gone))
    assert (first, len(named), rest) == ("7 were preempted more than once.", 5, "- and 2 more")


def test_a_preemption_costs_time_until_its_request_had_caught_up_or_was_preempted_again_or_ended() -> None:
    caught_up = pd.array([5, None, 9, 9], dtype="Int64")
    frame = pd.DataFrame({"request_id": [*"aabb"], "at_ns": [0, 20, 3, 4], "caught_up_ns": caught_up})
    assert _lost_ns(frame, pd.Series({"a": 30, "b": 50})).tolist() == [5, 10, 1, 5]


def test_the_longest_chain_goes_on_from_any_later_preemption_not_only_from_the_next() -> None:
    pairs = [("a", "b"), ("b", "c"), ("b", "d"), ("d", "e")]
    gone = pd.DataFrame(pairs, columns=["request_id", "for_request_id"])
    assert _longest_chain(gone) == ["a", "b", "d", "e"]


def test_who_is_aborted_as_it_comes_is_not_said_to_have_run(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [row("a", 12, 3), row("gone", 12, 3, at=1.5, cancel_after=0.1)])
    answer, *_ = explain_request(load_run(folder), "gone").splitlines()
    assert answer == "gone ended at the instant that first saw it: it neither waited nor ran."
    assert stretches(folder, "gone")["end_ns"].empty


def test_of_one_thing_nothing_is_said_in_the_plural(tmp_path: Path) -> None:
    rows = [row("a", 1, 1), row("b", 1, 2), row("c", 5, 1)]
    run = load_run(run_of(tmp_path, rows, "scheduler.max_num_seqs=1", "cache.num_gpu_blocks=2"))
    said = "\n".join([explain_run(run), *(explain_request(run, name) for name in "abc")])
    assert "1 prompt token;" in said
    assert not re.search(r"(?<![\d,.])1 (prompt |output )?(tokens|blocks|steps|requests|others)\b", said), said
    assert [computed_again(num) for num in (1, 2)] == ["1 token was computed again", "2 tokens were computed again"]


def test_who_is_preempted_and_runs_again_in_the_same_step_is_said_to_have_been_preempted(tmp_path: Path) -> None:
    rows = [row("late", 12, 9, deadline=99), row("soon", 12, 3, at=3, deadline=9)]
    order = "scheduler.queue_order={_target_: testbed.policies.orders.earliest_deadline, preemptive: true}"
    pool = ("cache.block_size=64", "cache.num_gpu_blocks=3", "cache.watermark=0.4")
    folder = run_of(tmp_path, rows, order, *pool, "sampling.n=2")
    assert causes(folder, "late") == {}
    first, _, third = explain_request(load_run(folder), "late").splitlines()[:3]
    assert first.endswith("the first step that saw it admitted it, and a step that preempted it took it back at once.")
    assert third.startswith("It was preempted once, for the order of the queue: 0\xa0ms until it ran again (0\xa0% ")


def test_of_the_worst_few_are_named_and_the_same_ones_once(tmp_path: Path) -> None:
    rows = [*(row(name, 4, 2) for name in "abcd"), row("e", 4, 30)]
    said = explain_run(load_run(run_of(tmp_path, rows, "scheduler.max_num_seqs=1"))).replace("\xa0", " ")
    found = re.findall(r"^(?:Worst .*|- \w: \S+ m?s)", said, re.MULTILINE)
    assert found == [
        "Worst E2E:", "- e: 38.0 s", "- d: 8.00 s", "- c: 6.00 s",
        "Worst waiting per output token:", "- d: 3.00 s", "- c: 2.00 s", "- b: 1.00 s", "- e: 267 ms",
    ]  # fmt: skip


def test_a_run_in_which_nobody_waits_says_so(tmp_path: Path) -> None:
    folder = run_of(tmp_path, [row("a", 12, 3)])
    assert waits(folder).empty
    assert preemptions(folder).empty
    said = explain_run(load_run(folder))
    assert said.startswith("1 request, and none waited in the queue.\nNobody was preempted.")
    assert ("Worst E2E:" in said, "Worst waiting" in said) == (True, False), "there is none to be headed"
    assert explain_request(load_run(folder), "a").startswith("a did not wait in the queue")
    assert isinstance(stretches(folder, "a"), pd.DataFrame)
