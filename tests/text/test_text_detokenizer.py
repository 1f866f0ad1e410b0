"""Pieces of text concatenate to the whole, and never end within a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real.text.detokenizer import REPLACEMENT, WindowDetokenizer
from real.text.tokenizer import Tokenizer
from tests.text.tokenizers_on_the_spot import KINDS, byte_fallback, byte_level

CHARACTERS = st.characters(codec="utf-8")
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=40), st.text(st.sampled_from("abe tn .日本🙂👩\u200d\u0301é�\x00\n "), max_size=40)
)
FLAGS = st.booleans()


def pieces_of(tokenizer: Tokenizer, ids: list[int], skips: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@st.composite
def token_ids(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Any ids: half characters, specials, ids that the tokenizer does not know, and pieces of real text between."""
    known = st.integers(0, tokenizer.num_tokens + 2)
    few = st.sampled_from([*(sorted(tokenizer._byte_ids) or range(257))[-70:], 1, tokenizer.num_tokens - 1])
    parts = draw(st.lists(st.one_of(st.lists(known, max_size=6), st.lists(few, max_size=12), TEXTS), max_size=4))
    return [token for part in parts for token in (tokenizer.encode(part) if isinstance(part, str) else part)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_pieces_concatenate_to_what_decode_gives(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    ids, skips = data.draw(token_ids(tokenizer)), data.draw(FLAGS)
    whole = tokenizer.decode(ids, skip_special_tokens=skips)
    assert whole == tokenizer.inner.decode(ids, skip_special_tokens=skips)
    assert "".join(pieces_of(tokenizer, ids, skips)) == whole  # so nothing was shown that later tokens mended


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=100)
@given(text=TEXTS)
def test_a_text_comes_whole_and_character_by_character(kind: str, text: str) -> None:
    """Every character of real text is shown as it is: no piece has a replacement that the text has not."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids, True)
    assert "".join(pieces) == tokenizer.decode(ids)
    if tokenizer.decode(ids) == text:
        position = 0
        for piece in pieces:
            assert text[position : position + len(piece)] == piece
            position += len(piece)
    if kind == "byte_level":
        assert tokenizer.decode(ids) == text


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    by_byte = {tokenizer._bytes_of(token, True): token for token in range(300)}
    ids = [by_byte[bytes([byte])] for byte in "a🙂b".encode()]
    assert [detokenizer.push(token) for token in ids] == ["a", "", "", "", "🙂", "b"]


def test_one_bad_byte_spoils_its_run_and_nothing_of_it_was_shown() -> None:
    tokenizer = byte_fallback()
    byte = tokenizer.inner.get_vocab()
    ids = [byte[f"<0x{value:02X}>"] for value in (0xE2, 0x82, 0xAC, 0xFF)]
    assert pieces_of(tokenizer, [*ids[:3], byte["a"]], True) == ["", "", "", "€a", ""]
    assert pieces_of(tokenizer, [*ids, byte["a"]], True) == ["", "", "", "", REPLACEMENT * 4 + "a", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_long_the_text_is(kind: str) -> None:
    """Counted, not timed: the ids that are decoded for each token."""
    tokenizer = KINDS[kind]()
    decoded: list[int] = []
    detokenizer = tokenizer.detokenizer()
    if isinstance(detokenizer, WindowDetokenizer):
        inner = detokenizer._decode
        detokenizer._decode = lambda ids: (decoded.append(len(ids)), inner(ids))[1]  # type: ignore[func-returns-value]
    ids = tokenizer.encode("the blocks run out, é 日本 🙂 � ") * 40
    for token in ids:
        detokenizer.push(token)
    assert sum(decoded) <= 12 * len(ids)
    ids = [tokenizer.num_tokens - 1] * 500  # the same token for ever
    decoded.clear()
    for token in ids:
        detokenizer.push(token)
    assert sum(decoded) <= 12 * len(ids)


def test_the_window_holds_what_a_decoder_leaves_open_and_not_for_ever() -> None:
    """A decoder that nobody knows, as of a tokenizer in plain Python: bytes of one character in several tokens."""
    detokenizer = WindowDetokenizer(
        lambda ids: bytes(ids).decode("utf-8", "replace"), lambda token: False, lambda token: False
    )
    euro = "€".encode()
    assert [detokenizer.push(token) for token in euro] == ["", "", "€"]
    shown = [detokenizer.push(0x80) for _ in range(40)]
    assert "".join(shown).count(REPLACEMENT) >= 32
    assert max(map(len, shown)) <= 4
