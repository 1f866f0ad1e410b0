"""Stop strings: found across pieces, cut as if the text had come at once, and nothing shown that is taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from real.text.detokenizer import ByteDetokenizer
from real.text.sequence_text import SequenceText, StopStrings
from testbed.core.sampling import SamplingParams
from tests.text.tokenizers_on_the_spot import byte_fallback

LETTERS = st.text("ab🙂", max_size=30)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


def cut(text: str, stops: tuple[str, ...], included: bool, num_early: int = 0) -> tuple[str, str | None]:
    """The reference: character by character; what ends within the first `num_early` does not count."""
    for end in range(num_early + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end if included else end - len(longest)], longest
    return text, None


def in_pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    borders = [0, *cuts, len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


@given(data=st.data(), text=LETTERS, stops=STOPS, included=st.booleans())
def test_pieces_make_no_difference(data: st.DataObject, text: str, stops: tuple[str, ...], included: bool) -> None:
    watched, shown = StopStrings(stops, is_included=included), ""
    num_early = data.draw(st.integers(0, len(text)))
    wanted, stop = cut(text, stops, included, num_early)
    seen = ""
    for piece in [*in_pieces(data.draw, text[:num_early]), *in_pieces(data.draw, text[num_early:])]:
        is_searched = len(seen) >= num_early
        seen += piece
        shown += watched.push(piece, is_searched=is_searched)
        assert wanted.startswith(shown), "shown, and taken back"
        if watched.found is None:  # only what may begin a stop string is held
            held = seen[len(shown) :]
            assert not held or any(one.startswith(held) for one in stops)
    assert watched.found == stop
    assert shown + watched.finish() == wanted


@given(data=st.data(), text=LETTERS, stops=STOPS)
def test_text_that_is_still_open_counts_and_is_not_shown(
    data: st.DataObject, text: str, stops: tuple[str, ...]
) -> None:
    """What is pending and comes later as settled text is found at once, and shown once."""
    watched, shown, num = StopStrings(stops), "", data.draw(st.integers(0, len(text)))
    shown += watched.push(text[:num], text[num:])
    wanted, stop = cut(text, stops, False)
    assert watched.found == stop
    shown += watched.push(text[num:]) + watched.finish()
    assert shown == wanted


def text_of(tokens: bytes, **sampling: object) -> SequenceText:
    return SequenceText(ByteDetokenizer(lambda token: bytes([token])), SamplingParams(**sampling), {0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "wanted", "stop"),
    [
        ({}, "one two", None),
        ({"stop": "e t"}, "on", "e t"),
        ({"stop": "e t", "include_stop_str_in_output": True}, "one t", "e t"),
        ({"stop": "o", "min_tokens": 1}, "one tw", "o"),
        ({"stop": "e t", "min_tokens": 4}, "on", "e t"),  # begins within them and ends after them, as vLLM has it
        ({"stop": "e t", "min_tokens": 5}, "one two", None),
        ({"stop": ["e two", "tw"], "min_tokens": 6}, "on", "e two"),  # "tw" was complete too early
        ({"stop": ["zz", "two!"]}, "one two", None),
    ],
)
def test_the_text_of_a_sequence(sampling: dict[str, object], wanted: str, stop: str | None) -> None:
    text, shown = text_of(b"", **sampling), ""
    for token in b"one two":
        text.push(token)
        shown += text.take()
        if text.stop is not None:
            break
    text.finish()
    text.finish()
    assert shown + text.take() == text.text == wanted
    assert text.stop == stop


def test_the_token_that_ends_a_sequence_is_no_text_unless_that_is_wished() -> None:
    for included, wanted in ((False, "a"), (True, "a\0")):
        text = text_of(b"", include_stop_str_in_output=included)
        for token in b"a\0":
            text.push(token)
        text.finish()
        assert text.text == wanted
        assert text.num_tokens == 2


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_a_stop_string_of_single_bytes_is_found_with_its_last_byte(min_tokens: int) -> None:
    tokenizer = byte_fallback()
    byte = tokenizer.inner.get_vocab()
    text = SequenceText(tokenizer.detokenizer(), SamplingParams(stop="。", min_tokens=min_tokens), ())
    for token in (byte["a"], byte["<0xE3>"], byte["<0x80>"]):
        text.push(token)
        assert text.stop is None
    text.push(byte["<0x82>"])
    assert text.stop == "。"
    text.finish()
    assert text.text == "a"


@pytest.mark.parametrize(
    "following", [[], ["<0x0A>"], ["<0x41>", "<0x0A>"], ["▁The", "<0x0A>"], ["<0xFF>", "▁The", "<0x0A>"]]
)
def test_bytes_that_are_still_open_after_min_tokens_do_not_count_later(following: list[str]) -> None:
    """A run of bytes is shown late; a stop string that it completed within the first tokens came too early."""
    tokenizer = byte_fallback()
    first = tokenizer.encode("The")
    ids = [*first, *tokenizer.inner.convert_tokens_to_ids(["<0x0A>", *following])]
    text = SequenceText(tokenizer.detokenizer(), SamplingParams(stop="\n", min_tokens=len(first) + 1), ())
    for number, token in enumerate(ids, 1):
        assert text.stop is None
        text.push(token)
        assert (text.stop is not None) == (number == len(ids) and bool(following))
    text.finish()
    whole = tokenizer.decode(ids)
    assert text.text == (whole.removesuffix("\n") if following else whole)


@pytest.mark.parametrize("num_early", [1, 2, 4])
def test_a_character_that_is_cut_by_min_tokens_does_not_revive_what_stands_before_it(num_early: int) -> None:
    """The bytes of a character that is not whole hide the stop string before them, until they are complete."""
    tokenizer = byte_fallback()
    first = tokenizer.encode("The")
    ids = tokenizer.inner.convert_tokens_to_ids(["<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])
    sampling = SamplingParams(stop="\n", min_tokens=len(first) + num_early)
    text = SequenceText(tokenizer.detokenizer(), sampling, ())
    for token in (*first, *ids):
        text.push(token)
    text.finish()
    text.finish()
    assert text.stop is None
    assert text.text == tokenizer.decode([*first, *ids])
