"""The CPU's provider: its kernel against a float64 reference, and what keeps it from being made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.attention.cpu_provider import CpuAttention, why_not
from real.attention.registry import choose_attention
from real.kernels import host
from tests.kernels.paged_batches import Batch, make_spec

pytestmark = pytest.mark.skipif((host.why_no_library() or "").startswith("there is no C"), reason="no C compiler here")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def attended(spec, batch):
    return CpuAttention(spec).prepare(batch.metadata)(batch.query, batch.key, batch.value, batch.kv_cache)


@settings(max_examples=150, deadline=None)
@given(
    num_kv_heads=st.sampled_from([1, 2, 3]), group=st.sampled_from([1, 2, 5, 8]),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 128]), block_size=st.sampled_from([1, 2, 5, 16, 32]),
    rows=st.lists(st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 200), st.just(2**40)), alibi=st.booleans(), dtype=DTYPES,
    num_threads=st.sampled_from([1, 2]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_cpu_attention_equals_a_float64_reference(
    num_kv_heads, group, head_dim, block_size, rows, window, alibi, dtype, num_threads, seed
):
    spec = make_spec(num_kv_heads, group, head_dim, block_size, dtype=dtype, window=window, alibi=alibi)
    batch, before = Batch(spec, rows, seed), torch.get_num_threads()
    expected = batch.expected()
    torch.set_num_threads(num_threads)
    try:
        output = attended(spec, batch)
    finally:
        torch.set_num_threads(before)
    unit = (3e-6 if dtype == torch.float32 else 2**-7) * max(1.0, float(expected.abs().max()))
    is_decode = torch.tensor([new == 1 for _, new in rows for _ in range(new)])
    torch.testing.assert_close(output[is_decode].double(), expected[is_decode], atol=unit, rtol=0)
    # prefills are torch's own function: in float32 a sum over a head rounds by the root of its length
    tolerance = unit * max(1.0, (head_dim / 64) ** 0.5) if dtype == torch.float32 else unit
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_scores_of_any_size_are_weighed(size):
    """Far apart, one position has all the weight; none is lost to an overflow."""
    spec = make_spec(head_dim=64, block_size=16)
    batch = Batch(spec, [(200, 1), (63, 1), (64, 1)], 3)
    batch.query *= size
    expected = batch.expected()
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(attended(spec, batch).double(), expected, atol=2e-4, rtol=0)


def test_what_a_row_gets_depends_on_no_other():
    spec = make_spec(2, 3, 64, 16)
    batch = Batch(spec, [(99, 1), (7, 1), (0, 12), (310, 1)], 5)
    together = attended(spec, batch)
    fewer = batch.query.clone()
    fewer[1:] = 17.0
    alone = CpuAttention(spec).prepare(batch.metadata)(fewer, batch.key, batch.value, batch.kv_cache)
    assert torch.equal(alone[0], together[0])


def test_queries_may_be_a_part_of_a_wider_tensor():
    spec = make_spec(2, 2, 32, 8)
    batch = Batch(spec, [(40, 1), (3, 1)], 6)
    expected, wide = attended(spec, batch), torch.zeros(2, 9, 32)
    wide[:, 3:7] = batch.query
    batch.query = wide[:, 3:7]
    assert torch.equal(attended(spec, batch), expected)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(head_dim=16), None),
        (make_spec(head_dim=16, device=torch.device("cuda")), "it is for CPUs, the device is cuda"),
        (make_spec(head_dim=16, dtype=torch.float16), "dtype is float16, it computes float32 and bfloat16"),
        (make_spec(head_dim=16, kv_dtype="fp8_e4m3"), "it reads no fp8_e4m3 cache"),
        (make_spec(head_dim=24), "head size 24 is no multiple of 16"),
    ],
)
def test_it_says_why_it_cannot_run(spec, reason):
    assert why_not(spec) == reason


def test_auto_takes_it_on_a_cpu():
    choice = choose_attention("auto", make_spec(head_dim=16))
    assert (choice.provider.name, choice.reasons["torch"]) == ("cpu", "after cpu in the order")


# --- making it ---


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "llm-serving-testbed"
    forget()


def forget() -> None:
    host.library.cache_clear()
    host.why_no_library.cache_clear()


def test_it_is_made_once_and_never_older_than_its_source(anew: Path, monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):
        host.library.cache_clear()
        assert host.library().decode_float32 is not None
    (made,) = anew.iterdir()
    changed = anew.parent / "kernels"
    changed.mkdir()
    names = ("paged_decode.c", "layers.c", "lines.h")
    files = [Path(host.__file__).with_name(name) for name in names]
    monkeypatch.setattr(host, "__file__", str(changed / "host.py"))
    monkeypatch.setattr(host, "_compile", lambda compiler, sources, file: shutil.copy(made, file))
    for num_made, other in enumerate(files, 2):
        for file in files:
            (changed / file.name).write_text(file.read_text() + "\n/* another */\n" * (file == other))
        host.library.cache_clear()
        host.library()
        assert len(list(anew.iterdir())) == num_made
    assert made.exists()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("exit 1", "there is no C compiler"),
        ('[ "$1" = --version ] && echo odd 1 && exit 0; echo "odd: no such flag" >&2; exit 1', "odd: no such flag"),
        ('[ "$1" = --version ] && exit 0; while [ "$1" != -o ]; do shift; done; echo no > "$2"', "cannot be used"),
    ],
)
def test_without_a_compiler_that_can_the_reference_stands_in(
    anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
):
    monkeypatch.setenv("CC", script(tmp_path / "cc", compiler))
    choice = choose_attention("auto", make_spec(head_dim=16))
    assert choice.provider.name == "torch"
    assert reason in choice.reasons["cpu"]
    assert "\n" not in choice.reasons["cpu"]


def test_a_cache_that_cannot_be_written_is_told_in_a_line(anew: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert "cannot be used" in (why_not(make_spec(head_dim=16)) or "")
