"""Shapes of steps for tests of prices: by hand, and drawn."""

from hypothesis import strategies as st

from testbed.core.plan import BatchShape, PrefillChunk

chunks = st.builds(PrefillChunk, st.integers(0, 30_000), st.integers(1, 8192))


def with_shared(share: float, shape: BatchShape) -> BatchShape:
    """With this share of the most positions that decodes can read again."""
    most = shape.decode_context_tokens - shape.longest_decode_context
    return shape.replace(repeated_context_tokens=int(share * most))


shapes = st.builds(
    lambda decodes, context, longest, shared, prefills, samples, *blocks: with_shared(shared, BatchShape(
        decodes, context + decodes if decodes else 0, tuple(prefills), samples, *blocks,
        min(context + decodes, -(-(context + decodes) // decodes) + longest) if decodes else 0,
    )),
    st.integers(0, 600), st.integers(0, 10**6), st.integers(0, 1000), st.floats(0, 1), st.lists(chunks, max_size=4),
    st.integers(0, 600), *[st.integers(0, 500)] * 3,
)  # fmt: skip


def decode(num: int, context_each: int = 1000) -> BatchShape:
    return BatchShape(num, num * context_each, (), num, longest_decode_context=context_each)


def prefill(*lengths: int, start: int = 0) -> BatchShape:
    return BatchShape(0, 0, tuple(PrefillChunk(start, n) for n in lengths), len(lengths))
