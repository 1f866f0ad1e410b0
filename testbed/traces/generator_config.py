"""The settings of a generated trace, with types and checks. A structure whose number is 0 is left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from testbed.checks import choose, require, require_type
from testbed.errors import ConfigError
from testbed.foreign_text import shortened, unknown
from testbed.traces.arrivals import ARRIVALS, ArrivalConfig
from testbed.traces.classes import check_class, relative_shares
from testbed.traces.lengths import LengthConfig
from testbed.traces.schema import MAX_NUM_TOKENS
from testbed.traces.stream import MAX_STREAMED_ROWS

THINK_TIMES = ("constant", "exponential")
_OF_ALL = ("name", "num_tenants", "tenants")  # keys that one of the tenants does not have
_MAX_ITEMS = 10_000_000


@dataclass(frozen=True, slots=True)
class FewShotConfig:
    """Prompts that begin with the worked examples of a task, after the system prompt; a session has one task."""

    num_tasks: int = 0  # 0: no examples
    num_examples: int = 5  # of each task; always the same ones in the same order
    example: LengthConfig = field(default_factory=lambda: LengthConfig(value=120.0))  # of one example
    skew: float = 1.0  # Zipf exponent of the tasks' popularity; 0: all equal

    def __post_init__(self) -> None:
        _check_count("trace.few_shot.num_tasks", self.num_tasks)
        _check_count("trace.few_shot.num_examples", self.num_examples)
        total, most = self.num_tasks * self.num_examples, f"at most {_MAX_ITEMS:,} examples in all (num_tasks of them)"
        require("trace.few_shot.num_examples", self.num_examples, total <= _MAX_ITEMS, most)
        _check_skew("trace.few_shot.skew", self.skew)


@dataclass(frozen=True, slots=True)
class RagConfig:
    """Documents that are inserted before each question, in the order found. Their popularity follows Zipf's law."""

    num_documents: int = 0  # in the store; 0: no documents
    documents_per_prompt: int = 4  # found for each question; a document that is found twice is inserted once
    document: LengthConfig = field(default_factory=lambda: LengthConfig(value=500.0, sigma=0.5))  # of one document
    skew: float = 1.0  # Zipf exponent of the documents' popularity; 0: all equal

    def __post_init__(self) -> None:
        _check_count("trace.rag.num_documents", self.num_documents)
        number = self.documents_per_prompt
        require("trace.rag.documents_per_prompt", number, 1 <= number <= 1000, "1 to 1000")
        _check_skew("trace.rag.skew", self.skew)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Agents: a turn calls tools before its answer. Each call is a separate request that continues the session."""

    min_calls: int = 0  # tool calls before the answer of a turn, uniform from min_calls to max_calls
    max_calls: int = 0  # 0: no agents
    call: LengthConfig = field(default_factory=lambda: LengthConfig(value=60.0, sigma=0.5))  # output that calls a tool
    result: LengthConfig = field(default_factory=lambda: LengthConfig(value=300.0, sigma=1.0))  # what the tool returns
    tool_time_s: float = 1.0  # mean, exponential: from the end of a call to the next request of the turn

    def __post_init__(self) -> None:
        require("trace.agent.min_calls", self.min_calls, self.min_calls >= 0, "0 or above")
        expected = f"at least min_calls ({shortened(self.min_calls)})"
        require("trace.agent.max_calls", self.max_calls, self.max_calls >= self.min_calls, expected)
        _check_count("trace.agent.max_calls", self.max_calls)
        require("trace.agent.tool_time_s", self.tool_time_s, 0 <= self.tool_time_s <= 1e9, "0 to 1e9")


@dataclass(frozen=True, slots=True)
class SyntheticConfig(ArrivalConfig):
    """What to generate. A session is a chain of turns; with max_turns=1 (and no agents) each request is independent.

    rate: of sessions, so of requests if these are independent (of tenants: see tenants_of). arrival=closed_loop:
    num_users users begin at 0. Each sends its next request think_time_s after its last one finished, forever, through
    one session after the other.
    """

    KINDS: ClassVar[tuple[str, ...]] = (*ARRIVALS, "closed_loop")
    name: str = "synthetic"
    num_requests: int = 200  # rows in all; the last session may be cut short
    num_users: int = 16  # arrival=closed_loop
    prompt: LengthConfig = field(default_factory=LengthConfig)  # new text of the first turn, without shared contents
    output: LengthConfig = field(default_factory=LengthConfig)
    turn_prompt: LengthConfig | None = None  # new text of later turns; absent: as prompt
    min_turns: int = 1  # turns of a session, uniform from min_turns to max_turns
    max_turns: int = 1
    closed_loop: bool = True  # later turns come think_time_s after the turn before finished; false: after it arrived
    think_time_s: float = 5.0  # mean
    think: str = "exponential"  # exponential, constant
    max_session_tokens: int | None = None  # a session ends before a turn that would exceed it; a first turn is cut
    num_system_prompts: int = 0  # each session begins with one of them; 0: none
    system_prompt_tokens: int = 512
    system_prompt_skew: float = 0.0  # Zipf exponent of their popularity; 0: all equal
    few_shot: FewShotConfig = field(default_factory=FewShotConfig)
    rag: RagConfig = field(default_factory=RagConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    priority: int = 0  # of every request, or of a tenant's; the lowest is the most urgent
    deadline_s: float | None = None  # after the arrival of each request
    num_tenants: int = 0  # sessions belong to tenant-0, tenant-1, ... at random; 0: no tenants
    tenants: tuple[Any, ...] = ()  # [{name, share, and any key of this group}]: each with its own settings

    def __post_init__(self) -> None:
        ArrivalConfig.__post_init__(self)
        choose("trace.think", self.think, THINK_TIMES)
        _check_count("trace.num_users", self.num_users, least=1)
        num, most = self.num_requests, MAX_STREAMED_ROWS
        require("trace.num_requests", num, num >= 1, "at least 1")
        require("trace.num_requests", num, num <= most, f"at most {most:,}")
        require("trace.min_turns", self.min_turns, self.min_turns >= 1, "at least 1")
        turns = f"at least min_turns ({shortened(self.min_turns)})"
        require("trace.max_turns", self.max_turns, self.max_turns >= self.min_turns, turns)
        require("trace.think_time_s", self.think_time_s, 0 <= self.think_time_s <= 1e9, "0 to 1e9")
        _check_count("trace.max_turns", self.max_turns, least=1)
        for name in ("num_system_prompts", "num_tenants"):
            _check_count(f"trace.{name}", getattr(self, name))
        size = self.system_prompt_tokens
        require("trace.system_prompt_tokens", size, 1 <= size <= MAX_NUM_TOKENS, f"1 to {MAX_NUM_TOKENS:,}")
        _check_skew("trace.system_prompt_skew", self.system_prompt_skew)
        limit = self.max_session_tokens
        if limit is not None:
            least = 2 + (size if self.num_system_prompts else 0)
            require("trace.max_session_tokens", limit, limit >= least, f"at least {least}, or absent")
        check_class("trace.", self.priority, self.deadline_s)
        tenants_of(self)


def tenants_of(config: SyntheticConfig) -> dict[str, SyntheticConfig]:
    """Returns each tenant's settings, by name: its own override the common ones, and it has its share of the requests.

    share: of the requests and of their rate, relative to the other tenants'. `rate` is that of sessions with the common
    number of turns: a tenant with twice as many has half as many sessions per second, so all last equally long
    (max_session_tokens, which ends sessions early, is not counted in). Raises ConfigError on a bad entry.
    """
    names: set[str] = set()
    for position, entry in enumerate(config.tenants):
        where = f"trace.tenants[{position}]"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or not entry["name"]:
            raise ConfigError(f"{where} is {entry!r}; it must be {{name: <text>, share: <number>, <key>: <value>, …}}")
        if entry["name"] in names:
            raise ConfigError(f"{where}.name is {entry['name']!r}, which another tenant has; choose another")
        names.add(entry["name"])
    shares = relative_shares("trace.tenants", [entry.get("share", 1.0) for entry in config.tenants])
    known = ["name", "share", *(item.name for item in fields(config) if item.name not in _OF_ALL)]
    found: dict[str, SyntheticConfig] = {}
    nums = _apportioned(config.num_requests, shares)
    for position, (entry, share) in enumerate(zip(config.tenants, shares, strict=True)):
        where = f"trace.tenants[{position}]"
        if not nums[position] and "num_requests" not in entry:
            raise ConfigError(
                f"{where} has a share of less than one of the {config.num_requests:,} requests; raise "
                "trace.num_requests, or its share"
            )
        own = {key: value for key, value in entry.items() if key not in ("name", "share")}
        base = replace(config, tenants=(), num_tenants=0, rate=config.rate * share, num_requests=max(1, nums[position]))
        made = overlaid(base, own, where, known)
        if "rate" not in own:
            made = replace(made, rate=base.rate * (_mean_requests(config) / _mean_requests(made)))
        found[entry["name"]] = made
    return found


def _apportioned(num: int, shares: Sequence[float]) -> list[int]:
    """Returns whole numbers in these shares with the sum `num`, by the largest remainders."""
    parts = [num * share for share in shares]
    found = [int(part) for part in parts]
    for position in sorted(range(len(parts)), key=lambda i: found[i] - parts[i])[: num - sum(found)]:
        found[position] += 1
    return found


TURNS = ("min_turns", "max_turns", "agent")  # what the number of a session's requests depends on


def _mean_requests(config: SyntheticConfig) -> float:
    """Returns how many requests a session has on average, if no limit ends it early."""
    return (config.min_turns + config.max_turns) / 2 * (1 + (config.agent.min_calls + config.agent.max_calls) / 2)


def overlaid(base: Any, values: Mapping[str, Any], where: str, known: Collection[str] = ()) -> Any:
    """Returns a config whose keys `values` override, nested ones key by key. Raises ConfigError at an unknown key.
    known: the valid keys; by default all."""
    cls: type = type(base)
    names = known or [item.name for item in fields(base)]
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(unknown(f"unknown key '{where}.{key}'", str(key), names))
        present = getattr(base, key)
        kinds = get_args(_hints(cls)[key])  # the types of a key that may be absent; else empty
        if value is None and NoneType in kinds:
            changed[key] = None
            continue
        if LengthConfig in kinds and present is None:
            present = LengthConfig()  # turn_prompt
        if is_dataclass(present):
            expected = f"a group with keys of {', '.join(item.name for item in fields(present))}"
            require(f"{where}.{key}", value, isinstance(value, Mapping), expected)
            value = overlaid(present, value, f"{where}.{key}")
        else:
            require_type(f"{where}.{key}", value, _hints(cls)[key])
        changed[key] = value
    try:
        return replace(base, **changed)
    except ConfigError as error:  # a value out of range; what it belongs to is known here
        group, _, said = str(error).partition(".")
        is_named = group not in ("trace", "lengths") or str(error).startswith(where)
        raise ConfigError(str(error) if is_named else f"{where}.{said}") from None


_hints = cache(get_type_hints)


def _check_count(name: str, value: int, least: int = 0) -> None:
    require(name, value, least <= value <= _MAX_ITEMS, f"{least} to {_MAX_ITEMS:,}")


def _check_skew(name: str, value: float) -> None:
    require(name, value, 0 <= value <= 100, "0 to 100")
