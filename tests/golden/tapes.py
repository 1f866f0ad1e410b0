"""Tapes of runs of the real engine on the CPU: what it was given and drew, to be replayed and decided again.

    python -m tests.golden.tapes            runs the engine again and writes the folders anew (needs torch)
    testbed parity tests/golden/tapes/<name>

A folder keeps what a replay needs and nothing of the machine. Another run of the engine takes other times, and so its
tape is another tape: they are written anew only where a replay of the old ones cannot be right.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from experiments.configuration.config import RunConfig
from experiments.runs.run import execute
from testbed.traces.readers.own import read_jsonl
from tests.experiments.kit import REAL, TINY, config_of
from tests.parity.kit import TIGHT

FOLDER = Path(__file__).parent / "tapes"
FILES = ("config.yaml", "manifest.json", "tape.jsonl", "trace.jsonl")
KEPT = (  # of the manifest: nothing that names a machine
    "status", "backend", "num_gpu_blocks", "num_cpu_blocks", "num_steps", "num_sent", "prefix_cache", "digest", "trace",
)  # fmt: skip
STOPS = [*range(20, 45)]  # in about one draw of twenty
SWAP = {"scheduler__preemption": "swap", "cache__num_cpu_blocks": 64}
SAMPLED = {"sampling__temperature": 0.9, "sampling__max_tokens": 18, "sampling__stop_token_ids": STOPS}
GROUP = {"cache__num_gpu_blocks": 28, "cache__num_cpu_blocks": 120, "scheduler__max_num_seqs": 12}

RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # preset, and what differs from it
    "vllm_v1": ("vllm_v1", {}),
    "vllm_v1_0_8-uncached-chunks": (
        "vllm_v1_0_8", {"cache__prefix_caching": False, "scheduler__max_num_batched_tokens": 12},
    ),
    "vllm_v0-swap": ("vllm_v0", SWAP),
    "vllm_v0_chunked-swap": ("vllm_v0_chunked", SWAP | {"scheduler__max_num_batched_tokens": 16}),
    "vllm_v0_classic-samples": ("vllm_v0_classic", GROUP | {"sampling__n": 3}),
    "nano_vllm": ("nano_vllm", {"scheduler__max_num_batched_tokens": 20}),
    "prefill_first-beams": ("prefill_first", GROUP | {"sampling__beam_width": 3}),
    "unified-sampled": ("unified", SAMPLED),
    "prefill_first-samples-sampled": ("prefill_first", SAMPLED | GROUP | {"sampling__n": 3}),
    "decode_first-sampled-swap": ("decode_first", SAMPLED | SWAP | {"scheduler__max_num_batched_tokens": 14}),
}  # fmt: skip


def rows(name: str) -> list[dict[str, Any]]:
    """Chats that begin alike, in a pool that is too small; one request is cancelled, one can never fit."""
    rng = random.Random(f"golden/tapes/{name}")
    is_sampled, is_group = name.endswith(("sampled", "sampled-swap")), "samples" in name or "beams" in name
    shared = [rng.randrange(5, 500) for _ in range(10)]
    made: list[dict[str, Any]] = []
    for index in range(6 if is_group else 10):
        prompt = shared[: rng.choice((0, 8, 10))] + [rng.randrange(5, 500) for _ in range(rng.randint(3, 16))]
        row: dict[str, Any] = {
            "request_id": f"r{index}", "arrival_time": 0.0005 * index, "prompt_token_ids": prompt,
            "session_id": f"s{index}", "turn": 0,
        }  # fmt: skip
        if not is_sampled or index % 3 == 0:  # else the model decides
            row["output_tokens"] = rng.randint(8, 15)
        made.append(row)
        if index % 3 == 1 and "output_tokens" in row:
            more = [rng.randrange(5, 500) for _ in range(4)]
            num = len(prompt) + row["output_tokens"] + len(more)
            made.append({
                "request_id": f"r{index}b", "think_time": 0.002, "prompt_tokens": num, "output_tokens": 8,
                "session_id": f"s{index}", "turn": 1,
            })  # fmt: skip
    late = {"arrival_time": 0.0005 * len(made)}
    made.append({"request_id": "cancelled", "prompt_tokens": 9, "output_tokens": 40, "cancel_after": 0.012} | late)
    made.append({"request_id": "too-long", "prompt_tokens": 200, "output_tokens": 4} | late)
    return made


def config(name: str) -> RunConfig:
    preset, settings = RUNS[name]
    given = {"cache__watermark": 0.0, "cache__num_gpu_blocks": TIGHT, "allow_ignored": True, **settings}
    return config_of((*TINY, *REAL, f"scheduler={preset}", "scheduler.max_num_batched_tokens=64"), **given)


def write(name: str) -> dict[str, Any]:
    """Runs the engine and keeps the folder; the run's summary."""
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "rows.jsonl"
        given.write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
        run = Path(scratch) / "run"
        result = execute(config(name), run, trace=read_jsonl(given))
        assert result.status == "complete", result.message
        _scrub(run)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        for file in FILES:
            shutil.copyfile(run / file, FOLDER / name / file)
    return result.summary


def _scrub(run: Path) -> None:
    """Takes out of a run's folder what names a place or a machine."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["trace"]["path"] = "trace.jsonl"
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    manifest = json.loads((run / "manifest.json").read_text())
    kept = {key: manifest[key] for key in KEPT} | {"trace": {"fingerprint": manifest["trace"]["fingerprint"]}}
    (run / "manifest.json").write_text(json.dumps(kept, indent=2) + "\n")


def main() -> int:
    for name in RUNS:
        summary = write(name)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size:,} bytes, {summary['finish_reasons']}, preemptions: {summary['preemptions']['total']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
