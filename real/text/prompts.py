"""Turns prompts in all forms that callers can pass into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from real.text.tokenizer import Tokenizer
from testbed.errors import RequestError
from testbed.foreign_text import shown

KEYS = ("prompt", "prompt_token_ids", "cache_salt", "priority")


class Prompt(NamedTuple):
    """A prompt as token ids. text: None if token ids were given."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0


def read_prompts(prompts: Any, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Reads one prompt or a list of them; each is a text, token ids, or a dict with `prompt` or `prompt_token_ids`.

    Raises RequestError naming the prompt, counted from 0.
    """
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a string, token ids, a dict, or a list of these"
        )
    return [_read(item, f"prompt {index}", tokenizer) for index, item in enumerate(prompts)]


def _read(item: Any, where: str, tokenizer: Tokenizer | None) -> Prompt:
    more: dict[str, Any] = {}
    if isinstance(item, Mapping):
        strange = [key for key in item if key not in KEYS]
        if strange:
            raise RequestError(f"{where} has the key {shown(strange[0])}; valid: {', '.join(KEYS)}")
        more = {key: item[key] for key in ("cache_salt", "priority") if item.get(key) is not None}
        if not isinstance(more.get("cache_salt", ""), str):
            raise RequestError(f"{where} has cache_salt {shown(more['cache_salt'])}; it must be a string")
        if not isinstance(priority := more.get("priority", 0), Integral):
            raise RequestError(f"{where} has priority {shown(priority)}; it must be a whole number")
        more["priority"] = int(priority)
        text, ids = item.get("prompt"), item.get("prompt_token_ids")
        if (text is None) == (ids is None):
            raise RequestError(f"{where} must have either prompt or prompt_token_ids")
        if isinstance(ids, str):
            raise RequestError(f"{where} has prompt_token_ids {shown(ids)}; they must be token ids")
        item = text if ids is None else ids
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, str):
        return Prompt(item, _encode(item, where, tokenizer), **more)
    if not _is_token_ids(item) and not (isinstance(item, Sequence) and len(item) == 0):
        raise RequestError(f"{where} is {shown(item)}; it must be a string, token ids, or a dict")
    if len(item) == 0:
        raise RequestError(f"{where} is empty; give it at least one token")
    return Prompt(None, [int(token) for token in item], **more)


def _encode(text: str, where: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            f"{where} is a string, and the model's folder has no tokenizer; pass token ids, or tokenizer=<folder>"
        )
    check_text(text, where)
    ids = tokenizer.encode(text)
    if not ids:
        raise RequestError(f"{where} is empty; give it at least one character")
    return ids


def check_text(text: str, where: str) -> None:
    """Raises RequestError for half of a surrogate pair, which Python makes of command-line bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{ord(text[error.start]):04x}"
        raise RequestError(
            f"{where} has half a character, \\u{half}, at {error.start}; it must be text that UTF-8 can hold"
        ) from None


def _is_token_ids(item: Any) -> bool:
    return (
        isinstance(item, Sequence)
        and not isinstance(item, str | bytes)
        and len(item) > 0
        and all(isinstance(token, Integral) and not isinstance(token, bool) for token in item)
    )
