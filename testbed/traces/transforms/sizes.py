"""Transformations of lengths. Equal prefixes stay equal."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator

from testbed.checks import require
from testbed.traces.parts import cut_part, cut_parts, join_parts
from testbed.traces.schema import MAX_NUM_TOKENS, Part, Span, TraceRequest
from testbed.traces.transforms.common import S, derived
from testbed.wording import count


def clip_lengths(
    trace: S,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    max_total_tokens: int | None = None,
) -> S:
    """Cuts prompts and outputs at their ends: `max_prompt_tokens`, `max_output_tokens`, `max_total_tokens`.

    max_total_tokens (a model's length): the output is cut to this minus one token, then the prompt to the rest.
    """
    limits = {
        "max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens,
        "max_total_tokens": max_total_tokens,
    }  # fmt: skip
    for name, value in limits.items():
        least = 2 if name == "max_total_tokens" else 1
        require(name, value, value is None or value >= least, f"at least {least}, or absent")
    most = [sys.maxsize if value is None else value for value in limits.values()]

    def rows() -> Iterator[TraceRequest]:
        return (_clipped(row, *most) for row in trace)

    note = "lengths clipped to " + ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)

    def counted(made: list[TraceRequest]) -> str:
        num = sum(clipped is not row for clipped, row in zip(made, trace, strict=True))
        return f"{note}: those of {count(num, 'request')}"

    return derived(trace, rows, note, counted=counted, num_requests=trace.num_requests)


def _clipped(row: TraceRequest, max_prompt: int, max_output: int, max_total: int) -> TraceRequest:
    prompt, output = row.prompt, row.output
    max_output = min(max_output, max_total - 1)
    if output is not None and output.num_tokens > max_output:
        output = cut_part(output, max_output)
    reserved = 1 if output is None else output.num_tokens
    max_prompt = min(max_prompt, max_total - reserved)
    if row.num_prompt_tokens > max_prompt:
        prompt = cut_parts(prompt, max_prompt)
    return row if prompt is row.prompt and output is row.output else row._replace(prompt=prompt, output=output)


def scale_lengths(trace: S, prompt: float = 1.0, output: float = 1.0) -> S:
    """Makes prompts and outputs `prompt` and `output` times as long, at least one token each.

    A session is one text. The answers that its later prompts repeat are scaled as outputs, so that these prompts still
    hit them; the rest is scaled by `prompt`. Each place is rounded once, by all that is before it in the prompt: errors
    do not add up over the blocks of a prompt, and shared prefixes stay shared in proportion. Explicit token ids can
    only be shortened, each part at its end.
    """
    for name, factor in (("prompt", prompt), ("output", output)):
        require(name, factor, 0 < factor <= 1000, "above 0, up to 1000")

    def rows() -> Iterator[TraceRequest]:
        scaling = _Scaling(prompt, output)
        for row in trace:
            made = scaling.scaled(row)
            for name, factor, num in (
                ("prompt", prompt, made.num_prompt_tokens),
                ("output", output, made.num_output_tokens or 0),
            ):
                if num > MAX_NUM_TOKENS:
                    where = row.place or row.request_id
                    require(name, factor, False, f"smaller: that of {where} would be above {MAX_NUM_TOKENS:,} tokens")
            yield made

    note = f"prompts x {prompt:g}, outputs x {output:g} in length"
    return derived(trace, rows, note, num_requests=trace.num_requests)


class _Scaling:
    """One pass of scale_lengths. Keeps where the answers of each session are, unless all is scaled by one factor."""

    def __init__(self, prompt: float, output: float) -> None:
        self._factors = {"prompt": prompt, "output": output}
        ratios = [factor.as_integer_ratio() for factor in (prompt, output)]
        self._one = max(one for _, one in ratios)  # a power of two: sums are exact
        self._asked, self._answered = (num * (self._one // one) for num, one in ratios)
        # session, content, place of its start -> (first, last + 1) of its tokens that were an answer
        self._answers: dict[tuple[str, int | bytes, int], set[tuple[int, int]]] = defaultdict(set)

    def scaled(self, row: TraceRequest) -> TraceRequest:
        made: list[Part] = []
        num_asked = num_answered = place = 0
        ends: dict[int, tuple[int, int]] = {}  # content -> where its last part ends in it, before and after
        for part in (*row.prompt, *(() if row.output is None else (row.output,))):
            is_output = len(made) == len(row.prompt)
            num = part.num_tokens if is_output else self._num_repeated(row.session_id, part, num_asked + num_answered)
            num_asked, num_answered = num_asked + part.num_tokens - num, num_answered + num
            end = self._rounded(num_asked, num_answered)
            name = "output" if is_output or self._factors["prompt"] <= 1 else "prompt"
            made.append(self._part(row, name, part, end - place, ends))
            place = end
        parts = join_parts(made[: len(row.prompt)]) or (cut_part(row.prompt[0], 1),)
        if row.output is None:
            return row._replace(prompt=parts)
        if row.session_id is not None and self._asked != self._answered:
            content, origin, first = _placed(row.output, row.num_prompt_tokens)
            self._answers[row.session_id, content, origin].add((first, first + row.output.num_tokens))
        return row._replace(prompt=parts, output=made[-1] if made[-1].num_tokens else cut_part(row.output, 1))

    def _rounded(self, num_asked: int, num_answered: int) -> int:
        return (num_asked * self._asked + num_answered * self._answered + self._one // 2) // self._one

    def _num_repeated(self, session: str | None, part: Part, place: int) -> int:
        """Returns how many tokens of a prompt's part are earlier answers of its session, where they were."""
        if session is None or not self._answers:
            return 0
        content, origin, first = _placed(part, place)
        answers = self._answers.get((session, content, origin), ())
        num = sum(max(0, min(end, first + part.num_tokens) - max(start, first)) for start, end in answers)
        return min(num, part.num_tokens)

    def _part(self, row: TraceRequest, name: str, part: Part, num: int, ends: dict[int, tuple[int, int]]) -> Part:
        if isinstance(part, Span):
            before, after = ends.get(part.key, (0, 0))
            start = after if before == part.start else self._rounded(part.start, 0)
            ends[part.key] = part.start + part.length, start + num
            return Span(part.key, start, num)
        expected = f"at most 1 for the explicit token ids of {row.place or row.request_id}: there are no more of them"
        require(name, self._factors[name], num <= part.num_tokens, expected)
        return cut_part(part, num)


def _placed(part: Part, place: int) -> tuple[int | bytes, int, int]:
    """Returns a part's content, the place at which that would start, and the part's first token in it."""
    return (part.key, place - part.start, part.start) if isinstance(part, Span) else (part.ids.tobytes(), place, 0)
