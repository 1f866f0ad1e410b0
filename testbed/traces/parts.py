"""Operations on the parts of a prompt: join, cut. Pure functions that make no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.traces.schema import Part, Span, TokenIds


def join_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Returns the same content with adjacent spans of one content joined, and empty parts left out."""
    joined: list[Part] = []
    for part in parts:
        if part.num_tokens == 0:
            continue
        last = joined[-1] if joined else None
        if (
            isinstance(part, Span)
            and isinstance(last, Span)
            and last.key == part.key
            and last.start + last.length == part.start
        ):
            joined[-1] = Span(last.key, last.start, last.length + part.length)
        else:
            joined.append(part)
    return tuple(joined)


def whole_runs(parts: Sequence[Part]) -> list[Part]:
    """Returns the same content as join_parts, with explicit ids joined too: the parts do not depend on how it was
    cut."""
    runs: list[Part] = []
    for part in join_parts(parts):
        last = runs[-1] if runs else None
        if isinstance(part, Span):
            runs.append(part)
        elif isinstance(last, TokenIds):
            last.ids.extend(part.ids)
        else:
            runs.append(TokenIds(part.ids[:]))  # a copy, as it may grow
    return runs


def cut_parts(parts: Sequence[Part], max_tokens: int) -> tuple[Part, ...]:
    """Returns the first `max_tokens` tokens of a content."""
    kept: list[Part] = []
    room = max_tokens
    for part in parts:
        if room <= 0:
            break
        kept.append(part if part.num_tokens <= room else cut_part(part, room))
        room -= part.num_tokens
    return tuple(kept)


def cut_part(part: Part, max_tokens: int) -> Part:
    """Returns the first `max_tokens` tokens of a part."""
    if isinstance(part, Span):
        return Span(part.key, part.start, min(part.length, max_tokens))
    return TokenIds(part.ids[:max_tokens])
