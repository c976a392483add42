"""Schemas of typed logs that are read together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.errors import SchemaMismatchError
from dlcore.log.typed.arrow import columns_of, schema_of
from dlcore.log.typed.schema import LogSchema, describe

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa


def merge_schemas(schemas: Mapping[str, pa.Schema | None]) -> pa.Schema | None:
    """Return the columns that hold those of all logs; None if these are logs of bytes.

    Args:
        schemas: of each log by name, as `Namespace.get_schemas` returns them.

    Raises:
        SchemaMismatchError: no schema holds what two of them hold, or only some are of bytes.
    """
    typed = {log: columns_of(schema) for log, schema in schemas.items() if schema is not None}
    if not typed:
        return None
    (first, columns), *others = typed.items()
    if len(typed) < len(schemas):
        plain = next(log for log, schema in schemas.items() if schema is None)
        raise SchemaMismatchError(
            f"log {first!r} is typed, log {plain!r} is one of bytes: read them apart"
        )
    merged = LogSchema.first(columns)
    for log, more in others:
        try:
            merged = merged.merged(first, more)
        except SchemaMismatchError as error:
            raise SchemaMismatchError(
                f"logs {first!r} and {log!r} cannot be read together: log {first!r} has "
                f"({describe(columns)}), log {log!r} has ({describe(more)})"
            ) from error
    return schema_of(merged.latest)
