"""Without torch there is no real engine to test; the rest of the suite runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU that is not there, with all of our kernels: tests.real.fake_cuda.FakeGPU."""
    from tests.real.fake_cuda import FakeGPU, fake_cuda
    from tests.real.fake_launches import fake_kernels

    with fake_cuda(monkeypatch, FakeGPU()) as made:
        fake_kernels(monkeypatch, made)
        yield made
