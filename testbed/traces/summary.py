"""Statistics of a trace, from one iteration over its rows. Keeps 32 bytes a row, and the contents seen as prefixes.

The share of common prefixes is that of an infinite cache to which every request adds its prompt and output at once: an
upper bound of the hits of any engine. It is computed on the contents, exact to the token, without making tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from testbed.traces.batches import Batches
from testbed.traces.fingerprint import Fingerprint
from testbed.traces.parts import cut_part, whole_runs
from testbed.traces.schema import Part, Span, TraceRequest

WINDOWS_S = (1.0, 10.0, 60.0, 600.0)  # in which arrivals are counted, for their dispersion
_ID_CHUNK = 16  # explicit token ids are kept in pieces of this many
_pack = Struct("<QQQQ").pack
_ID_BYTES = array("i").itemsize
_FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Statistics of a trace. Arrays have one entry a row, in row order.

    arrivals_s: only of rows with an arrival of their own. outputs: 0 if the model decides. hits: tokens of the prompt
    that an infinite cache would have. tenants: tenant -> requests. turns: number of turns -> sessions with that many.
    """

    num_requests: int
    fingerprint: str
    arrivals_s: _FloatArray
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    hits: NDArray[np.int64]
    num_free_outputs: int
    turns: dict[int, int]
    tenants: dict[str, int]
    num_cancelled: int
    batches: Batches

    @property
    def duration_s(self) -> float:
        return float(self.arrivals_s[-1] - self.arrivals_s[0]) if len(self.arrivals_s) else 0.0

    @property
    def rate(self) -> float | None:
        """Arrivals per second; None if all arrive at once."""
        return (len(self.arrivals_s) - 1) / self.duration_s if self.duration_s > 0 else None

    @property
    def gap_cv(self) -> float | None:
        """Coefficient of variation of the gaps between arrivals."""
        gaps = np.diff(self.arrivals_s)
        return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None

    def dispersion(self, window_s: float) -> float | None:
        """Returns variance / mean of the arrivals per whole window: 1 for Poisson. None with fewer than 5 windows.

        It shows swings over minutes; the CV of the gaps depends only on neighbouring arrivals.
        """
        if self.duration_s / window_s < 5:
            return None
        places = ((self.arrivals_s - self.arrivals_s[0]) / window_s).astype(np.int64)
        counts = np.bincount(places)[: int(self.duration_s / window_s)]
        return float(counts.var(ddof=1) / counts.mean()) if counts.sum() else None

    def shared(self, block_size: int = 1) -> float:
        """Returns the share of all prompt tokens that hit in an infinite cache of such blocks (whole blocks only)."""
        total = int(self.prompts.sum())
        return float((self.hits // block_size * block_size).sum()) / total if total else 0.0


_Piece = Span | bytes  # of a content, or of a run of explicit ids: at most _ID_CHUNK, counted from the run's begin


class PrefixShare:
    """Finds the part of each prompt that was seen before as a prefix, under the same salt, exact to the token."""

    def __init__(self) -> None:
        # seen after a prefix: (prefix hash, content key, start in it) -> most tokens; prefix hash -> ids, sorted
        self._spans: dict[tuple[int, int, int], int] = {}
        self._ids: dict[int, list[bytes]] = {}

    def add(self, row: TraceRequest) -> int:
        """Returns how many tokens of the row's prompt are a prefix of an earlier row's prompt and output. Then adds the
        row. The last token of an output does not count: its KV is never computed.
        """
        root = xxhash.xxh64_intdigest(row.cache_salt.encode()) if row.cache_salt else 0
        prompt = _pieces(row.prompt)
        num_hit = self._match(root, prompt)
        num_output = row.num_output_tokens or 0
        if row.output is None or num_output < 2:
            self._insert(root, prompt)
        else:
            self._insert(root, _pieces((*row.prompt, cut_part(row.output, num_output - 1))))
        return num_hit

    def _match(self, prefix: int, pieces: list[_Piece]) -> int:
        num_hit = 0
        for piece in pieces:
            if isinstance(piece, Span):
                length, known = piece.length, self._spans.get((prefix, piece.key, piece.start), 0)
            else:
                length, known = len(piece) // _ID_BYTES, _longest_common(piece, self._ids.get(prefix, []))
            if known < length:
                return num_hit + known
            num_hit += length
            prefix = _extended(prefix, piece)
        return num_hit

    def _insert(self, prefix: int, pieces: list[_Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Span):
                place = (prefix, piece.key, piece.start)
                if self._spans.get(place, 0) < piece.length:
                    self._spans[place] = piece.length
            else:
                known = self._ids.setdefault(prefix, [])
                index = bisect_left(known, piece)
                if index == len(known) or known[index] != piece:
                    known.insert(index, piece)
            prefix = _extended(prefix, piece)


def _longest_common(piece: bytes, known: list[bytes]) -> int:
    """Returns the most ids that the piece and a known piece both begin with: a sorted neighbour has the most."""
    index = bisect_left(known, piece)
    return max((_num_common(piece, near) for near in known[max(index - 1, 0) : index + 1]), default=0)


def _num_common(one: bytes, other: bytes) -> int:
    first, second = array("i", one), array("i", other)
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _extended(prefix: int, piece: _Piece) -> int:
    """Returns the hash of a prefix and the piece after it. The encodings of ids and of spans differ in length."""
    if isinstance(piece, Span):
        return xxhash.xxh64_intdigest(_pack(prefix, *piece))
    return xxhash.xxh64_intdigest(_pack(prefix, 0, 0, 0) + piece)


def _pieces(parts: tuple[Part, ...]) -> list[_Piece]:
    """Returns joined spans, and runs of explicit ids in pieces that do not depend on how the parts were cut."""
    pieces: list[_Piece] = []
    for part in whole_runs(parts):
        if isinstance(part, Span):
            pieces.append(part)
        else:
            chunks = range(0, len(part.ids), _ID_CHUNK)
            pieces += [part.ids[start : start + _ID_CHUNK].tobytes() for start in chunks]
    return pieces


def summarise(rows: Iterable[TraceRequest]) -> TraceSummary:
    """Returns the statistics of the rows. Iterates over them once."""
    digest, share, batches = Fingerprint(), PrefixShare(), Batches()
    arrivals_ns, prompts, outputs, hits = array("q"), array("q"), array("q"), array("q")
    turns_of: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    num_free = num_cancelled = 0
    for row in rows:
        digest.update(row)
        batches.add(row)
        if row.think_ns is None:
            arrivals_ns.append(row.arrival_ns)
        prompts.append(row.num_prompt_tokens)
        outputs.append(row.num_output_tokens or 0)
        hits.append(share.add(row))
        num_free += row.output is None
        num_cancelled += row.cancel_after_ns is not None
        if row.session_id is not None:
            turns_of[row.session_id] += 1
        if row.tenant is not None:
            tenants[row.tenant] += 1
    return TraceSummary(
        num_requests=len(prompts),
        fingerprint=digest.hexdigest(),
        arrivals_s=np.array(arrivals_ns, dtype=np.float64) / 1e9,
        prompts=np.array(prompts, dtype=np.int64),
        outputs=np.array(outputs, dtype=np.int64),
        hits=np.array(hits, dtype=np.int64),
        num_free_outputs=num_free,
        turns=dict(sorted(Counter(turns_of.values()).items())),
        tenants=tenants,
        num_cancelled=num_cancelled,
        batches=batches,
    )
