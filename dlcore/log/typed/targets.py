"""The facts of a log that a planner of writes needs: its columns, and whether it is sealed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import EndOfStreamError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa


class Target(NamedTuple):
    """A log that may be written to."""

    schema: pa.Schema | None
    """Its columns; None for a byte log."""
    sealed: bool


def schemas_to_write(targets: Mapping[str, Target]) -> dict[str, pa.Schema | None]:
    """Return the columns of each log; raise `EndOfStreamError` if one of them is sealed."""
    for name, target in targets.items():
        if target.sealed:
            raise EndOfStreamError(f"log {name!r} is sealed: no record can follow")
    return {name: target.schema for name, target in targets.items()}
