"""Invariants of a typed log: of its schema, in every state of the metadata, and of its rows.

There is one such log in a run, and it stays.  Its schema is read here as JSON, and the types of
its columns are integers of four widths, or bytes.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.simulation.life_checkers import require
from tests.simulation.redaction_checkers import PERSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyarrow as pa

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Op
    from tests.fixtures.simulated_store import SimulatedTree

GROWS = "L13 SchemasOnlyGrow"
AS_WRITTEN = "L14 TypedRowsAreAsWritten"
TYPE_INVARIANTS = (GROWS, AS_WRITTEN)

WIDTHS = ("int8", "int16", "int32", "int64")
PAYLOAD = "payload"

Columns = dict[str, str]
"""Types by the names of columns, in their order."""


class TypeCheckers:
    """Records the versions of the schema and what was given to the columns, and judges both."""

    def __init__(self, *, tree: SimulatedTree, paths: NamespacePaths) -> None:
        self._tree = tree
        self._paths = paths
        self.versions: list[Columns] = []
        """Those that are stored now."""
        self._given: dict[bytes, list[dict[str, int]]] = {}
        """The values of each row by its payload: a repeated append may give it other ones."""

    def on_metadata(self, ops: Iterable[Op]) -> None:
        """L13: no version is changed or removed, and each holds what the one before holds."""
        for op in ops:
            if not (op.path.startswith(f"{self._paths.heads}/") and op.path.endswith("/schema")):
                continue
            node = self._tree._find(op.path)
            assert node is not None, "a typed log is never deleted here"
            versions = _versions_in(node.value)
            if PERSON in versions[0]:
                continue  # the log of `redactions.py`, whose schema stays
            before, self.versions = self.versions, versions
            require(
                GROWS,
                holds=self.versions[: len(before)] == before,
                message=f"{op.path} had the versions {before}, and has {self.versions}",
            )
            for earlier, later in pairwise(self.versions):
                require(
                    GROWS,
                    holds=_holds(later, earlier),
                    message=f"{op.path}: {later} follows {earlier}, and holds less",
                )

    def check_answer(self, merged: Columns, asked: Mapping[str, str]) -> None:
        """L13: a client got an answer with these columns, after it asked for some."""
        require(
            GROWS,
            holds=merged in self.versions,
            message=f"the columns are called {merged}, and no version of {self.versions} has them",
        )
        require(
            GROWS,
            holds=_holds(merged, asked),
            message=f"{asked} were asked for, and the columns are called {merged}",
        )

    def on_write(self, payload: bytes, values: dict[str, int]) -> None:
        """A client is going to write a row."""
        self._given.setdefault(payload, []).append(values)

    def check_batch(self, batch: pa.RecordBatch) -> None:
        """L14: a version of the schema was read, and each row is as it was written."""
        own = [field for field in batch.schema if not field.name.startswith("_")]
        columns = {field.name: str(field.type) for field in own}
        require(
            AS_WRITTEN,
            holds=columns in self.versions,
            message=f"{columns} were read, the versions are {self.versions}",
        )
        for row in batch.select([field.name for field in own]).to_pylist():
            payload = row.pop(PAYLOAD)
            values = {name: value for name, value in row.items() if value is not None}
            require(
                AS_WRITTEN,
                holds=values in self._given.get(payload, ()),
                message=f"{payload!r} has {values}, and was given {self._given.get(payload)}",
            )


def _versions_in(value: bytes) -> list[Columns]:
    stored = json.loads(value)
    return [{each["name"]: each["type"] for each in version} for version in stored["versions"]]


def _holds(columns: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Return whether columns hold all that others hold."""
    return all(_is_as_wide(columns.get(name, ""), kind) for name, kind in others.items())


def _is_as_wide(kind: str, other: str) -> bool:
    if kind in WIDTHS and other in WIDTHS:
        return WIDTHS.index(kind) >= WIDTHS.index(other)
    return kind == other
