"""Reads an archive of trace files (.tar, .tar.gz, .tgz, .tar.zst) or a folder of them. Nothing is unpacked to disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from testbed.errors import TraceError
from testbed.traces.readers.open_text import UNREADABLE, existing_file, open_bytes, unreadable

_MAX_MEMBER_BYTES = 1 << 30


def archive_files(path: str | Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields (name within the archive, text) of each file whose name ends in one of `suffixes`, in the archive's order.

    A folder's files come sorted by name. Raises TraceError if the archive is missing or damaged, a file is not UTF-8,
    or a file in an archive is larger than 1 GiB.
    """
    import tarfile  # seldom needed

    root = Path(path)
    if root.is_dir():
        for file in sorted(root.rglob("*")):
            if file.is_file() and file.name.endswith(suffixes):
                yield file.relative_to(root).as_posix(), _text(path, file.name, file.read_bytes())
        return
    try:
        with open_bytes(existing_file(path)) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or not member.name.endswith(suffixes):
                    continue
                if member.size > _MAX_MEMBER_BYTES:
                    raise TraceError(f"{path}:{member.name}: {member.size:,} bytes; expected at most 1 GiB a file")
                content = archive.extractfile(member)
                assert content is not None, "a file has content"
                yield member.name, _text(path, member.name, content.read())
    except tarfile.TarError as error:
        raise TraceError(f"{path}: damaged, or no archive: {error}; expected a .tar, .tar.gz or .tar.zst") from None
    except UNREADABLE as error:
        raise unreadable(path, error) from None


def _text(path: str | Path, name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{name}: not UTF-8 text ({error.reason}); expected a text file") from None
