"""`testbed observe import`: makes a run folder from a log of vLLM's own scheduler, written by real.vllm.observer."""

from __future__ import annotations

import shlex
from pathlib import Path

from experiments.console import Parser
from testbed.errors import ConfigError


def main(arguments: list[str]) -> int:
    from experiments.observe.importing import import_log

    parser = Parser(
        "testbed observe import",
        description="Make a run folder of a log that vLLM left with scheduler_cls=real.vllm.ObservedScheduler.",
    )
    parser.add_argument("log", type=Path, help="the log, plain or packed (docs/vllm.md)")
    parser.add_argument("--out", type=Path, help="the run folder (runs/observed-<log's name>)")
    parser.add_argument("--device", help="its name in the device library, where the log's is not found there")
    parser.add_argument("--overwrite", action="store_true", help="replace a run that the folder holds")
    if not arguments or arguments[0] not in ("import", "-h", "--help"):
        raise ConfigError("testbed observe has one command: testbed observe import <log>")
    options = parser.parse_args(arguments[1:] if arguments[0] == "import" else ["--help"])
    out = options.out or Path("runs") / f"observed-{options.log.name.split('.')[0]}"
    lines = import_log(
        options.log, out, device=options.device, overwrite=options.overwrite,
        command=shlex.join(["testbed", "observe", *arguments]),
    )  # fmt: skip
    for line in lines:
        print(line)
    return 0
