"""Old names of the columns of byte logs: accepted up to version 0.1, with a warning.

Every API has one name for a column, that of the Spark source (docs/python.md has the table).
Python's frames had other names.  A frame cannot warn when a program looks for a missing column.
Therefore rows have the new names, and a program that needs the old ones asks for them: by `columns`
of `read`, or by `with_old_names`.  Batches to write may still have a column ``payload``.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Collection

_Rows = TypeVar("_Rows", "pa.RecordBatch", "pa.Table")

OLD_NAMES = {
    "payload": "value",
    "lssn": "dlsn.lssn",
    "entry_id": "dlsn.entry",
    "slot_id": "dlsn.slot",
}
"""The column, or the part of one, of each old name."""


def warn_of_old_names(names: Collection[str]) -> None:
    """Warn the caller of this library if it uses old names."""
    told = ", ".join(f"{old} is called {new} now" for old, new in OLD_NAMES.items() if old in names)
    if not told:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "dlcore":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{told}; version 0.3 will not know the old name", DeprecationWarning, level)


def old_column(rows: Any, name: str) -> Any:
    """Return a column of rows by its old name."""
    import pyarrow.compute as pc

    column, _, part = OLD_NAMES[name].partition(".")
    found = rows.column(column)
    return pc.struct_field(found, part) if part else found


def with_old_names(rows: _Rows) -> _Rows:
    """Return rows of a byte log with the old columns.

    These are ``lssn, entry_id, slot_id, txid, sequence_id, timestamp, payload``, as far as the rows
    have the new ones; times are in milliseconds, and ``log`` is left out.

    Args:
        rows: a batch of a reader, or a table.
    """
    columns: dict[str, Any] = {}
    for name in rows.schema.names:
        old = [each for each, new in OLD_NAMES.items() if new.partition(".")[0] == name]
        columns.update((each, old_column(rows, each)) for each in old)
        if name == "timestamp":
            columns[name] = rows.column(name).cast(pa.timestamp("ms", tz="UTC"))
        elif not old and name != "log":
            columns[name] = rows.column(name)
    warn_of_old_names(columns.keys())
    return type(rows).from_arrays(list(columns.values()), names=list(columns))
