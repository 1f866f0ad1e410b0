"""Without torch there is no real engine to test; the rest of the suite runs."""

from __future__ import annotations

import sys
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
    from tests.real.fake_kernels import fake_kernels

    with fake_cuda(monkeypatch, FakeGPU()) as made:
        fake_kernels(monkeypatch, made)
        yield made


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the package flash_attn."""
    from tests.real.fake_flash import FakeFlash

    module = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def flash3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the package flash_attn_interface."""
    from tests.real.fake_flash import FakeFlash3

    module = FakeFlash3()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return module


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from real.attention import triton_provider

    monkeypatch.setattr(triton_provider, "why_not", lambda spec: "no Triton here")


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would say of a GPU."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.fixture(scope="module")
def vllm_stub() -> Iterator[None]:
    """The stand-in for vLLM is importable as `vllm`."""
    from tests.real.vllm_stub import stub_vllm

    with stub_vllm():
        yield
