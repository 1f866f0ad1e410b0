"""The roofline's time of one attention kernel over the chunks of a step, and its decodes unless they have their own,
counted in tiles of query rows.

A tile is a number of query rows of one head; if the kernel packs heads, of all heads that read the same K and V. It
iterates over all keys that its last row sees. A tile that is partly masked or not full takes as long as a full one.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sim.cost.base import to_ns
from testbed.core.commands import Recorder, StepView
from testbed.core.plan import PrefillChunk
from testbed.specs.device import DeviceSpec
from testbed.specs.ranges import MAX_SIZE

# The query tiles of all chunks: their number, the sum of their keys, the keys of the longest one, the most tiles of a
# chunk, positions read, positions written, and the keys of whole waves (see _whole_waves)
Tiles = tuple[i64, i64, i64, i64, i64, i64, i64]

CHECKED: Final = {  # device -> its kind of mixed attention whose times were compared with measured ones
    "h100": "packed", "h200": "packed", "rtx4090": "unpacked", "rtx_pro_6000": "unpacked",
    "rtx_pro_6000_server": "unpacked",
}  # fmt: skip


class MixedWatch(Recorder):
    """Notes whether any step has prefills and decodes. unchecked: as in RooflineCost."""

    def __init__(self, unchecked: str) -> None:
        self._unchecked = unchecked
        self._is_mixed = False

    def committed(self, step: StepView) -> None:
        if not self._is_mixed:
            self._is_mixed = step.plan.shape.kind == "mixed"

    def notes(self) -> list[str]:
        if not self._is_mixed:
            return []
        return [
            f"mixed steps: attention of decodes beside prompts is priced as {self._unchecked}, which nobody compared "
            "with an engine; it can decide between whole and chunked prompts: compare cost.mixed_attention=packed, "
            "unpacked and split"
        ]


class MixedAttention:
    """The attention kernels of all `layers` of one rank with `num_heads` query heads, of which each `group` reads the
    same K and V. packs_heads: such a group shares its tiles. ns_per_pair: of a (query, key) pair; kv_ns_per_token,
    qo_ns_per_token: of one position's traffic."""

    def __init__(
        self, device: DeviceSpec, layers: int, num_heads: int, group: int, window: int | None, *, packs_heads: bool,
        ns_per_pair: float, kv_ns_per_token: float, qo_ns_per_token: float,
    ) -> None:  # fmt: skip
        packed = group if packs_heads else 1
        rows = max(device.attention_tile_rows, packed)
        self._num_sms: i64 = device.num_sms
        self._tokens_per_tile: i64 = rows // packed
        self._tile_keys: i64 = device.attention_tile_keys
        self._tiled_heads: i64 = num_heads // packed
        self._reach: i64 = MAX_SIZE if window is None else window + self._tokens_per_tile - 1  # most keys of a tile
        self._unpacked = float(group // packed)
        self._tile_ns_per_key = ns_per_pair * rows * device.num_sms / num_heads  # on one multiprocessor
        self._kv_ns_per_token, self._qo_ns_per_token = kv_ns_per_token, qo_ns_per_token
        self._packs_heads = packs_heads
        self._floor_ns = device.kernel_factor * layers * device.attention_floor_ns
        self._combining_ns = device.kernel_factor * layers * max(
            0, device.decode_attention_floor_ns - device.attention_floor_ns
        )  # fmt: skip

    def ns(self, of_chunks: Tiles, num_decodes: i64, context: i64, longest: i64) -> int:
        """Returns the kernels' time. Each decode is a tile. The arithmetic takes the longest of: all tiles, shared
        evenly by the multiprocessors; the longest tile; whole waves of tiles. Additional work shortens none of these.

        A kernel that packs heads splits keys if the tiles of each chunk leave a fifth of the multiprocessors idle, as
        FlashAttention 3 does (num_splits_heuristic): a chunk's tile is shared by as many multiprocessors as there are
        for each, a decode by all, and a second kernel combines the parts.

        K and V of a chunk are read once, and written once for new tokens. Heads that are not packed are processed in
        turn. The more tiles a turn has, the less of the K and V that heads share is still cached for the next one.
        """
        tiles, keys, of_chunk, most, num_read, num_tokens, waves = of_chunks
        alone = of_chunk
        if num_decodes:
            alone = max(alone, longest if longest else context // num_decodes)  # 0: not known, the mean is taken
            tiles, keys = tiles + num_decodes, keys + context
            num_read, num_tokens = num_read + context, num_tokens + num_decodes
        alone = min(alone, self._reach) + self._tile_keys
        evenly = float((keys + tiles * self._tile_keys) * self._tiled_heads) / float(self._num_sms)
        num_reads = min(self._unpacked, max(1.0, self._unpacked * float(tiles) / float(self._num_sms)))
        moved = num_reads * float(num_read) + float(num_tokens)  # positions of K and V
        qo_ns = float(num_tokens) * self._qo_ns_per_token
        bytes_ns = moved * self._kv_ns_per_token + qo_ns
        ns = max(max(evenly, float(max(alone, waves))) * self._tile_ns_per_key, bytes_ns)
        num_busy = most * self._tiled_heads
        if self._packs_heads and 5 * num_busy < 4 * self._num_sms:
            part = float(min(of_chunk, self._reach) * num_busy) / float(self._num_sms) + float(self._tile_keys)
            combining_ns = self._combining_ns + 2 * qo_ns  # parts are float32, written and read
            ns = min(ns, max(max(evenly, part) * self._tile_ns_per_key, bytes_ns) + combining_ns)
        return to_ns(self._floor_ns + ns)

    def tiles_of(self, prefills: tuple[PrefillChunk, ...]) -> Tiles:
        tiles, keys, longest, most, num_read, num_tokens = i64(0), i64(0), i64(0), i64(0), i64(0), i64(0)
        for chunk in prefills:
            start, length = i64(chunk.start), i64(chunk.num_tokens)
            num_tiles = -(-length // self._tokens_per_tile)
            tiles += num_tiles
            keys += self._keys_of(start, length, num_tiles)
            longest, most = max(longest, start + length), max(most, num_tiles)
            num_read += start + length
            num_tokens += length
        return tiles, keys, longest, most, num_read, num_tokens, self._whole_waves(prefills)

    def _whole_waves(self, prefills: tuple[PrefillChunk, ...]) -> i64:
        """Returns the most keys that one multiprocessor processes in whole waves of tiles. A wave counts the tiles that
        have at least the keys of some chunk's first tile (its shortest, unless a window cuts its last) or last tile.
        """
        if len(prefills) == 1:  # most steps have one chunk: without a list `price` takes two thirds of the time
            whole, first, last = self._levels(prefills[0])
            return max(self._wave_keys(whole, first), self._wave_keys(whole + 1, last))
        levels: list[tuple[i64, i64]] = []  # (least keys of a tile, number of tiles)
        for chunk in prefills:
            whole, first, last = self._levels(chunk)
            levels += [(first, whole), (last, 1)]
        levels.sort(reverse=True)
        tiles, most = i64(0), i64(0)
        for keys, num in levels:
            tiles += num
            most = max(most, self._wave_keys(tiles, keys))
        return most

    def _wave_keys(self, tiles: i64, keys: i64) -> i64:
        return -(-tiles * self._tiled_heads // self._num_sms) * (keys + self._tile_keys)

    def _levels(self, chunk: PrefillChunk) -> tuple[i64, i64, i64]:
        """Returns the number of tiles before a chunk's last one, the least keys of any of them, and the keys of the
        last one, which count at most as many as that."""
        start, length = i64(chunk.start), i64(chunk.num_tokens)
        whole = -(-length // self._tokens_per_tile) - 1
        first = min(start + min(length, self._tokens_per_tile), self._reach)
        return whole, first, min(first, self._last_keys(start, length, whole))

    def _last_keys(self, start: i64, length: i64, whole: i64) -> i64:
        """Returns the keys of a chunk's last tile, which follows `whole` full tiles."""
        rows = self._tokens_per_tile
        return min(start + length, self._reach - rows + length - whole * rows)

    def _keys_of(self, start: i64, length: i64, num_tiles: i64) -> i64:
        """Returns the summed keys of a chunk's tiles: each reads up to its last token, as far back as the window."""
        rows, whole = self._tokens_per_tile, num_tiles - 1
        growing = min(whole, max(i64(0), (self._reach - start) // rows))  # tiles that see everything before them
        grown = growing * start + rows * growing * (growing + 1) // 2
        return grown + (whole - growing) * self._reach + self._last_keys(start, length, whole)
