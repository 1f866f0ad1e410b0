"""A trace that a user's own function makes is checked and sorted as a file is, drawn, searched and frozen."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import find_capacity, simulate
from experiments.cli import main
from experiments.wiring.own_traces import make_trace
from testbed.errors import TestbedError
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.stream import MAX_HELD_ROWS, StreamedTrace
from tests.experiments.kit import TINY, Say, manifest_of, table_of

MINE = """
from array import array
from collections.abc import Iterable
import numpy as np
from testbed.traces.schema import Span, TokenIds, Trace, TraceRequest
from testbed.traces.stream import StreamedTrace

def request(i, arrival_ns, **more):
    return TraceRequest(f"d{i}", arrival_ns, (Span(i, 0, 9),), Span(100 + i, 0, 3))._replace(**more)

def ordered():
    return Trace("mine", tuple(request(i, i * 10**6) for i in range(5)))

def of_numpy():
    return Trace("mine", [request(i, np.int64(i * 10**6), prompt=[Span(i, 0, np.int32(9))]) for i in range(5)])

def late_first():
    return Trace("mine", ordered().rows[::-1])

def bare():
    return list(ordered())

def as_dicts(num=3):
    return [{"arrival_time": i * 0.001, "prompt_tokens": 9, "output_tokens": 3} for i in range(num)]

def yielded():
    for i in range(np.int64(3)):
        yield {"arrival_time": np.float32(i), "prompt_tokens": np.int64(9), "output_tokens": 3}

def drawn(rate=10.0, num=40, seed=7):
    gaps = np.random.default_rng(seed).exponential(1e9 / rate, num)
    return [request(i, at) for i, at in enumerate(gaps.cumsum().astype(int))]

def twice():
    return [request(0, 0), request(0, 10)]

def of_floats():
    return [request(0, 1e9)]

def before():
    return [request(0, -1)]

def one_part():
    return [request(0, 0, prompt=Span(0, 0, 9))]

def counted():
    return [request(0, 0, output=4)]

def numbered():
    return [request(0, 0, tenant=3)]

def below_zero():
    return [request(0, 0, output=Span(0, 0, -2))]

def negative():
    return [request(0, 0, prompt=(TokenIds(array("i", [3, -1])),))]

def one_id():
    return [request(0, 0, prompt=(TokenIds(3),))]

def mixed():
    return [request(0, 0), {"arrival_time": 0}]

def streamed():
    return StreamedTrace("mine", lambda: iter([request(0, 0.5)]), num_requests=1)

def nothing():
    pass

def ending():
    yield {"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 3}
    raise KeyError("half way")

def ending_source():
    def rows():
        yield request(0, 0)
        raise KeyError("half way")
    return StreamedTrace("mine", rows, num_requests=2)

class Users:
    name, notes, closed_tail = "users", ("of two users",), True

    def __init__(self, num_requests=6):
        self.num_requests = num_requests

    def __iter__(self):
        for i in range(self.num_requests):
            think_ns = None if i < 2 else np.int64(1000)
            yield request(i, 0, session_id=f"u{i % 2}", turn=i // 2, think_ns=think_ns)

def batches():
    return [request(i, i // 4 * 10**6) for i in range(40)]
"""


@pytest.fixture
def home(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "mine_traces.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(here))
    return here


def simulated(name: str, **more: object) -> Any:
    return simulate({"_target_": f"mine_traces.{name}"} | more, model="tiny").manifest["trace"]


def test_numbers_of_numpy_and_rows_out_of_order_give_the_same_trace(home: Path) -> None:
    trace = simulated("ordered")
    for name in ("of_numpy", "late_first", "bare"):
        assert simulated(name)["fingerprint"] == trace["fingerprint"], name
    assert simulated("late_first")["notes"] == ["4 rows out of order, sorted by arrival"]
    assert simulated("as_dicts")["num_requests"] == 3
    assert simulated("as_dicts", num=2)["name"] == "as_dicts"


def test_an_own_trace_in_batches_is_spread_once_it_is_frozen(home: Path) -> None:
    """`trace.transforms` is refused for it."""
    (note,) = simulated("batches")["notes"]
    assert "a trace of your own: once `testbed trace freeze` has written it" in note


def test_a_source_of_ones_own_is_not_held_whole(home: Path) -> None:
    """As that of users with endless requests: the rows of the next turns are not read before."""
    made = make_trace({"_target_": "mine_traces.Users", "num_requests": MAX_HELD_ROWS + 1}, seed=0)
    assert (made.name, made.notes, made.closed_tail) == ("users", ("of two users",), True)
    row = next(islice(made, 2, None))
    assert (row.request_id, type(row.think_ns)) == ("d2", int)
    assert simulated("Users")["num_requests"] == 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("twice", "request 'd0': field 'request_id' is 'd0'; expected an id not used before"),
        ("of_floats", "request 'd0': arrival_ns is 1000000000.0; it must be a whole number from 0 to "),
        ("before", "request 'd0': arrival_ns is -1; it must be a whole number from 0 to "),
        ("one_part", "request 'd0': prompt is Span(key=0, start=0, length=9); it must be a tuple of parts"),
        ("counted", "request 'd0': the output has 4; a part is a testbed.traces.schema.Span or TokenIds"),
        ("numbered", "request 'd0': tenant is 3; it must be a text, or None"),
        ("below_zero", "request 'd0': output length is -2; it must be a whole number from 0 to 100,000,000"),
        ("negative", "request 'd0': prompt token is -1; it must be a whole number from 0 to 2,147,483,647"),
        ("one_id", "request 'd0': prompt ids is 3; it must be token ids"),
        ("mixed", "row 1 is {'arrival_time': 0}; a row of a Trace is a testbed.traces.schema.TraceRequest"),
        ("streamed", "request 'd0': arrival_ns is 0.5; it must be a whole number from 0 to "),
        ("ending", "mine_traces.py:72: KeyError: 'half way'; mend it there"),
        ("ending_source", "mine_traces.py:77: KeyError: 'half way'; mend it there"),
        ("nothing", "trace: mine_traces.nothing returned None; it must return a testbed.traces.schema.Trace, or rows"),
    ],
)
def test_what_is_no_trace_is_named_in_one_line(home: Path, say: Say, name: str, said: str) -> None:
    (home / "conf" / "trace").mkdir(parents=True)
    (home / "conf" / "trace" / "ours.yaml").write_text(f"_target_: mine_traces.{name}\n")
    assert said in say("run", "--config-dir", "conf", "trace=ours", *TINY, "hydra.run.dir=run").error()


def test_a_trace_from_python_is_checked_and_sorted_as_a_file_is() -> None:
    """Rows out of order were simulated as they came: each after the last one, and the latencies were wrong."""
    ids: Any = [1, 2]  # no array
    length: Any = np.int64(2)
    no_part: Any = 4
    rows = [TraceRequest(f"d{i}", 10**9 * (3 - i), (TokenIds(ids),), Span(i, 0, length)) for i in range(3)]
    run = simulate(Trace("mine", tuple(rows)), model="tiny")
    assert run.requests["request_id"].tolist() == ["d2", "d1", "d0"]
    assert run.summary["e2e_s"]["p99"] < 0.5
    assert run.manifest["trace"]["notes"] == ["2 rows out of order, sorted by arrival"]
    with pytest.raises(TestbedError, match="expected an id not used before"):
        simulate(Trace("mine", (rows[0], rows[0])), model="tiny")
    streamed = simulate(StreamedTrace("mine", lambda: iter(rows)), model="tiny")
    assert streamed.manifest["trace"]["fingerprint"] == run.manifest["trace"]["fingerprint"]
    endless = [{"arrival_time": 0, "prompt_tokens": 9, "output_tokens": 2}, {"arrival_time": 1, "prompt_tokens": 9}]
    with pytest.raises(TestbedError, match=r"^the rows given:2: request '1' forces no output"):
        simulate(endless, model="tiny")
    with pytest.raises(TestbedError, match="request 'd0': the output has 4; a part is a "):
        simulate(StreamedTrace("mine", lambda: iter([rows[0]._replace(output=no_part)])), model="tiny")


def test_a_parameter_seed_without_a_value_is_the_runs_seed(home: Path, say: Say) -> None:
    (home / "conf" / "trace").mkdir(parents=True)
    (home / "conf" / "trace" / "ours.yaml").write_text("_target_: mine_traces.drawn\nrate: 50.0\n")
    own = ("--config-dir", "conf", "trace=ours")
    say("run", "-m", *own, *TINY, "seed=0,1", "hydra.sweep.dir=s").success()
    prints = [manifest_of(path.parent)["trace"]["fingerprint"] for path in (home / "s").glob("*/manifest.json")]
    assert len(set(prints)) == 2
    assert simulated("drawn", seed=7)["fingerprint"] not in prints, "a value that is given holds"

    found = find_capacity(
        *own[2:], f"hydra.searchpath=[file://{home / 'conf'}]", *TINY, "slo.ttft_s=0.2", "slo.attainment=0.5",
        "seed=0,1", folder=home / "cap", tolerance=0.5,
    )  # fmt: skip
    assert found.found[0].arm.rate_key == "trace.rate"
    assert found.found[0].arm.num_requests == (40, 40)

    assert main(["trace", "freeze", "own.parquet", *own, "seed=1"]) == 0
    again = ("run", *TINY, "trace=parquet", "trace.path=own.parquet", "trace.transforms=[{name: thin, fraction: 0.5}]")
    say(*again, "hydra.run.dir=thin").success()
    assert 0 < table_of(home / "thin").num_rows < 40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("_target_: mine_traces.drawn\n", "trace=mine_traces.drawn has no rate to search: give it a parameter rate"),
        ("_target_: mine_traces.drawn\nrate: 9.0\nseed: 4\n", "no value for it in its file"),
        ("_target_: mine_traces.drawn\nrate: null\n", "trace.rate is null; it must be a number"),
    ],
)
def test_what_cannot_be_searched_says_what_to_do(home: Path, say: Say, text: str, said: str) -> None:
    (home / "conf" / "trace").mkdir(parents=True)
    (home / "conf" / "trace" / "ours.yaml").write_text(text)
    search = ("capacity", "--config-dir", "conf", "trace=ours", *TINY, "slo.ttft_s=0.2", "seed=0,1", "--out", "cap")
    assert said in say(*search).error()


def test_a_file_of_a_trace_that_fails_when_it_is_imported_is_named_with_its_line(home: Path) -> None:
    for name, text, said in (("syntax", "def f(:", "invalid syntax"), ("zero", "1 / 0", "ZeroDivisionError")):
        (home / f"wrong_{name}.py").write_text(f"\n{text}\n")
        with pytest.raises(TestbedError, match=f"trace: cannot make 'wrong_{name}.f': .*wrong_{name}.py:2: {said}"):
            make_trace({"_target_": f"wrong_{name}.f", "name": "f"}, seed=0)
