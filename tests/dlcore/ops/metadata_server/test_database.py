"""The file of the metadata server."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from dlcore.base.errors import ConfigurationError, CorruptMetadataError
from dlcore.metadata.tree import Node
from dlcore.ops.metadata_server.database import Database
from dlcore.ops.metadata_server.service import Session, Store

if TYPE_CHECKING:
    from pathlib import Path

SESSION = Session(2, b"secret", 1.5)


def test_stored_nodes_are_loaded_again(tmp_path: Path) -> None:
    """Nodes with their children, sessions, and the latest number; what is gone is gone."""
    database = Database(tmp_path / "file")
    database.store(
        [
            Store(1, {"/": Node(b"top", 1), "/a": Node(b"x", 2, owner=2), "/b": Node(b"")}),
            Store(2, begun=SESSION),
            Store(3, begun=Session(3, b"", 1.0)),
            Store(4, {"/b": None, "/b/c": None}, ended=3),
        ]
    )
    database.close()
    database = Database(tmp_path / "file")
    tree, sessions, number = database.load()
    database.close()
    assert (sessions, number) == ([SESSION], 4)
    assert {path: (node.value, node.version) for path, node in tree.dump().items()} == {
        "/": (b"top", 1),
        "/a": (b"x", 2),
    }
    assert tree.owned_by(2) == ["/a"]
    found = tree.find("/")
    assert found is not None
    assert list(found.children) == ["a"]


def test_a_file_has_one_user(tmp_path: Path) -> None:
    """A second server would tell things that the first one does not know."""
    database = Database(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="another server uses it"):
        Database(tmp_path / "file")
    database.close()
    Database(tmp_path / "file").close()


def test_a_failed_write_leaves_nothing_of_its_transaction(tmp_path: Path) -> None:
    """A number that is taken fails; the node before it is not there."""
    database = Database(tmp_path / "file")
    database.store([Store(1, begun=SESSION)])
    with pytest.raises(sqlite3.Error):
        database.store([Store(2, {"/a": Node(b"")}, begun=SESSION)])
    database.close()
    database = Database(tmp_path / "file")
    tree, _, number = database.load()
    database.close()
    assert (tree.find("/a"), number) == (None, 1)


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    """One of another layout, another kind of file, and a folder; the error names it."""
    with sqlite3.connect(tmp_path / "later") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(CorruptMetadataError, match="layout 99, expected 1"):
        Database(tmp_path / "later")
    (tmp_path / "other").write_bytes(b"no database, and long enough to be one" * 99)
    with pytest.raises(CorruptMetadataError, match=r"other is damaged"):
        Database(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=f"cannot open {tmp_path}"):
        Database(tmp_path)


@pytest.mark.parametrize(
    "damage",
    ["DELETE FROM nodes WHERE path = '/a'", "DROP TABLE sessions"],
    ids=["parent", "table"],
)
def test_a_damaged_tree_is_refused(tmp_path: Path, damage: str) -> None:
    """A node without its parent, and a missing table, which the start would make again."""
    database = Database(tmp_path / "file")
    database.store([Store(1, {"/a": Node(b""), "/a/b": Node(b"")})])
    database._connection.execute(damage)
    with pytest.raises(CorruptMetadataError, match="file is damaged"):
        database.load()
    database.close()
