"""The long fuzz: random lives of random cores, each with its shadow, until so many operations are done.

    python -m tests.properties.fuzz --operations 1000000 --seed 0
    python -m tests.properties.fuzz --life 0/1234/80          one life again, as the table of failures names it

An operation is an add, an abort, a reset, a plan or a commit. After each, the core's own invariants and every law of
the shadow hold. Exit status 1 if any life failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator

from tests.properties.life import random_life

LENGTHS = (20, 60, 150)
MAX_FAILURES = 200
ROWS = (
    "operations", "adds", "plans", "admissions", "preemptions by recompute", "preemptions by swap",
    "blocks swapped out", "blocks swapped in", "swap ins", "forks", "drops", "copies on write", "beams given up",
    "hit tokens", "evictions", "resets of running", "resets of swapped", "aborts of waiting", "aborts of running",
    "aborts of swapped", "ended by stop", "ended by length", "ended by abort", "ended by ignored",
    "victims admitted again in the step", "steps of decodes that share", "steps of decodes that share beside prompts",
    "runs that do not end by themselves", "digests repeated", "digests repeated with all prefixes listed",
)  # fmt: skip


def names(seed: int) -> Iterator[str]:
    """Of all lives of a seed: seed/number/length."""
    number = 0
    while True:
        yield f"{seed}/{number}/{random.Random(f'{seed}/{number}').choice(LENGTHS)}"
        number += 1


def run(name: str) -> Counter[str]:
    return random_life(name, int(name.rpartition("/")[2])).counts


def fuzz(num_operations: int, seed: int) -> tuple[Counter[str], list[tuple[str, str]]]:
    """Counts of what happened, and the lives that failed, with the reason."""
    counts: Counter[str] = Counter()
    failures: list[tuple[str, str]] = []
    shown = time.monotonic()
    for name in names(seed):
        if counts["operations"] >= num_operations or len(failures) >= MAX_FAILURES:
            break
        counts["lives"] += 1
        try:
            counts += run(name)
        except Exception as error:  # noqa: BLE001  any failure of the core is a finding; the others go on
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failures.append((name, f"{type(error).__name__}: {error} ({frame.name}, line {frame.lineno})"))
        if sys.stderr.isatty() and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{counts['operations']:,} operations, {len(failures)} failures", end="", file=sys.stderr)
    return counts, failures


def table(counts: Counter[str], failures: list[tuple[str, str]], seconds: float) -> str:
    lines = ["| | |", "|---|---:|", f"| lives | {counts['lives']:,} |"]
    lines += [f"| {row} | {counts[row]:,} |" for row in ROWS]
    lines += [f"| failures | {len(failures):,} |", f"| seconds | {seconds:,.0f} |"]
    for name, reason in failures:
        lines.append(f"\n{reason}\n    python -m tests.properties.fuzz --life {name}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--operations", type=int, default=1_000_000, help="how many to do at least (1000000)")
    parser.add_argument("--seed", type=int, default=0, help="of the lives (0)")
    parser.add_argument("--life", help="repeat this one life, with its traceback")
    options = parser.parse_args()
    if options.life is not None:
        print(f"passed: {dict(run(options.life))}")
        return 0
    start = time.monotonic()
    counts, failures = fuzz(options.operations, options.seed)
    print(table(counts, failures, time.monotonic() - start))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
