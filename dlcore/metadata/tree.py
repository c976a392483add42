"""A tree of small versioned nodes and its transactions, in ZooKeeper's terms; pure.

The same transactions in the same order give the same result in a copy of the tree.  By this
`dlog metadata serve` replays its database, and tests simulate servers that lag behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, assert_never

from dlcore.base.errors import (
    MetadataError,
    MetadataVersionError,
    NodeExistsError,
    NodeNotEmptyError,
    NoNodeError,
)
from dlcore.metadata.port import ANY_VERSION, Check, Create, Delete, Op, Put, Versioned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(slots=True)
class Node:
    """A node; `owner` is the session of an ephemeral node.

    `created` and `changed` are the numbers of transactions, as in `Versioned`.
    """

    value: bytes
    version: int = 0
    owner: int | None = None
    created: int = 0
    changed: int = 0
    children: dict[str, None] = field(default_factory=dict)  # a set that keeps its order

    def versioned(self) -> Versioned:
        """Return the value and version that readers see."""
        return Versioned(
            self.value,
            self.version,
            session_token_of(self.owner),
            created=self.created,
            changed=self.changed,
            children=len(self.children),
        )


def session_token_of(session: int | None) -> str:
    """Return the token of a session, "" for none."""
    return "" if session is None else f"memory-{session}"


def parent_of(path: str) -> str:
    """Return the path of the parent of `path`."""
    assert path.startswith("/")
    assert path != "/"
    return path.rpartition("/")[0] or "/"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The operation of a transaction that failed, by its index, and its error."""

    index: int
    error: MetadataError


class Tree:
    """All nodes by path; the root always exists."""

    def __init__(self) -> None:
        self._nodes = {"/": Node(b"")}
        self._number = 0  # of the last transaction

    def __len__(self) -> int:
        return len(self._nodes)

    def copy(self) -> Tree:
        """Return a tree of equal nodes."""
        copied = Tree()
        copied._nodes = {
            path: replace(node, children=dict(node.children)) for path, node in self._nodes.items()
        }
        copied._number = self._number
        return copied

    @classmethod
    def of(cls, nodes: Mapping[str, Node], *, number: int = 0) -> Tree:
        """Return a tree of these nodes, by path; their `children` are found here.

        `number` is that of the last transaction.

        Raises:
            NoNodeError: a node has no parent.
        """
        tree = cls()
        tree._number = number
        for path in sorted(nodes):  # a parent comes before its children
            if path == "/":
                tree._nodes["/"] = nodes["/"]
                continue
            parent = tree._nodes.get(parent_of(path))
            if parent is None:
                raise NoNodeError(f"{path} has no parent")
            parent.children[path.rpartition("/")[2]] = None
            tree._nodes[path] = nodes[path]
        return tree

    def find(self, path: str) -> Node | None:
        """Return the node, or None if there is none."""
        return self._nodes.get(path)

    def dump(self) -> dict[str, Versioned]:
        """Return every node by path."""
        return {path: node.versioned() for path, node in sorted(self._nodes.items())}

    def owned_by(self, session: int) -> list[str]:
        """Return the ephemeral nodes of a session."""
        return [path for path, node in self._nodes.items() if node.owner == session]

    def missing_above(self, path: str) -> list[str]:
        """Return the missing ancestors of `path`, the highest first."""
        missing: list[str] = []
        above = parent_of(path)
        while above not in self._nodes:
            missing.append(above)
            above = parent_of(above)
        return missing[::-1]

    def apply(self, ops: Sequence[Op], session: int) -> dict[str, None]:
        """Apply all of `ops` in order, or none; return the paths that changed, as a set.

        Raises:
            MetadataError: the error of the first operation that fails.
        """
        changed = self.attempt(ops, session)
        if isinstance(changed, Refusal):
            raise changed.error
        return changed

    def attempt(self, ops: Sequence[Op], session: int) -> dict[str, None] | Refusal:
        """Apply all of `ops` in order, or none; return the paths that changed, or why not."""
        undo: list[Callable[[], None]] = []
        changed: dict[str, None] = {}
        for index, op in enumerate(ops):
            try:
                changed.update(dict.fromkeys(self._apply_one(op, session, undo)))
            except MetadataError as error:
                for step in reversed(undo):
                    step()
                return Refusal(index, error)
        self._number += 1
        return changed

    def _apply_one(self, op: Op, session: int, undo: list[Callable[[], None]]) -> Iterable[str]:
        match op:
            case Create():
                return self._create(op, session, undo)
            case Put():
                node = self._require(op.path, op.version)
                before = (node.value, node.version, node.changed)
                undo.append(lambda: _restore(node, *before))
                node.value, node.version = op.value, node.version + 1
                node.changed = self._number + 1
                return (op.path,)
            case Delete():
                return self._delete(op, undo)
            case Check():
                self._require(op.path, op.version)
                return ()
            case _:
                assert_never(op)

    def _create(self, op: Create, session: int, undo: list[Callable[[], None]]) -> Iterable[str]:
        above = parent_of(op.path)
        parent = self._nodes.get(above)
        if parent is None:
            raise NoNodeError(f"cannot create {op.path}: {above} does not exist")
        if op.path in self._nodes:
            raise NodeExistsError(f"{op.path} exists")
        if parent.owner is not None:
            raise MetadataError(f"cannot create {op.path}: {above} is ephemeral")
        name = op.path.rpartition("/")[2]
        parent.children[name] = None
        owner, number = session if op.ephemeral else None, self._number + 1
        self._nodes[op.path] = Node(op.value, owner=owner, created=number, changed=number)
        undo.append(lambda: parent.children.pop(name))
        undo.append(lambda: _discard(self._nodes, op.path))
        return (op.path, above)

    def _delete(self, op: Delete, undo: list[Callable[[], None]]) -> Iterable[str]:
        node = self._require(op.path, op.version)
        if node.children:
            raise NodeNotEmptyError(f"cannot delete {op.path}: it has children")
        above = parent_of(op.path)
        parent = self._nodes[above]
        name = op.path.rpartition("/")[2]
        # A copy, so that an undo also restores the order of the children.
        children = dict(parent.children)
        del parent.children[name]
        del self._nodes[op.path]
        undo.append(lambda: setattr(parent, "children", children))
        undo.append(lambda: self._nodes.__setitem__(op.path, node))
        return (op.path, above)

    def _require(self, path: str, version: int) -> Node:
        node = self._nodes.get(path)
        if node is None:
            raise NoNodeError(f"{path} does not exist")
        if version not in (ANY_VERSION, node.version):
            raise MetadataVersionError(f"{path} has version {node.version}, not {version}")
        return node


def _restore(node: Node, value: bytes, version: int, changed: int) -> None:
    node.value, node.version, node.changed = value, version, changed


def _discard(nodes: dict[str, Node], path: str) -> None:
    del nodes[path]
