"""Cases that real schedulers logged, run by our presets: the digest after each.

    python -m tests.golden.oracle_cases            writes oracle_cases.txt anew (TESTBED_ORACLES names the folder)
    python -m tests.golden.oracle_cases --check    names the cases that differ; exit status 1 if any does

Files that are not in the folder are not compared, and keep their lines. Whether ours decides as they did is
`testbed conform`'s to say; here, whether it decides as it did.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.conform.cases import Case, read_cases
from experiments.conform.replay import Feed, case_config
from experiments.conform.systems import SYSTEMS
from experiments.wiring.build import build_scheduler, simulated_pools

RECORDS = Path(__file__).parent / "oracle_cases.txt"
FOLDER = os.environ.get("TESTBED_ORACLES")
FILES = tuple(f"{system}.jsonl.gz" for system in SYSTEMS)
HEAD = "# file, case, digest after its last step, steps\n"


class Record(NamedTuple):
    digest: str
    num_steps: int


def is_absent(file: str) -> bool:
    """Whether the file is not on this machine."""
    return FOLDER is None or not (Path(FOLDER) / file).is_file()


def records_of(file: str) -> dict[tuple[str, str], Record]:
    """Runs every case of the file: what came of each, by file and name."""
    assert FOLDER is not None
    return {(file, case.name): _run(case) for case in read_cases(Path(FOLDER) / file)}


def _run(case: Case) -> Record:
    config = case_config(SYSTEMS[case.system].preset, case.config, SYSTEMS[case.system].options)
    scheduler = build_scheduler(config, simulated_pools(config))
    feed = Feed(case, scheduler)
    while feed.next_plan() is not None:
        feed.commit()
    return Record(f"{scheduler.digest:016x}", scheduler.num_steps)


@cache
def recorded() -> dict[tuple[str, str], Record]:
    lines = [line.split() for line in RECORDS.read_text().splitlines() if not line.startswith("#")]
    return {(file, name): Record(digest, int(num_steps)) for file, name, digest, num_steps in lines}


def differing(file: str) -> list[str]:
    """One line for each case of the file that is decided otherwise than was written down, is new, or is missing."""
    found, kept = records_of(file), {key: record for key, record in recorded().items() if key[0] == file}
    keys = sorted(found.keys() | kept.keys())
    return [f"{key}: {found.get(key)}, recorded {kept.get(key)}" for key in keys if found.get(key) != kept.get(key)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.oracle_cases", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what is recorded")
    options = parser.parse_args()
    present = [file for file in FILES if not is_absent(file)]
    if not present:
        print(f"no such file in the folder that TESTBED_ORACLES names: {', '.join(FILES)}", file=sys.stderr)
        return 1
    if options.check:
        lines = [line for file in present for line in differing(file)]
        print(*lines, f"{len(lines)} cases of {', '.join(present)} differ", sep="\n")
        return 1 if lines else 0
    found = {key: record for key, record in recorded().items() if key[0] not in present}
    found |= {key: record for file in present for key, record in records_of(file).items()}
    RECORDS.write_text(HEAD + "".join(" ".join(map(str, (*key, *record))) + "\n" for key, record in found.items()))
    print(f"{len(found)} cases, {sum(record.num_steps for record in found.values()):,} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
