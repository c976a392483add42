"""The process of one query: it takes a statement, and writes its rows as a stream of Arrow's IPC.

A process of its own can be killed when its time is over, and what it takes of memory is bounded by
the system; a limit of DuckDB does not count all that a function of SQL takes.  If it fails, the
last line on standard error is the error as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import msgspec

from dlcore.base.errors import ConfigurationError, DLError


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A statement, where it is to be run, and what it may take."""

    sql: str
    endpoint: str
    token: str | None
    tls: tuple[str, str, str] | None
    """The files of the certificate authorities, the certificate and its key."""
    memory_bytes: int
    query_s: int


_DUCKDB_SHARE = 0.5
"""Share of the memory that DuckDB gets as its limit; the rest is for what it does not count."""


def main() -> int:
    """Run the query on standard input; return the exit code."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
    try:
        _run(asked)
    except MemoryError:
        return _failed(
            ConfigurationError(
                f"the statement takes more than {asked.memory_bytes:,} bytes of memory: expected "
                "one that takes less, or a server whose queries may take more (--memory-mib)"
            )
        )
    except DLError as error:
        return _failed(error)
    return 0


def _failed(error: DLError) -> int:
    failure = {"kind": type(error).__name__, "error": str(error)}
    sys.stderr.write("\n" + json.dumps(failure) + "\n")
    return 1


def _run(asked: Asked) -> None:
    import pyarrow as pa

    from dlcore.base.access.tls import TlsFiles
    from dlcore.ops.sql.engine import Query, opened

    tls = None
    if asked.tls is not None:
        ca, cert, key = asked.tls
        tls = TlsFiles.of(ca=ca, cert=cert, key=key)
    _limit(asked)
    with opened(asked.endpoint, tls=tls, token=asked.token) as namespace:
        memory_bytes = int(asked.memory_bytes * _DUCKDB_SHARE)
        rows = Query(asked.sql, namespace, memory_bytes=memory_bytes)
        with pa.ipc.new_stream(sys.stdout.buffer, rows.schema) as out:
            for batch in rows:
                out.write_batch(batch)
                sys.stdout.buffer.flush()


def _limit(asked: Asked) -> None:
    """Let the process take so much memory beside what its libraries have, and so much CPU."""
    own = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmData:")
    )
    for what, most in (
        (resource.RLIMIT_DATA, own + asked.memory_bytes),
        # The server ends the process before this, and knows why; the limit holds if the server is
        # gone.
        (resource.RLIMIT_CPU, asked.query_s + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    sys.exit(main())
