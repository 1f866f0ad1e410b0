"""From the loop's events to outputs: a Recorder that follows every sequence and detects complete stop strings.

Text is decoded incrementally only if it is needed while it grows: for pieces and for stop strings. Otherwise it is
decoded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from real.text.detokenizer import ByteDetokenizer
from real.text.outputs import (
    CompletionOutput,
    Logprob,
    Piece,
    RequestMetrics,
    RequestOutput,
    TextRequest,
    TokenLogprobs,
)
from real.text.sequence_text import SequenceText
from real.text.tokenizer import Tokenizer
from testbed.core import outcome as core
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Completion, Finished, FinishReason, Outcome
from testbed.core.plan import BatchPlan
from testbed.core.request import SamplingParams
from testbed.core.sequence import Sequence


@dataclass(slots=True)
class _Member:
    """One sequence of a request. seq: None until it has emitted a token. text: None if it is decoded at the end."""

    text: SequenceText | None
    seq: Sequence | None = None
    num_shown: int = 0  # tokens that are already in pieces
    is_over: bool = False  # whether it has ended, and its last piece was made


@dataclass(slots=True)
class _Live:
    """A request that is not finished."""

    asked: TextRequest
    end_tokens: frozenset[int]  # tokens that end a sequence and are not part of its text
    is_streamed: bool
    members: dict[int, _Member] = field(default_factory=dict)  # by sequence id
    first_token_ns: int | None = None
    num_cached_tokens: int | None = None

    @property
    def has_stops(self) -> bool:
        return bool(self.asked.request.sampling.stop)


class NewText(NamedTuple):
    """What the steps since the last `take` have added."""

    pieces: list[Piece]
    outputs: list[RequestOutput]


class Collector(Recorder):
    """Turns the tokens that sequences emit into texts.

    tokenizer: None leaves all texts empty. eos_ids: tokens that end every sequence that does not ignore them.
    streams: whether to make pieces.
    """

    def __init__(
        self, requests: Seq[TextRequest], tokenizer: Tokenizer | None, eos_ids: frozenset[int], *, streams: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._streams = streams
        self._live: dict[str, _Live] = {}
        for asked in requests:
            sampling = asked.request.sampling
            ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
            self._live[asked.request.request_id] = _Live(asked, ends, streams and not is_ranked(sampling))
        self._watched: dict[int, tuple[_Live, SequenceText]] = {}  # sequences with stop strings, by id
        self._pieces: list[Piece] = []
        self._outputs: list[RequestOutput] = []

    def take(self) -> NewText:
        new = NewText(self._pieces, self._outputs)
        self._pieces, self._outputs = [], []
        return new

    # --- stop strings ---

    @property
    def has_stops(self) -> bool:
        """Whether any live sequence has stop strings."""
        return bool(self._watched)

    def planned(self, plan: BatchPlan) -> None:
        for admission in plan.admitted:
            live = self._live[admission.request_id]
            if live.num_cached_tokens is None:
                live.num_cached_tokens = admission.num_cached_tokens
            if live.has_stops:
                self._watch(live, admission.seq_id)
        for request_id in plan.swapped_in:
            live = self._live[request_id]
            for seq_id in list(live.members):
                self._watch(live, seq_id)

    def marked(self, outcome: Outcome) -> Outcome:
        """Returns the outcome with `stop` and `fork_stops` set where a stop string is complete."""
        found = self._watched.get(outcome.seq_id)
        if found is None:
            return outcome
        live, text = found
        for token in outcome.tokens:
            text.push(token)
        if text.stop is not None:
            outcome = outcome.replace(stop=FinishReason.STOP)
        if outcome.forks:
            stops = tuple(self._stop_of(live, token) for token in outcome.forks)
            outcome = outcome.replace(fork_stops=stops if any(stops) else ())
        return outcome

    def _stop_of(self, live: _Live, token: int) -> FinishReason | None:
        """Returns STOP if a sequence whose first token is this one has completed a stop string, else None."""
        text = self._new_text(live)
        text.push(token)
        return None if text.stop is None else FinishReason.STOP

    def _member(self, live: _Live, seq_id: int) -> _Member:
        member = live.members.get(seq_id)
        if member is None:
            text = self._new_text(live) if live.has_stops or live.is_streamed else None
            member = live.members[seq_id] = _Member(text)
            if live.has_stops and text is not None:
                self._watched[seq_id] = live, text
        return member

    def _watch(self, live: _Live, seq_id: int) -> None:
        """Watches a sequence that starts or returns. If it has emitted nothing, its text begins anew: its first token
        may have been in flight at its preemption, and then it samples it again."""
        if seq_id in live.members and live.members[seq_id].seq is None:
            del live.members[seq_id]
        self._member(live, seq_id)

    def _new_text(self, live: _Live) -> SequenceText:
        sampling = live.asked.request.sampling
        if self._tokenizer is None:
            return SequenceText(ByteDetokenizer(lambda token: b""), sampling, live.end_tokens)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        return SequenceText(detokenizer, sampling, live.end_tokens)

    # --- the loop's events ---

    def committed(self, step: StepView) -> None:
        for seq in step.emitters:
            live = self._live[seq.request.request_id]
            if live.first_token_ns is None:
                live.first_token_ns = step.end_ns
            member = self._member(live, seq.seq_id)
            member.seq = seq
            if member.text is not None:
                self._show(live, member, member.text, seq)

    def ended(self, finished: list[Finished], now_ns: int) -> None:
        for item in finished:
            live = self._live.pop(item.request.request_id)
            for seq_id in live.members:
                self._watched.pop(seq_id, None)
            self._outputs.append(self._output(live, item, now_ns))
            if self._streams:
                self._show_rest(live, self._outputs[-1])

    # --- pieces ---

    def _show(self, live: _Live, member: _Member, text: SequenceText, seq: Sequence) -> None:
        """Passes the sequence's new tokens to its text, and makes a piece of them."""
        for token in seq.known_tokens(seq.num_prompt_tokens + text.num_tokens, seq.num_known_tokens):
            text.push(token)
        member.is_over = seq.finish_reason is not None
        if member.is_over:
            text.finish()
            self._watched.pop(seq.seq_id, None)  # a plan in flight may sample for it once more
        if live.is_streamed:
            new = seq.known_tokens(seq.num_prompt_tokens + member.num_shown, seq.num_known_tokens).tolist()
            member.num_shown += len(new)
            self._pieces.append(_piece(live, _place(seq), text.take(), new, seq.finish_reason))

    def _show_rest(self, live: _Live, output: RequestOutput) -> None:
        """Makes the last pieces of sequences that ended between two steps, and all pieces of ranked requests, whose
        places are only known at the end."""
        shown = {_place(m.seq): m for m in live.members.values() if m.seq is not None} if live.is_streamed else {}
        for one in output.outputs:
            member = shown.get(one.index)
            if member is None or member.text is None:
                self._pieces.append(_piece(live, one.index, one.text, one.token_ids, one.finish_reason))
            elif not member.is_over:
                self._pieces.append(_piece(live, one.index, member.text.take(), [], one.finish_reason))

    # --- outputs ---

    def _output(self, live: _Live, finished: Finished, now_ns: int) -> RequestOutput:
        request, sampling = finished.request, finished.request.sampling
        ended = [
            (member, member.seq.completion)
            for _, member in sorted(live.members.items())
            if member.seq is not None and member.seq.finish_reason not in (None, FinishReason.DROPPED)
        ]
        places = [_place(member.seq) for member, _ in ended]
        if is_ranked(sampling):
            ended = sorted(ended, key=lambda item: -_score(item[1], sampling))[: sampling.n]
            places = list(range(len(ended)))
        outputs = [
            self._completion(live, place, member, completion)
            for place, (member, completion) in zip(places, ended, strict=True)
        ]
        prompt = None
        if sampling.prompt_logprobs is not None:
            pairs = zip(request.prompt_token_ids, finished.prompt_logprobs, strict=False)
            prompt = [None if one is None else self._logprobs(token, one) for token, one in pairs]
        return RequestOutput(
            request.request_id,
            live.asked.prompt,
            list(request.prompt_token_ids),
            outputs or [CompletionOutput(0, "", [], str(finished.reason))],
            RequestMetrics(request.arrival_ns, live.first_token_ns, now_ns, live.num_cached_tokens),
            finished.message,
            prompt,
        )

    def _completion(self, live: _Live, index: int, member: _Member, completion: Completion) -> CompletionOutput:
        sampling = live.asked.request.sampling
        ids, text = list(completion.token_ids), member.text
        last = ids[-1] if completion.reason is FinishReason.STOP else None
        stop_reason: str | int | None = last
        if text is not None and text.stop is not None:
            stop_reason = text.stop
        elif not sampling.ignore_eos and last in self._eos_ids:
            stop_reason = None
        if text is not None:
            text.finish()
            shown = text.text
        else:
            is_left_out = last in live.end_tokens and not sampling.include_stop_str_in_output
            shown = self._decode(ids[:-1] if is_left_out else ids, sampling)
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self._logprobs(token, one) for token, one in zip(ids, completion.logprobs, strict=True)]
        score = completion.cumulative_logprob if sampling.needs_logprobs else None
        return CompletionOutput(index, shown, ids, str(completion.reason), stop_reason, score, logprobs)

    def _decode(self, token_ids: list[int], sampling: SamplingParams) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=sampling.skip_special_tokens)

    def _logprobs(self, token: int, one: core.TokenLogprobs) -> TokenLogprobs:
        found = {token: self._logprob(token, one.logprob, one.rank)}
        for rank, (other, logprob) in enumerate(one.top, 1):
            found.setdefault(other, self._logprob(other, logprob, rank))
        return found

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        text = None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
        return Logprob(logprob, rank, text)


def is_ranked(sampling: SamplingParams) -> bool:
    """Whether only the best of a request's sequences are returned; which ones is known only at the end."""
    return sampling.num_seqs > sampling.n or sampling.beam_width > 0


def _score(completion: Completion, sampling: SamplingParams) -> float:
    """Returns the score by which the sequences of a request are ranked; larger is better."""
    if not sampling.beam_width:
        return completion.cumulative_logprob
    return completion.cumulative_logprob / float(len(completion.token_ids) ** sampling.length_penalty)


def _place(seq: Sequence | None) -> int:
    """Returns the sequence's index among the samples of its prompt; the core gives them consecutive ids."""
    assert seq is not None
    return 0 if seq.group is None else seq.seq_id - seq.group.group_id


def _piece(live: _Live, place: int, text: str, token_ids: list[int], reason: str | None) -> Piece:
    request_id = live.asked.request.request_id
    return Piece(live.asked.index, request_id, place, text, token_ids, None if reason is None else str(reason))
