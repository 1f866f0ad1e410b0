"""Compiles the C files of this folder for this machine on first use, and loads them, as Triton does for a GPU.

The compiled library is in the user's cache. Its name is a hash of all inputs, so it is never older than its source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from real.cpu_name import cpu_name
from testbed.compiled import c_compiler

FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast",
    # allow sums in another order, as vectors need; infinities keep their meaning
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
LINKED = ("-shared",)  # without -fopenmp, which could load a second OpenMP with threads of its own next to torch's
# The first options that the compiler takes are used. -fno-tree-pre: otherwise GCC makes branches for the ends of ranges
# and does not vectorise the loops around them.
FOR_THIS_MACHINE = (("-march=native", "-fno-tree-pre"), ("-march=native",), ("-mcpu=native",), ())


class HostCodeError(Exception):
    """The library cannot be compiled or loaded here; the message is one line."""


@cache
def library() -> ctypes.CDLL:
    """Returns the compiled functions, which use the threads of torch's OpenMP. Raises HostCodeError."""
    sources = {file.name: file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.[ch]"))}
    compiler = c_compiler()
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise HostCodeError(f"there is no C compiler ({compiler[0]})") from None
    made_from = (*sources.values(), version, repr((compiler, FLAGS, FOR_THIS_MACHINE, LINKED)).encode(), _processor())
    key = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    file = _folder() / f"kernels-{key}.so"
    if not file.is_absolute():  # no home folder, so no cache; code must not be loaded from the current folder
        raise HostCodeError("there is no folder for what is compiled; set XDG_CACHE_HOME to one")
    try:
        if not file.exists():
            _compile(compiler, sources, file)
        return ctypes.CDLL(str(file))
    except OSError as error:  # e.g. a folder that cannot be written to, a missing libc or OpenMP
        raise HostCodeError(f"what {compiler[0]} makes cannot be used ({error})") from None


@cache
def why_no_library() -> str | None:
    """Why the library cannot be used; None if it can."""
    try:
        library()
    except HostCodeError as error:
        return str(error)
    return None


def _compile(compiler: list[str], sources: dict[str, bytes], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as work:
        for name, text in sources.items():
            Path(work, name).write_bytes(text)
        codes, made = sorted(Path(work).glob("*.c")), Path(work, "kernels.so")
        objects = [str(code.with_suffix(".o")) for code in codes]
        said = b""
        for native in FOR_THIS_MACHINE:
            command = [*compiler, *FLAGS, *native, "-c"]
            done = [
                subprocess.run([*command, str(code), "-o", made_of], capture_output=True, check=False)
                for code, made_of in zip(codes, objects, strict=True)
            ]
            said = said or b"".join(one.stderr for one in done)
            if not any(one.returncode for one in done):
                break
        else:
            first, *_ = said.decode(errors="replace").splitlines() or ["without a word"]
            raise HostCodeError(f"{compiler[0]} refuses its source ({first})")
        linked = subprocess.run([*compiler, *LINKED, *objects, "-o", str(made)], capture_output=True, check=False)
        if linked.returncode:
            raise HostCodeError(f"{compiler[0]} cannot link a shared library")
        made.replace(file)  # atomic: another process may compile the same library


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llm-serving-testbed")


def _processor() -> bytes:
    """Describes the processor: code compiled for it may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {cpu_name()}".encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})).encode()
