"""Settings that have no effect in a run are noted."""

import json

import pytest

from analysis.load import load_run
from experiments.cli import main
from experiments.configuration.compose import compose_config
from experiments.wiring.unused import unused_settings, without_classes
from testbed.policies.orders import VirtualTokenCounter
from testbed.policies.victim import LowestPriority
from testbed.traces.classes import ClassFields
from tests.experiments.kit import REAL, SHORT, TINY, latest
from tests.experiments.test_models_from_files import SHAPE

RESERVE = "scheduler.admission={_target_: testbed.policies.admission.NoEvict, reserve: oracle}"
IN_A_LIST = f"scheduler.admission={{_target_: testbed.policies.admission.All, of: [{RESERVE.partition('=')[2]}]}}"


class OwnShare(VirtualTokenCounter):
    """A user's queue order, which goes by what its base goes by."""


class OwnVictim(LowestPriority):
    """A user's victim choice."""


def test_a_real_run_says_that_nothing_reads_its_cost_model_unless_a_policy_does():
    def notes(*options):
        return unused_settings(compose_config(["backend=real", "model=tiny", *options]))

    assert notes() == []
    assert notes("cost=linear") == ["cost=linear has no effect on measured times"]
    own = "{_target_: mine.Admission}"
    by_class = "scheduler.preemption={_target_: testbed.policies.preemption.Cheaper}"
    for asking in ("scheduler.preemption=cheaper", by_class, "cache.eviction=cost_aware", f"scheduler.admission={own}"):
        assert notes("cost=linear", asking) == []


def test_made_up_step_times_that_a_policy_of_an_engine_asks_for_are_noted(tmp_path, say):
    for name, options, is_noted in (
        ("cpu", ("device=cpu", "scheduler.preemption=cheaper"), True),
        ("given", ("device=cpu", "scheduler.preemption=cheaper", "cost=constant"), False),
        ("unasked", ("device=cpu",), False),
    ):
        said = say("run", *TINY, *SHORT, *REAL, *options, f"hydra.run.dir={tmp_path / name}").success()
        assert ("step times that a policy may ask for are made up: no data sheet gives a CPU's" in said) is is_noted


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("cache.eviction=lfu",), []),
        (("cache.prefix_caching=false", "cache.eviction=lfu"), ["cache.eviction has no effect with cache.prefix_"]),
        (
            ("cache.prefix_caching=false", "cache.isolate_tenants=true", "scheduler.queue_order=dfs"),
            ["cache.isolate_tenants has no", "scheduler.queue_order=dfs is first come, first served with cache."],
        ),
        (("scheduler.oracle=perfect",), ["scheduler.oracle has no effect with a queue order"]),
        (("scheduler.oracle=perfect", "scheduler.queue_order=sjf"), ["scheduler.oracle has no effect with a queue"]),
        (("scheduler.oracle=perfect", "scheduler.queue_order=hrrn"), []),
        (("scheduler.oracle=perfect", "scheduler.victim=longest_remaining"), []),
        (("scheduler.oracle=perfect", "scheduler.admission={_target_: testbed.policies.admission.FuturePeak}"), []),
        (("scheduler.oracle=perfect", RESERVE), []),
        (("scheduler.oracle=perfect", IN_A_LIST), []),
        (
            ("scheduler.oracle=perfect", "scheduler.admission={_target_: testbed.policies.admission.Watermark}"),
            ["scheduler.oracle has no effect with a queue order"],
        ),
        (("scheduler.oracle=perfect", "cache.eviction={_target_: mine.Eviction}"), []),
    ],
)
def test_policies_that_nothing_reaches_are_noted(options, expected):
    told = unused_settings(compose_config([*options]))
    assert [note.startswith(start) for note, start in zip(told, expected, strict=True)] == [True] * len(expected), told


def test_an_oracle_that_another_point_of_the_sweep_asks_is_not_noted():
    config = compose_config(["scheduler.oracle=noisy"])
    assert len(unused_settings(config, ["seed"])) == 1
    assert unused_settings(config, ["scheduler.queue_order"]) == []


@pytest.mark.parametrize(
    ("policy", "alike"),
    [
        ("queue_order=priority", "priority"),
        ("queue_order={_target_: testbed.policies.orders.priority, ageing_per_s: 1}", "priority"),
        ("queue_order=edf", "deadline"),
        ("queue_order=vtc", "tenant"),
        ("victim=lowest_priority", "priority"),
        ("queue_order={_target_: tests.experiments.test_unused.OwnShare}", "tenant"),
        ("victim={_target_: tests.experiments.test_unused.OwnVictim}", "priority"),
    ],
)
def test_policies_that_go_by_a_class_say_so_where_all_requests_are_of_one(policy, alike):
    config, (key, *_) = compose_config([f"scheduler.{policy}"]), policy.split("=")
    told = without_classes(config, [name for name in ClassFields.NAMES if name != alike])
    assert [note.partition("=")[0] for note in told] == [f"scheduler.{key}"]
    assert f": all requests have one {alike}" in told[0]
    assert without_classes(config, [alike]) == without_classes(config, None) == []


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_run_says_that_its_trace_has_one_class(stream, tmp_path, capsys):
    one = ["trace.num_requests=4", f"trace.stream={stream}", "scheduler.queue_order=priority"]
    label = "trace.transforms=[{name: label, classes: [{}, {priority: 1}]}]"
    said = "scheduler.queue_order=priority tells no requests apart here"
    for name, options in (("one", one), ("two", [*one, label])):
        assert main(["run", *latest(*options, f"hydra.run.dir={tmp_path / name}")]) == 0
        assert (said in capsys.readouterr().out) is (name == "one")
        notes = load_run(tmp_path / name).notes
        assert any(note.startswith(said) for note in notes) is (name == "one")
        assert all(note in (tmp_path / name / "run.log").read_text() for note in notes)


SWAPS = ("scheduler.preemption=swap",)
LINK = ("device.host_link_bytes_per_s=1e9", "device.host_link_latency_ns=9")
SWAP_KEYS = ("backend.swap_overlap", "device.host_link_latency_ns", "device.host_link_bytes_per_s")
NO_SWAPS = "scheduler.preemption=auto, which swaps only groups of sequences"


def test_settings_of_swaps_are_not_noted_where_another_point_of_the_sweep_swaps():
    config = compose_config(["backend.swap_overlap=true"])
    assert len(unused_settings(config, ["seed"])) == 1
    assert unused_settings(config, ["scheduler.preemption"]) == unused_settings(config, ["scheduler"]) == []


def test_what_has_no_effect_is_said(tmp_path, capsys):
    linear = ["cost=linear", "cost.base_s=1", "device.num_sms=9"]
    fleet = [*SWAPS, "backend.num_replicas=2", "backend.replicas_per_link=2"]
    roofline = ["cost.cuda_graphs=false", "cost.graph_launch_ns=7", "cost.logits=gather", "backend.router=random",
                "backend.router_period_ns=1000000"]  # fmt: skip
    for number, (options, expected) in enumerate((
        (linear, ["device.num_sms does not change the step times of cost=linear"]),
        (fleet, ["backend.replicas_per_link has no effect with backend.swap_overlap=false"]),
        ([*fleet, "backend.swap_overlap=true"], []),
        (["backend.swap_overlap=true", *LINK], [f"{key} has no effect with {NO_SWAPS}" for key in SWAP_KEYS]),
        (["backend.swap_overlap=true", "scheduler.preemption=recompute"],
         ["backend.swap_overlap has no effect with scheduler.preemption=recompute, which swaps nothing"]),
        (["backend.swap_overlap=true", *LINK, "sampling.n=2", "sampling.temperature=1"], []),
        (["device=l40s", "device.interconnect=pcie_host", "device.tensor_parallel_size=2",
          "device.host_link_bytes_per_s=1e9", "scheduler=prefill_first"], []),
        ([*SWAPS, "backend.swap_overlap=true", *LINK], []),
        (["device.interconnect_latency_ns=9"],
         ["device.interconnect_latency_ns has no effect with device.tensor_parallel_size=1"]),
        (["device.interconnect_latency_ns=9", "device.tensor_parallel_size=2"], []),
        (["trace.lengths_format=azure"], ["trace.lengths_format has no effect with trace.lengths_from=null"]),
        (["cache.isolate_tenants=true"],
         ["cache.isolate_tenants=true tells no requests apart here: all requests have one tenant, or none; "
          "trace.tenants, or trace.transforms=[{name: label, classes: …}], gives them classes"]),
        (["device=a100", "cost=constant"],
         ["device=a100 does not change the step times of cost=constant: its memory alone counts, for the KV blocks"]),
        (["device=a100", "cost=linear", "cost.base_s=1", "cache.num_gpu_blocks=9000"],
         ["device=a100 does not change the step times of cost=linear"]),
        (roofline, ["cost.graph_launch_ns has no effect with cost.cuda_graphs=false",
                    "cost.logits has no effect with device.tensor_parallel_size=1",
                    "backend.router has no effect with backend.num_replicas=1",
                    "backend.router_period_ns has no effect with backend.num_replicas=1"]),
        (["cost.cuda_graphs=false", "cost.max_captured_tokens=64"],
         ["cost.max_captured_tokens has no effect with cost.cuda_graphs=false"]),
        (["device=cpu", "cost.cuda_graphs=false"],
         ["cost.cuda_graphs has no effect with a CPU, which launches nothing",
          "the step times are made up: no data sheet gives a CPU's; `testbed calibrate` measures them"]),
        (["cost.filtering=sort", "sampling.top_k=5"],
         ["sampling.top_k has no effect with sampling.temperature=0, which is greedy",
          "cost.filtering has no effect with sampling that has no top_k or top_p to apply"]),
        (["cost.filtering=sort", "sampling.temperature=1", "sampling.top_p=0.9", "sampling.beam_width=2"],
         ["sampling.top_p has no effect with sampling.beam_width, which draws nothing",
          "cost.filtering has no effect with sampling that has no top_k or top_p to apply"]),
        (["scheduler.estimator.factor=0.9"],
         ["scheduler.estimator has no effect with policies that ask for no step times"]),
        (["sampling.seed=3"], ["sampling.seed has no effect with backend=sim, whose outputs are those of the trace"]),
        (["sampling.stop_token_ids=[3]", "sampling.max_tokens=4"],
         ["sampling.stop_token_ids has no effect with backend=sim, whose outputs are those of the trace",
          "sampling.max_tokens ends no output of a simulation, as the trace gives their lengths: cut them with "
          "trace.max_output_tokens. Only policies that go by a request's own limit read it"]),
        (["scheduler=sarathi", "scheduler.long_prefill_token_threshold=64"],
         ["scheduler.long_prefill_token_threshold has no effect with scheduler.max_num_partial_prefills=1"]),
        (["scheduler=sarathi", "scheduler.max_long_partial_prefills=2", "scheduler.max_num_partial_prefills=2"], []),
        (["cost=constant", "sampling.logprobs=3"], ["sampling does not change the step times of cost=constant"]),
        (["cost=linear", "device.flops_per_s=1e15", "device.memory_bytes=90000000000"],
         ["device.flops_per_s does not change the step times of cost=linear"]),
        (["cost=linear", "sampling=recommended"], ["sampling does not change the step times of cost=linear"]),
        (["cost.filtering=sort", "sampling=recommended"], []),
        (["model.dtype=fp8", "cost=constant"], []),
        (["model.dtype=fp8"],
         ["FP8 weights are multiplied in FP8, with activations quantised before (w8a8), as vLLM on this device; "
          "cost.fp8_gemms chooses; backend=real has w8a16 (docs/models.md)"]),
        (["model.dtype=fp8", "cost.fp8_gemms=w8a16"],
         ["FP8 weights are multiplied at 16 bits (w8a16), one byte read for each; "
          "cost.fp8_gemms chooses; backend=real has w8a16 (docs/models.md)"]),
        (["cost.fp8_gemms=w8a16", "device.fp8_efficiency=0.3"],
         ["cost.fp8_gemms has no effect with weights of more than 8 bits",
          "device.fp8_efficiency has no effect with weights of more than 8 bits"]),
    )):  # fmt: skip
        assert main(["run", *latest("trace.num_requests=2", *options, f"hydra.run.dir={tmp_path / str(number)}")]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
        assert [note.removeprefix("note").strip() for note in notes] == expected


def test_a_given_setting_that_another_one_overrules_is_noted(tmp_path, say):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    both = ("model=tiny", f"model.path={tmp_path}", "cache.watermark=0.1", "scheduler.watermark=0.2")
    for place, options, expected in (("all", both, 2), ("one", both[1:3], 0)):
        few = latest("trace.num_requests=2", f"hydra.run.dir={tmp_path / place}")
        said = say("run", *few, *options).success()
        notes = ("model=tiny has no effect with model.path,", "scheduler.watermark has no effect with cache.watermark,")
        assert sum(note in said for note in notes) == expected


DRAWING = """
import random
import time
from functools import wraps
from random import choice

import numpy as np

from testbed.policies.orders import KeyedQueue

mine, numpys = random.Random(3), np.random.default_rng(3)

def one():
    return random.random()

class Draws:
    def choose(self, running):
        return list(running.values())[int(one() * len(running))]

class Legacy:
    def choose(self, running):
        return list(running.values())[np.random.randint(len(running))]

class Chooses:
    def choose(self, running):
        return choice(list(running.values()))

def by_the_clock():
    return KeyedQueue(lambda seq: (time.time_ns(), seq.seq_id))

def with_seconds(function):
    @wraps(function)
    def called(self, running):
        return function(self, running, 2)

    return called

class Seeded:
    @with_seconds
    def choose(self, running, seconds):
        time.sleep(0 * seconds)
        return list(running.values())[int((mine.random() + numpys.random()) / 2 * len(running))]
"""


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("victim={_target_: drawing.Draws}", "random.random"),
        ("victim={_target_: drawing.Legacy}", "numpy.random.randint"),
        ("victim={_target_: drawing.Chooses}", "random.choice"),
        ("victim={_target_: drawing.Seeded}", ""),
        ("queue_order={_target_: drawing.by_the_clock}", "time.time_ns"),
    ],
)
def test_a_class_that_no_seed_determines_gets_a_note(tmp_path, monkeypatch, say, own, said):
    (tmp_path / "drawing.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(tmp_path)
    out = say("run", *TINY, *SHORT, f"scheduler.{own}", f"hydra.run.dir={tmp_path / 'run'}").success()
    name = own.replace("={_target_: ", "=").rstrip("}")
    assert (f"note         scheduler.{name} calls {said}, which the seed does not set" in out) == bool(said)
    assert ("the seed does not set" in out) == bool(said)
