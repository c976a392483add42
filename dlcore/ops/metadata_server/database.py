"""The file of the metadata server: nodes and sessions in SQLite.

A commit returns once its bytes are on disk (`synchronous=FULL`).  The file has one user: a second
server on it is refused.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError, CorruptMetadataError, NoNodeError
from dlcore.metadata.tree import Node, Tree
from dlcore.ops.metadata_server.service import Session

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dlcore.ops.metadata_server.service import Store

_LAYOUT = 1
_TABLES = f"""
CREATE TABLE IF NOT EXISTS nodes (
    path TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, owner INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, password BLOB NOT NULL, timeout_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS latest (id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL);
INSERT OR IGNORE INTO latest VALUES (1, 0);
PRAGMA user_version = {_LAYOUT};
"""


class Database:
    """The file, opened for this process alone.

    Raises:
        ConfigurationError: the file cannot be opened, or another server uses it.
        CorruptMetadataError: it is damaged, or of another layout.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        except sqlite3.Error as error:
            raise ConfigurationError(f"cannot open {path}: {error}") from error
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        ask = self._connection.execute
        try:
            ask("PRAGMA locking_mode = EXCLUSIVE")
            ask("PRAGMA journal_mode = WAL")
            ask("PRAGMA synchronous = FULL")
            ask("BEGIN EXCLUSIVE")
            ask("COMMIT")  # the lock stays
            (layout,) = ask("PRAGMA user_version").fetchone()
            if layout not in (0, _LAYOUT):
                raise CorruptMetadataError(
                    f"{self._path} has layout {layout}, expected {_LAYOUT}: it was made by another "
                    "version of dlog"
                )
            self._connection.executescript(_TABLES)
        except sqlite3.OperationalError as error:
            raise ConfigurationError(
                f"cannot use {self._path}: {error}; if it is locked, another server uses it"
            ) from error
        except sqlite3.DatabaseError as error:
            raise CorruptMetadataError(f"{self._path} is damaged: {error}") from error

    def load(self) -> tuple[Tree, list[Session], int]:
        """Return the nodes, the sessions, and the number of the latest transaction.

        Raises:
            CorruptMetadataError: the file is damaged.
        """
        ask = self._connection.execute
        try:
            rows = ask("SELECT path, value, version, owner FROM nodes").fetchall()
            sessions = ask("SELECT number, password, timeout_s FROM sessions").fetchall()
            (number,) = ask("SELECT number FROM latest").fetchone()
            # It is not stored which transaction wrote a node: the last one counts for all.
            nodes = {
                path: Node(value, version, owner, number, number)
                for path, value, version, owner in rows
            }
            tree = Tree.of(nodes, number=number)
        except (sqlite3.DatabaseError, NoNodeError) as error:
            raise CorruptMetadataError(f"{self._path} is damaged: {error}") from error
        return tree, [Session(*each) for each in sessions], number

    def store(self, changes: Iterable[Store]) -> None:
        """Write changes in one transaction, and return once they are on disk.

        Raises:
            sqlite3.Error: it is unknown whether they are; the caller must not go on.
        """
        ask, many = self._connection.execute, self._connection.executemany
        ask("BEGIN")
        for change in changes:
            gone = [(path,) for path, node in change.nodes.items() if node is None]
            many("DELETE FROM nodes WHERE path = ?", gone)
            kept = [
                (path, node.value, node.version, node.owner)
                for path, node in change.nodes.items()
                if node is not None
            ]
            many("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", kept)
            if change.begun is not None:
                begun = change.begun
                row = (begun.number, begun.password, begun.timeout_s)
                ask("INSERT INTO sessions VALUES (?, ?, ?)", row)
            if change.ended is not None:
                ask("DELETE FROM sessions WHERE number = ?", (change.ended,))
            ask("UPDATE latest SET number = ?", (change.number,))
        ask("COMMIT")

    def rewrite(self) -> None:
        """Write one row as it is, and return once it is on disk.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        with self._connection:  # a transaction that failed is undone
            self._connection.execute("BEGIN")
            self._connection.execute("UPDATE latest SET number = number")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
