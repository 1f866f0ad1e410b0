"""One world: a scheduler, random requests, aborts and steps, and sessions that go on with what they were answered.

Everything is drawn from one generator, in an order that only the scheduler's public answers decide: the rows of a plan
and the requests that ended. So equal decisions lead to the same world.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import NamedTuple

from testbed.core.outcome import Finished, FinishReason
from testbed.core.plan import BatchPlan, PreemptionMode
from testbed.core.request import Request
from tests.golden.outcomes import draw, result_of
from tests.properties.setups import NS_PER_S, VOCAB_SIZE, Setup, random_request

MAX_PATIENCE = 400  # steps in which what is left may end by itself; then it is aborted
MAX_TURNS = 4
RUNNING, WAITING, SWAPPED = "running", "waiting", "swapped"

FLAGS = {  # what happened in a world, as letters in its record
    "s": "preempted by swap",
    "r": "preempted by recompute",
    "i": "swapped in",
    "c": "copied on write",
    "h": "hit the prefix cache",
    "x": "ended as ignored",
    "n": "parallel samples",
    "b": "beams",
    "d": "dropped a beam",
    "f": "forced outputs",
    "p": "stopped by the device",
    "t": "went on with a session",
    "u": "tenants",
    "k": "cache salts",
    "W": "aborted what waited",
    "R": "aborted what ran",
    "S": "aborted what was swapped out",
    "m": "sliding window",
    "l": "lookahead",
    "w": "weak hashes",
    "o": "block ids decide",
    "e": "did not end by itself",
}
_OF_PLACE = {WAITING: "W", RUNNING: "R", SWAPPED: "S"}


class Record(NamedTuple):
    """What is kept of a world. flags: of FLAGS, in their order."""

    digest: str
    num_steps: int
    flags: str


class World:
    """watch: is told every call and every step, in one line each."""

    def __init__(self, number: int, setup: Setup, watch: Callable[[str], None] | None = None) -> None:
        self.scheduler = setup.scheduler()
        self._rng = random.Random(f"golden/{number}")
        self._watch = watch
        self._now_ns = 0
        self._live: dict[str, Request] = {}
        self._places: dict[str, str] = {}  # of live requests, as the plans tell
        self._turns: list[tuple[int, Request]] = []  # (operation from which it is there, next turn of a session)
        self._num_requests = self._num_operations = 0
        self._share_followed = self._rng.choice((0.0, 0.3, 0.7))
        self._flags = {
            letter
            for letter, is_so in (
                ("m", setup.window is not None),
                ("l", setup.lookahead > 0),
                ("w", setup.num_hashes is not None and setup.caching),
                ("o", setup.ids_decide),
            )
            if is_so
        }

    def run(self) -> Record:
        """A random mix of operations, then the rest of the work: by itself, or with aborts where it does not end."""
        rng = self._rng
        share_added, share_aborted = rng.choice((0.15, 0.3, 0.5)), rng.choice((0.0, 0.03, 0.1))
        for _ in range(rng.randint(10, 80)):
            self._operate(share_added, share_aborted)
        for _ in range(MAX_PATIENCE):
            if not (self.scheduler.has_work or self._turns):
                break
            self._operate(0.0, 0.0)
        if self._live:
            self._flags.add("e")
        for name in list(self._live):
            self._abort(name)
        flags = "".join(letter for letter in FLAGS if letter in self._flags)
        return Record(f"{self.scheduler.digest:016x}", self.scheduler.num_steps, flags)

    def _operate(self, share_added: float, share_aborted: float) -> None:
        self._num_operations += 1
        due = [request for operation, request in self._turns if operation <= self._num_operations]
        self._turns = [item for item in self._turns if item[0] > self._num_operations]
        for request in due:
            self._add(request.replace(arrival_ns=self._now_ns))
        choice = self._rng.random()
        if choice < share_added:
            self._add(random_request(self._rng, self._new_name(), self._now_ns))
        elif choice >= share_added + share_aborted:
            self._step()
        elif self._live:
            self._abort(self._rng.choice(self._candidates()))

    def _candidates(self) -> list[str]:
        """Who may be aborted: in half of the cases what is swapped out alone, as that is rare."""
        swapped = [name for name, place in self._places.items() if place == SWAPPED]
        return swapped if swapped and self._rng.random() < 0.5 else list(self._live)

    def _new_name(self) -> str:
        self._num_requests += 1
        return f"r{self._num_requests}"

    # --- calls ---

    def _add(self, request: Request) -> None:
        name, sampling = request.request_id, request.sampling
        self._tell(f"add {name}: {len(request.prompt_token_ids)} tokens")
        self.scheduler.add(request)
        self._live[name], self._places[name] = request, WAITING
        self._note("n", sampling.num_seqs > 1 and not sampling.beam_width)
        self._note("b", sampling.beam_width > 1)
        self._note("f", request.forced_output is not None and sampling.beam_width <= 1)
        self._note("u", request.tenant is not None)
        self._note("k", request.cache_salt != "")

    def _abort(self, name: str) -> None:
        self._tell(f"abort {name}, {self._places[name]}")
        self._flags.add(_OF_PLACE[self._places[name]])
        self.scheduler.abort(name, self._now_ns)
        del self._live[name], self._places[name]

    def _step(self) -> None:
        scheduler = self.scheduler
        self._now_ns += self._rng.randrange(3) * NS_PER_S
        if not scheduler.has_work:
            return
        plan = scheduler.plan(self._now_ns)
        if plan.is_empty:
            self._tell("an empty plan")
            return
        rows = plan.scheduled
        said = self._watch is not None and _describe(plan, scheduler.blocks.num_free_blocks)
        outcomes = draw(rows, self._rng)
        self._now_ns += 1
        finished = scheduler.commit(result_of(self._now_ns, outcomes), self._now_ns)
        self._tell(f"{scheduler.num_steps} {scheduler.digest:016x} {said}")
        self._follow(plan)
        self._note("d", any(outcome.dropped for outcome in outcomes or ()))
        self._note("p", any(outcome.stop is not None for outcome in outcomes or ()))
        for item in finished:
            self._end(item)

    # --- what came of it ---

    def _end(self, finished: Finished) -> None:
        """A request has ended; with some probability its session goes on after a while."""
        request = finished.request
        self._tell(f"ended {request.request_id}: {finished.reason.value}, {finished.num_output_tokens} tokens")
        del self._live[request.request_id], self._places[request.request_id]
        self._note("x", finished.reason is FinishReason.IGNORED)
        turn = (request.turn or 0) + 1
        if finished.reason not in (FinishReason.STOP, FinishReason.LENGTH) or turn >= MAX_TURNS:
            return
        if self._rng.random() < self._share_followed:
            self._flags.add("t")
            self._turns.append((self._num_operations + self._rng.randint(1, 6), self._next_turn(finished, turn)))

    def _next_turn(self, finished: Finished, turn: int) -> Request:
        """The old prompt, what was answered, and a few new tokens."""
        before, rng = finished.request, self._rng
        new = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 5))]
        return random_request(rng, self._new_name(), self._now_ns).replace(
            prompt_token_ids=array("i", [*before.prompt_token_ids, *finished.output_token_ids, *new]),
            session_id=before.session_id or before.request_id,
            turn=turn,
            tenant=before.tenant,
            cache_salt=before.cache_salt,
        )

    def _follow(self, plan: BatchPlan) -> None:
        """Where the requests are now; of the sequences of a group, where the plan last moved one."""
        names = {item.seq_id: item.request_id for item in plan.admitted}
        for victim in plan.preempted:
            is_swap = victim.mode is PreemptionMode.SWAP
            self._flags.add("s" if is_swap else "r")
            self._places[victim.request_id] = SWAPPED if is_swap else WAITING
        for name in [*names.values(), *plan.swapped_in]:
            self._places[name] = RUNNING
        self._note("i", bool(plan.swapped_in))
        self._note("c", bool(plan.copies))
        self._note("h", any(item.num_cached_tokens for item in plan.admitted))

    def _note(self, letter: str, is_so: bool) -> None:
        if is_so:
            self._flags.add(letter)

    def _tell(self, line: str) -> None:
        if self._watch is not None:
            self._watch(line)


def _describe(plan: BatchPlan, num_free_blocks: int) -> str:
    """A plan in one line: rows as sequence:start+tokens, and what else it decided. No block ids: they may differ."""
    parts = ["rows " + " ".join(f"{row.seq_id}:{row.start}+{row.num_tokens}" for row in plan.scheduled)]
    parts += [f"admitted {item.seq_id} ({item.num_cached_tokens} cached)" for item in plan.admitted]
    parts += [f"preempted {item.seq_id} by {item.mode.value}" for item in plan.preempted]
    parts += [f"swapped in {name}" for name in plan.swapped_in]
    parts += [f"ignored {item.seq_id}" for item in plan.ignored]
    moved = (len(plan.swap_out), len(plan.swap_in), len(plan.copies))
    parts += [f"blocks out, in, copied {moved}"] if any(moved) else []
    parts += [f"blocked by {plan.blocked_by.value}"] if plan.blocked_by is not None else []
    return ", ".join([*parts, f"free {num_free_blocks}"])
