"""`testbed conform`: hand-made logs against presets. How fields are read off our plans is in test_conform_systems.

The cases' numbers are worked out in comments. V1's rules suffice: running requests first, then waiting ones in order of
arrival; chunks fill the token budget; a request takes ceil(tokens / block_size) blocks as it grows.
"""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.conform import replay
from experiments.conform.cases import Case, read_cases
from experiments.conform.replay import case_config
from experiments.conform.systems import SYSTEMS, DecisionReader, System
from testbed.core.plan import BatchPlan
from tests.experiments.kit import Said, Say, write_rows

CONFIG: dict[str, Any] = {
    "block_size": 4, "num_gpu_blocks": 8, "num_cpu_blocks": None, "max_num_batched_tokens": 8, "max_num_seqs": 4,
    "max_model_len": 64, "prefix_caching": False, "preemption_mode": None, "queue_order": "fcfs",
    "long_prefill_token_threshold": 0, "max_num_partial_prefills": None, "watermark": 0.0,
}  # fmt: skip


def request(request_id: str, arrival_step: int, prompt: range, num_output: int) -> dict[str, Any]:
    return {
        "request_id": request_id, "arrival_step": arrival_step, "prompt_token_ids": list(prompt),
        "output_token_ids": list(range(900, 900 + num_output)), "priority": 0, "n": 1,
    }  # fmt: skip


def decision(
    step: int, scheduled: dict[str, int], free: int, free_after: int, cached: dict[str, int] | None = None
) -> dict[str, Any]:
    return {
        "step": step, "scheduled": scheduled, "preempted": [], "cached_tokens": cached or {}, "free_blocks": free,
        "free_blocks_after_commit": free_after, "num_waiting": 0,
    }  # fmt: skip


# Two requests at second 0: '9' comes before '10' although the file and the alphabet say otherwise; one at second 7.
# Second 0: '9' gets its 6 tokens in 2 blocks, '10' the 2 of 5 that the budget of 8 leaves, in 1 block; 8 - 3 = 5 free.
# Second 1: '9' computes its 7th token in its second block; '10' its other 3, which need a second block; 4 free. Both
# emit their last token and end: 8 free. Seconds 2 to 6 are idle. Second 7: 3 tokens in 1 block; 7 free, then 8.
PLAIN: dict[str, Any] = {
    "case": "plain",
    "system": "vllm_v1_0.33",
    "config": CONFIG,
    "requests": [request("10", 0, range(20, 25), 1), request("9", 0, range(6), 2), request("11", 7, range(40, 43), 1)],
    "steps": [
        decision(0, {"9": 6, "10": 2}, 5, 5, {"9": 0, "10": 0}),
        decision(1, {"9": 1, "10": 3}, 4, 8),
        decision(7, {"11": 3}, 7, 8, {"11": 0}),
    ],
}

# The same prompt of 8 tokens twice. '0' takes 2 of 8 blocks and ends; both stay cached and count as free. '1' may hit
# whole blocks of all but its last token: 4 tokens; it computes the other 4 and holds 2 blocks until it ends.
CACHED = {
    "case": "cached",
    "system": "vllm_v1_0.33",
    "config": CONFIG | {"prefix_caching": True},
    "requests": [request("0", 0, range(8), 1), request("1", 1, range(8), 1)],
    "steps": [decision(0, {"0": 8}, 6, 8, {"0": 0}), decision(1, {"1": 4}, 6, 8, {"1": 4})],
}

# '0' and '1' run, '2' waits for a seat. A reset behind step 0 has both computed again, with what each emitted, before
# '2' enters: 9 tokens, and the 7 of 8 that are left of the budget of 16. Behind step 1, with which '0' ended,
# another has '1' computed again; '2' finds nothing, though '0' had the same prompt. Blocks: 2 + 2, 3 + 2, 2 + 2, 3.
RESET = {
    "case": "reset",
    "system": "vllm_v1_0.33",
    "config": CONFIG | {"prefix_caching": True, "max_num_seqs": 2, "max_num_batched_tokens": 16},
    "requests": [request("0", 0, range(8), 2), request("1", 0, range(20, 27), 3), request("2", 0, range(8), 1)],
    "resets": [{"planned": 2, "committed": 2}, {"planned": 1, "committed": 1}],
    "steps": [
        decision(0, {"0": 8, "1": 7}, 4, 4, {"0": 0, "1": 0}) | {"num_waiting": 1},
        decision(1, {"0": 9, "1": 7}, 3, 6) | {"preempted": ["0", "1"], "num_waiting": 1},
        decision(2, {"1": 8, "2": 8}, 4, 6, {"2": 0}) | {"preempted": ["1"]},
        decision(3, {"1": 1}, 5, 8),
    ],
}


def changed(case: dict[str, Any], index: int, **fields: Any) -> dict[str, Any]:
    """The case with other values recorded at one step."""
    case = copy.deepcopy(case)
    case["steps"][index] |= fields
    return case


def conform(say: Say, folder: Path, cases: list[dict[str, Any]], *options: str) -> tuple[Said, list[str]]:
    """What the command said of these cases, and its lines."""
    said = say("conform", str(write_rows(folder / "cases.jsonl", cases)), *options)
    return said, said.out.splitlines()


# --- cases that pass ---


def test_cases_that_are_decided_as_recorded_pass(tmp_path: Path, say: Say) -> None:
    said, lines = conform(say, tmp_path, [PLAIN, CACHED, RESET])
    assert lines == ["ok plain: 3 steps", "ok cached: 2 steps", "ok reset: 4 steps", "3 passed, 0 failed"]
    assert said.status == 0
    assert said.err == ""


def test_a_compressed_file_and_one_case_of_it(tmp_path: Path, say: Say) -> None:
    file = tmp_path / "cases.jsonl.gz"
    with gzip.open(file, "wt") as stream:
        stream.writelines(json.dumps(case) + "\n" for case in (changed(PLAIN, 0, free_blocks=0), CACHED))
    said = say("conform", str(file), "--case", "cached")
    assert said.out.splitlines() == ["ok cached: 2 steps", "1 passed, 0 failed"]
    assert said.status == 0


def test_a_field_that_was_not_logged_is_not_compared(tmp_path: Path, say: Say) -> None:
    case = copy.deepcopy(PLAIN)
    case["steps"] = [{"step": step["step"], "scheduled": step["scheduled"]} for step in PLAIN["steps"]]
    assert conform(say, tmp_path, [case])[0].status == 0


def test_the_example_of_the_documentation_is_true(tmp_path: Path, say: Say) -> None:
    text = (Path(__file__).parents[2] / "docs" / "conform.md").read_text()
    case = json.loads(text.partition("```json\n")[2].partition("```")[0])
    assert conform(say, tmp_path, [case])[1] == ["ok two-prompts: 2 steps", "1 passed, 0 failed"]
    _, lines = conform(say, tmp_path, [changed(case, 1, free_blocks=5)])
    assert "\n".join(lines) in text


# --- the systems: cases worked out by hand from their rules; `why` in each case says how ---

BY_HAND = Path(__file__).parent / "conform_cases"
MIRRORED = sorted({system.preset for system in SYSTEMS.values()})


@cache
def cases_of(preset: str) -> list[Case]:
    return read_cases(BY_HAND / f"{preset}.jsonl")


def cases_by_hand() -> list[Any]:
    return [pytest.param(preset, case, id=f"{preset}-{case.name}") for preset in MIRRORED for case in cases_of(preset)]


@pytest.mark.parametrize(("preset", "case"), cases_by_hand())
def test_a_preset_decides_what_its_system_does(preset: str, case: Case) -> None:
    system = SYSTEMS[case.system]
    assert system.preset == preset
    mismatch = replay.replay_case(case, system, preset)
    assert mismatch is None, f"{mismatch.reason} at second {mismatch.second}: {mismatch.decided}"


@pytest.mark.parametrize("preset", MIRRORED)
def test_the_cases_of_a_system_tell_it_from_every_other(preset: str) -> None:
    """Otherwise a preset might be another one's copy and pass."""
    for other in MIRRORED:
        if other != preset:
            found = (replay.replay_case(case, SYSTEMS[case.system], other) for case in cases_of(preset))
            assert any(mismatch is not None for mismatch in found), (
                f"{other} decides all of {preset}'s cases as it does"
            )


def test_every_case_by_hand_says_how_it_was_worked_out() -> None:
    for preset in MIRRORED:
        for line in (BY_HAND / f"{preset}.jsonl").read_text().splitlines():
            case = json.loads(line)
            assert "Rule" in case["why"], case["case"]
            assert len(case["steps"]) >= 3


# --- cases that fail ---


@pytest.mark.parametrize(
    ("index", "field", "value", "when"),
    [
        (0, "scheduled", {"10": 2, "9": 6}, "plan"),  # the same tokens in another order
        (1, "step", 2, "plan"),
        (1, "preempted", ["9"], "plan"),
        (1, "num_waiting", 1, "plan"),
        (2, "free_blocks", 6, "plan"),
        (2, "free_blocks_after_commit", 7, "commit"),
        (2, "cached_tokens", {}, "plan"),
    ],
)
def test_the_first_step_that_differs_is_shown_with_both_sides(
    tmp_path: Path, say: Say, index: int, field: str, value: Any, when: str
) -> None:
    said, lines = conform(say, tmp_path, [changed(PLAIN, index, **{field: value}), CACHED])
    assert said.status == 1
    assert lines[0] == (
        f"FAILED plain: {index} of 3 steps agree; step {index} at second {(0, 1, 7)[index]}: "
        f"differing after the {when}: {field}"
    )
    marked = [line for line in lines if line.startswith("*")]
    assert len(marked) == 1
    assert marked[0].split(maxsplit=3) == ["*", field, "recorded", json.dumps(value)]
    ours = lines[lines.index(marked[0]) + 1].split(maxsplit=1)
    assert ours == ["ours", json.dumps(PLAIN["steps"][index][field])]
    assert lines[-2:] == ["ok cached: 2 steps", "1 passed, 1 failed"]


@pytest.mark.parametrize(
    ("index", "field", "num_agreeing"),
    [(2, "free_blocks", 1), (2, "free_blocks_after_commit", 2), (0, "free_blocks_after_commit", 0)],
)
def test_the_step_that_differs_is_named_while_another_is_in_flight(
    tmp_path: Path, say: Say, index: int, field: str, num_agreeing: int
) -> None:
    cases = map(json.loads, (BY_HAND / "vllm_v1_async.jsonl").open())
    case = next(case for case in cases if case["case"] == "a-victim-gets-the-token-that-is-on-its-way")
    line = conform(say, tmp_path, [changed(case, index, **{field: 99})])[1][0]
    assert f": {num_agreeing} of 4 steps agree; step {index} at second {index}: differing after the " in line


def test_a_failure_shows_how_far_the_requests_are(tmp_path: Path, say: Say) -> None:
    """At second 1, before the commit: '9' has 6 of 7 known tokens computed, '10' has 2 of 5."""
    _, lines = conform(say, tmp_path, [changed(PLAIN, 1, free_blocks=0)])
    assert ["9", "running", "6", "7", "6"] in [line.split() for line in lines]
    assert ["10", "running", "2", "5", "5"] in [line.split() for line in lines]


def test_a_log_that_is_too_short_or_too_long_fails(tmp_path: Path, say: Say) -> None:
    short, long = copy.deepcopy(PLAIN) | {"case": "short"}, copy.deepcopy(PLAIN) | {"case": "long"}
    short["steps"].pop()
    long["steps"].append(decision(8, {"11": 1}, 7, 8))
    said, lines = conform(say, tmp_path, [short, long])
    assert said.status == 1
    assert "short: 2 of 2 steps agree; step 2 at second 7: the log has ended, our scheduler goes on" in lines[0]
    assert any("long: 3 of 4 steps agree" in line and "has finished everything" in line for line in lines)


def test_a_value_that_the_preset_does_not_have_fails_its_case_alone(tmp_path: Path, say: Say) -> None:
    case = PLAIN | {"case": "odd", "config": CONFIG | {"queue_order": "by_the_moon"}}
    said, lines = conform(say, tmp_path, [case, CACHED])
    assert lines[0].startswith("FAILED odd: ")
    assert "by_the_moon" in lines[0]
    assert lines[1:] == ["ok cached: 2 steps", "1 passed, 1 failed"]
    assert said.status == 1


def test_a_bug_of_ours_fails_its_case_alone(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    after_plan = DecisionReader.after_plan

    def broken(self: DecisionReader, step: int, plan: BatchPlan) -> Any:
        assert "9" not in dict(plan.num_scheduled), "nine is\ntoo many"
        return after_plan(self, step, plan)

    monkeypatch.setattr(DecisionReader, "after_plan", broken)
    said, lines = conform(say, tmp_path, [PLAIN, CACHED])
    assert lines[0].startswith("FAILED plain: 0 of 3 steps agree; step 0 at second 0: AssertionError: nine is too many")
    assert "test_conform.py:" in lines[0]
    assert "Traceback" not in said.out + said.err
    assert lines[-2:] == ["ok cached: 2 steps", "1 passed, 1 failed"]


# --- bad input ---


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "expected one object"),
        (json.dumps({"case": "x"}), "'system' is missing"),
        (json.dumps(PLAIN | {"config": {"block_sise": 4}}), "unknown field 'block_sise'"),
        (json.dumps(PLAIN | {"config": CONFIG | {"block_size": "4"}}), "config.block_size"),
        (json.dumps(PLAIN | {"requests": [request("a", 0, range(3), 1)]}), "request_id"),
        (json.dumps(PLAIN | {"requests": [request("1", 0, range(3), 0)]}), "output_token_ids"),
        (json.dumps(PLAIN | {"requests": [request("1", 0, range(3), 1)] * 2}), "occurs twice"),
        (json.dumps(changed(PLAIN, 1, step=0)), "steps must increase"),
        (json.dumps(changed(PLAIN, 1, free_blocks=-1)), "step 1: field 'free_blocks' is -1"),
        (json.dumps(changed(PLAIN, 1, free_bloks=1)), "unknown field 'free_bloks'"),
        (json.dumps(changed(PLAIN, 1, preempted=["77"])), "preempted names request '77'"),
        (json.dumps(PLAIN | {"aborts": None}), "field 'aborts' is None; expected a list"),
        (json.dumps(PLAIN | {"resets": 3}), "field 'resets' is 3; expected a list"),
        (json.dumps(PLAIN | {"aborts": [{"request_id": []}]}), "field 'request_id' is []; expected a decimal number"),
        (json.dumps(PLAIN | {"aborts": [{"request_id": "77"}]}), "aborts name request '77', which the case does not"),
        (json.dumps(PLAIN), "names must differ"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, say: Say, line: str, reason: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(PLAIN) + "\n" + line + "\n")
    error = say("conform", str(file)).error()
    assert error.startswith(f"{file}:2: ")
    assert reason in error


def test_files_that_are_no_files_of_cases(tmp_path: Path, say: Say) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    assert "does not exist" in say("conform", str(tmp_path / "none.jsonl")).error()
    assert "is a folder" in say("conform", str(tmp_path)).error()
    assert "no cases" in say("conform", str(tmp_path / "empty.jsonl")).error()
    assert "damaged" in say("conform", str(tmp_path / "torn.jsonl.gz")).error()


def test_an_unknown_case_lists_close_names(tmp_path: Path, say: Say) -> None:
    assert "close to it: plain" in conform(say, tmp_path, [PLAIN, CACHED], "--case", "plein")[0].error()


def test_an_unknown_system_and_an_unknown_preset(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    error = conform(say, tmp_path, [PLAIN | {"system": "vllm_v1_0.34"}])[0].error()
    assert "cases.jsonl:1: system is 'vllm_v1_0.34'; did you mean 'vllm_v1_0.33'?" in error
    error = conform(say, tmp_path, [PLAIN], "--preset", "vllm_v11")[0].error()
    assert "there is no preset 'vllm_v11'; did you mean 'vllm_v1'?" in error
    monkeypatch.setitem(SYSTEMS, "vllm_v1_0.33", System("not_built_yet"))
    error = conform(say, tmp_path, [PLAIN])[0].error()
    assert "there is no preset 'not_built_yet', which mirrors vllm_v1_0.33" in error


def test_another_preset_can_be_put_to_the_test(tmp_path: Path, say: Say) -> None:
    """prefill_first computes no decode beside a prompt, so it parts from the log at second 1 at the latest."""
    said, lines = conform(say, tmp_path, [PLAIN], "--preset", "prefill_first")
    assert said.status == 1
    assert "scheduled" in lines[0]


def test_null_leaves_the_presets_value(tmp_path: Path) -> None:
    config = case_config("vllm_v1", CONFIG)
    assert config.scheduler.max_num_partial_prefills == 1
    assert config.cache.num_cpu_blocks == 0
    assert config.scheduler.max_num_seqs == 4
