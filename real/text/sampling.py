"""Sampling parameters with the defaults that users of a text engine expect: vLLM's, or those of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed.core import sampling
from testbed.errors import RequestError
from testbed.specs.hf_config import GENERATION_FILE, SAMPLING_DEFAULTS, read_json_object

# our parameters -> the keys of generation_config.json
DEFAULTS = {name: name for name in SAMPLING_DEFAULTS} | {"max_tokens": "max_new_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingParams(sampling.SamplingParams):
    """The core's parameters with vLLM's defaults: temperature 1, at most 16 tokens."""

    temperature: float = 1.0
    max_tokens: int | None = 16


def default_sampling(folder: Path | None) -> SamplingParams:
    """Returns the recommendation of a checkpoint's generation_config.json, as vLLM reads it (`do_sample` is ignored).

    Raises ModelError for a damaged file, RequestError for a value that is out of range; both name the file.
    """
    if folder is None:
        return SamplingParams()
    values = read_json_object(folder / GENERATION_FILE)
    try:
        return SamplingParams(**{name: values[key] for name, key in DEFAULTS.items() if values.get(key) is not None})
    except RequestError as error:
        said = str(error).removeprefix("sampling.").replace("max_tokens", DEFAULTS["max_tokens"])
        raise RequestError(f"{folder / GENERATION_FILE}: {said}") from None
