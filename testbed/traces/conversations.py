"""Contents of generated sessions: each request's prompt is the session so far (prompt and output), plus new text.

A session's own text is one content, cut into spans. System prompts, examples and documents are contents that sessions
share. Knows no arrival times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from testbed.errors import ConfigError
from testbed.traces.draws import Stream, endless, whole_numbers, zipf_ranks
from testbed.traces.generator_config import SyntheticConfig
from testbed.traces.lengths import Cuts, JointLengths, LengthConfig, endless_lengths, length_stream
from testbed.traces.schema import MAX_NS, Part, Span
from testbed.traces.synthesis import content_key


class SessionDraw(NamedTuple):
    """The random numbers of one session."""

    num_turns: int
    system: int
    task: int
    tenant: int


class RowDraw(NamedTuple):
    """The random numbers of one request; its place in the session decides which of them it uses."""

    prompt: int
    turn_prompt: int
    output: int
    think_ns: int
    num_calls: int
    call: int
    result: int
    tool_ns: int
    documents: tuple[int, ...]


class Said(NamedTuple):
    """One request of a session. wait_ns: since the request before it finished (closed loop) or arrived (open loop)."""

    prompt: tuple[Part, ...]
    output: Span
    wait_ns: int


def length_configs(config: SyntheticConfig) -> dict[str, LengthConfig]:
    """Returns the length distributions that a config uses, by the name of their setting."""
    return {
        "prompt": config.prompt,
        "output": config.output,
        **({"turn_prompt": config.turn_prompt} if config.turn_prompt and config.max_turns > 1 else {}),
        **({"agent.call": config.agent.call, "agent.result": config.agent.result} if config.agent.max_calls else {}),
        **({"rag.document": config.rag.document} if config.rag.num_documents else {}),
        **({"few_shot.example": config.few_shot.example} if config.few_shot.num_tasks else {}),
    }


def session_draws(config: SyntheticConfig, rng: Stream) -> Iterator[SessionDraw]:
    """Returns endless draws; each purpose has its own random stream."""
    columns = (
        whole_numbers(config.min_turns, config.max_turns, rng("turns")),
        zipf_ranks(max(1, config.num_system_prompts), config.system_prompt_skew, rng("system_prompt")),
        zipf_ranks(max(1, config.few_shot.num_tasks), config.few_shot.skew, rng("task")),
        whole_numbers(0, max(0, config.num_tenants - 1), rng("tenant")),
    )
    return map(SessionDraw._make, zip(*columns, strict=False))


def row_draws(config: SyntheticConfig, rng: Stream, joint: JointLengths | None) -> Iterator[RowDraw]:
    """Returns endless draws; each purpose has its own random stream, so its values do not depend on other settings."""
    agent = config.agent
    waits = (
        _waits(config.think_time_s, config.think, rng("think")),
        whole_numbers(agent.min_calls, agent.max_calls, rng("calls")) if agent.max_calls else repeat(0),
        endless_lengths(agent.call, rng("call"), "trace.agent.call") if agent.max_calls else repeat(0),
        endless_lengths(agent.result, rng("result"), "trace.agent.result") if agent.max_calls else repeat(0),
        _waits(agent.tool_time_s, "exponential", rng("tool_time")) if agent.max_calls else repeat(0),
    )
    columns = (
        length_stream(config.prompt, "prompt", 0, rng, joint),
        length_stream(config.turn_prompt or config.prompt, "turn_prompt", 0, rng, joint),
        length_stream(config.output, "output", 1, rng, joint),
        *waits,
        _documents(config, rng),
    )
    return map(RowDraw._make, zip(*columns, strict=False))


def _waits(mean_s: float, kind: str, rng: np.random.Generator) -> Iterator[int]:
    mean_ns = mean_s * 1e9
    if kind == "constant":
        return repeat(round(mean_ns))
    return endless(lambda num: np.rint(np.minimum(rng.standard_exponential(num) * mean_ns, MAX_NS)).astype(np.int64))


def _documents(config: SyntheticConfig, rng: Stream) -> Iterator[tuple[int, ...]]:
    """Returns the documents found for each request, without repetitions, in the order found."""
    if not config.rag.num_documents:
        return repeat(())
    ranks = zipf_ranks(config.rag.num_documents, config.rag.skew, rng("document"))
    found = zip(*(ranks,) * config.rag.documents_per_prompt, strict=False)
    return (tuple(dict.fromkeys(documents)) for documents in found)


@dataclass(frozen=True, slots=True)
class Library:
    """The contents that sessions share, as spans."""

    systems: tuple[Span, ...]
    tasks: tuple[Span, ...]
    documents: tuple[Span, ...]

    @classmethod
    def of(cls, config: SyntheticConfig, seed: int, rng: Stream, cuts: Cuts) -> Library:
        """Makes the contents. All tenants of one seed share content i of a kind, up to the shorter of their lengths."""

        def keyed(kind: str, sizes: list[int]) -> tuple[Span, ...]:
            return tuple(Span(content_key(kind, seed, i), 0, size) for i, size in enumerate(sizes) if size)

        def sizes(name: str, lengths: LengthConfig, purpose: str, num: int) -> list[int]:
            drawn = islice(endless_lengths(lengths, rng(purpose), f"trace.{name}"), num)
            return [cuts.count(name, length) for length in drawn]

        shots, rag, each = config.few_shot, config.rag, config.few_shot.num_examples
        examples = sizes("few_shot.example", shots.example, "example", shots.num_tasks * each)
        tasks = [sum(examples[start : start + each]) for start in range(0, len(examples), each or 1)]
        documents = sizes("rag.document", rag.document, "document_length", rag.num_documents)
        systems = [config.system_prompt_tokens] * config.num_system_prompts
        return cls(
            keyed("synthetic-system", systems), keyed("synthetic-task", tasks), keyed("synthetic-doc", documents)
        )


class Conversation:
    """One growing session. `say` returns its next request, or None when the session is over."""

    def __init__(self, config: SyntheticConfig, library: Library, draw: SessionDraw, key: int, cuts: Cuts) -> None:
        self._config = config
        self._cuts = cuts
        self._later = "prompt" if config.turn_prompt is None else "turn_prompt"
        self._library = library
        self._key = key
        self._parts: list[Part] = []  # the session so far, outputs included
        if library.systems:
            self._parts.append(library.systems[draw.system])
        if library.tasks:
            self._parts.append(library.tasks[draw.task])
        self._num_tokens = sum(part.num_tokens for part in self._parts)
        self._text = 0  # tokens of the session's own content so far
        self._turns_left = draw.num_turns
        self._calls_left = 0
        self._is_first = True

    def say(self, draw: RowDraw) -> Said | None:
        """Returns the next request. None: the session has ended, and `draw` was not used."""
        is_call_result = self._calls_left > 0
        if not is_call_result and not self._turns_left:
            return None
        documents: tuple[Span, ...] = ()
        if is_call_result:
            text, drawn, wait_ns, num_calls = "agent.result", draw.result, draw.tool_ns, self._calls_left - 1
        else:
            documents = tuple(self._library.documents[i] for i in draw.documents)
            text, drawn = ("prompt", draw.prompt) if self._is_first else (self._later, draw.turn_prompt)
            wait_ns, num_calls = draw.think_ns, draw.num_calls
        answer, drawn_output = ("agent.call", draw.call) if num_calls else ("output", draw.output)
        new, output = self._cuts.at_most(text, drawn), self._cuts.at_most(answer, drawn_output)
        limit = self._config.max_session_tokens
        if limit is not None:
            before = self._num_tokens + sum(document.length for document in documents)
            wanted = before + new + output
            if not self._is_first and wanted > limit:
                self._turns_left = self._calls_left = 0
                return None
            if limit - before < 2:
                documents, before = (), self._num_tokens  # a first turn whose documents do not fit
            if limit - before < 2:
                raise ConfigError(
                    f"trace.max_session_tokens is {limit}, and {before} tokens stand before the question; raise it"
                )
            output = min(output, limit - before - 1)
            new = min(new, limit - before - output)
            self._cuts.num_first_cut += before + new + output < wanted
        self._cuts.count(text, drawn)  # counted here, as the lengths are used only now
        self._cuts.count(answer, drawn_output)
        self._calls_left = num_calls
        self._turns_left -= not is_call_result
        self._is_first = False
        return self._grow(documents, new, output, wait_ns)

    def _grow(self, documents: tuple[Span, ...], new: int, output: int, wait_ns: int) -> Said:
        parts, key, text = self._parts, self._key, self._text
        parts.extend(documents)
        last = parts[-1] if parts else None
        if isinstance(last, Span) and last.key == key:
            parts[-1] = Span(key, last.start, last.length + new)
        else:
            parts.append(Span(key, text, new))
        prompt = tuple(parts)
        last = parts[-1]
        parts[-1] = Span(key, text + new - last.num_tokens, last.num_tokens + output)
        self._text = text + new + output
        self._num_tokens += sum(document.length for document in documents) + new + output
        return Said(prompt, Span(key, text + new, output), wait_ns)
