"""The path of captured decodes with our kernels: padded batches over fixed memory, lengths read on the device."""

from __future__ import annotations

import pytest

from tests.real import test_decode_graphs


@pytest.mark.parametrize("window", [None, 6])
def test_random_decodes_equal_those_of_an_engine_without_graphs(window, monkeypatch):
    monkeypatch.setattr(test_decode_graphs, "NUM_STEPS", 3)  # an iteration of a kernel takes milliseconds here
    test_decode_graphs.check_random_decodes(1, attention="triton", block_size=8, sliding_window=window)
