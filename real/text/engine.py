"""Serves live requests: requests in, pieces and outputs out, step by step.

Scheduler, prefix cache, clock and step counters continue from call to call. If a caller stops early, by Ctrl-C or by
closing the iterator, the remaining requests are aborted at the next step boundary. Their blocks are freed, and the
engine stays usable.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from real.clocks import RealTimeClock
from real.driver import Computed, Drive, Work
from real.text.collector import Collector, NewText
from real.text.outputs import TextRequest
from real.text.tokenizer import Tokenizer
from testbed.core.commands import Abort, Arrive, Event, Recorder
from testbed.core.interfaces import Backend
from testbed.core.outcome import Finished
from testbed.core.plan import BatchPlan
from testbed.core.request import Request
from testbed.core.scheduler import Scheduler
from testbed.core.sequence import Sequence as CoreSequence
from testbed.core.serve import serve
from testbed.errors import RequestError, TestbedError
from testbed.foreign_text import shown
from testbed.records.recorders import Recorders


class OneClock(RealTimeClock):
    """Continues from call to call: a new loop does not reset it."""

    def start(self) -> None:
        """Does nothing, as the clock runs already."""


class LiveInbox:
    """Requests that all arrive at once and can all be given up. A testbed.core.interfaces.Inbox. It is open while any
    of them is unfinished; meanwhile the loop pauses after each step.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = list(requests)
        self._live: dict[str, None] = {}
        self._is_giving_up = False

    @property
    def is_open(self) -> bool:
        return bool(self._waiting or self._live)

    def give_up(self) -> None:
        """Aborts every unfinished request at the next step boundary; requests that have not arrived never will."""
        self._waiting.clear()
        self._is_giving_up = True

    def due(self, now_ns: int) -> list[Event]:
        if self._is_giving_up:
            return [Abort(request_id) for request_id in self._live]
        arrived, self._waiting = self._waiting, []
        self._live.update(dict.fromkeys(request.request_id for request in arrived))
        return [Arrive(request) for request in arrived]

    def next_ns(self) -> int | None:
        return self._waiting[0].arrival_ns if self._waiting else None

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for finished in requests:
            del self._live[finished.request.request_id]


class StoppingBackend:
    """Wraps a backend and marks the outcomes that complete a stop string. collector: knows the texts.

    The core ends a sequence with a marked outcome in the same step, so no further token is computed.
    """

    def __init__(self, backend: Backend[Work], collector: Collector) -> None:
        self._backend = backend
        self._collector = collector

    def start(self, plan: BatchPlan) -> Work:
        work = self._backend.start(plan)
        self._collector.planned(plan)
        return Work(lambda: self._marked(work.wait())) if self._collector.has_stops else work

    def _marked(self, computed: Computed) -> Computed:
        if computed.outcomes is None:
            return computed
        return computed._replace(outcomes=tuple(self._collector.marked(outcome) for outcome in computed.outcomes))


class TextEngine:
    """One scheduler and one backend. tokenizer: None leaves texts empty. eos_ids: tokens that end a sequence.

    It serves one call at a time, and is not thread-safe.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Backend[Work],
        tokenizer: Tokenizer | None,
        *,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self._backend = backend
        self._eos_ids = eos_ids
        self._clock = OneClock()
        self._is_busy = False
        self._is_in_turn = False

    @property
    def now_ns(self) -> int:
        return self._clock.now_ns()

    def check(self, asked: TextRequest, vocab_size: int) -> None:
        """Raises RequestError, naming the prompt, for a request that can never be served completely."""
        request, limits = asked.request, self.scheduler.limits
        where, tokens, sampling = f"prompt {asked.index}", request.prompt_token_ids, request.sampling
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            raise RequestError(
                f"{where} has token id {shown(bad)}; the model's vocabulary has ids 0 to {vocab_size - 1}"
            )
        for token, _ in sampling.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"{where}: logit_bias names token {token}; the model's vocabulary has ids 0 to {vocab_size - 1}"
                )
        if (
            sampling.min_tokens
            and len({token for token in sampling.stop_token_ids if token < vocab_size}) == vocab_size
        ):
            raise RequestError(
                f"{where}: min_tokens is {sampling.min_tokens}, and every token of the vocabulary is among "
                "stop_token_ids; leave one out, or set min_tokens=0"
            )
        if len(tokens) > limits.max_model_len:
            raise RequestError(
                f"{where} has {len(tokens)} tokens, more than max_model_len ({limits.max_model_len}); shorten it, or "
                "raise max_model_len"
            )
        if sampling.num_seqs > min(limits.max_num_seqs, limits.max_num_batched_tokens):
            raise RequestError(
                f"{where} asks for {sampling.num_seqs} sequences, and max_num_seqs is {limits.max_num_seqs}, "
                f"max_num_batched_tokens {limits.max_num_batched_tokens}; lower n, best_of or beam_width"
            )
        if sampling.beam_width and sampling.stop:
            raise RequestError(f"{where}: beam search does not look for stop strings; use stop_token_ids, or no beams")
        if sampling.stop and self.tokenizer is None:
            raise RequestError(f"{where} has stop strings, and there is no tokenizer to find them; pass tokenizer=")
        blocks, seq = self.scheduler.blocks, CoreSequence(0, request, limits.max_model_len)
        if reason := blocks.never_fits_reason(seq):
            raise RequestError(
                f"{where} can never fit: {reason}; shorten it, or raise num_gpu_blocks or gpu_memory_utilization"
            )

    def serve(
        self, requests: Sequence[TextRequest], *, streams: bool = False, watchers: Sequence[Recorder] = ()
    ) -> Generator[NewText, None, None]:
        """Serves these requests to their end. Yields what is new after every step that made a piece or an output.

        streams: whether to make pieces. watchers: recorders that get the loop's events. Raises TestbedError if the
        engine is busy, or was stopped in the middle of a step.
        """
        if self._is_in_turn:
            raise TestbedError("the engine was stopped in the middle of a step; make a new LLM")
        if self._is_busy:
            raise TestbedError("a stream of this LLM is still open; read it to its end, or close() it")
        collector = Collector(requests, self.tokenizer, self._eos_ids, streams=streams)
        inbox = LiveInbox([asked.request for asked in requests])
        loop = serve(inbox, self.scheduler, Recorders(collector, *watchers))
        drive = Drive(loop, StoppingBackend(self._backend, collector), self._clock)
        self._is_busy = True
        try:
            while not drive.is_over:
                self._turn(drive)
                new = collector.take()
                if new.pieces or new.outputs:
                    yield new
        finally:
            if not self._is_in_turn:
                inbox.give_up()
                while not drive.is_over:
                    self._turn(drive)
            self._is_busy = False

    def _turn(self, drive: Drive) -> None:
        """Runs one step and what follows it, until the loop waits or is over."""
        with deferred():
            self._is_in_turn = True
            drive.step()
            while not (drive.is_waiting or drive.is_over):
                drive.step()
            self._is_in_turn = False


@contextmanager
def deferred() -> Iterator[None]:
    """Defers the first Ctrl-C to the end of the block, where the former handler gets it, so that a step that has begun
    is finished. A second Ctrl-C raises KeyboardInterrupt at once.

    Outside the main thread, and if Ctrl-C is ignored, nothing changes.
    """
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append((number, frame))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if pressed:
        former(*pressed[0])
