"""Converts one record of the testbed's own schema to a row: checks every field, and makes synthetic contents of counts.

docs/traces.md documents the fields, and a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from testbed.core.sampling import SamplingParams
from testbed.errors import TraceError
from testbed.traces.parts import join_parts
from testbed.traces.readers import fields as check
from testbed.traces.readers.fields import listed
from testbed.traces.schema import MAX_NUM_TOKENS, MAX_PRIORITY, Part, Span, TokenIds, TraceRequest
from testbed.traces.synthesis import content_key

FIELDS = (
    "request_id",
    "arrival_time",
    "prompt_token_ids",
    "prompt_tokens",
    "output_token_ids",
    "output_tokens",
    "priority",
    "tenant",
    "session_id",
    "turn",
    "think_time",
    "cancel_after",
    "deadline",
    "cache_salt",
    "max_tokens",
)
EXACT_FIELDS = ("arrival_ns", "think_ns", "cancel_after_ns", "deadline_ns", "prompt_parts", "output_part")
KNOWN = frozenset((*FIELDS, *EXACT_FIELDS))
_TIMES = {  # <name>_ns: the field in seconds
    "arrival": "arrival_time",
    "think": "think_time",
    "cancel_after": "cancel_after",
    "deadline": "deadline",
}
_EXACT = {field: f"{name}_ns" for name, field in _TIMES.items()}
_UNIT = re.compile(r"(\w+?)(?:_time)?_(?:[mu]?s|m?secs?|millis|(?:milli|micro)?seconds|minutes|hours)")
_MISSPELT = 0.85  # similarity (difflib) to a known field from which an unknown one is taken for a misspelling
FOREIGN = {  # trace=<name>: fields by which a file of another schema is recognised
    "azure": {"TIMESTAMP", "ContextTokens"},
    "burstgpt": {"Timestamp", "Request tokens"},
    "bailian": {"chat_id", "hash_ids"},
    "mooncake": {"timestamp", "hash_ids"},
    "sharegpt": {"conversations"},
    "lengths": {"num_prefill_tokens", "num_decode_tokens"},
}
SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_OTHER_NAMES = "say what has another name: trace.columns={arrival_time: <its name>, …}"
_KEY = re.compile("[0-9a-f]{16}")


@dataclass(slots=True)
class Draft:
    """A row whose synthetic contents are not made yet, as they depend on the turn before."""

    row: TraceRequest
    num_prompt_tokens: int | None  # a count without content; None: the row has its content
    num_output_tokens: int | None
    clock: str | None = None  # of its arrival, as `fields.arrival` calls it; None: it has none


def row_from_fields(fields: dict[str, Any], place: str) -> TraceRequest:
    """Returns the row of a single record: counts become content keyed by request_id, without regard to sessions.

    Raises TraceError on a bad value, with `place` and the field.
    """
    return fill(read_draft(fields, place, ""), None)


def read_draft(fields: dict[str, Any], place: str, default_id: str) -> Draft:
    """Checks every field of a record, and returns the row; counts stay counts. default_id: if the record has no id."""
    given = {name: value for name, value in fields.items() if value is not None}
    if KNOWN.isdisjoint(given):
        raise _unknown_fields(given, place)
    for name in given:
        if name in KNOWN or (ours := meant(name)) is None:
            continue
        if ours not in given and _EXACT.get(ours) not in given:
            unit = ", in seconds" if ours in _EXACT else ""
            raise TraceError(
                f"{place}: field {name!r} is not known; did you mean {ours!r}{unit}? (trace.columns={{{ours}: "
                f"{name}}} says so; {ours}: null, that it is a field of your own)"
            )
    request_id = check.name_text(given.get("request_id", default_id), place, "request_id")
    prompt, num_prompt = _content(given, place, "prompt")
    output, num_output = _content(given, place, "output")
    if not prompt and num_prompt is None:
        raise TraceError(
            f"{place}: neither 'prompt_token_ids' nor 'prompt_tokens' is given; expected one of them, "
            f"found {listed(given)}{_foreign_hint(given) or '; ' + _OTHER_NAMES}"
        )
    think_ns = _optional_ns(given, place, "think")
    arrival_ns, clock = _arrival(given, place)
    if clock is None and think_ns is None:
        raise TraceError(
            f"{place}: field 'arrival_time' is missing; found {listed(given)}. "
            f"Expected it in every row but closed-loop turns (think_time); {_OTHER_NAMES}"
        )
    row = TraceRequest(
        request_id=request_id,
        arrival_ns=arrival_ns,
        prompt=prompt,
        output=output[0] if output else None,
        priority=_optional_whole(given, place, "priority", -MAX_PRIORITY - 1, MAX_PRIORITY) or 0,
        tenant=_optional_name(given, place, "tenant"),
        session_id=_optional_name(given, place, "session_id"),
        turn=_optional_whole(given, place, "turn", 0, 2**31 - 1),
        think_ns=think_ns,
        cancel_after_ns=_optional_ns(given, place, "cancel_after"),
        deadline_ns=_optional_ns(given, place, "deadline"),
        cache_salt=_optional_name(given, place, "cache_salt"),
        max_tokens=check.token_count(given["max_tokens"], place, "max_tokens") if "max_tokens" in given else None,
        place=place,
    )
    return Draft(row, num_prompt, num_output, clock)


def foreign_format(names: Iterable[str]) -> str | None:
    """Returns the format of READERS that has these fields; None if there is none, or a field is the testbed's own."""
    found = set(names)
    if found & KNOWN - {"turn"}:  # Bailian's rows have one, too
        return None
    return next((name for name, marks in FOREIGN.items() if marks <= found), None)


def _foreign_hint(names: Iterable[str]) -> str:
    foreign = foreign_format(names)
    return "" if foreign is None else f"; read it with trace={foreign}"


def ignored_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Returns a note on those of the fields that are not read; none if all are."""
    unread = [name for name in names if name not in KNOWN]
    sampling = [name for name in unread if name in SAMPLING]
    if not unread:
        return ()
    hint = f"; sampling is set for the whole run, as sampling.{sampling[0]}" if sampling else ""
    return (f"ignored fields: {', '.join(name or 'one without a name' for name in unread)}{hint}",)


@cache
def meant(name: str) -> str | None:
    """Returns the known field of which `name` is probably a misspelling, or the same in another unit (`think_ms`);
    None: it is a field of another schema, which may add words to a known name (`max_output_tokens`)."""
    from difflib import get_close_matches  # seldom needed

    said = name.lower().replace(" ", "_").removeprefix("num_")
    if (found := _UNIT.fullmatch(said)) is not None and found[1] in _TIMES:
        return _TIMES[found[1]]
    said = said.removesuffix("_s")
    for match in get_close_matches(said, (*FIELDS, *EXACT_FIELDS), cutoff=_MISSPELT):
        has_same_words = match.count("_") == said.count("_") or match.replace("_", "") == said.replace("_", "")
        if has_same_words and match.endswith("_ns") == said.endswith("_ns"):
            return match
    return None


def _unknown_fields(given: dict[str, Any], place: str) -> TraceError:
    """Returns the error for a record of another schema, with a hint at its format."""
    is_csv = all(isinstance(value, str) for value in given.values())
    hint = _foreign_hint(given) or (check.header_hint(list(given)) if is_csv else "") or f"; {_OTHER_NAMES}"
    shown = listed(map(repr, given)) or "nothing"
    return TraceError(f"{place}: no known field; expected arrival_time, prompt_tokens, …, found {shown}{hint}")


def _content(given: dict[str, Any], place: str, side: str) -> tuple[tuple[Part, ...], int | None]:
    """Returns (parts, None) for explicit content, ((), count) for a count, ((), None) if nothing is given."""
    ids_field, count_field = f"{side}_token_ids", f"{side}_tokens"
    exact_field = "prompt_parts" if side == "prompt" else "output_part"
    count = given.get(count_field)
    num_tokens = None if count is None else check.token_count(count, place, count_field)
    if exact_field in given:
        parts = _parts(given[exact_field], place, exact_field)
        total = sum(part.num_tokens for part in parts)
        if num_tokens is not None and num_tokens != total:
            raise check.refuse(place, count_field, count, f"{total}, the length of {exact_field!r}, or absent")
        return parts, None
    if ids_field in given:
        if num_tokens is not None:
            raise TraceError(f"{place}: both {ids_field!r} and {count_field!r} are given; expected one of them")
        return (TokenIds(check.token_ids(given[ids_field], place, ids_field)),), None
    return (), num_tokens


def _parts(value: object, place: str, field: str) -> tuple[Part, ...]:
    """Returns parts as serialize writes them: {"span": [key in hex, start, length]} or {"ids": [...]}."""
    expected = (
        'parts as {"span": ["<16 hex digits>", start (to 2**62), '
        f'length (to {MAX_NUM_TOKENS:,})]}} or {{"ids": [...]}}'
    )
    if isinstance(value, str):  # a cell of a CSV or Parquet file
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise check.refuse(place, field, value, expected) from None
    items = [value] if field == "output_part" else value
    if not isinstance(items, list) or not items:
        raise check.refuse(place, field, value, expected)
    parts: list[Part] = []
    for item in items:
        span = item.get("span") if isinstance(item, dict) else None
        if isinstance(item, dict) and "ids" in item:
            parts.append(TokenIds(check.token_ids(item["ids"], place, field)))
        elif isinstance(span, list) and len(span) == 3 and isinstance(span[0], str):
            if _KEY.fullmatch(span[0]) is None:
                raise check.refuse(place, field, item, expected)
            start = check.whole_number(span[1], place, field, 0, 2**62, expected)
            length = check.whole_number(span[2], place, field, 0, MAX_NUM_TOKENS, expected)
            parts.append(Span(int(span[0], 16), start, length))
        else:
            raise check.refuse(place, field, item, expected)
    return tuple(parts)


def _arrival(given: dict[str, Any], place: str) -> tuple[int, str | None]:
    """Returns the arrival in ns, and its clock; (0, None) if the row has none."""
    if "arrival_ns" in given or "arrival_time" not in given:
        exact = _optional_ns(given, place, "arrival")
        return (0, None) if exact is None else (exact, "")
    return check.arrival(given["arrival_time"], place, "arrival_time")


def _optional_ns(given: dict[str, Any], place: str, name: str) -> int | None:
    """Returns `name`_ns, or its field in seconds, as ns."""
    if f"{name}_ns" in given:
        return check.nanoseconds(given[f"{name}_ns"], place, f"{name}_ns")
    field = _TIMES[name]
    return check.seconds(given[field], place, field) if field in given else None


def _optional_name(given: dict[str, Any], place: str, field: str) -> str | None:
    return check.name_text(given[field], place, field) if field in given else None


def _optional_whole(given: dict[str, Any], place: str, field: str, least: int, most: int) -> int | None:
    return check.whole_number(given[field], place, field, least, most) if field in given else None


def fill(draft: Draft, previous: TraceRequest | None) -> TraceRequest:
    """Returns the row with its synthetic contents. previous: the turn before it in its session."""
    row = draft.row
    own_key = content_key("request", row.request_id)
    prompt, output = row.prompt, row.output
    if draft.num_prompt_tokens is not None:
        prompt = _prompt(draft.num_prompt_tokens, previous, own_key)
    if draft.num_output_tokens is not None:
        last = prompt[-1]
        following = (last.key, last.start + last.length) if isinstance(last, Span) else (own_key, 0)
        output = Span(*following, draft.num_output_tokens)
    return row._replace(prompt=prompt, output=output) if prompt is not row.prompt or output is not row.output else row


def _prompt(num_tokens: int, previous: TraceRequest | None, own_key: int) -> tuple[Part, ...]:
    """Returns a prompt of `num_tokens`. It begins with the turn before, if it is long enough; else it is new content.

    The new text of a turn continues the span of the output before, if there is one: a session is then one long span.
    """
    if previous is None:
        return (Span(own_key, 0, num_tokens),)
    history = previous.prompt if previous.output is None else (*previous.prompt, previous.output)
    num_new = num_tokens - sum(part.num_tokens for part in history)
    if num_new < 0:
        return (Span(own_key, 0, num_tokens),)
    last = history[-1]
    if isinstance(last, Span) and previous.output is not None:
        new = Span(last.key, last.start + last.length, num_new)
    else:
        new = Span(own_key, 0, num_new)
    return join_parts((*history, new))
