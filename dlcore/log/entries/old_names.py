"""Names that columns of logs of bytes had at first: taken up to version 0.1, with a warning.

All doors call a column by one name, that of the Spark source (docs/contract.md has the table).
Python's frames had others.  A frame cannot warn when somebody looks for a column that is gone, so
rows have the new names, and whoever needs the old ones asks for them: by `columns` of `read`, or by
`with_old_names`.  Batches that are written may still have a column ``payload``.
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
"""What each old name stands for: a column, or a part of one."""


def warn_of_old_names(names: Collection[str]) -> None:
    """Warn whoever called this library that it goes by old names, if there are any."""
    told = ", ".join(f"{old} is called {new} now" for old, new in OLD_NAMES.items() if old in names)
    if not told:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "dlcore":
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{told}; version 0.2 will not know the old name", DeprecationWarning, level)


def old_column(rows: Any, name: str) -> Any:
    """Return a column of rows by its old name."""
    import pyarrow.compute as pc

    column, _, part = OLD_NAMES[name].partition(".")
    found = rows.column(column)
    return pc.struct_field(found, part) if part else found


def with_old_names(rows: _Rows) -> _Rows:
    """Return rows of a log of bytes with the columns that they had at first.

    These are ``lssn, entry_id, slot_id, txid, sequence_id, timestamp, payload``, as far as there is
    something to make them of; times are in milliseconds, and ``log`` is left out.

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
