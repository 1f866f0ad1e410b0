"""Without torch there is no real engine to test; the rest of the suite runs."""

from importlib.util import find_spec

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
