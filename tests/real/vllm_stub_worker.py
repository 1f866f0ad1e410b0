"""Stand-ins for vLLM's two model runners: what a worker remembers of requests, and what it makes of a step.

They know only what `SchedulerOutput` tells them, and keep it as vLLM's own do: OlderRunner as gpu_model_runner.py,
NewerRunner as gpu/model_runner.py (vLLM 0.32). A token is drawn from what all KV slots before it hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

VOCAB_SIZE = 11
NULL_BLOCK = 0
UNKNOWN = -1  # a token that is on the device only, as vLLM writes it


def draw(text: Sequence[int]) -> int:
    return zlib.crc32(bytes(text)) % VOCAB_SIZE


@dataclass(frozen=True)
class Row:
    """One request's share of a step, as its worker understands it."""

    name: str
    tokens: list[int]  # at positions start, start + 1, …
    start: int
    table: list[int]
    samples: bool


class Memory:
    """KV slots. Each holds the name of a text: what was computed there depended on all of it."""

    def __init__(self, block_size: int, num_blocks: int, *, reads_own_step: bool) -> None:
        self._block_size, self._reads_own_step = block_size, reads_own_step
        self._slots = [[UNKNOWN] * block_size for _ in range(num_blocks)]
        self._names: dict[tuple[int, int], int] = {}
        self.texts: list[list[int]] = [[]]

    def wipe(self) -> None:
        """Other weights: what was computed before is worth nothing."""
        self._slots = [[UNKNOWN] * self._block_size for _ in self._slots]

    def compute(self, rows: list[Row]) -> dict[str, int]:
        """Writes the rows' slots; the token of each that samples."""
        read = {} if self._reads_own_step else {row.name: self._read(row) for row in rows}
        drawn, written = {}, dict[tuple[int, int], int]()
        for row in rows:
            text = read[row.name] if row.name in read else self._read(row)
            for position, token in enumerate(row.tokens, row.start):
                assert 0 <= token < VOCAB_SIZE, f"{row.name} computes token {token} at {position}, which nobody knows"
                text = self._name(text, token)
                place = self._place(row, position)
                assert written.setdefault(place, text) == text, f"{row.name} writes where another row writes: {place}"
                self._slots[place[0]][place[1]] = text
            if row.samples:
                drawn[row.name] = draw(self.texts[text])
        return drawn

    def _name(self, text: int, token: int) -> int:
        """The text that has this token after that one."""
        name = self._names.setdefault((text, token), len(self.texts))
        if name == len(self.texts):
            self.texts.append([*self.texts[text], token])
        return name

    def _read(self, row: Row) -> int:
        """The text that stands in the slots before the row. Each slot must hold the text of the one before, and more:
        else attention would mix texts."""
        last = 0
        for position in range(row.start):
            block, offset = self._place(row, position)
            found = self._slots[block][offset]
            assert found != UNKNOWN, f"{row.name} reads position {position} of {row.start}, which nobody wrote"
            text = self.texts[found]
            assert self._names.get((last, text[-1])) == found, f"{row.name} reads a foreign token at {position}"
            last = found
        return last

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self._block_size)
        assert index < len(row.table), f"{row.name} has no block for position {position}"
        assert row.table[index] != NULL_BLOCK, f"{row.name} uses the null block for position {position}"
        return row.table[index], offset


def answer(order: list[str], drawn: dict[str, int]) -> Any:
    """A ModelRunnerOutput."""
    return SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(order)},
        sampled_token_ids=[[drawn[name]] if name in drawn else [] for name in order], logprobs=None,
        prompt_logprobs_dict={}, num_nans_in_logits=None,
    )  # fmt: skip


def check(output: Any) -> None:
    """What every worker relies on."""
    new, cached = [one.req_id for one in output.scheduled_new_reqs], output.scheduled_cached_reqs.req_ids
    counts = output.num_scheduled_tokens
    assert len({*new, *cached}) == len(new) + len(cached), "a request is told of twice"
    assert {*new, *cached} == set(counts), "tokens are scheduled for what is not told of"
    assert sum(counts.values()) == output.total_num_scheduled_tokens
    assert min(counts.values(), default=1) > 0
    assert output.scheduled_cached_reqs.resumed_req_ids <= set(cached)
    lists = output.scheduled_cached_reqs
    for item in (lists.new_block_ids, lists.num_computed_tokens, lists.num_output_tokens):
        assert len(item) == len(cached)
    assert not lists.new_token_ids


# --- the older runner ---


@dataclass
class _Known:
    """A request's state, kept whether it runs or not."""

    prompt: list[int]
    blocks: list[int]
    start: int
    output: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class OlderRunner:
    """Keeps a state for each request, and a batch of those of the last step, which alone know what was drawn for them.

    is_async: drawn tokens stay on the device; the next step takes them from there.
    """

    def __init__(self, memory: Memory, *, is_async: bool) -> None:
        self.known: dict[str, _Known] = {}
        self._memory, self._is_async = memory, is_async
        self._batch: dict[str, list[int]] = {}  # tokens, as far as the host has them
        self._newest: dict[str, int] = {}  # what the last step drew, on the device

    def execute(self, output: Any) -> Any:
        check(output)
        self._forget(output)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known, f"{new.req_id} is new, and known"
            self.known[new.req_id] = _Known(list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens)
            self._batch[new.req_id] = list(new.prompt_token_ids)
        for index in range(len(output.scheduled_cached_reqs.req_ids)):
            self._update(output.scheduled_cached_reqs, index)
        if not output.total_num_scheduled_tokens:
            return answer([], {})
        drawn = self._memory.compute(
            [self._row(name, num_tokens) for name, num_tokens in output.num_scheduled_tokens.items()]
        )
        for name, token in drawn.items():
            seen = UNKNOWN if self._is_async else token
            self._batch[name].append(seen)
            self.known[name].output.append(seen)
        self._newest = drawn if self._is_async else {}
        return answer(list(self._batch), drawn)

    def _forget(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.known.pop(name, None)
            self._batch.pop(name, None)
        stays = output.num_scheduled_tokens.keys() - output.scheduled_cached_reqs.resumed_req_ids
        self._batch = {name: tokens for name, tokens in self._batch.items() if name in stays}
        self._newest = {name: token for name, token in self._newest.items() if name in self._batch}

    def _update(self, told: Any, index: int) -> None:
        name = told.req_ids[index]
        assert name in self.known, f"{name} is told of as known, and is not"
        known, blocks, num_output = self.known[name], told.new_block_ids[index], told.num_output_tokens[index]
        known.start = told.num_computed_tokens[index]
        del known.output[num_output:]
        if name in told.resumed_req_ids:
            assert blocks is not None, f"{name} is resumed without blocks"
            known.blocks = list(blocks[0])
        elif blocks is not None:
            known.blocks += blocks[0]
        if name in self._batch:
            del self._batch[name][len(known.prompt) + num_output :]
            assert num_output == len(known.output), f"{name} has {len(known.output)} outputs, and not {num_output}"
            return
        if self._is_async and num_output > 0:
            assert name in told.all_token_ids, f"{name} was not in the last step, and its tokens are not told"
            known.output = told.all_token_ids[name][-num_output:]
        assert num_output == len(known.output), f"{name} has {len(known.output)} outputs, and not {num_output}"
        self._batch[name] = known.prompt + known.output

    def _row(self, name: str, num_tokens: int) -> Row:
        known, end = self.known[name], self.known[name].start + num_tokens
        assert end <= known.num_tokens, f"{name} computes {end} tokens of {known.num_tokens}"
        tokens = self._batch[name][known.start : end]
        if name in self._newest:
            tokens[-1] = self._newest[name]
        return Row(name, tokens, known.start, known.blocks, samples=end == known.num_tokens)


# --- the newer runner ---


@dataclass
class _State:
    """A request's place on the device. num_prefill: tokens that came with it."""

    tokens: list[int]
    blocks: list[int]
    num_computed: int
    num_prefill: int
    num_prompt: int


class NewerRunner:
    """Keeps a request until it ends or is preempted, `max_held` of them at most; whoever is resumed comes as a new one,
    with all its tokens."""

    def __init__(self, memory: Memory, max_held: int) -> None:
        self.known: dict[str, _State] = {}
        self._max_held = max_held
        self._memory = memory

    def execute(self, output: Any) -> Any:
        check(output)
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.known.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.known, f"{new.req_id} is new, and known"
            assert new.prefill_token_ids is not None
            assert len(new.prefill_token_ids) >= len(new.prompt_token_ids)
            tokens = list(new.prefill_token_ids)
            self.known[new.req_id] = _State(
                tokens, list(new.block_ids[0]), new.num_computed_tokens, len(tokens), len(new.prompt_token_ids)
            )
        assert len(self.known) <= self._max_held, "there is no place for one more"
        told = output.scheduled_cached_reqs
        assert not told.resumed_req_ids, "this runner knows nobody who is resumed"
        for name, start, blocks in zip(told.req_ids, told.num_computed_tokens, told.new_block_ids, strict=True):
            assert name in self.known, f"{name} is told of as known, and is not"
            found = self.known[name].num_computed  # the device counts by itself
            assert start == found, f"{name} starts at {start}, and {found} of its tokens are computed"
            self.known[name].blocks += [] if blocks is None else blocks[0]
        if not output.total_num_scheduled_tokens:
            return answer([], {})
        counts = output.num_scheduled_tokens
        drawn = self._memory.compute([self._row(name, num_tokens) for name, num_tokens in counts.items()])
        for name, num_tokens in counts.items():
            self.known[name].num_computed += num_tokens
            if name in drawn:
                self.known[name].tokens.append(drawn[name])
        return answer(sorted(counts), drawn)

    def _row(self, name: str, num_tokens: int) -> Row:
        state = self.known[name]
        start, end = state.num_computed, state.num_computed + num_tokens
        assert end <= len(state.tokens), f"{name} computes {end} tokens of {len(state.tokens)}"
        assert start < state.num_prefill or num_tokens == 1, f"{name} decodes {num_tokens} tokens at once"
        return Row(name, state.tokens[start:end], start, state.blocks, samples=end >= state.num_prefill)
