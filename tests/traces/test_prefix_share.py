"""The prefixes that hash ids share are shared, to the token, by the tokens that are synthesised, at any block size."""

import json
import re
from array import array
from itertools import accumulate
from operator import and_, eq

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TraceError
from testbed.traces.arrange import arrange
from testbed.traces.generators import SyntheticConfig, generate
from testbed.traces.readers import read_trace
from testbed.traces.readers.agentic import SEMANTICS as AGENTIC
from testbed.traces.readers.bailian import SEMANTICS as BAILIAN
from testbed.traces.readers.hash_blocks import BlockSemantics, HashBlocks
from testbed.traces.readers.mooncake import SEMANTICS as MOONCAKE
from testbed.traces.schema import Span, TokenIds, TraceRequest
from testbed.traces.summary import PrefixShare
from testbed.traces.synthesis import materialize
from tests.traces.kit import published

VOCAB = 50_000


def hits_of_tokens(prompts, block_size: int) -> list[int]:
    """Tokens that an infinite prefix cache of such blocks would hit, on tokens as an engine sees them."""
    seen: set = set()
    found = []
    for tokens in prompts:
        raw, size = tokens.tobytes(), tokens.itemsize * block_size
        chain, num_hit, is_hit = 0, 0, True
        for start in range(0, len(raw) // size * size, size):
            chain = xxhash.xxh64_intdigest(raw[start : start + size], seed=chain)
            is_hit = is_hit and chain in seen
            num_hit += block_size * is_hit
            seen.add(chain)
        found.append(num_hit)
    return found


def hits_of_ids(rows, semantics: BlockSemantics) -> list[int]:
    """Tokens of the longest common prefix with any earlier prompt, from the ids alone. rows: (session, ids, tokens)."""
    known: dict = {}  # (scope, ids up to a block) -> the most tokens of that block that were seen
    found = []
    for session, ids, num_tokens in rows:
        scope = session if semantics.scope == "session" else None
        num_hit, is_hit = 0, True
        for k in range(len(ids)):
            size = min(semantics.block_tokens, num_tokens - k * semantics.block_tokens)
            key = (scope, tuple(ids[: k + 1]))
            if is_hit:
                num_hit += min(size, known.get(key, 0))
            is_hit = is_hit and known.get(key, 0) >= size
            known[key] = max(size, known.get(key, 0))
        found.append(num_hit)
    return found


def parts_of(rows, semantics):
    blocks = HashBlocks("test", semantics)
    return [blocks.prompt(list(ids), n, f"f:{i}", 10**9 + i, session) for i, (session, ids, n) in enumerate(rows)]


@st.composite
def traces(draw):
    semantics = BlockSemantics(
        draw(st.sampled_from([16, 64, 512])),
        draw(st.sampled_from(["ceil", "floor", "either"])),
        draw(st.sampled_from(["global", "session"])),
    )
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        num_tokens = draw(st.integers(1, 4 * semantics.block_tokens))
        num_ids = draw(st.sampled_from(semantics.counts(num_tokens)))
        ids = draw(st.lists(st.integers(0, 2), min_size=num_ids, max_size=num_ids))
        rows.append((draw(st.sampled_from(["s", "t"])), ids, num_tokens))
    return semantics, rows


@given(traces(), st.sampled_from([1, 8, 16, 48, 64, 100, 512]))
def test_synthesised_tokens_hit_what_the_ids_share_whatever_the_engines_block_size(trace, block_size):
    semantics, rows = trace
    shared = hits_of_ids(rows, semantics)
    parts = parts_of(rows, semantics)
    prompts = [materialize(prompt, VOCAB) for prompt in parts]
    assert [len(tokens) for tokens in prompts] == [n for _, _, n in rows]
    assert hits_of_tokens(prompts, block_size) == [hit // block_size * block_size for hit in shared]
    share = PrefixShare()
    counted = [share.add(TraceRequest(str(i), i, prompt, None)) for i, prompt in enumerate(parts)]
    assert counted == shared, "without making tokens"


@pytest.mark.parametrize(
    ("semantics", "num_tokens", "counts"),
    [(MOONCAKE, 1100, (3,)), (MOONCAKE, 1024, (2,)), (AGENTIC, 130, (2,)), (AGENTIC, 63, (0,)), (BAILIAN, 20, (2, 1))],
)
def test_each_format_declares_how_many_ids_a_prompt_has(semantics, num_tokens, counts):
    assert semantics.counts(num_tokens) == counts
    blocks = HashBlocks("x", semantics)
    with pytest.raises(TraceError, match=rf"f:1: field 'hash_ids' is 'a list of 9'; expected {counts[0]} ids, one for"):
        blocks.prompt(list(range(9)), num_tokens, "f:1", 0)


def test_ids_of_two_sessions_mean_two_things_only_where_they_are_local():
    for scope, is_shared in (("global", True), ("session", False)):
        one, two = parts_of([("s", [1], 16), ("t", [1], 16)], BlockSemantics(16, "ceil", scope))
        assert (one == two) is is_shared


def test_generated_outputs_count_as_seen_but_for_their_last_token():
    trace = generate(SyntheticConfig(num_requests=40, max_turns=4), 2)
    share, before = PrefixShare(), {}
    for row in trace:
        expected = before.get((row.session_id, row.turn - 1), 0)
        assert share.add(row) == expected
        before[row.session_id, row.turn] = row.num_prompt_tokens + row.num_output_tokens - 1


@st.composite
def contents(draw):
    """Explicit ids and spans, with much in common: runs of 1 and 2 that part at any place."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            parts.append(Span(draw(st.integers(7, 8)), 0, draw(st.integers(1, 20))))
        else:
            runs = draw(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 19)), min_size=1, max_size=3))
            parts.append(TokenIds(array("i", [number for number, times in runs for _ in range(times)])))
    return tuple(parts)


def named_tokens(parts):
    """Each token by what it is: an id, or a place in a content."""
    return [
        item
        for part in parts
        for item in (
            part.ids if isinstance(part, TokenIds) else [(part.key, part.start + i) for i in range(part.length)]
        )
    ]


@given(st.lists(st.tuples(contents(), st.sampled_from([None, "", "a", "b"])), min_size=2, max_size=8))
def test_prefixes_of_one_salt_are_compared_to_the_token_however_they_are_cut(rows):
    share, seen = PrefixShare(), []
    for number, (parts, salt) in enumerate(rows):
        tokens = named_tokens(parts)
        common = [sum(accumulate(map(eq, tokens, before), and_)) for before, other in seen if other == (salt or "")]
        assert share.add(TraceRequest(str(number), number, parts, None, cache_salt=salt)) == max(common, default=0)
        seen.append((tokens, salt or ""))


@pytest.mark.parametrize("scope", ["global", "session"])
@pytest.mark.parametrize("bad", [True, False, 1.5, None, [1]])
def test_only_whole_numbers_are_ids_also_where_an_equal_one_was_seen(scope, bad):
    blocks = HashBlocks("x", BlockSemantics(16, "ceil", scope))
    blocks.prompt([0, 1], 32, "f:1", 0, "s")
    with pytest.raises(TraceError, match=rf"f:2: field 'hash_ids' is {re.escape(repr(bad))}; expected whole numbers"):
        blocks.prompt([0, bad], 32, "f:2", 0, "s")


def test_the_mooncake_file_hits_in_tokens_what_its_ids_share():
    file = published("mooncake_fast25_conversation.jsonl.gz")
    import gzip

    with gzip.open(file, "rt") as lines:
        given_rows = [json.loads(line) for line in lines]
    trace = read_trace("mooncake", file)
    shared = hits_of_ids([("", row["hash_ids"], row["input_length"]) for row in given_rows], MOONCAKE)
    total = sum(row["input_length"] for row in given_rows)
    assert sum(shared) / total == pytest.approx(0.374, abs=0.002)
    hits = hits_of_tokens((materialize(row.prompt, VOCAB) for row in trace), 512)
    assert hits == [hit // 512 * 512 for hit in shared]
    assert sum(hits) / total == pytest.approx(0.37, abs=0.005)
    first = list(trace.rows[:1500])
    for block_size in (16, 48, 100):
        hits = hits_of_tokens((materialize(row.prompt, VOCAB) for row in first), block_size)
        assert hits == [hit // block_size * block_size for hit in shared[:1500]]


def test_whole_blocks_only_count_in_the_summary():
    from testbed.traces.summary import summarise

    rows = [
        TraceRequest(name, i, (Span(7, 0, n),), Span(i, 0, 1)) for i, (name, n) in enumerate((("a", 40), ("b", 100)))
    ]
    summary = summarise(arrange("x", rows))
    assert (summary.shared(), summary.shared(16)) == (40 / 140, 32 / 140)
