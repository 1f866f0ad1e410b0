"""Routers: which replica of a fleet serves a request. This is decided once, at its arrival; the request stays there.

A router sees the replicas as they are at the instant of the arrival, after every step that has ended by then, and
before the steps that are planned then; with backend.router_period_ns it sees earlier counts. Ties go to the replica
with the lowest number. Random choices are hashes of the run's seed and the request's id: they depend neither on the
order of arrivals nor on other policies (common random numbers). A user's own router is a class with `route`, named by
`_target_`; see docs/simulator.md.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from xxhash import xxh64_intdigest

from testbed.checks import choose, require, require_whole
from testbed.composites import with_parts
from testbed.core.request import Request
from testbed.errors import ConfigError
from testbed.foreign_text import shown
from testbed.streams import draw


class ReplicaView(Protocol):
    """What a router may read of a replica. Reading changes nothing."""

    @property
    def number(self) -> int: ...

    @property
    def num_requests(self) -> int:
        """Requests that were sent there and have not ended."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that wait: not yet taken by its scheduler, queued, or swapped out."""
        ...

    @property
    def num_running(self) -> int:
        """Running sequences."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens so far (prompt plus generated) of all sequences that have not ended, computed or not."""
        ...

    @property
    def num_kv_blocks(self) -> int:
        """Referenced GPU blocks; cached blocks without references do not count."""
        ...

    def num_cached_tokens(self, request: Request) -> int:
        """Prompt tokens that its prefix cache holds. The lookup does not change the cache's order of eviction."""
        ...


Replicas = Sequence[ReplicaView]


class Router(Protocol):
    def route(self, request: Request, replicas: Replicas) -> int:
        """Returns the number of the replica that serves the request. Called once for each, in order of arrival."""
        ...


class RouterContext(NamedTuple):
    """The context that a router receives once, if it has a method `bind(context)`."""

    seed: int
    num_replicas: int


def bind(router: Any, context: RouterContext) -> None:
    """Passes the context to a router and to its parts, where they have a method `bind`."""
    for one in with_parts([router]):
        if hasattr(one, "bind"):
            one.bind(context)


# --- loads ---

MEASURES: Mapping[str, Callable[[ReplicaView], int]] = {
    "requests": lambda replica: replica.num_requests,
    "tokens": lambda replica: replica.num_tokens,
    "kv_blocks": lambda replica: replica.num_kv_blocks,
}


def least(replicas: Replicas, load: Callable[[ReplicaView], Any]) -> int:
    """Returns the number of the least loaded replica, the lowest number among equals."""
    return min(replicas, key=lambda replica: (load(replica), replica.number)).number


# --- policies ---


class RoundRobin:
    """One replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, replicas: Replicas) -> int:
        number = self._next % len(replicas)
        self._next = number + 1
        return number


class _Drawing:
    """Common part of the routers with random choices. Not a router itself."""

    def __init__(self) -> None:
        self._seed = 0

    def bind(self, context: RouterContext) -> None:
        self._seed = context.seed

    def _draw(self, request: Request, index: int, below: int) -> int:
        """Returns a random whole number from 0 to below - 1. It is made from 64 bits: the bias is below 1e-18."""
        return draw(self._seed, "router", index, request.request_id) % below


class Random(_Drawing):
    """A random replica, all equally likely."""

    def route(self, request: Request, replicas: Replicas) -> int:
        return self._draw(request, 0, len(replicas))


class PowerOfTwo(_Drawing):
    """The less loaded one of two different random replicas (Mitzenmacher, 2001).

    measure: requests (default), tokens or kv_blocks, as for least_loaded.
    """

    def __init__(self, measure: str = "requests") -> None:
        super().__init__()
        self._load = MEASURES[choose("measure of router power_of_two", measure, MEASURES)]

    def route(self, request: Request, replicas: Replicas) -> int:
        if len(replicas) == 1:
            return 0
        first = self._draw(request, 0, len(replicas))
        second = self._draw(request, 1, len(replicas) - 1)
        second += second >= first
        return least([replicas[first], replicas[second]], self._load)


class LeastLoaded:
    """The replica with the least load, by default in tokens.

    measure: tokens (tokens so far, prompt plus generated, of its unfinished sequences), requests (unfinished ones), or
    kv_blocks (referenced GPU blocks, so waiting requests do not count).
    """

    def __init__(self, measure: str = "tokens") -> None:
        self._load = MEASURES[choose("measure of router least_loaded", measure, MEASURES)]

    def route(self, request: Request, replicas: Replicas) -> int:
        return least(replicas, self._load)


class ShortestQueue:
    """The replica with the fewest waiting requests; of equals, with the fewest running sequences."""

    def route(self, request: Request, replicas: Replicas) -> int:
        return least(replicas, lambda replica: (replica.num_waiting, replica.num_running))


class PrefixAffinity:
    """The replica whose prefix cache holds most of the prompt, unless the fleet is out of balance.

    As the cache-aware router of SGLang, with the defaults of its command line. If the replicas' numbers of unfinished
    requests differ by more than `balance_abs_threshold`, and the largest is more than `balance_rel_threshold` times the
    smallest, it takes the replica with the fewest. Otherwise it takes the one with the longest cached prefix, if that
    is more than `cache_threshold` of the prompt, and else again the one with the fewest requests.
    SGLang's router keeps a tree of what it has sent to each worker; this one looks up the caches themselves, so evicted
    blocks do not count. If no prefix is long enough, SGLang takes the worker with the smallest tree.
    """

    def __init__(
        self, cache_threshold: float = 0.3, balance_abs_threshold: int = 64, balance_rel_threshold: float = 1.5
    ) -> None:
        share = cache_threshold
        require("cache_threshold of router prefix_affinity", share, 0 <= share <= 1, "from 0 to 1")
        apart, times = balance_abs_threshold, balance_rel_threshold
        require("balance_abs_threshold of router prefix_affinity", apart, apart >= 0, "at least 0")
        require("balance_rel_threshold of router prefix_affinity", times, times >= 1, "at least 1")
        self._share, self._most_apart, self._most_times = share, apart, times

    def route(self, request: Request, replicas: Replicas) -> int:
        loads = [replica.num_requests for replica in replicas]
        low, high = min(loads), max(loads)
        is_out_of_balance = high - low > self._most_apart and high > self._most_times * low
        if not is_out_of_balance:
            hits = [replica.num_cached_tokens(request) for replica in replicas]
            longest = max(hits)
            if longest > self._share * len(request.prompt_token_ids):
                replicas = [replicas[i] for i, hit in enumerate(hits) if hit == longest]
        return least(replicas, MEASURES["requests"])


class PrefixHash(_Drawing):
    """Prompts with the same beginning go to the same replica: rendezvous hashing of the first `num_tokens` tokens.

    It reads neither caches nor loads. If a replica is added, only its share of the prefixes moves (Thaler and
    Ravishankar, 1998).
    """

    def __init__(self, num_tokens: int = 64) -> None:
        super().__init__()
        self._num_tokens = require_whole("num_tokens of router prefix_hash", num_tokens, 1)

    def route(self, request: Request, replicas: Replicas) -> int:
        content = request.cache_salt.encode() + array("i", request.prompt_token_ids[: self._num_tokens]).tobytes()
        weights = [xxh64_intdigest(content, (self._seed << 16) + replica.number) for replica in replicas]
        return weights.index(max(weights))


class SessionSticky:
    """A session stays on the replica of its first turn. `others` routes first turns, and requests without a session.

    others: the name of a router, or a router (in a configuration: {_target_: …}). max_sessions: how many sessions are
    remembered. Beyond that, the one with the oldest last turn is forgotten: its next turn then counts as a first one.
    """

    def __init__(self, others: Any = "least_loaded", max_sessions: int = 100_000) -> None:
        if isinstance(others, str):
            others = ROUTERS[choose("others of router session_sticky", others, ROUTERS)]()
        self._others: Router = others
        if not hasattr(self._others, "route"):
            raise ConfigError(
                f"others of router session_sticky is {shown(others)}; give a router's name, or a router by _target_"
            )
        self.parts = (self._others,)
        self._max_sessions = require_whole("max_sessions of router session_sticky", max_sessions, 1)
        self._homes: OrderedDict[str, int] = OrderedDict()  # replica by session, the least recently used session first

    def route(self, request: Request, replicas: Replicas) -> int:
        session = request.session_id
        if session is None:
            return self._others.route(request, replicas)
        if session in self._homes:
            self._homes.move_to_end(session)
            return self._homes[session]
        if len(self._homes) >= self._max_sessions:
            self._homes.popitem(last=False)
        home = self._homes[session] = self._others.route(request, replicas)
        return home


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "shortest_queue": ShortestQueue,
    "power_of_two": PowerOfTwo,
    "prefix_affinity": PrefixAffinity,
    "prefix_hash": PrefixHash,
    "session_sticky": SessionSticky,
}
