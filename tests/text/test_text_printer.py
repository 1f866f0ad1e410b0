"""Texts that come in any order are printed in the order of their prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from real.text.generate import Printer


@given(data=st.data(), nums=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_whatever_comes_first_is_printed_in_order_and_once(data: st.DataObject, nums: list[int]) -> None:
    """Any interleaving of pieces; cut off anywhere, nothing of what came is lost."""
    texts = {(i, j): [f"<{i}.{j}.{k}>" for k in range(3)] for i, num in enumerate(nums) for j in range(num)}
    left = {at: list(pieces) for at, pieces in texts.items()}
    out: list[str] = []
    printer = Printer([f"prompt {i}" for i in range(len(nums))], out.append)
    came: dict[tuple[int, int], str] = {}
    for _ in range(data.draw(st.integers(0, 3 * len(texts)))):
        at = data.draw(st.sampled_from(sorted(left)))
        piece = left[at].pop(0)
        came[at] = came.get(at, "") + piece
        printer.add(*at, piece, not left[at])
        if not left[at]:
            del left[at]
        if not any(other[0] == at[0] for other in left):
            printer.close(at[0], nums[at[0]])
    printer.flush()
    wanted = [f"[{i}{f'.{j}' if j else ''}] prompt {i}\n{came[i, j]}\n" for i, j in sorted(came)]
    assert "".join(out) == "".join(wanted)
