"""ServeGen (Xiang et al., 2025; alibaba/ServeGen): not recorded requests, but statistics of clients in time windows.

An archive or folder with, for each client N, `chunk-N-trace.csv` without a header (window start in s, requests/s, CV of
the gaps, `Gamma`, `Weibull` or nothing, shape, scale) and `chunk-N-dataset.json` (for longer windows: `input_tokens`
and `output_tokens`, each a text of {length: probability}). Requests are sampled from these: the reader is a generator,
and the same seed gives the same trace. The file has no joint distribution, so prompt and output lengths are
independent. A length of 0 becomes 1, as a request has a prompt and an output.

In each window a client sends rate x length requests (the published rates are counts); a fraction is rounded up or down
at random. Their gaps are Gamma with the window's CV, or Weibull with its shape, scaled to fill the window. So the
counts per window and the burstiness within windows are those of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from testbed.errors import TraceError
from testbed.traces.draws import streams
from testbed.traces.readers.fields import MAX_SECONDS, decimal, is_plain, json_object, refuse, whole_number
from testbed.traces.readers.open_archive import archive_files
from testbed.traces.schema import MAX_NUM_TOKENS, Span, TraceRequest
from testbed.traces.stream import MAX_HELD_ROWS, StreamedTrace
from testbed.traces.synthesis import numbered_keys

_TRACE, _DATASET = "-trace.csv", "-dataset.json"
_PATTERNS = ("Gamma", "Weibull", "")
_WHOLE_SECONDS = f"whole seconds from 0 to {MAX_SECONDS:,}"
_MAX_RATE = 1e9  # also of a CV or a shape, which have narrower bounds if they are used
_Pdf = tuple[NDArray[np.int64], NDArray[np.float64]]  # lengths, cumulated probabilities


class _Window(NamedTuple):
    start_s: int
    rate: float
    cv: float
    pattern: str
    shape: float
    place: str


@dataclass(frozen=True, slots=True)
class _Client:
    """One of the clients whose requests are sampled."""

    number: int
    windows: dict[int, _Window]  # by start
    lengths: dict[int, dict[str, str]]  # start of a window -> field -> text of {length: probability}
    place: str  # of the lengths


def stream_servegen(path: str | Path, limit: int | None = None, seed: int = 0) -> StreamedTrace:
    """Returns the first `limit` requests sampled from an archive or folder. A request's tenant is its client.

    Memory grows with the clients and the largest window. Raises TraceError, with archive, file and line, on a malformed
    row, a client without lengths, or windows that differ between clients; ConfigError for a negative seed.
    """
    clients = _load(path)
    streams(seed)  # rejects a bad seed before any row is made
    note = f"drawn from {len(clients)} clients with seed {seed}"
    return StreamedTrace("servegen", lambda: islice(_requests(clients, seed), limit), (note,))


def _load(path: str | Path) -> list[_Client]:
    windows: dict[int, dict[int, _Window]] = {}
    lengths: dict[int, tuple[dict[int, dict[str, str]], str]] = {}
    for name, text in archive_files(path, (_TRACE, _DATASET)):
        place = f"{path}:{name}"
        number = _client_number(name, place)
        if name.endswith(_TRACE):
            windows[number] = _windows(text, place)
        else:
            lengths[number] = (_lengths(text, place), place)
    if not windows:
        raise TraceError(f"{path}: no client; expected files chunk-N{_TRACE} and chunk-N{_DATASET}")
    clients = []
    starts = next(iter(windows.values())).keys()
    for number in sorted(windows):
        if number not in lengths:
            raise TraceError(f"{path}: client {number} has no lengths; expected chunk-{number}{_DATASET}")
        if windows[number].keys() != starts:
            raise TraceError(
                f"{path}: chunk-{number}{_TRACE} has other windows than the first client; expected the same"
            )
        clients.append(_Client(number, windows[number], *lengths[number]))
    return clients


def _client_number(name: str, place: str) -> int:
    parts = name.rsplit("/", 1)[-1].split("-")
    if len(parts) != 3 or parts[0] != "chunk" or not (parts[1].isdigit() and parts[1].isascii()):
        raise TraceError(f"{place}: the file's name is unknown; expected chunk-N{_TRACE} or chunk-N{_DATASET}")
    return int(parts[1])


def _windows(text: str, place: str) -> dict[int, _Window]:
    found: dict[int, _Window] = {}
    previous = -1
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        where = f"{place}:{number}"
        if len(cells) != 6:
            raise TraceError(f"{where}: {len(cells)} cells; expected 6: start, rate, CV, pattern, shape, scale")
        start = whole_number(cells[0], where, "start", 0, MAX_SECONDS, _WHOLE_SECONDS)
        if start <= previous:
            raise refuse(where, "start", cells[0], f"more than {previous}, the window before")
        if cells[3] not in _PATTERNS:
            raise refuse(where, "pattern", cells[3], "Gamma, Weibull or nothing")
        rate, cv, shape = (
            _number(cell, where, field)
            for cell, field in zip((cells[1], cells[2], cells[4]), ("rate", "CV", "shape"), strict=True)
        )
        if rate > 0:
            _check_process(cells, cv, shape, where)
        found[start] = _Window(start, rate, cv, cells[3], shape, where)
        previous = start
    if not found:
        raise TraceError(f"{place}: no windows; expected a row for each")
    for start, length in zip(found, _window_lengths(list(found)), strict=True):
        _check_window(found[start], length)
    return found


def _window_lengths(starts: list[int]) -> list[int]:
    """Returns the length of each window in s; the last is as long as the one before."""
    lengths = [after - start for start, after in pairwise(starts)]
    return [*lengths, lengths[-1] if lengths else 600]


def _check_window(window: _Window, length_s: int) -> None:
    """Raises TraceError for a window that ends after MAX_SECONDS, or has more than MAX_HELD_ROWS requests."""
    last_s = MAX_SECONDS - length_s
    if window.start_s > last_s:
        raise refuse(window.place, "start", window.start_s, f"at most {last_s:,}, as its window is {length_s:,} s long")
    if window.rate * length_s > MAX_HELD_ROWS:
        most = MAX_HELD_ROWS / length_s
        raise refuse(window.place, "rate", window.rate, f"at most {most:g} in a window of {length_s:,} s")


def _check_process(cells: list[str], cv: float, shape: float, where: str) -> None:
    """Raises TraceError for parameters from which no gaps can be sampled."""
    if not cells[3]:
        raise refuse(where, "pattern", cells[3], "Gamma or Weibull, as the rate is above 0")
    if not 0 < cv <= 1000:
        raise refuse(where, "CV", cells[2], "above 0, up to 1000")
    if cells[3] == "Weibull" and not 0.01 <= shape <= 1e6:
        raise refuse(where, "shape", cells[4], "0.01 to 1e6")


def _number(text: str, place: str, field: str) -> float:
    number = decimal(text)
    if number is None or not 0 <= number <= _MAX_RATE:
        raise refuse(place, field, text, f"a number from 0 to {_MAX_RATE:g}")
    return number


def _lengths(text: str, place: str) -> dict[int, dict[str, str]]:
    """Returns the texts of the distributions by window; windows without lengths are left out."""
    found: dict[int, dict[str, str]] = {}
    for start, given in json_object(text, place).items():
        number = whole_number(start, place, "window", 0, MAX_SECONDS, _WHOLE_SECONDS)
        if not isinstance(given, dict):
            raise refuse(place, start, given, "an object with input_tokens and output_tokens")
        chosen = {}
        for field in ("input_tokens", "output_tokens"):
            if not isinstance(given.get(field), str):
                raise refuse(f"{place}: window {start}", field, given.get(field), "a string of {length: probability}")
            chosen[field] = given[field]
        if all(pdf.strip() not in ("", "{}") for pdf in chosen.values()):
            found[number] = chosen
    if not found:
        raise TraceError(f"{place}: no window has lengths; expected input_tokens and output_tokens")
    return dict(sorted(found.items()))


def _pdf(text: str, place: str) -> _Pdf:
    """Reads a text of {length: probability}; lengths of probability 0 are left out. Raises TraceError."""
    expected = (
        f"a string of {{length: probability}}, whole lengths from 0 to {MAX_NUM_TOKENS:,}, probabilities that sum to 1"
    )
    body = text.strip()
    is_object = body[:1] == "{" and body[-1:] == "}" and is_plain(body)
    pairs = body[1:-1].replace(":", ",").split(",") if is_object else []
    try:
        numbers = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    except ValueError:
        raise refuse(place, "tokens", text, expected) from None
    sizes, shares = numbers[:, 0], numbers[:, 1]
    total = float(shares.sum()) if len(shares) else 0.0
    if not abs(total - 1) < 0.01 or shares.min() < 0 or sizes.min() < 0 or (sizes != np.rint(sizes)).any():
        raise refuse(place, "tokens", text, expected)
    known = shares > 0
    if sizes[known].max() > MAX_NUM_TOKENS:
        raise refuse(place, "tokens", f"{{…, {sizes[known].max():.16g}: …}}", expected)
    return np.maximum(sizes[known].astype(np.int64), 1), np.cumsum(shares[known]) / total


class _Drawn:
    """Samples one client's requests, window after window."""

    def __init__(self, client: _Client, seed: int) -> None:
        rng = streams(seed, f"servegen/{client.number}")
        self._client = client
        self._arrivals, self._sides = rng("arrival"), {"input_tokens": rng("input"), "output_tokens": rng("output")}
        self._starts = list(client.lengths)
        self._pdfs: dict[str, _Pdf] = {}
        self._pdfs_of = -1
        self.num_sent = 0

    def draw(self, start_s: int, length_s: int) -> tuple[list[int], list[int], list[int]]:
        """Returns arrivals in ns, prompt lengths and output lengths of a window."""
        window = self._client.windows[start_s]
        expected = window.rate * length_s
        num = int(expected + self._arrivals.random()) if window.rate else 0
        if not num:
            return [], [], []
        if window.pattern == "Gamma":
            gaps = self._arrivals.standard_gamma(1 / window.cv**2, num + 1)
        else:
            gaps = self._arrivals.weibull(window.shape, num + 1)
        sums = np.cumsum(gaps)
        shares = sums[:-1] / sums[-1] if sums[-1] > 0 else np.zeros(num)
        instants = np.rint((start_s + shares * length_s) * 1e9).astype(np.int64)
        prompts = self._draw_lengths("input_tokens", start_s, num)
        return instants.tolist(), prompts, self._draw_lengths("output_tokens", start_s, num)

    def _draw_lengths(self, field: str, start_s: int, num: int) -> list[int]:
        """Samples from the last window of lengths that starts by `start_s`; from the first one if there is none."""
        chosen = max((start for start in self._starts if start <= start_s), default=self._starts[0])
        if chosen != self._pdfs_of:
            place = f"{self._client.place}: window {chosen}"
            self._pdfs = {name: _pdf(text, place) for name, text in self._client.lengths[chosen].items()}
            self._pdfs_of = chosen
        sizes, cumulated = self._pdfs[field]
        picks = np.searchsorted(cumulated, self._sides[field].random(num), side="right")
        drawn: list[int] = sizes[np.minimum(picks, len(sizes) - 1)].tolist()
        return drawn


def _requests(clients: list[_Client], seed: int) -> Iterator[TraceRequest]:
    drawn = [_Drawn(client, seed) for client in clients]
    keys = [numbered_keys("servegen", seed, client.number) for client in clients]
    starts = list(clients[0].windows)
    for start_s, length_s in zip(starts, _window_lengths(starts), strict=True):
        found: list[tuple[int, int, int, int]] = []  # (arrival, client, prompt, output)
        for index, client in enumerate(drawn):
            instants, prompts, outputs = client.draw(start_s, length_s)
            triples = zip(instants, prompts, outputs, strict=True)
            found.extend((at, index, num_prompt, num_output) for at, num_prompt, num_output in triples)
        found.sort()
        for arrival_ns, index, num_prompt, num_output in found:
            number, client_number = drawn[index].num_sent, clients[index].number
            drawn[index].num_sent += 1
            key = keys[index](number)
            yield TraceRequest(
                request_id=f"servegen-{client_number}-{number}",
                arrival_ns=arrival_ns,
                prompt=(Span(key, 0, num_prompt),),
                output=Span(key, num_prompt, num_output),
                tenant=f"client-{client_number}",
                place=clients[index].windows[start_s].place,
            )
