"""The name of this machine's processor, for descriptions of it; needs no torch."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_OF_MACOS = ("sysctl", "-n", "machdep.cpu.brand_string")


@cache
def cpu_name() -> str:
    """Returns the model's name; where the system tells none, as Linux on Arm, the architecture."""
    said = ""
    with suppress(OSError, subprocess.SubprocessError):
        if CPUINFO.exists():
            lines = CPUINFO.read_text(errors="replace").splitlines()
            said = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        else:
            said = subprocess.run(_OF_MACOS, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return said or platform.machine()
