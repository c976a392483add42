"""The log of a Delta table, as far as a commit of dlog needs it: commits as bytes, read and made.

The library reads a table whole, each time, and so a commit by it costs more with each file that the
table has.  This reads only what came after a version that is known, and makes commits, without the
library.  The library reads the rest: checkpoints, tables that are not known, and every commit
with something that dlog does not write.  Nothing here does I/O.

A commit is a file of JSON, a line for each action:
https://github.com/delta-io/delta/blob/master/PROTOCOL.md
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dlcore.base.errors import TableError
from dlcore.log.cold.delta_format import DELTA, statistics_of
from dlcore.log.cold.table_format import (
    TableSeen,
    boundary_of,
    file_of,
    number_of,
    place_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlcore.log.cold.table_format import AddedFile, Field, Place, TableFile, TableFiles

_WRITER_VERSION_MAX = 2
_FEATURES_VERSION = 7
_FEATURES_KNOWN = frozenset({"appendOnly", "invariants", "timestampNtz"})
"""Features that ask nothing of dlog: its own tables have the last one at most."""
_NO_EFFECT = "commitInfo"


class DeltaState(NamedTuple):
    """A table at one version, and which commit made it: a table made anew has another one.

    `checkpoint` is the newest version that is known to have one; 0 is none.
    """

    version: int
    commit: bytes
    checkpoint: int
    position: Place | None
    description: str
    fields: tuple[Field, ...]
    files: TableFiles

    def seen(self) -> TableSeen:
        """Return the table as everybody else sees it."""
        return TableSeen(
            version=self.version,
            known_as=self.version,
            position=self.position,
            description=self.description,
            fields=self.fields,
            files=self.files,
            checkpoint=self.checkpoint,
        )


def name_of(version: int) -> str:
    """Return the name of a commit's file."""
    return f"{version:020}.json"


def identity_of(data: bytes) -> bytes:
    """Return what tells a commit from all others."""
    return hashlib.blake2b(data, digest_size=16).digest()


def require_known_features(writer_version: int, features: Iterable[str] | None) -> None:
    """Require that dlog may write to a table.

    Raises:
        TableError: it needs something that dlog does not do.
    """
    unknown = sorted(set(features or ()) - _FEATURES_KNOWN)
    if writer_version == _FEATURES_VERSION and not unknown:
        return
    if writer_version > _WRITER_VERSION_MAX:
        needs = ", ".join(unknown) or f"version {writer_version}"
        raise TableError(
            f"the table asks of its writers {needs}, which dlog does not know: another program "
            f"changed it; to do: {DELTA.remake}, and it is made again"
        )


def after(state: DeltaState, data: bytes, app_id: str) -> DeltaState | None:
    """Return a table with its next commit; None if only the library can tell what it does.

    Raises:
        TableError: it adds a file that is none of dlog's.
    """
    position = state.position
    adds: dict[str, TableFile] = {}
    gone: set[str] = set()
    for line in data.splitlines():
        try:
            action: Any = msgspec.json.decode(line)
            ((kind, what),) = action.items()
            if kind == "add" and what.get("deletionVector") is None:
                adds[what["path"]] = _file_of(what)
            elif kind == "remove":
                gone.add(what["path"])
            elif kind == "txn":
                if what["appId"] == app_id:
                    position = place_of(int(what["version"]))
            elif kind != _NO_EFFECT:
                return None
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError):
            return None
    # If one commit added and removed a file, it would be open which came last.  No program does so.
    if adds.keys() & gone:
        return None
    return state._replace(
        version=state.version + 1,
        commit=identity_of(data),
        position=position,
        files=state.files.changed(adds.values(), {*gone, *adds}),
    )


def _file_of(add: Mapping[str, Any]) -> TableFile:
    known: Any = msgspec.json.decode(add.get("stats") or "{}")
    last, records = (known.get("maxValues") or {}).get("_entry"), known.get("numRecords")
    return file_of(add["path"], add["size"], last, records, DELTA)


def commit_of(
    adds: Sequence[AddedFile],
    removes: Sequence[TableFile],
    position: Place,
    *,
    app_id: str,
    now_ms: int,
    data_change: bool,
) -> bytes:
    """Return the commit that adds and removes files, and sets the position.

    Raises:
        TableError: no table can hold the position.
    """
    actions: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": "WRITE",
                "operationParameters": {"mode": "Append", "partitionBy": "[]"},
                "engineInfo": "dlog",
                # For people: it is in the history of the table.
                "dlog.end": str(boundary_of(position)),
            }
        },
        {"txn": {"appId": app_id, "version": number_of(position)}},
    ]
    actions += [
        {
            "add": {
                "path": each.name,
                "partitionValues": {},
                "size": each.size_bytes,
                "modificationTime": each.modified_ms,
                "dataChange": data_change,
                "stats": statistics_of(each.footer, each.end_entry),
            }
        }
        for each in adds
    ]
    actions += [
        {
            "remove": {
                "path": each.name,
                "deletionTimestamp": now_ms,
                "dataChange": data_change,
                "extendedFileMetadata": True,
                "partitionValues": {},
                "size": each.size_bytes,
            }
        }
        for each in removes
    ]
    return b"\n".join(map(msgspec.json.encode, actions)) + b"\n"
