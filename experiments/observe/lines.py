"""The lines of an observer's log: their fields and the types of these."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from testbed.errors import RunFolderError
from testbed.foreign_text import shown, whole
from testbed.traces.schema import MAX_NS

VERSION = 1
_HEADER: dict[str, dict[str, tuple[type, ...]]] = {  # fields of the first line that are read
    "": {"vllm": (str,), "unknown": (list,)},
    "config": {
        **dict.fromkeys(
            ("block_size", "num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
             "num_kv_cache_groups"), (int,)
        ),
        "policy": (str,), "kv_dtype": (str,), "prefix_caching": (bool,), "async_scheduling": (bool, NoneType),
        "long_prefill_token_threshold": (int, NoneType), "watermark": (int, float, NoneType),
    },
    "model": {"name": (str,), "dtype": (str,), "hf_config": (dict,)},
    "device": {"type": (str,), "name": (str,), "tensor_parallel_size": (int,), "pipeline_parallel_size": (int,)},
}  # fmt: skip
_NS, _COUNT, _ID = whole(0, MAX_NS), whole(0, 2**31 - 1), lambda value: isinstance(value, str)


def _is_by_id(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_one, value.values()))


def _is_tokens(value: Any) -> bool:
    """Whether a value is a list of token ids, or their number."""
    return _COUNT(value) or (isinstance(value, list) and all(map(_COUNT, value)))


def _is_scheduled(value: Any) -> bool:
    """Whether a value gives the tokens of each request, with a sum that fits the records' counters."""
    return _is_by_id(_COUNT)(value) and _COUNT(sum(value.values()))


_PLACE = {"ns": _NS, "plans": _COUNT, "commits": _COUNT}
_OF_STEPS = {"step": _COUNT, "began_ns": _NS, "ns": _NS, "free_blocks": _COUNT}
_KINDS: dict[str, dict[str, Callable[[Any], bool]]] = {  # fields of the other lines that are read
    "add": _PLACE | {
        "id": _ID, "arrival_unix_ns": _NS, "prompt": _is_tokens, "priority": whole(-MAX_NS, MAX_NS), "salt": _ID,
        "max_tokens": lambda value: value is None or (_NS(value) and value > 0),
    },
    "plan": _OF_STEPS | {
        "committed": _COUNT, "num_running": _COUNT, "num_waiting": _COUNT, "scheduled": _is_scheduled,
        "admitted": _is_by_id(_COUNT), "preempted": lambda value: isinstance(value, list),
    },
    "commit": _OF_STEPS | {"emitted": _is_by_id(_is_tokens), "ended": _is_by_id(_ID)},
    "abort": _PLACE | {"id": _ID},
    "reset_prefix_cache": _PLACE,
}  # fmt: skip


def check_header(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Checks and returns the first line of a log. Raises RunFolderError if it is not a valid first line."""
    if fields.get("kind") != "observed":
        raise RunFolderError(
            f"{place}: not the first line of an observer's log: its kind is {shown(fields.get('kind'))}"
        )
    if fields.get("version") != VERSION:
        raise RunFolderError(f"{place}: a log of version {shown(fields.get('version'))}; this code reads {VERSION}")
    for group, kinds in _HEADER.items():
        found = fields.get(group) if group else fields
        if not isinstance(found, dict):
            raise _damaged(place, group, found)
        for key, kind in kinds.items():
            if not isinstance(found.get(key), kind) or key not in found:
                raise _damaged(place, f"{group}.{key}".removeprefix("."), found.get(key))
    texts = {"unknown": fields["unknown"], "config.kv_cache_specs": fields["config"].get("kv_cache_specs", [])}
    for key, value in texts.items():
        if not (isinstance(value, list) and all(map(_ID, value))):
            raise _damaged(place, key, value)
    for key in ("ns", "unix_ns"):
        if not _NS(fields.get(key)):
            raise _damaged(place, key, fields.get(key))
    return fields


def _damaged(place: str, key: str, value: object) -> RunFolderError:
    return RunFolderError(
        f"{place}: the first line of the log is damaged: its {key} is {shown(value)}; restore it, or record another log"
    )


def check_line(kind: str, fields: dict[str, Any]) -> None:
    """Checks a line other than the first. Raises ValueError for a bad value, KeyError for a missing field."""
    for key, is_one in _KINDS.get(kind, {}).items():
        if not is_one(fields[key]):
            raise ValueError(f"its {key} is {shown(fields[key])}")
