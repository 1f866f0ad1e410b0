"""A user's own class, in the user's own file, plugs in by `_target_`; nothing in the repository knows of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments import simulate
from experiments.configuration.compose import compose_config
from experiments.configuration.policies import POLICIES
from experiments.configuration.saved import read_config
from testbed.core.request import Request
from testbed.core.sequence import Sequence
from testbed.errors import ConfigError
from tests.experiments.kit import SHORT, TINY, Say, decisions_of, manifest_of, option, table_of

DOCS = Path(__file__).parents[2] / "docs"
MINE = '''
from collections import OrderedDict
from testbed.blocks.eviction import LRU
from testbed.core.outcome import Spans
from testbed.policies.compositions.unified import Unified
from testbed.policies.queue_order import FCFS
from testbed.traces.readers.own_rows import row_from_fields
from testbed.traces.schema import Trace

SEEN = []

class OneAtATime:
    """Computes one token a step."""
    def __init__(self, budget=1):
        self.budget = budget
    def compose(self, step):
        step.token_budget = self.budget
        Unified().compose(step)

class LastComeFirst(FCFS):
    def head(self, now_ns):
        waiting = list(self)
        return max(waiting, key=lambda seq: seq.seq_id) if waiting else None

class Eldest:
    def choose(self, running):
        SEEN.append("victim")
        return next(iter(running.values()))

class Watched(LRU):
    def __init__(self):
        super().__init__()
        SEEN.append("eviction")

class Slow:
    """A microsecond a token, and a step of base_us."""
    def __init__(self, base_us):
        if base_us < 0:
            raise ValueError("base_us is negative")
        self.base_us = base_us
    def price(self, shape):
        return Spans(forward_ns=1000 * (self.base_us + shape.num_tokens))

def my_trace(num):
    rows = [{"request_id": f"mine-{i}", "arrival_time": i * 0.001, "prompt_tokens": 5, "output_tokens": 2}
            for i in range(num)]
    return Trace("mine", tuple(row_from_fields(row, f"row {i}") for i, row in enumerate(rows)))
'''


def test_what_the_page_says_of_a_sequence_is_there() -> None:
    section = (DOCS / "extending.md").read_text().split("## What a policy reads of a sequence")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    seq = Sequence(0, Request("r", [1, 2, 3]), 100)
    assert len(names) > 12
    assert [name for name in names if not hasattr(seq, name)] == []


def test_a_users_file_may_have_the_name_of_a_module_that_we_use(home: Path) -> None:
    for name in ("analysis", "sim", "queue", "yaml", "numpy", "random"):
        (home / f"{name}.py").write_text("raise AssertionError(__file__)\n")
    (home / "mine.py").rename(home / "my_order.py")
    arguments = ("run", *TINY, *SHORT, "scheduler.queue_order={_target_: my_order.LastComeFirst}", "hydra.run.dir=run")
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    command = Path(sys.executable).with_name("testbed")
    ran = subprocess.run([command, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert (home / "run" / "done").exists()


def test_a_run_of_ones_own_class_is_repeated_from_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    say("run", *BURST, "scheduler.queue_order={_target_: mine.LastComeFirst}").success()
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in (str(home), str(DOCS.parent))])
    sys.modules.pop("mine", None)
    say("run", f"from={home / 'run'}", "hydra.run.dir=again").success()
    assert manifest_of(home / "run")["digest"] == manifest_of(Path("again"))["digest"]


BURST = (*TINY, *SHORT, "trace.arrival=all_at_once", "record.decisions=true", "hydra.run.dir=run")


def test_a_composition_with_parameters(home: Path, say: Say) -> None:
    say("run", *BURST, "scheduler.composition={_target_: mine.OneAtATime, budget: 3}").success()
    assert max(sum(line["scheduled"].values()) for line in decisions_of(home / "run")) == 3


def test_lists_and_mappings_come_as_pythons_own(home: Path, say: Say) -> None:
    """Hydra's own are no lists, and every look into one takes a hundred times as long. One may be called name."""
    takes = """
class Takes(Eldest):
    def __init__(self, edges, lengths, name="none"):
        assert type(edges) is list and type(lengths) is dict and type(lengths["chat"]) is list and name == "eldest"
"""
    (home / "mine.py").write_text(MINE + takes)
    parameters = "edges: [1, 2], lengths: {chat: [3]}, name: eldest"
    say("run", *BURST, f"scheduler.victim={{_target_: mine.Takes, {parameters}}}").success()


def test_it_takes_the_place_of_a_presets_class_and_of_its_parameters(home: Path, say: Say) -> None:
    """The preset's composition has parameters, which this one has not."""
    target = {"_target_": "mine.OneAtATime"}
    own = "scheduler.composition={_target_: mine.OneAtATime, budget: 2}"
    short = [*TINY, *SHORT, "scheduler=vllm_v0_chunked", own]
    runs = (
        ("run", ["run", *short, "hydra.run.dir=run"], {"budget": 2}),
        ("again", ["run", "from=run", "scheduler.composition={_target_: mine.OneAtATime}", "hydra.run.dir=again"], {}),
        ("sweep", ["run", "-m", *short, "hydra.sweep.dir=sweep"], {"budget": 2}),
        ("forced", ["run", *short[:-1], f"++{own}", "hydra.run.dir=forced"], {"budget": 2}),
        ("in", ["run", "from=run", "scheduler={composition: {_target_: mine.OneAtATime}}", "hydra.run.dir=in"], {}),
    )
    for name, arguments, parameters in runs:
        say(*arguments).success()
        folder = next((home / name).glob("**/config.yaml")).parent
        assert read_config(folder)["scheduler"]["composition"] == target | parameters
    assert shlex.split(manifest_of(home / "run")["command"]).count(own) == 1
    assert "scheduler.composition=null" not in manifest_of(home / "run")["command"]
    settings = {"name": "vllm_v0_chunked", "composition": target}
    assert simulate({"num_requests": 3}, model="tiny", folder=home / "py", scheduler=settings).summary["checks"]


def test_a_composition_is_bound_too_and_may_ask_what_others_ask(home: Path) -> None:
    asks = """
class Asks(OneAtATime):
    def bind(self, context):
        self.context = context
    def compose(self, step):
        assert step.now_ns >= 0
        seq = step.head()
        if seq is not None:
            assert self.context.oracle.predict(seq) > 0
            assert self.context.estimator.recompute_ns(0, seq.num_prompt_tokens) > 0
            SEEN.append("asked")
        super().compose(step)
"""
    (home / "mine.py").write_text(MINE + asks)
    sys.path.append(str(home))
    chosen = {"composition": {"_target_": "mine.Asks"}, "oracle": "perfect"}
    assert simulate({"num_requests": 3}, model="tiny", folder=home / "run", scheduler=chosen).is_complete
    assert "asked" in sys.modules["mine"].SEEN


def test_a_queue_order(home: Path, say: Say) -> None:
    more = ("scheduler.queue_order={_target_: mine.LastComeFirst}", "scheduler.max_num_seqs=1")
    say("run", *BURST, *more).success()
    first = [name for line in decisions_of(home / "run") for name in line["cached_tokens"]]
    assert first == table_of(home / "run")["request_id"].to_pylist()
    starts = table_of(home / "run").sort_by("first_scheduled_ns")["request_id"].to_pylist()
    assert starts == sorted(starts, key=lambda name: int("".join(filter(str.isdigit, name))), reverse=True)


def test_a_victim_and_an_eviction(home: Path, say: Say) -> None:
    more = ("scheduler.victim={_target_: mine.Eldest}", "cache.eviction={_target_: mine.Watched}")
    tight = ("cache.num_gpu_blocks=9", "trace.output={kind: uniform, min_tokens: 8, max_tokens: 12}")
    say("run", *BURST, *more, *tight, "trace.num_requests=12").success()
    assert {"victim", "eviction"} <= set(sys.modules["mine"].SEEN)


def test_a_cost_model_of_ones_own_may_be_called_by_a_name_that_its_class_may_take(home: Path, say: Say) -> None:
    named = "class Named(Slow):\n    def __init__(self, name):\n        super().__init__(len(name))\n"
    (home / "mine.py").write_text(MINE + named)
    for text in ("_target_: mine.Slow\nbase_us: 7\n", "_target_: mine.Named\n"):
        option(home / "conf", "cost/ours", f"{text}name: fifteen\n")
        say("run", "--config-dir=conf", *TINY, *SHORT, "cost=ours", "hydra.run.dir=run", "overwrite=true").success()
        assert manifest_of(home / "run")["cost"] == "fifteen"
        step = table_of(home / "run", "steps").to_pylist()[-1]
        assert step["forward_ns"] == 1000 * (7 + step["num_decode_tokens"] + step["num_prefill_tokens"])


def test_a_cost_model_and_a_trace_of_a_folder_of_ones_own(home: Path, say: Say) -> None:
    option(home / "conf", "cost/ours", "_target_: mine.Slow\nbase_us: 7\n")
    option(home / "conf", "trace/ours", "_target_: mine.my_trace\nnum: 4\n")
    arguments = ("--config-dir", "conf", *TINY, "cost=ours", "trace=ours", "hydra.run.dir=run")
    say("run", *arguments).success()
    steps = table_of(home / "run", "steps").to_pylist()
    for step in steps:
        num_tokens = step["num_decode_tokens"] + step["num_prefill_tokens"]
        assert step["end_ns"] - step["start_ns"] == 1000 * (7 + num_tokens)
    assert table_of(home / "run")["request_id"].to_pylist() == [f"mine-{i}" for i in range(4)]
    assert manifest_of(home / "run")["trace"]["name"] == "mine"
    assert manifest_of(home / "run")["cost"] == "mine.Slow"
    say("run", "from=run", "hydra.run.dir=again").success()
    assert manifest_of(home / "again")["digest"] == manifest_of(home / "run")["digest"]
    error = say("run", *arguments, "cost.base_us=-1", "overwrite=true").error()
    assert "mine.Slow" in error
    assert "base_us is negative" in error


@pytest.mark.usefixtures("unrendered")
def test_options_of_a_folder_of_ones_own_are_searched_and_compared_too(home: Path, say: Say) -> None:
    option(home / "conf", "cost/ours", "_target_: mine.Slow\nbase_us: 700\n")
    option(home / "conf", "scheduler/ours", "defaults: [unified]\n")
    own = ("--config-dir", "conf", "cost=ours", "scheduler=ours")
    sizes = ("trace.max_prompt_tokens=32", "trace.max_output_tokens=8")
    load = (*sizes, "trace.num_requests=40", "trace.rate=20", "slo.ttft_s=0.5", "slo.attainment=0.9")
    said = say("capacity", *own[:-1], "scheduler=ours,decode_first", *TINY, *load, "--out", "cap").success()
    assert "| ours " in said
    say("run", *own, *TINY, *load, "hydra.run.dir=run").success()
    said = say("fidelity", "run", *own).success()
    assert "cost=mine.Slow" in said
    (mean,) = [line for line in said.splitlines() if line.startswith("| TTFT mean")]
    assert mean.split("|")[-2].strip() == "0.0", "simulated as it was"
    say("report", "run", "--out", "r.html").success()
    page = (home / "r.md").read_text().replace("\\", "")
    assert re.search(r"\| cost = mine\.Slow\(base_us=700\), file [0-9a-f]{8}", page), "what stands behind the name"
    assert f"| commands were given in | {home} |" in page
    for command in (("capacity", *load), ("fidelity", "run"), ("calibrate",)):
        error = say(*command, "--config-dir", "nowhere", "cost=ours").error()
        assert "name a folder of your own options" in error


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trace.sizes={a.b: 4}", {"a.b": 4, 8: 2, "c": {"d": 3}}),
        ("trace={sizes: {a.b: 4}}", {"a.b": 4, 8: 2, "c": {"d": 3}}),
        ("trace.sizes={8: 5, c: {d: 6}}", {"a.b": 1, 8: 5, "c": {"d": 6}}),
        ("+trace.sizes={9: 7, e.f: 8}", {"a.b": 1, 8: 2, "c": {"d": 3}, 9: 7, "e.f": 8}),
    ],
)
def test_a_mapping_of_a_class_has_names_that_are_no_words_of_a_key(
    tmp_path: Path, override: str, expected: dict[Any, Any]
) -> None:
    option(tmp_path, "trace/ours", "_target_: mine.my_trace\nsizes: {a.b: 1, 8: 2, c: {d: 3}}\n")
    config = compose_config([f"hydra.searchpath=['file://{tmp_path}']", "trace=ours", override])
    assert config.raw["trace"]["sizes"] == expected


def test_a_cost_model_and_a_trace_from_python(home: Path, say: Say) -> None:
    sys.path.append(str(home))  # as Python has the folder where it was started
    trace, cost = {"_target_": "mine.my_trace", "num": 4}, {"_target_": "mine.Slow", "base_us": 7}
    run = simulate(trace, cost=cost, folder="run")
    assert (run.config["trace"], run.config["cost"]) == (trace, cost)
    assert (run.steps["end_ns"] - run.steps["start_ns"] >= 7000).all()
    assert run.manifest["given"]["cost"] == "{_target_:mine.Slow,base_us:7}"
    say("run", "from=run", "hydra.run.dir=again").success()
    assert manifest_of(home / "again")["digest"] == run.manifest["digest"]
    with pytest.raises(ConfigError, match="base_us is negative"):
        simulate(trace, cost=cost | {"base_us": -1})
    with pytest.raises(ConfigError, match="A class of your own goes by its name"):
        simulate(trace, cost=cost | {"base_us": object()})
    with pytest.raises(ConfigError, match=r"as \{'_target_': 'testbed.core.request.Request'\}"):
        simulate(trace, cost=cost | {"base_us": Request})


FAILS = """
class Key:
    def __init__(self):
        {}["x"]

class Empty:
    def __init__(self):
        assert False

class Coloured:
    def __init__(self):
        raise RuntimeError("no\x1b[31m way")

class Weighs:
    def __init__(self, weight=1):
        self.weight = weight
"""


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("other.Key", "other.py:4: KeyError: 'x'; mend it there"),
        ("other.Empty", "other.py:8: AssertionError; mend it there"),
        ("other.Coloured", "other.py:12: RuntimeError: no\\x1b[31m way; mend it there"),
        ("other.Weighs, wieght: 2", "it has no parameter 'wieght'; did you mean 'weight'? valid: weight"),
        (
            "testbed.policies.orders.VirtualTokenCounter, input_weigth: 1",
            "it has no parameter 'input_weigth'; did you mean 'input_weight'? valid: input_weight, output_weight",
        ),
        ("testbed.policies.compositions.Static", "testbed.policies.compositions has no 'Static'"),
        ("other.Nothing", "other has no 'Nothing'"),
        ("nowhere.Thing", "or where PYTHONPATH says; run testbed where nowhere.py lies"),
        ("mine.Slow", "TypeError: Slow.__init__() missing 1 required positional argument: 'base_us'"),
        ("nul_bytes.X", "nul_bytes.py: source code string cannot contain null bytes; mend it there"),
        ("nul_bytes.X.Inner", "nul_bytes.X: source code string cannot contain null bytes; mend it there"),
        ("half.X.Inner", "half.py:1: '(' was never closed; mend it there"),
    ],
)
def test_what_fails_in_the_making_is_told_with_its_kind_and_place(
    home: Path, say: Say, choice: str, expected: str
) -> None:
    (home / "other.py").write_text(FAILS)
    (home / "nul_bytes.py").write_text("X = 1\0\n")
    (home / "half.py").write_text("X = (\n")
    error = say("run", *TINY, f"scheduler.queue_order={{_target_: {choice}}}", "hydra.run.dir=run").error()
    assert error.startswith(f"scheduler.queue_order: cannot make {choice.partition(',')[0]!r}: ")
    assert error.endswith(expected)
    assert not (home / "run").exists()


@pytest.mark.parametrize("key", sorted(POLICIES))
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("{_target_: testbed.blocks.eviction.LFUs}", "eviction has no 'LFUs'; did you mean 'LFU'?"),
        ("{_target_: nowhere.Thing}", "run testbed where nowhere.py lies"),
        ("{_target_: ''}", "it must be a module and a class in it, as mine.Class"),
        ("{_targt_: mine.Eldest}", "has _targt_ where a class is named by _target_: {_target_: your.Class}"),
    ],
)
def test_every_policy_that_is_no_class_is_named_by_its_key(say: Say, key: str, choice: str, expected: str) -> None:
    error = say("run", *TINY, f"{key}={choice}", "hydra.run.dir=run").error()
    assert error.startswith(key)
    assert error.endswith(expected)


def test_an_option_of_our_own_class_that_is_on_or_off_takes_nothing_else(say: Say) -> None:
    target = "testbed.policies.compositions.unified.Unified, threshold_when_alone: maybe"
    error = say("run", *TINY, f"scheduler.composition={{_target_: {target}}}").error()
    assert error == "scheduler.composition.threshold_when_alone is 'maybe'; it must be true or false"


@pytest.mark.parametrize(
    "read", ["seq.request.forced_output", "seq.token_limit", "seq.foreseen_end", "seq.first_tokens(10**6)[9:]"]
)
def test_a_class_that_reads_how_long_an_output_will_be_is_refused(home: Path, say: Say, read: str) -> None:
    """Also in what it derives from. An oracle may: it is where the truth comes from."""
    peeking = f"""
from testbed.policies.orders import KeyedQueue
class Peeks:
    def peek(self, seq):
        return {read}
class Victim(Peeks):
    def choose(self, running):
        return min(running.values(), key=self.peek)
def order():
    return KeyedQueue(lambda seq: (len(str({read})), seq.seq_id))
class Rule(Peeks):
    def allows(self, seq, running):
        return bool(self.peek(seq))
class Oracle:
    def predict(self, seq):
        return len(str({read}))
def work(seq):
    return len(str({read}))
def half(seq):
    return work(seq) / 2
def by_helper():
    return KeyedQueue(lambda seq: (half(seq), seq.seq_id))
"""
    other = """
import mine
from mine import half
class ByModule:
    def choose(self, running):
        return min(running.values(), key=lambda seq: mine.half(seq))
class ByName:
    def choose(self, running):
        return min(running.values(), key=half)
class Honest:
    def choose(self, running):
        return next(iter(running.values()))
"""
    (home / "mine.py").write_text(MINE + peeking)
    (home / "other.py").write_text(other)
    victims = [f"scheduler.victim={{_target_: {name}}}" for name in ("mine.Victim", "other.ByModule", "other.ByName")]
    orders = [f"scheduler.queue_order={{_target_: mine.{name}}}" for name in ("order", "by_helper")]
    for key in (*victims, *orders):
        error = say("run", *BURST, key).error()
        name = read.rpartition(".")[2].partition("(")[0]
        assert f"reads {name}, which says how long an output will be" in error
        assert "context.oracle.predict(seq)" in error
    part = "{_target_: testbed.policies.admission.All, of: [{_target_: mine.Rule}]}"
    assert f"mine.Rule reads {name}, which says" in say("run", *BURST, f"scheduler.admission={part}").error()
    say("run", *BURST, "scheduler.victim={_target_: other.Honest}").success()
    oracle = ("scheduler.oracle={_target_: mine.Oracle}", "scheduler.queue_order=srpt", "overwrite=true")
    say("run", *BURST, *oracle).success()


def test_one_that_reads_it_is_refused_where_it_is_installed_or_has_no_source(
    home: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = home / "site-packages"
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    reads = "def length(seq):\n    return seq.forced_output\n"
    victim = "class Victim:\n    def choose(self, running):\n        return min(running.values(), key=length)\n"
    (installed / "installed_policy.py").write_text(reads + victim)
    (home / "other.py").write_text("import installed_policy\nexec('class Made(installed_policy.Victim): pass')\n")
    for name in ("installed_policy.Victim", "other.Made"):
        error = say("run", *BURST, f"scheduler.victim={{_target_: {name}}}").error()
        assert f"{name} reads forced_output, which says how long an output will be" in error


@pytest.mark.parametrize(
    "name",
    [
        "testbed.core.interfaces.WaitingQueue", "testbed.core.interfaces.AdmissionPolicy",
        "testbed.core.interfaces.PreemptionChoice", "testbed.core.interfaces.VictimChoice",
        "testbed.core.interfaces.Estimator", "testbed.core.composition.Composition",
        "testbed.blocks.interfaces.EvictionPolicy", "testbed.policies.context.LengthOracle",
    ],
)  # fmt: skip
def test_a_class_may_derive_from_its_protocol(name: str) -> None:
    """Compiled ones could not be derived from."""
    module, _, attribute = name.rpartition(".")
    protocol = getattr(import_module(module), attribute)
    assert type("Mine", (protocol,), {})().__class__.__mro__[1] is protocol


@pytest.mark.parametrize("group", ["cost", "trace"])
def test_a_class_for_a_whole_group_is_told_where_it_goes(say: Say, group: str) -> None:
    for override in (f"{group}={{_target_: mine.Own}}", f"{group}._target_=mine.Own"):
        error = say("run", override).error()
        assert error.startswith(f"{group}._target_: {group} is a whole group")
        assert f"as my_conf/{group}/mine.yaml; choose it with --config-dir=my_conf {group}=mine" in error
