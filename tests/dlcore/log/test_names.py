"""A dictionary of names that gets every change agrees with the names in the end.

Goal: however creations, deletions, renames and looks mix, and however late a look is applied, the
reported changes can be applied one after the other, and give the names there are.  Method: exact
changes of small cases; random ones beside a plain dictionary.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dlcore.log.metadata.names import KnownNames, LogChange, LogChangeKind
from dlcore.metadata.paths import bucket_of
from tests.fixtures.lengths import for_each, sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CREATED, DELETED, RENAMED = LogChangeKind


class World:
    """The logs there are, and the subscribers that know of them."""

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}  # by name
        self.known = KnownNames()
        self.notified: dict[str, str] = {}  # by name
        self.count = 0
        self.renamed: set[str] = set()

    def create(self, name: str) -> str:
        """Create a log, or delete the one of that name first."""
        self.count += 1
        self.ids[name] = f"id-{self.count}"
        return self.ids[name]

    def rename(self, name: str, to: str) -> None:
        """Rename a log."""
        self.ids[to] = self.ids.pop(name)
        self.renamed.add(self.ids[to])

    def listed(self, bucket: str) -> dict[str, str]:
        """Return what is in a bucket."""
        return {name: i for name, i in self.ids.items() if bucket_of(name) == bucket}

    def present(self, ids: Iterable[str]) -> dict[str, str | None]:
        """Return what heads say."""
        names = {i: name if i in self.renamed else "" for name, i in self.ids.items()}
        return {log_id: names.get(log_id) for log_id in ids}

    def apply(self, bucket: str, found: Mapping[str, str]) -> list[LogChange]:
        """Apply a look, perhaps of an earlier moment; each subscriber notes it."""
        present = self.present(self.known.to_ask(bucket, found))
        changes = self.known.looked(bucket, found, present)
        for change in changes:
            if change.kind is not CREATED:
                old = change.name if change.old_name is None else change.old_name
                assert self.notified.pop(old) == change.log_id
            if change.kind is not DELETED:
                assert change.name not in self.notified
                self.notified[change.name] = change.log_id
        assert self.known.names("") == sorted(self.notified)
        return changes

    def look(self, *names: str) -> list[tuple[LogChangeKind, str, str | None]]:
        """Look at the buckets of these names; return the changes."""
        changes: list[LogChange] = []
        for bucket in dict.fromkeys(map(bucket_of, names)):
            changes += self.apply(bucket, self.listed(bucket))
        return [(change.kind, change.name, change.old_name) for change in changes]


def test_creations_and_deletions_are_reported_once() -> None:
    """A look without news tells nothing."""
    world = World()
    world.create("b")
    world.create("a")
    assert world.look("a", "b") == [(CREATED, "a", None), (CREATED, "b", None)]
    assert world.look("a", "b") == []
    del world.ids["a"]
    assert world.look("b", "a") == [(DELETED, "a", None)]


def test_a_log_that_was_created_again_is_reported_as_deleted_and_created() -> None:
    """Its name is the same, and it is another one."""
    world = World()
    world.create("a")
    world.look("a")
    world.create("a")
    assert world.look("a") == [(DELETED, "a", None), (CREATED, "a", None)]


def test_a_look_that_is_older_than_the_reports() -> None:
    """A log that is not in it and lives is still there."""
    world = World()
    empty = world.listed(bucket_of("a"))
    world.create("a")
    world.look("a")
    assert world.apply(bucket_of("a"), empty) == []


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_rename_is_reported_once_whichever_name_is_looked_at_first(first: str) -> None:
    """The other bucket has nothing to add."""
    world = World()
    world.create("a")
    world.look("a")
    world.rename("a", "b")
    assert world.look(first) == [(RENAMED, "b", "a")]
    assert world.look("a", "b") == []


@pytest.mark.parametrize("names", [("a", "c", "b"), ("z", "c", "b")])
def test_a_name_that_went_on_is_free_before_it_is_given(names: tuple[str, str, str]) -> None:
    """A log is renamed, and another takes its name: the rename is reported first."""
    name, to, taker = names
    world = World()
    world.create(name)
    world.create(taker)
    world.look(name, taker)
    world.rename(name, to)
    world.rename(taker, name)
    assert world.look(name) == [(RENAMED, to, name), (RENAMED, name, taker)]


def test_two_logs_that_changed_names() -> None:
    """No order of renames describes it: one of them is reported as deleted and created."""
    world = World()
    world.create("a")
    world.create("b")
    world.look("a", "b")
    for name, to in (("a", "c"), ("b", "a"), ("c", "b")):
        world.rename(name, to)
    changes = world.look("a", "b")
    assert sorted(kind.value for kind, *_ in changes) == ["created", "deleted", "renamed"]
    assert world.notified == world.ids


def test_a_look_that_is_applied_late() -> None:
    """A log that moved on meanwhile is reported as it is now."""
    world = World()
    world.create("a")
    world.look("a")
    old = world.listed(bucket_of("a"))
    world.rename("a", "b")
    world.look("b")
    assert world.apply(bucket_of("a"), old) == []
    before = world.listed(bucket_of("a"))
    world.rename("b", "a")
    assert world.apply(bucket_of("b"), world.listed(bucket_of("b")))
    assert world.apply(bucket_of("a"), before) == []
    assert world.notified == {"a": "id-1"}


@pytest.mark.parametrize(
    ("old_name", "name", "expected"),
    [
        (None, "x/a", ("created", "x/a", None)),
        (None, "y/a", None),
        ("x/a", "x/b", ("renamed", "x/b", "x/a")),
        ("x/a", "y/b", ("deleted", "x/a", None)),
        ("y/a", "x/b", ("created", "x/b", None)),
        ("y/a", "y/b", None),
    ],
)
def test_a_prefix(
    old_name: str | None, name: str, expected: tuple[str, str, str | None] | None
) -> None:
    """A rename into it is a creation, one out of it a deletion."""
    kind = CREATED if old_name is None else RENAMED
    change = LogChange(kind=kind, name=name, log_id="1", old_name=old_name).within("x/")
    assert (change and (change.kind.value, change.name, change.old_name)) == expected


@for_each(sample(range(2000), 200))
def test_random_changes_and_looks(seed: int) -> None:
    """Each change is followed by a look at its buckets, at any later time, of any age."""
    rng = random.Random(seed)
    world = World()
    names = [f"n{i}" for i in range(rng.randint(2, 12))]
    due: dict[str, None] = {}
    read: list[tuple[str, dict[str, str]]] = []
    for _ in range(200):
        action = rng.randrange(6)
        name, other = rng.sample(names, 2)
        if action == 0:
            world.create(name)
            due[bucket_of(name)] = None
        elif action == 1 and name in world.ids:
            del world.ids[name]
            due[bucket_of(name)] = None
        elif action == 2 and name in world.ids and other not in world.ids:
            world.rename(name, other)
            due |= dict.fromkeys([bucket_of(name), bucket_of(other)])
        elif action in (3, 4) and due:
            bucket = rng.choice(list(due))
            del due[bucket]
            read.append((bucket, world.listed(bucket)))
        elif read:
            world.apply(*read.pop(0))
    for bucket, found in read:
        world.apply(bucket, found)
    for bucket in due:
        world.apply(bucket, world.listed(bucket))
    assert world.notified == world.ids
