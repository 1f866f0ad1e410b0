"""A user's own class that misbehaves is named in one line, with its file and line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from analysis.load import load_run, load_sweep
from experiments.api import simulate
from experiments.runs.run import execute
from testbed.errors import TestbedError
from tests.experiments.kit import SHORT, TINY, Say, config_of, manifest_of, table_of, write_rows

MISBEHAVING = """
from testbed.blocks.eviction import LRU
from testbed.policies.compositions.unified import Unified
from testbed.policies.queue_order import FCFS

class HeadRaises(FCFS):
    def head(self, now_ns):
        raise ValueError("no head today")

class HeadIsText(FCFS):
    def head(self, now_ns):
        return "a"

class BindRaises(FCFS):
    def bind(self, context):
        raise KeyError("nothing")

class Exits(FCFS):
    def head(self, now_ns):
        raise SystemExit(0)

class FindsNone:
    def choose(self, running):
        return next(iter(()))

    price = choose

class BindsNoPrice:
    def bind(self, context):
        raise LookupError(context.device.name)

    def price(self, shape):
        pass

class ForgetsToAnswer:
    def allows(self, seq, running):
        pass

class TakesABlock:
    def allows(self, seq, running):
        for other in running:
            other.block_table.pop()
            break
        return True

class SaysSwap:
    def mode(self, seq, num_blocks):
        return "swap"

class Yields:
    def compose(self, step):
        yield step.decode()

class SchedulesWaiting:
    def compose(self, step):
        step.schedule(step.head(), 5)

class SchedulesTooMany:
    def compose(self, step):
        if not step.running():
            seq = step.head()
            step.admit(seq, step.blocks.lookup(seq), 1)
            step.preempt(seq)
            return step.admit(seq, step.blocks.lookup(seq), 1)  # again, which it may
        step.schedule(step.running()[0], 500)

class OrdersTwice(Unified):
    def compose(self, step):
        super().compose(step)
        step.reorder([*step.running(), *step.running()])

class OrdersAStranger:
    def compose(self, step):
        step.reorder([step.head()])

class OrdersTooFew(Unified):
    def compose(self, step):
        super().compose(step)
        step.reorder(list(step.running())[:-1])

class HasNoSlots(Unified):
    def compose(self, step):
        if not step.num_running:
            super().compose(step)
        else:
            for seq in step.running():
                step.schedule(seq, 1)

class SchedulesTwice:
    def compose(self, step):
        seq = step.head()
        step.admit(seq, step.blocks.lookup(seq), 1)
        step.schedule(seq, 1)

class AdmitsTooMany:
    def compose(self, step):
        seq = step.head()
        step.admit(seq, step.blocks.lookup(seq), 10**6)

class SchedulesNothing:
    def compose(self, step):
        seq = step.head()
        step.admit(seq, step.blocks.lookup(seq), 0)

class ResumesTooMany:
    def compose(self, step):
        seq = step.head()
        step.admit(seq, step.blocks.lookup(seq), 1)
        step.resume(seq, 10**6)

class AdmitsAll:
    def compose(self, step):
        while (seq := step.head()) is not None:
            hit = step.blocks.lookup(seq)
            step.admit(seq, hit, seq.num_tokens - hit.num_tokens)
        if not step.batch.seqs:
            step.decode()

class NoMode:
    def mode(self, seq, num_blocks):
        return None

class PreemptsTheSame:
    first = None

    def choose(self, running):
        self.first = self.first or next(iter(running.values()))
        return self.first

class ChoosesANumber:
    def choose(self, running):
        return max(running)

class Counting(LRU):
    calls = {"add": 0, "hit": 0}

    def add(self, block, depth, last_step):
        self.calls["add"] += 1
        super().add(block, depth, last_step)

    def hit(self, block):
        self.calls["hit"] += 1

class BindRaisesAtTwo(FCFS):
    def bind(self, context):
        if context.seed == 2:
            raise KeyError("nothing")

class HoldsLongOnes:
    def allows(self, seq, running):
        return seq.num_prompt_tokens <= 12

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")

class RaisesMute:
    def allows(self, seq, running):
        raise Mute

class Cancels:
    def allows(self, seq, running):
        raise GeneratorExit

class AllowsNumber:
    allows = 5

class AllowsRaises:
    @property
    def allows(self):
        raise ValueError("not today")

class OthersRaise(FCFS):
    def __getattr__(self, name):
        raise KeyError(name)

class BindExits(FCFS):
    def bind(self, context):
        raise SystemExit(0)

class BindsNothing(FCFS):
    def bind(self):
        pass

class BindsNoTime:
    bind = None

    def price(self, shape):
        pass

class Asks:
    def bind(self, context):
        self.estimator = context.estimator

    def allows(self, seq, running):
        return self.estimator.swap_ns(1) > self.estimator.recompute_ns(0, 1)

class HeadForgetsSelf(FCFS):
    def head(now_ns):
        return None

class DropsPreempted(FCFS):
    def push_preempted(self, seq):
        pass

class ChoosesByTwo:
    def choose(self, running, count):
        return next(iter(running.values()))
"""


@pytest.fixture(autouse=True)
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("queue_order", "HeadRaises", ("misbehaving.py:8", "ValueError: no head today", "partial results kept")),
        ("queue_order", "HeadIsText", ("queue_order=misbehaving.HeadIsText", "docs/extending.md")),
        ("queue_order", "BindRaises", ("misbehaving.py:16", "KeyError")),
        ("queue_order", "Exits", ("misbehaving.py:20", "SystemExit")),
        ("queue_order", "BindExits", ("misbehaving.py:", ": SystemExit: 0 (in scheduler.queue_order=misbehaving.B")),
        ("queue_order", "BindsNothing", ("BindsNothing.bind() takes 1 ", "or has a method with other parameters; see")),
        ("admission", "ForgetsToAnswer", ("allows() returned None", "misbehaving.ForgetsToAnswer")),
        ("queue_order", "HeadForgetsSelf",
         ("misbehaving.HeadForgetsSelf.head must take (self, now_ns): too many positional arguments; see docs/",)),
        ("victim", "ChoosesByTwo",
         ("misbehaving.ChoosesByTwo.choose must take (self, running): missing a required argument: 'count'",)),
        ("queue_order", "DropsPreempted",
         ("nothing can be scheduled and nothing will arrive, but ", "(in scheduler.queue_order=misbehaving.Drops")),
        ("victim", "PreemptsTheSame",
         ("the victim is not among the running sequences: ", "misbehaving.PreemptsTheSame")),
        ("victim", "ChoosesANumber",
         ("int", "because scheduler.victim=misbehaving.ChoosesANumber returned what it may")),
        ("victim", "FindsNone", ("misbehaving.py:24: StopIteration (in", "partial results kept")),
        ("admission", "RaisesMute", (": Mute: what it says cannot be read (in", "partial results kept")),
        ("admission", "Cancels", (": GeneratorExit (in scheduler.admission=", "partial results kept")),
        ("composition", "Yields", ("scheduler.composition: misbehaving.Yields.compose has a yield or is async, so ",)),
        ("admission", "AllowsNumber", ("scheduler.admission: misbehaving.AllowsNumber lacks allows; ",)),
        ("admission", "AllowsRaises", ("scheduler.admission: ", "ValueError: not today; mend it there")),
        ("queue_order", "OthersRaise", ("misbehaving.py:", ": KeyError: '", "(in scheduler.queue_order=misbehaving.O")),
        ("preemption", "NoMode", ("not a valid PreemptionMode", "misbehaving.NoMode")),
    ],
)  # fmt: skip
def test_a_class_that_fails_is_named_in_one_line(
    say: Say, tmp_path: Path, key: str, name: str, words: tuple[str, ...]
) -> None:
    said = say("run", *SHORT, *TINY, f"scheduler.{key}={{_target_: misbehaving.{name}}}", "cache.num_gpu_blocks=20",
        "cache.block_size=4", "trace.arrival=all_at_once", "trace.num_requests=20", f"hydra.run.dir={tmp_path}/run",
    )  # fmt: skip
    assert said.status == 1
    for word in words:
        assert word in said.error()


def test_a_price_that_is_not_found_does_not_end_the_run_as_if_it_were_over(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=r"misbehaving.py:24: StopIteration \(in cost=misbehaving.FindsNone"):
        simulate({"num_requests": 2}, folder=tmp_path / "run", cost={"_target_": "misbehaving.FindsNone"})


@pytest.mark.usefixtures("unrendered")
def test_a_point_that_a_class_ends_before_it_begins_is_missed_until_it_is_made(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "scheduler.queue_order=fcfs,{_target_: misbehaving.BindRaisesAtTwo}"
    sweep = ("run", "-m", *TINY, *SHORT, own, "seed=1,2", f"hydra.sweep.dir={tmp_path / 's'}")
    for _ in range(2):
        assert "KeyError: 'nothing'" in say(*sweep).error()
        found = load_sweep(tmp_path / "s")
        ((folder, _),) = found.incomplete
        assert len(found.runs) == 3
        manifest = manifest_of(folder)
        assert manifest["status"] == "failed"
        assert "KeyError: 'nothing'" in manifest["failure"]
        assert manifest["swept"]["seed"] == "2"
    say("report", str(tmp_path / "s"), "--out", str(tmp_path / "r.html")).success()
    assert "1 run of queue order BindRaisesAtTwo failed" in (tmp_path / "r.md").read_text().replace("\\", "")
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING.replace("seed == 2", "seed == 3"))
    monkeypatch.delitem(sys.modules, "misbehaving")
    say(*sweep).success()
    found = load_sweep(tmp_path / "s")
    assert (len(found.runs), found.incomplete) == (4, ()), "of what did not begin nothing stays"


@pytest.mark.parametrize(("num_tokens", "num_held", "num_unfit"), [(128, 1, 0), (16, 1, 1)])
def test_what_an_admission_policy_holds_back_for_ever_is_no_request_that_cannot_fit(
    say: Say, tmp_path: Path, num_tokens: int, num_held: int, num_unfit: int
) -> None:
    rows = [{"arrival_time": 0, "prompt_tokens": size, "output_tokens": 2} for size in (4, 13, 20)[: 2 + num_unfit]]
    own = "scheduler.admission={_target_: misbehaving.HoldsLongOnes}"
    error = say("run", *TINY, own, "trace=jsonl", f"trace.path={write_rows(tmp_path / 'rows.jsonl', rows)}",
        f"scheduler.max_model_len={num_tokens}", f"hydra.run.dir={tmp_path / 'run'}",
    ).error()  # fmt: skip
    assert f"{num_held} of {len(rows)} requests were held back while nothing ran" in error
    assert "blocked by admission while nothing runs" in error
    assert "Let scheduler.admission=misbehaving.HoldsLongOnes allow a request that is alone" in error
    assert ("could never fit" in error) == ("trace.max_prompt_tokens" in error) == bool(num_unfit)


def test_a_run_that_a_class_ended_says_so_in_its_manifest(say: Say, tmp_path: Path) -> None:
    own = "scheduler.queue_order={_target_: misbehaving.HeadRaises}"
    say("run", *TINY, *SHORT, own, f"hydra.run.dir={tmp_path / 'run'}")
    assert "ValueError: no head today" in manifest_of(tmp_path / "run")["failure"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SchedulesWaiting", ("r0 is scheduled, and does not run: Sequence(0, ", "WAITING")),
        ("SchedulesTooMany", ("r0 is scheduled for 500 tokens; it may be for 1 to ",)),
        ("SchedulesTwice", ("r0 is scheduled twice in step 0",)),
        ("OrdersTwice", ("put in order is not each that runs, once: r0, r1, ",)),
        ("OrdersAStranger", ("put in order is not each that runs, once: r0 (in scheduler.composition=",)),
        ("OrdersTooFew", ("put in order is not each that runs, once: r0, ",)),
        ("HasNoSlots", (": reserve slots before (in ",)),
        ("AdmitsTooMany", ("r0 is scheduled for 1000000 tokens; it may be for 1 to ",)),
        ("SchedulesNothing", ("r0 is scheduled for 0 tokens; it may be for 1 to ")),
        ("ResumesTooMany", ("r0 is scheduled for 1000000 tokens; it may be for 1 to ",)),
    ],
)
def test_a_composition_that_schedules_what_it_may_not_is_named_with_file_and_line(
    say: Say, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    said = say("run", *SHORT, *TINY, f"scheduler.composition={{_target_: misbehaving.{name}}}",
        "trace.arrival=all_at_once", f"hydra.run.dir={tmp_path}/run",
    )  # fmt: skip
    error = said.error()
    lines = MISBEHAVING[: MISBEHAVING.index("\n\nclass ", MISBEHAVING.index(f"class {name}"))].splitlines()
    assert f"misbehaving.py:{len(lines)}: AssertionError: " in error, "the last line of the method is to blame"
    for word in words:
        assert word in error


def test_a_run_that_a_class_ended_in_its_first_step_is_not_said_to_have_decided_otherwise(
    tmp_path: Path, say: Say
) -> None:
    own = "scheduler.admission={_target_: misbehaving.ForgetsToAnswer}"
    say("run", *TINY, *SHORT, own, f"hydra.run.dir={tmp_path}/run").error()
    error = say("explain", f"{tmp_path}/run").error()
    assert "run ended early, in its first step or with record.steps=false" in error
    assert "allows() returned None, not True or False" in error


def test_a_cost_model_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(TestbedError, match=r"misbehaving\.py:\d+: LookupError: h100 \(in cost=misb"):
        simulate({"num_requests": 2}, cost={"_target_": "misbehaving.BindsNoPrice"}, folder=tmp_path / "run")


def test_a_policy_that_asks_for_a_step_time_is_not_blamed_for_a_wrong_one(tmp_path: Path) -> None:
    cost, scheduler = {"_target_": "misbehaving.BindsNoTime"}, {"admission": {"_target_": "misbehaving.Asks"}}
    with pytest.raises(TestbedError, match="cost: BindsNoTime returned None for a step; it must be testbed"):
        simulate({"num_requests": 2}, cost=cost, scheduler=scheduler, folder=tmp_path / "run")


def test_a_class_that_takes_from_what_it_was_shown_ends_no_run_as_complete(tmp_path: Path, say: Say) -> None:
    own = "scheduler.admission={_target_: misbehaving.TakesABlock}"
    more = ("trace.arrival=all_at_once", f"hydra.run.dir={tmp_path}/run")
    error = say("run", *SHORT, *TINY, own, *more).error()
    assert "reference counts differ from the tables" in error
    assert "most likely because scheduler.admission=misbehaving.TakesABlock returned" in error


@pytest.mark.parametrize("more", [(), ("scheduler=vllm_v1_async",), ("backend.num_replicas=2",)])
def test_a_checked_run_names_the_first_step_after_which_a_class_took_something(tmp_path: Path, say: Say, more) -> None:
    run = ("run", *SHORT, *TINY, *more, "record.check=true")
    say(*run, f"hydra.run.dir={tmp_path}/kept").success()
    own = "scheduler.admission={_target_: misbehaving.TakesABlock}"
    error = say(*run, own, f"hydra.run.dir={tmp_path}/taken").error()
    steps = load_run(tmp_path / "taken").steps
    last = steps[steps.num_admitted > 0].iloc[-1]
    assert f"AssertionError: after step {last.step}: reference counts differ from the tables" in error
    assert (last.step, last.replica) == tuple(steps.loc[steps.end_ns.idxmax(), ["step", "replica"]]), "it ended there"


def test_a_mode_by_its_name_and_a_class_derived_from_ours_are_heard(tmp_path: Path) -> None:
    options = (
        "scheduler.preemption={_target_: misbehaving.SaysSwap}",
        "cache.eviction={_target_: misbehaving.Counting}",
    )
    config = config_of(
        (*SHORT, *TINY, *options), trace__arrival="all_at_once", trace__num_system_prompts=1,
        trace__system_prompt_tokens=8, trace__num_requests=20, cache__block_size=4, cache__num_gpu_blocks=20,
        cache__num_cpu_blocks=90,
    )  # fmt: skip
    result = execute(config, tmp_path / "run")
    assert result.exit_status == 0, result.message
    assert sum(table_of(tmp_path / "run", "steps").to_pydict()["num_swapped_out"]) > 0
    module = import_module("misbehaving")  # written by the fixture
    assert min(module.Counting.calls.values()) > 0


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("scheduler.max_num_seqs=4", "computes 6 sequences in step 0, and scheduler.max_num_seqs is 4"),
        ("scheduler.max_num_batched_tokens=9", "tokens in step 0, and scheduler.max_num_batched_tokens is 9"),
    ],
)
def test_a_composition_beyond_the_limits_is_refused_by_name(tmp_path: Path, say: Say, limit: str, said: str) -> None:
    own = ("scheduler.composition={_target_: misbehaving.AdmitsAll}", "trace.arrival=all_at_once")
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    error = say("run", *TINY, *SHORT, *own, limit, folder).error()
    assert "scheduler.composition=misbehaving.AdmitsAll" in error
    assert said in error


@pytest.mark.parametrize(
    "of", ["[]", "watermark", "[watermark]", "[{_target_: testbed.policies.admission.NoEvict}, 3]", "{a: 1}"]
)
def test_all_takes_admission_rules_only(say: Say, of: str) -> None:
    target = "testbed.policies.admission.All"
    error = say("run", *TINY, f"scheduler.admission={{_target_: {target}, of: {of}}}", "hydra.run.dir=run").error()
    assert error.startswith("scheduler.admission.of is ")
    assert error.endswith("; list admission rules, each as {_target_: your.Class}")


@pytest.mark.parametrize(
    ("target", "lacking"),
    [("testbed.blocks.eviction.Evictor", "__len__, add, hit, pop, remove"), ("half.Half", "__len__, pop, remove")],
)
def test_methods_of_the_abstract_base_are_lacking(here: Path, say: Say, target: str, lacking: str) -> None:
    source = "from testbed.blocks.eviction import Evictor\nclass Half(Evictor):\n"
    (here / "half.py").write_text(source + "    def add(self, *of): ...\n    hit = add\n")
    error = say("run", *TINY, f"cache.eviction={{_target_: {target}}}", "hydra.run.dir=run").error()
    assert error.startswith("cache.eviction: ")
    said = f"{target} lacks {lacking}; see docs/extending.md"
    assert error.endswith(said) or "abstract class" in error  # interpreted, Python makes none
