"""Benchmarks. Each prints a table. No test depends on a timing. Compare numbers of one run only: machines are noisy."""

from __future__ import annotations

import time
from importlib import import_module

from experiments.runs.environment import describe_machine, describe_versions
from testbed import compiled
from testbed.errors import ConfigError
from testbed.foreign_text import unknown

BENCHES = ("core", "simulator", "engine", "host", "vllm", "observer")
IN_VLLM = ("vllm", "observer")  # need an environment with vLLM


def main(arguments: list[str]) -> int:
    """`testbed bench [<name>] [options]`. Without a name: all benchmarks that need no vLLM, with default options."""
    name = arguments[0] if arguments else None
    if name in ("-h", "--help"):
        print(f"usage: testbed bench [{'|'.join(BENCHES)}] [options]; `testbed bench <name> --help` lists them")
        return 0
    if name is not None and name not in BENCHES:
        raise ConfigError(unknown(f"there is no benchmark {name!r}", name, BENCHES))
    if not {"-h", "--help"} & set(arguments):
        print(f"{machine_line()}; {compiled.describe()}\n", flush=True)
    if name is not None:
        return _run(name, arguments[1:])
    for each in [one for one in BENCHES if one not in IN_VLLM]:
        _run(each, [])
        print()
    return 0


def _run(name: str, arguments: list[str]) -> int:
    return int(import_module(f"experiments.bench.{name}").main(arguments))


def machine_line() -> str:
    """Returns the machine, the Python version and the date of a measurement, as one line."""
    machine, versions = describe_machine(), describe_versions()
    date = time.strftime("%Y-%m-%d")
    return f"{machine['cpu']}, {machine['num_cores']} cores, Python {versions['python']}, {date}"
