"""Records as JSON for programs, on the command line and over HTTP."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.ops.cli.rows import TypedRow


def payload_json(payload: bytes) -> dict[str, str]:
    """Return a payload without loss: as text, or as base64 if it is not UTF-8."""
    try:
        return {"value": payload.decode("utf-8")}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(payload).decode("ascii")}


def record_json(record: LogRecordWithDLSN | TypedRow) -> dict[str, Any]:
    """Return a record, or the row of a typed log with its columns, as a JSON object."""
    row = getattr(record, "row", None)
    return {
        "dlsn": str(record.dlsn),
        "txid": record.txid,
        "sequence_id": record.sequence_id,
        "timestamp_ms": record.timestamp_ms,
        **(payload_json(record.payload) if row is None else {"row": row}),
    }
