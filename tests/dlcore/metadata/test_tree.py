"""The tree of nodes behind the store in memory: all of a transaction or none of it."""

from __future__ import annotations

import pytest

from dlcore.base.errors import MetadataError, MetadataVersionError, NoNodeError
from dlcore.metadata.port import Check, Create, Delete, Op, Put
from dlcore.metadata.tree import Tree

SESSION = 1


def tree_with_a_log() -> Tree:
    """Return a tree with /a, whose version is 1, and /a/b."""
    tree = Tree()
    tree.apply([Create("/a", b"1"), Create("/a/b", b"2"), Put("/a", b"3", 0)], SESSION)
    return tree


def test_a_check_guards_and_changes_nothing() -> None:
    """Neither value nor version, and no watch reports it."""
    tree = tree_with_a_log()
    before = tree.dump()
    assert list(tree.apply([Check("/a", 1), Check("/a/b", -1)], SESSION)) == []
    assert tree.dump() == before
    changed = tree.apply([Check("/a", 1), Delete("/a/b", 0)], SESSION)
    assert sorted(changed) == ["/a", "/a/b"]


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Check("/a", 0), MetadataVersionError),
        (Check("/c", -1), NoNodeError),
        (Create("/c/d", b""), NoNodeError),
        (Put("/a", b"", 7), MetadataVersionError),
        (Delete("/a", -1), MetadataError),
    ],
)
def test_nothing_is_left_of_a_transaction_that_fails(
    failing: Op, error: type[MetadataError]
) -> None:
    """Whatever came before the operation that fails is undone, the last one first."""
    tree = tree_with_a_log()
    before = tree.dump()
    ops: list[Op] = [Put("/a/b", b"4", 0), Create("/e", b"", ephemeral=True), Delete("/a/b", 1)]
    ops += [Create("/a/b", b"new"), Create("/a/b/c", b"")]
    with pytest.raises(error):
        tree.apply([*ops, failing], SESSION)
    assert tree.dump() == before
    assert tree.owned_by(SESSION) == []
    assert tree.apply(ops, SESSION)


def test_an_ephemeral_node_has_no_children() -> None:
    """As in ZooKeeper: they would stay when it goes."""
    tree = tree_with_a_log()
    tree.apply([Create("/e", b"", ephemeral=True)], SESSION)
    with pytest.raises(MetadataError, match="cannot create /e/x: /e is ephemeral"):
        tree.apply([Create("/e/x", b"")], SESSION)


def test_missing_nodes_above_a_node() -> None:
    """The highest first: they are made in this order."""
    tree = tree_with_a_log()
    assert tree.missing_above("/a/x/y/z") == ["/a/x", "/a/x/y"]
    assert tree.missing_above("/a/x") == []
