"""A checkpoint of a tiny random model with a tokenizer, and LLMs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.text import LLM
from real.checkpoint import make_checkpoint
from real.text.outputs import Piece, RequestOutput
from real.text.sampling import SamplingParams
from real.text.tokenizer import Tokenizer, train_tokenizer
from tests.real.engine_helpers import tiny_spec

PROMPTS = ["The scheduler decides", "東京の朝は", "Emoji too: 🙂", "What runs can be measured, and what is"]
ROOMY = {"block_size": 4, "num_gpu_blocks": 256, "num_cpu_blocks": 0, "device": "cpu"}
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "chunks": ROOMY | {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "tight": ROOMY | {"num_gpu_blocks": 20, "prefix_caching": False},
    "two phases": ROOMY | {"scheduler": "nano_vllm", "num_gpu_blocks": 24, "block_size": 4},
}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_folder(folder: Path, *, tokenizer: Tokenizer | None, seed: int = 3, **changes: Any) -> Path:
    """A checkpoint; its EOS is a token that random weights hardly ever find likeliest."""
    spec = tiny_spec(**({"vocab_size": 512, "eos_token_id": 0} | changes))
    make_checkpoint(folder, spec, seed=seed)
    if tokenizer is not None:
        tokenizer.inner.save_pretrained(folder)
    return folder


def tokenizer_with_chat() -> Tokenizer:
    tokenizer = train_tokenizer(512)
    assert tokenizer.num_tokens == 512
    tokenizer.inner.chat_template = CHAT
    return tokenizer


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | more))


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def joined(pieces: list[Piece]) -> dict[tuple[int, int], tuple[str, list[int], list[str | None]]]:
    """By (prompt, output): all text, all tokens, and what the last piece says of the end."""
    found: dict[tuple[int, int], tuple[str, list[int], list[str | None]]] = {}
    for piece in pieces:
        text, tokens, ends = found.get((piece.index, piece.output_index), ("", [], []))
        assert not ends or ends[-1] is None, "a piece after the last"
        found[piece.index, piece.output_index] = (
            text + piece.text, [*tokens, *piece.token_ids], [*ends, piece.finish_reason]
        )  # fmt: skip
    return found


def assert_idle(llm: LLM) -> None:
    """Nothing is held: every block is free, and the core is sound."""
    scheduler = llm.scheduler
    scheduler.check_invariants()
    assert not scheduler.has_work
    assert scheduler.blocks.num_free_blocks == llm.num_gpu_blocks


def write(folder: Path, name: str, **values: Any) -> None:
    (folder / name).write_text(json.dumps(values))
