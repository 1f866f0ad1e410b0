"""Tokens are a pure function of content, position and vocabulary."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.traces.parts import cut_parts, join_parts
from testbed.traces.schema import Span, TokenIds
from testbed.traces.synthesis import content_key, heads, materialize

keys = st.integers(0, 2**64 - 1)
vocabularies = st.integers(1, 2**31 - 1)


def synthesize(span: Span, vocab_size: int) -> array:
    return materialize((span,), vocab_size)


def test_golden_values_hold_on_every_machine():
    assert content_key("golden", 1) == 16084598073692240405
    assert synthesize(Span(content_key("golden", 1), 0, 5), 151936).tolist() == [44082, 12981, 11324, 147849, 118073]
    assert synthesize(Span(0, 0, 5), 1000).tolist() == [883, 431, 26, 970, 106]  # splitmix64 of seed 0: e220a839…, …


def test_agrees_with_splitmix64_in_plain_python():
    def token(key: int, position: int, vocab_size: int) -> int:
        mask = 2**64 - 1
        z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (((z ^ (z >> 31)) >> 32) * vocab_size) >> 32

    key, start = 2**64 - 3, 10**12
    assert synthesize(Span(key, start, 50), 50257).tolist() == [token(key, start + j, 50257) for j in range(50)]


@given(keys, st.integers(0, 10**9), st.integers(0, 300), st.integers(0, 300), vocabularies)
def test_a_slice_agrees_with_the_whole(key, start, offset, length, vocab_size):
    whole = synthesize(Span(key, start, offset + length), vocab_size)
    span = Span(key, start + offset, length)
    assert synthesize(span, vocab_size) == whole[offset:]
    assert heads([span, span], 64, vocab_size) == [whole[offset:][:64]] * 2
    assert all(0 <= token < vocab_size for token in whole)


@given(st.lists(st.tuples(keys, st.integers(0, 1000), st.integers(0, 40)), max_size=6), st.integers(0, 240))
def test_parts_are_concatenated_cut_and_joined_without_changing_a_token(spans, cut):
    parts = [Span(*span) for span in spans]
    parts.insert(len(parts) // 2, TokenIds(array("i", [7, 8])))
    whole = materialize(parts, 1000)
    assert whole.tolist() == [t for part in parts for t in materialize((part,), 1000)]
    assert materialize(cut_parts(parts, cut), 1000) == whole[:cut]
    assert materialize(join_parts(parts), 1000) == whole


def test_pieces_longer_than_a_chunk_agree():
    size = (1 << 18) + 100
    whole = synthesize(Span(5, 0, size), 32000)
    assert len(whole) == size
    assert whole[-200:] == synthesize(Span(5, size - 200, 200), 32000)


def test_different_contents_differ():
    assert synthesize(Span(1, 0, 64), 32000) != synthesize(Span(2, 0, 64), 32000)


def test_tokens_cover_the_vocabulary_evenly():
    tokens = synthesize(Span(content_key("even"), 0, 80_000), 8)
    counts = [tokens.count(token) for token in range(8)]
    assert sum((count - 10_000) ** 2 / 10_000 for count in counts) < 30  # chi-square, 7 degrees: p about 1e-4


def test_content_keys_are_unambiguous():
    names = [("ab", "c"), ("a", "bc"), ("abc",), ("1",), (1,), (-1,), (), ("",), ("", "")]
    assert len({content_key(*name) for name in names}) == len(names)


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31])
def test_impossible_vocabularies_are_refused(vocab_size):
    with pytest.raises(ValueError, match="vocab_size is"):
        synthesize(Span(1, 0, 1), vocab_size)


@pytest.mark.parametrize("span", [Span(1, -1, 1), Span(1, 0, -1)])
def test_impossible_spans_are_refused(span):
    with pytest.raises(ValueError, match="is impossible"):
        synthesize(span, 10)
