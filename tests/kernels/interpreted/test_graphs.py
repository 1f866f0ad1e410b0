"""The path of captured steps with our kernels: padded batches over fixed memory, lengths read on the device."""

from __future__ import annotations

from real.graphs import GraphShape
from tests.real import test_step_graphs


def test_random_steps_equal_those_of_an_engine_without_graphs(monkeypatch):
    """As few steps, and as small a warm-up, as say anything: an iteration of a kernel takes milliseconds here. Without
    a window: the kernels alone have both, in test_a_step_is_computed_from_what_the_device_knows."""
    monkeypatch.setattr(test_step_graphs, "NUM_STEPS", 3)
    monkeypatch.setattr(test_step_graphs, "MIXED", [GraphShape(8, 3, False), GraphShape(17, 8, False)])
    test_step_graphs.check_random_steps(
        1, [1, 1, 2, 7], attention="triton", block_size=8, max_num_batched_tokens=8, max_num_seqs=4
    )
