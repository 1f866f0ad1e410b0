"""The benchmark of the host runs end to end; its numbers decide nothing, but what is counted is counted right."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from experiments.bench import host


def test_each_part_of_each_batch_is_shown(say, monkeypatch):
    for name, value in {"BATCHES": (1, 3), "CONTEXT": 40, "LONG": (2, 100), "COUNTED": (2, 64)}.items():
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(host, "CHUNK", 32)
    said = say("bench", "host", "--steps", "2").success()
    lines = [line for line in said.splitlines() if line.startswith(("  decode,", "  mixed,"))]
    assert len(lines) == 2 * 5 + 1 + 2
    assert all(float(word) > 0 for line in lines for word in line.split()[-4:])
    assert "sampling of 2 rows at a vocabulary of 64" in said


def test_operators_are_counted_with_the_bytes_that_they_read_and_write():
    x, y = torch.zeros(10), torch.zeros(10)
    with host.counting() as counts:
        (x + y).view(2, 5)  # reads 80 bytes, writes 40; the view is none
        x.add_(y)  # the same
        torch.empty(100)  # allocates
    assert counts == [120, 120]


def test_mistakes_are_one_line(say):
    said = say("bench", "host", "--steps", "0")
    assert said.status != 0
    assert "--steps is 0" in said.err
