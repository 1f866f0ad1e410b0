"""Fleets from the command line: their folders, routers of one's own, swaps on the link, and what is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from xxhash import xxh64_hexdigest

from experiments import simulate
from experiments.wiring.engines import fleet_digest, refuse_fleet
from real.config import RealConfig
from sim.config import SimConfig
from testbed.errors import ConfigError
from testbed.routing.config import FLEET_KEYS
from testbed.routing.routers import ROUTERS
from tests.experiments.kit import SHORT, TINY, Say, config_of, decisions_of, manifest_of, table_of

FLEET = (*TINY, *SHORT, "trace.num_requests=24", "backend.num_replicas=3", "hydra.run.dir=run")
SESSIONS = ("trace.min_turns=3", "trace.max_turns=3", "trace.closed_loop=true", "trace.think_time_s=0.002")

MINE = """
class EveryOther:
    def __init__(self, step=2):
        self.step, self.last = step, 0

    def bind(self, context):
        self.num = context.num_replicas

    def route(self, request, replicas):
        assert [replica.number for replica in replicas] == list(range(self.num))
        self.last = (self.last + self.step) % self.num
        return self.last

class Lost:
    def route(self, request, replicas):
        return "somewhere"

class Broken:
    def route(self, request, replicas):
        return request.no_such_thing

class Deaf:
    pass
"""


def steps_of(folder: Path) -> pa.Table:
    return table_of(folder, "steps").sort_by([("replica", "ascending"), ("step", "ascending")])


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_the_folder_of_a_fleet(home: Path, say: Say) -> None:
    said = say("run", *FLEET, "record.decisions=true", "backend.router=random").success()
    assert "replicas     3 by random: the busiest computed" in said
    manifest, requests, steps = manifest_of(home / "run"), table_of(home / "run"), steps_of(home / "run")
    assert (manifest["num_replicas"], manifest["router"]) == (3, "random")
    each = manifest["replicas"]
    for number, one in enumerate(each):
        own = steps.filter(pc.field("replica") == number)
        assert own["step"].to_pylist() == list(range(one["num_steps"])), "counted by each replica for itself"
        assert f"{own['digest'][-1].as_py():016x}" == one["digest"]
        assert requests.filter(pc.field("replica") == number).num_rows == one["num_sent"]
        assert [row["step"] for row in decisions_of(home / "run") if row["replica"] == number] == own[
            "step"
        ].to_pylist()
    assert manifest["num_steps"] == sum(one["num_steps"] for one in each) == steps.num_rows
    assert manifest["num_sent"] == sum(one["num_sent"] for one in each) == 24
    digests = b"".join(int(one["digest"], 16).to_bytes(8, "little") for one in each)
    assert manifest["digest"] == (home / "run" / "done").read_text().strip() == xxh64_hexdigest(digests)
    assert fleet_digest([7]) == f"{7:016x}"
    summary = summary_of(home / "run")
    assert summary["replicas"]["num"] == 3
    assert all(check["holds"] for check in summary["checks"].values()), summary["checks"]


@pytest.mark.parametrize("router", ROUTERS)
def test_a_run_repeated_makes_the_same_folder(router: str, home: Path, say: Say) -> None:
    tight = ("cache.num_gpu_blocks=14", "cache.num_cpu_blocks=24", "scheduler.preemption=swap",
             "scheduler=vllm_v0", "device.host_link_bytes_per_s=1e6", "allow_ignored=true")  # fmt: skip
    options = (*FLEET, *SESSIONS, *tight, f"backend.router={router}", "backend.swap_overlap=true",
               "backend.replicas_per_link=2", "backend.schedule_ns=1500", "backend.schedule_ns_per_seq=20")  # fmt: skip
    made = []
    for folder in ("first", "second"):
        say("run", *options, f"hydra.run.dir={folder}").success()
        requests = table_of(home / folder).sort_by("request_id")
        made.append((manifest_of(home / folder)["digest"], steps_of(home / folder), requests))
    first, second = made
    assert first[0] == second[0]
    assert first[1].equals(second[1])
    assert first[2].equals(second[2])
    steps = first[1]
    assert pc.min(steps["schedule_ns"]).as_py() >= 1500
    assert pc.sum(steps["num_swapped_out"]).as_py() > 0
    assert pc.sum(steps["swap_ns"]).as_py() > 0


def test_a_run_is_made_again_from_its_folder(home: Path, say: Say) -> None:
    router = "backend.router={_target_: testbed.routing.routers.PowerOfTwo, measure: tokens}"
    say("run", *FLEET, router).success()
    say("run", "from=run", "hydra.run.dir=again").success()
    assert manifest_of(home / "again")["digest"] == manifest_of(home / "run")["digest"]
    assert manifest_of(home / "again")["router"] == "testbed.routing.routers.PowerOfTwo"


def test_a_router_of_ones_own(home: Path, say: Say) -> None:
    say("run", *FLEET, "backend.router={_target_: mine.EveryOther}").success()
    requests = table_of(home / "run").sort_by("arrival_ns")
    assert requests["replica"].to_pylist() == [2, 1, 0] * 8
    others = "{_target_: mine.EveryOther, step: 1}"
    nested = f"backend.router={{_target_: testbed.routing.routers.SessionSticky, others: {others}}}"
    say("run", *FLEET, *SESSIONS, nested, "hydra.run.dir=sticky").success()
    table = table_of(home / "sticky").select(["session_id", "replica"]).to_pylist()
    homes = {(row["session_id"], row["replica"]) for row in table}
    assert len(homes) == len({row["session_id"] for row in table}) == 8


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("router={_target_: mine.Lost}", "router Lost sent request 'r0' to 'somewhere'; route() must return the"),
        ("router={_target_: mine.Broken}", "mine.py:20: AttributeError: 'Request' object has no attribute"),
        ("router={_target_: mine.Deaf}", "backend.router: mine.Deaf lacks route"),
        ("router=round_robbin", "backend.router is 'round_robbin'; did you mean 'round_robin'? valid: round_robin,"),
        (
            "router={_target_: testbed.routing.routers.LeastLoaded, measure: token}",
            "measure of router least_loaded is 'token'; did",
        ),
        ("num_replicas=0", "backend.num_replicas is 0; it must be from 1 to 10,000"),
        ("replicas_per_link=4", "backend.replicas_per_link is 4, more than backend.num_replicas=3; raise"),
        ("router_period_ns=5", "backend.router_period_ns is 5; it must be 0, or from 1,000,000"),
        ("schedule_ns=-1", "backend.schedule_ns is -1; it must be from 0 to"),
        ("routers=random", "unknown key 'backend.routers'; did you mean 'backend.router'?"),
    ],
)
def test_what_is_refused(option: str, message: str, home: Path, say: Say) -> None:
    error = say("run", *FLEET, f"backend.{option}").error()
    assert message in error


def test_a_tape_is_of_one_engine() -> None:
    for key, value in (("num_replicas", 2), ("swap_overlap", True), ("schedule_ns", 5)):
        with pytest.raises(ConfigError, match=f"backend.{key} is {value}, but cost=recorded replays what one real"):
            refuse_fleet(config_of(**{f"backend__{key}": value}))
    refuse_fleet(config_of())


def test_a_link_changes_nothing_without_swaps(home: Path, say: Say) -> None:
    one = (*TINY, *SHORT)
    say("run", *one, "hydra.run.dir=plain").success()
    say("run", *one, "backend.swap_overlap=true", "hydra.run.dir=link").success()
    assert steps_of(home / "plain").equals(steps_of(home / "link"))
    assert manifest_of(home / "plain")["replicas"] is manifest_of(home / "link")["replicas"] is None


def test_the_operators_of_a_fleet_add_up(home: Path, say: Say) -> None:
    """What the scheduler takes, and what hid behind the computation, are parts of their own."""
    slow = ("scheduler=vllm_v0", "scheduler.preemption=swap", "cache.num_gpu_blocks=14", "cache.num_cpu_blocks=24",
            "device.host_link_bytes_per_s=1e6", "allow_ignored=true")  # fmt: skip
    options = (
        "backend.swap_overlap=true",
        "backend.schedule_ns=700",
        "record.operators=true",
        "trace.arrival=all_at_once",
    )
    say("run", *FLEET, *slow, *options).success()
    phases = json.loads((home / "run" / "operators.json").read_text())["phases"]
    steps = steps_of(home / "run")
    assert sum(phase["ns"]["scheduler"] for phase in phases.values()) == 700 * steps.num_rows
    assert any(phase["ns"].get("link") for phase in phases.values())
    spans = sum(pc.sum(steps[f"{name}_ns"]).as_py() for name in ("schedule", "prepare", "swap", "forward", "sample"))
    assert sum(sum(phase["ns"].values()) for phase in phases.values()) == spans


def test_a_fleet_without_records_of_steps(home: Path, say: Say) -> None:
    said = say("run", *FLEET, "record.steps=false").success()
    assert "replicas     3 by round_robin: the busiest was sent 1 times the mean" in said
    replicas = summary_of(home / "run")["replicas"]
    assert replicas["imbalance"] == {"requests": 1.0, "computed_tokens": None, "busy": None}
    assert [one["num_computed_tokens"] for one in replicas["each"]] == [None] * 3
    assert [one["busy_share"] for one in replicas["each"]] == [None] * 3


def test_from_python() -> None:
    rows = [{"request_id": str(i), "arrival_time": 0.0, "prompt_tokens": 9, "output_tokens": 3} for i in range(6)]
    run = simulate(rows, backend={"num_replicas": 2, "router": "shortest_queue"}, model="tiny")
    assert run.requests.sort_values("request_id")["replica"].tolist() == [0, 1] * 3
    assert run.summary["replicas"]["imbalance"]["requests"] == 1.0


def test_what_both_backends_have_is_kept_when_the_backend_changes() -> None:
    """A repeat with from= keeps FLEET_KEYS; a key that is added to both is one of them."""
    simulated, real = ({item.name for item in fields(kind)} for kind in (SimConfig, RealConfig))
    assert simulated & real == set(FLEET_KEYS)
