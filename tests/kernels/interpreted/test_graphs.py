"""The path of captured steps with our kernels: padded batches over fixed memory, lengths read on the device."""

from __future__ import annotations

import pytest

from real.graphs import GraphShape
from tests.real import test_step_graphs


@pytest.mark.parametrize(
    ("window", "lengths"), [(6, [1]), (None, [1, 1, 2, 7])], ids=["decodes in a window", "mixed"]
)  # the kernels alone have both windows with both: test_a_step_is_computed_from_what_the_device_knows
def test_random_steps_equal_those_of_an_engine_without_graphs(window, lengths, monkeypatch):
    """As few steps, and as small a warm-up, as say anything: an iteration of a kernel takes milliseconds here."""
    monkeypatch.setattr(test_step_graphs, "NUM_STEPS", 3)
    monkeypatch.setattr(test_step_graphs, "MIXED", [GraphShape(8, 3, False), GraphShape(17, 8, False)])
    test_step_graphs.check_random_steps(
        1, lengths, attention="triton", block_size=8, sliding_window=window, max_num_batched_tokens=8, max_num_seqs=4
    )
