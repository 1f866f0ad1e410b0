"""Compiles a C file of this folder for the machine at hand, on first use, and loads it; as Triton does for a GPU.

What was compiled lies in the user's cache, named by all that it was made from: it is never older than its source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

HEADER = "lines.h"  # what the C files share
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast",
    # sums may be taken in another order, which vectors do; infinities stay what they are
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
    "-fno-tree-pre",  # GCC would give the ends of ranges branches of their own, and no vectors to the loops around them
)  # fmt: skip
LINKED = ("-shared",)  # without -fopenmp: not a second OpenMP, whose threads would wait beside torch's
FOR_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes


class HostCodeError(Exception):
    """Why there is no such library here, in one line."""


@cache
def library(name: str) -> ctypes.CDLL:
    """The functions of `<name>.c`, for threads of the OpenMP that torch has loaded. Raises HostCodeError."""
    source, header = (Path(__file__).with_name(file).read_bytes() for file in (f"{name}.c", HEADER))
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise HostCodeError(f"there is no C compiler ({compiler[0]})") from None
    made_from = (source, header, version, repr((compiler, FLAGS, FOR_THIS_MACHINE, LINKED)).encode(), _processor())
    key = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    file = _folder() / f"{name}-{key}.so"
    if not file.is_absolute():  # who has no home has no cache; code is not taken from where one happens to be
        raise HostCodeError("there is no folder for what is compiled; set XDG_CACHE_HOME to one")
    try:
        if not file.exists():
            _compile(compiler, source, header, file)
        return ctypes.CDLL(str(file))
    except OSError as error:  # a folder that cannot be written to, a libc or an OpenMP that is not there
        raise HostCodeError(f"what {compiler[0]} makes cannot be used ({error})") from None


@cache
def why_no_library(name: str) -> str | None:
    """None if it can be used."""
    try:
        library(name)
    except HostCodeError as error:
        return str(error)
    return None


def _compile(compiler: list[str], source: bytes, header: bytes, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        code, object_file, made = Path(work, "code.c"), Path(work, "code.o"), Path(work, "code.so")
        code.write_bytes(source)
        Path(work, HEADER).write_bytes(header)
        said = b""
        for native in FOR_THIS_MACHINE:
            command = [*compiler, *FLAGS, *native, "-c", str(code), "-o", str(object_file)]
            done = subprocess.run(command, capture_output=True, check=False)
            said = said or done.stderr
            if not done.returncode:
                break
        else:
            first, *_ = said.decode(errors="replace").splitlines() or ["without a word"]
            raise HostCodeError(f"{compiler[0]} refuses its source ({first})")
        done = subprocess.run([*compiler, *LINKED, str(object_file), "-o", str(made)], capture_output=True, check=False)
        if done.returncode:
            raise HostCodeError(f"{compiler[0]} cannot link a shared library")
        made.replace(file)  # whole: another process may be making the same


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llm-serving-testbed")


def _processor() -> bytes:
    """What code that was made for this machine may not run without."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})).encode()
