"""The random worlds: their configurations and records as files, and the command that checks or rewrites them.

python -m tests.golden.worlds                  writes worlds.txt anew
python -m tests.golden.worlds --check          names the worlds that differ; exit status 1 if any does
python -m tests.golden.worlds --world 17       prints one, step by step
python -m tests.golden.worlds --draw           draws the configurations anew too: other worlds
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from xxhash import xxh64_hexdigest

from testbed.blocks.config import KVRules
from testbed.core.limits import Limits
from tests.golden.world import FLAGS, Record, World
from tests.properties.setups import Setup, random_request, random_setup

FOLDER = Path(__file__).parent
RECORDS, SETUPS = FOLDER / "worlds.txt", FOLDER / "setups.jsonl.gz"
NUM_WORLDS = 2000
HEAD = "# world, digest after its last step, steps, what happened in it (tests/golden/world.py: FLAGS)\n"


# --- configurations of worlds ---


@cache
def setups() -> tuple[Setup, ...]:
    """Of each world, by number."""
    lines = gzip.decompress(SETUPS.read_bytes()).decode().splitlines()
    return tuple(_setup(json.loads(line)) for line in lines)


def _setup(given: dict[str, Any]) -> Setup:
    return Setup(**{**given, "rules": KVRules(**given.get("rules", {})), "limits": Limits(**given["limits"])})


def _container(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults; of limits, which have none, all."""
    if isinstance(config, Limits):
        return asdict(config)
    default = type(config)()
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if value != getattr(default, item.name):
            found[item.name] = _container(value) if isinstance(value, KVRules | Limits) else value
    return found


def _draw_setup(number: int) -> Setup:
    """As the drawing of the tests is today; every third one has few blocks, room on the CPU, and swaps."""
    setup = random_setup(random.Random(f"golden/{number}/setup"))
    if number % 3:
        return setup
    limits = replace(
        setup.limits,
        max_num_seqs=max(4, setup.limits.max_num_seqs),
        max_num_batched_tokens=max(16, setup.limits.max_num_batched_tokens),
        max_model_len=max(60, setup.limits.max_model_len),
    )
    return replace(
        setup, limits=limits, block_size=min(setup.block_size, 4),
        num_blocks=min(-(-60 // min(setup.block_size, 4)), max(10, setup.num_blocks)),
        num_cpu_blocks=max(12, setup.num_cpu_blocks), watermark=min(setup.watermark, 0.1), preemption="swap",
    )  # fmt: skip


def _draw_setups() -> None:
    lines = []
    for number in range(NUM_WORLDS):
        setup = _draw_setup(number)
        assert _setup(json.loads(json.dumps(_container(setup)))) == setup
        lines.append(json.dumps(_container(setup), separators=(",", ":")))
    SETUPS.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    setups.cache_clear()


def fingerprint_of_requests() -> str:
    """Of what `random_request` draws: where it changes, the worlds are other worlds."""
    rng = random.Random("golden/requests")
    shown = []
    for index in range(300):
        one = random_request(rng, f"r{index}", index)
        forced = None if one.forced_output is None else list(one.forced_output)
        sampling = one.sampling
        shown.append((
            one.request_id, list(one.prompt_token_ids), one.arrival_ns, forced, one.priority, one.tenant,
            one.deadline_ns, one.cache_salt, sampling.max_tokens, sampling.stop_token_ids, sampling.ignore_eos,
            sampling.n, sampling.best_of, sampling.beam_width, sampling.prompt_logprobs,
        ))  # fmt: skip
    return xxh64_hexdigest(repr(shown).encode())


# --- records ---


@cache
def recorded() -> dict[int, Record]:
    """What was written down of each world."""
    found = {}
    for line in RECORDS.read_text().splitlines():
        if not line.startswith("#"):
            number, digest, num_steps, *flags = line.split()
            found[int(number)] = Record(digest, int(num_steps), "".join(flags))
    return found


def recorded_fingerprint() -> str:
    """That of the requests when the records were made."""
    return RECORDS.read_text().splitlines()[1].rpartition(" ")[2]


def record_of(number: int) -> Record:
    """Runs the world."""
    return World(number, setups()[number]).run()


def differing(numbers: Iterable[int]) -> list[str]:
    """One line for each of these worlds that is decided otherwise than was written down."""
    lines = []
    for number in numbers:
        found, kept = record_of(number), recorded()[number]
        if found != kept:
            lines.append(f"world {number}: {' '.join(map(str, found))}, recorded {' '.join(map(str, kept))}")
    return lines


def num_worlds_by_flag() -> Counter[str]:
    """In how many of the recorded worlds each thing happened."""
    return Counter(FLAGS[letter] for record in recorded().values() for letter in record.flags)


def _write() -> None:
    lines = [HEAD, f"# requests as drawn: {fingerprint_of_requests()}\n"]
    lines += [" ".join(map(str, (number, *record_of(number)))).rstrip() + "\n" for number in range(NUM_WORLDS)]
    RECORDS.write_text("".join(lines))
    recorded.cache_clear()


def _show(number: int) -> None:
    print(setups()[number])
    print(*World(number, setups()[number], watch=print).run())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.worlds", description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with what is recorded")
    action.add_argument("--world", type=int, help="print this one, step by step")
    action.add_argument("--draw", action="store_true", help="draw the configurations anew, then write the records")
    options = parser.parse_args()
    if options.world is not None:
        _show(options.world)
        return 0
    if options.check:
        lines = differing(range(NUM_WORLDS))
        print(*lines, f"{len(lines)} of {NUM_WORLDS} worlds differ", sep="\n")
        return 1 if lines else 0
    if options.draw:
        _draw_setups()
    _write()
    for name, num_worlds in num_worlds_by_flag().items():
        print(f"{num_worlds:6,} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
