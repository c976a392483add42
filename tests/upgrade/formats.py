"""Logs of every kind: written as one release stores them, and described as another reads them.

``write URI KEYS`` makes them; it ends like a program that is killed, with a segment in progress.
``tell URI KEYS`` prints what they hold as JSON.  Both use only what 0.2.0 had.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

import msgspec
import pyarrow as pa

import dlcore
from dlcore import LogConfig, LogRecord, QuorumConfig
from dlcore.sync import DistributedLogManager, Namespace, open_namespace

KEY_LINE = f"k1 {base64.b64encode(bytes(range(32))).decode()}\n"
"""The file of keys of the encrypted log."""
_QUORUM = QuorumConfig(1, 1, 1)
_KINDS = {
    "plain": LogConfig(quorum=_QUORUM, segment_bytes_max=4_000),
    "compressed": LogConfig(quorum=_QUORUM, compression="zstd"),
    "encrypted": LogConfig(quorum=_QUORUM, encrypted=True),
    "sealed": LogConfig(quorum=_QUORUM),
    "typed": LogConfig(quorum=_QUORUM),
    "before": LogConfig(quorum=_QUORUM),
    "copy": LogConfig(quorum=_QUORUM),
}
_COLUMNS = pa.schema({"city": pa.string(), "fare": pa.float64()})


def write(namespace: Namespace) -> None:
    """Make all logs."""
    for name, config in _KINDS.items():
        schema = _COLUMNS if name == "typed" else None
        namespace.create_log(name, config=config, schema=schema)
    for name in ("compressed", "encrypted", "sealed", "before"):
        with namespace.open_log(name, config=_KINDS[name]) as log:
            _append(log, 5, b"a few words, and again a few words" * 20)
    with namespace.open_log("sealed") as log:
        log.mark_end_of_stream()
    namespace.rename_log("before", "renamed")
    with namespace.open_log("typed") as log:
        _append_rows(log, {"city": ["Paris", None], "fare": [12.5, 0.0]})
        wider = _COLUMNS.append(pa.field("seats", pa.int32()))
        log.update_schema(wider)
        _append_rows(log, {"city": ["Łódź"], "fare": [1.0], "seats": [4]})
    namespace.change_access_rules(add=["allow user:alice read log plain"])
    with namespace.open_log("plain", config=_KINDS["plain"]) as log:
        for _ in range(3):
            _append(log, 8, b"x" * 300)
        with log.open_reader(subscriber="job") as reader:
            records = reader.read_bulk(10, timeout_s=10)
            reader.commit()
        log.truncate(records[4].dlsn)
        log.update_settings(retention_s=100 * 365 * 86_400)
        writer = log.open_writer()
        writer.write(LogRecord(writer.last_txid + 1, b"the last one"))
        writer.commit()
        print("written", flush=True)
        os._exit(0)


def _append(log: DistributedLogManager, count: int, payload: bytes) -> None:
    with log.open_writer() as writer:
        for txid in range(writer.last_txid + 1, writer.last_txid + 1 + count):
            writer.write(LogRecord(txid, payload + b" %d" % txid))


def _append_rows(log: DistributedLogManager, columns: dict[str, list[Any]]) -> None:
    with log.open_writer() as writer:
        writer.write_table(pa.table(columns))


def tell(namespace: Namespace) -> dict[str, Any]:
    """Return what the namespace holds, as JSON has it."""
    facts: dict[str, Any] = {
        "logs": {name: _tell_log(namespace, name) for name in namespace.get_logs()},
        "rules": namespace.get_access_rules(),
        "commits": [[each.identity, each.version] for each in namespace.list_commits()],
    }
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def _tell_log(namespace: Namespace, name: str) -> dict[str, Any]:
    with namespace.open_log(name) as log:
        schema = log.get_schema()
        places = ["_dlsn", "_txid", "_sequence_id", "_timestamp"]
        rows = log.read(columns=[*places, *schema.names] if schema else None)
        return {
            "id": log.log_id,
            "rows": rows.to_arrow().to_pylist(),
            "schema": [[each.name, str(each.type)] for each in schema or ()],
            "ended": log.is_end_of_stream_marked(),
            "settings": msgspec.to_builtins(log.get_settings()),
            "subscriptions": {key: str(at) for key, at in log.get_subscriptions().items()},
        }


if __name__ == "__main__":
    work, uri, keys = sys.argv[1:]
    print(f"of {dlcore.__file__}", flush=True)
    with open_namespace(uri, encryption_keys=keys) as opened:
        if work == "write":
            write(opened)
        else:
            print(json.dumps(tell(opened)))
