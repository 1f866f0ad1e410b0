"""`from experiments import LLM`: builds a text engine from keyword arguments, by way of a configuration.

Contains no generation code; that is in real/text/llm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

from analysis.load import require_path
from experiments.configuration.compose import compose_config, to_overrides
from experiments.configuration.config import RunConfig
from experiments.llm_settings import find_model, settings_to_overrides
from experiments.wiring.build import Pools, build_scheduler
from experiments.wiring.build_engine import build_real_backend
from real.text import llm
from testbed.checks import require


class LLM(llm.LLM):
    """A model that generates text, built from its name or folder.

    model: a local folder in Hugging Face's layout; or a name of `testbed list model` with load_format="dummy" (random
    weights); or "tiny": random weights and a tokenizer made on the spot, whose text is noise. tokenizer: a folder, or a
    tokenizer of transformers or tokenizers; None takes the model's. scheduler: a preset, or keys of the group as a dict
    (`name` is the preset). status_s: the interval of the status line on standard error, in seconds. The other keyword
    arguments are those of vLLM (llm_settings.SETTINGS lists them), groups of the configuration as dicts
    (cache={"eviction": "lfu"}), or dotted keys (**{"backend.num_threads": 1}); of llm_settings.READ only.

    Raises TestbedError with a one-line message.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        tokenizer: Any = None,
        scheduler: str | Mapping[str, Any] = "vllm_v1",
        status_s: float | None = None,
        **settings: Any,
    ) -> None:
        is_known = status_s is None or 0 < status_s <= 1e9
        require("status_s", status_s, is_known, "above 0 and at most 1e9, or null (no status lines)")
        found = find_model(
            str(require_path("model", model)),
            tokenizer,
            settings.get("load_format") or settings.get("backend.load_format"),
        )
        preset = to_overrides({"scheduler": dict(scheduler) if isinstance(scheduler, Mapping) else scheduler})
        config = compose_config(["backend=real", *preset, *found.overrides, *settings_to_overrides(settings)])
        self.config: RunConfig = replace(config, model=replace(config.model, name=found.name))
        shape, eos_ids = self.config.model, (config.model.eos_token_id, *found.eos_ids)
        backend = build_real_backend(self.config, swaps=True)  # any request may be a beam search, which is swapped
        try:
            pools = Pools(backend.num_gpu_blocks, backend.num_cpu_blocks)
            core = build_scheduler(self.config, pools)
        except BaseException:
            backend.close()
            raise
        super().__init__(
            core, backend, found.tokenizer, vocab_size=shape.vocab_size, seed=self.config.seed, folder=found.folder,
            eos_ids=[*dict.fromkeys(token for token in eos_ids if token is not None)], status_s=status_s,
        )  # fmt: skip
