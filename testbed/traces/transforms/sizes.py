"""Transformations of lengths. Equal prefixes stay equal."""

from __future__ import annotations

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
    """Cuts prompts and outputs at their ends. max_total_tokens (a model's length): the output is cut to this minus one
    token, then the prompt to the rest.
    """
    limits = {
        "max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens,
        "max_total_tokens": max_total_tokens,
    }  # fmt: skip
    for name, value in limits.items():
        least = 2 if name == "max_total_tokens" else 1
        require(name, value, value is None or value >= least, f"at least {least}, or absent")
    num_clipped = 0

    def rows() -> Iterator[TraceRequest]:
        nonlocal num_clipped
        num_clipped = 0
        for row in trace:
            clipped = _clipped(row, max_prompt_tokens, max_output_tokens, max_total_tokens)
            num_clipped += clipped is not row
            yield clipped

    note = "lengths clipped to " + ", ".join(f"{name}={value}" for name, value in limits.items() if value is not None)

    def counted() -> str:
        return f"{note}: those of {count(num_clipped, 'request')}"

    return derived(trace, rows, note, counted=counted, num_requests=trace.num_requests)


def _clipped(
    row: TraceRequest, max_prompt_tokens: int | None, max_output_tokens: int | None, max_total_tokens: int | None
) -> TraceRequest:
    max_output = _least(max_output_tokens, None if max_total_tokens is None else max_total_tokens - 1)
    output = row.output
    if output is not None and max_output is not None and output.num_tokens > max_output:
        output = cut_part(output, max_output)
    reserved = 1 if output is None else output.num_tokens
    max_prompt = _least(max_prompt_tokens, None if max_total_tokens is None else max_total_tokens - reserved)
    prompt = row.prompt
    if max_prompt is not None and row.num_prompt_tokens > max_prompt:
        prompt = cut_parts(prompt, max_prompt)
    return row if prompt is row.prompt and output is row.output else row._replace(prompt=prompt, output=output)


def scale_lengths(trace: S, prompt: float = 1.0, output: float = 1.0) -> S:
    """Makes prompts and outputs `prompt` and `output` times as long, at least one token each.

    Start and end of every span are scaled, so that shared prefixes stay shared in proportion. Explicit token ids can
    only be shortened, at their end. Earlier turns of a session are a part of later prompts: use the same factor for
    both if later turns are to hit the outputs of earlier ones.
    """
    for name, factor in (("prompt", prompt), ("output", output)):
        require(name, factor, 0 < factor <= 1000, "above 0, up to 1000")

    def rows() -> Iterator[TraceRequest]:
        for row in trace:
            parts = join_parts([_scaled(part, prompt, row, "prompt") for part in row.prompt])
            if not parts:
                parts = (cut_part(row.prompt[0], 1),)
            answer = row.output
            if answer is not None:
                scaled = _scaled(answer, output, row, "output")
                answer = scaled if scaled.num_tokens else cut_part(answer, 1)
            made = row._replace(prompt=parts, output=answer)
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


def _scaled(part: Part, factor: float, row: TraceRequest, name: str) -> Part:
    if isinstance(part, Span):
        start = round(part.start * factor)
        return Span(part.key, start, round((part.start + part.length) * factor) - start)
    expected = f"at most 1 for the explicit token ids of {row.place or row.request_id}: there are no more of them"
    require(name, factor, factor <= 1, expected)
    return cut_part(part, round(part.num_tokens * factor))


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
