"""Kernels run in Triton's interpreter only where its variable was set before they were imported: in a process of their
own, which test_interpreted.py starts."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore = []
collect_ignore_glob = []
if find_spec("torch") is None:
    collect_ignore_glob = ["*.py", "interpreted/*.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = ["test_interpreted.py", "test_compile.py", "test_on_gpu.py", "test_layers_on_gpu.py"]
else:
    collect_ignore = ["interpreted"]
