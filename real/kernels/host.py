"""Compiles the C files of this folder for the machine at hand, on first use, and loads them; as Triton does for a GPU.

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

FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast",
    # sums may be taken in another order, which vectors do; infinities stay what they are
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
LINKED = ("-shared",)  # without -fopenmp: not a second OpenMP, whose threads would wait beside torch's
# The first that the compiler takes. no-tree-pre: GCC would give the ends of ranges branches of their own, and the loops
# around them no vectors.
FOR_THIS_MACHINE = (("-march=native", "-fno-tree-pre"), ("-march=native",), ("-mcpu=native",), ())


class HostCodeError(Exception):
    """Why there is no such library here, in one line."""


@cache
def library() -> ctypes.CDLL:
    """Their functions, for threads of the OpenMP that torch has loaded. Raises HostCodeError."""
    sources = {file.name: file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.[ch]"))}
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise HostCodeError(f"there is no C compiler ({compiler[0]})") from None
    made_from = (*sources.values(), version, repr((compiler, FLAGS, FOR_THIS_MACHINE, LINKED)).encode(), _processor())
    key = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    file = _folder() / f"kernels-{key}.so"
    if not file.is_absolute():  # who has no home has no cache; code is not taken from where one happens to be
        raise HostCodeError("there is no folder for what is compiled; set XDG_CACHE_HOME to one")
    try:
        if not file.exists():
            _compile(compiler, sources, file)
        return ctypes.CDLL(str(file))
    except OSError as error:  # a folder that cannot be written to, a libc or an OpenMP that is not there
        raise HostCodeError(f"what {compiler[0]} makes cannot be used ({error})") from None


@cache
def why_no_library() -> str | None:
    """None if it can be used."""
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
