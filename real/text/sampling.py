"""Sampling as users of a text engine expect it: vLLM's defaults, or those that a checkpoint brings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed.core import sampling
from testbed.errors import ModelError
from testbed.specs.hf_config import GENERATION_FILE, SAMPLING_DEFAULTS, read_json_object

# of our parameters, the keys of generation_config.json
DEFAULTS = {name: name for name in SAMPLING_DEFAULTS} | {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingParams(sampling.SamplingParams):
    """The core's parameters; what is left out is what vLLM takes: temperature 1, at most 16 tokens."""

    temperature: float = 1.0
    max_tokens: int | None = 16


def default_sampling(folder: Path | None) -> SamplingParams:
    """What a checkpoint's generation_config.json recommends, as vLLM reads it (`do_sample` is not looked at).

    Raises ModelError for a file that is damaged; RequestError for a value that is out of range.
    """
    values = {} if folder is None else read_json_object(folder / GENERATION_FILE)
    return SamplingParams(**{name: values[key] for name, key in DEFAULTS.items() if values.get(key) is not None})


def end_tokens(folder: Path | None) -> tuple[int, ...]:
    """Every token that ends a text, by config.json and generation_config.json; in that order, each once.

    Raises ModelError for a file that is damaged.
    """
    if folder is None:
        return ()
    found: list[int] = []
    for name in ("config.json", GENERATION_FILE):
        value = read_json_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ModelError(
                    f"{folder / name}: 'eos_token_id' is {value!r}; expected a token id, or a list of them"
                )
        found += ids
    return tuple(dict.fromkeys(found))
