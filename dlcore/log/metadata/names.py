"""The names of logs as reported so far, and the changes that a look at some of them shows.

Names are looked at bucket by bucket, each at a moment of its own.  The reported changes, applied
one after the other, turn the names of before into the present ones.  A log is created under a free
name, renamed to a free name, and deleted under the name that it has.  A name that came and went
between two looks is not reported.  A log that is deleted and created again is reported as both.

If the name of a log is gone, the log was deleted, or has another name, which its head says: the
bucket of the new name may not have been looked at yet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.html_tables import ShownFields
from dlcore.metadata.paths import bucket_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class LogChangeKind(enum.Enum):
    """The kind of a change of a log's name."""

    CREATED = "created"
    DELETED = "deleted"
    RENAMED = "renamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChange(ShownFields):
    """A log was created, deleted, or renamed from `old_name`; `name` is the last one it has."""

    kind: LogChangeKind
    name: str
    log_id: str
    old_name: str | None = None

    def within(self, prefix: str) -> LogChange | None:
        """Return the change as seen by a watch of this prefix; None if it sees nothing."""
        is_in = self.name.startswith(prefix)
        if self.old_name is None:
            return self if is_in else None
        was_in = self.old_name.startswith(prefix)
        if is_in and was_in:
            return self
        if is_in:
            return LogChange(kind=LogChangeKind.CREATED, name=self.name, log_id=self.log_id)
        if was_in:
            return LogChange(kind=LogChangeKind.DELETED, name=self.old_name, log_id=self.log_id)
        return None


class KnownNames:
    """The reported names of the logs."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, str]] = {}  # by bucket and name
        self._names: dict[str, str] = {}  # by id

    def names(self, prefix: str) -> list[str]:
        """Return the names with this prefix, sorted."""
        return sorted(name for name in self._names.values() if name.startswith(prefix))

    def to_ask(self, bucket: str, found: Mapping[str, str]) -> list[str]:
        """Return the ids of the logs whose heads `looked` needs.

        Args:
            bucket: the bucket that was looked at.
            found: the ids of the logs in it, by name.
        """
        gone = {i for name, i in self._ids.get(bucket, {}).items() if found.get(name) != i}
        moved = {i for name, i in found.items() if self._names.get(i, name) != name}
        return sorted(gone | moved)

    def looked(
        self, bucket: str, found: Mapping[str, str], present: Mapping[str, str | None]
    ) -> list[LogChange]:
        """Return the changes that a look at a bucket shows.

        Args:
            bucket: the bucket that was looked at.
            found: the ids of the logs in it, by name.
            present: the names of the logs of `to_ask`, read afterwards; None: deleted, "": the name
                that it was created with.
        """
        changes: list[LogChange] = []
        left = sorted(present, key=self._names.__getitem__)
        while left:
            # First the changes that free names for others; in a cycle there is none.
            log_id = next((i for i in left if self._holder(present[i]) in (None, i)), left[0])
            left.remove(log_id)
            name = present[log_id]
            if name is None:
                self._delete(log_id, changes)
            elif name:
                self._name(log_id, name, changes)
        for name, log_id in sorted(found.items()):
            if log_id not in present:
                self._name(log_id, name, changes)
        return changes

    def _holder(self, name: str | None) -> str | None:
        """Return the log that has the name, as reported."""
        return None if name is None else self._ids.get(bucket_of(name), {}).get(name)

    def _name(self, log_id: str, name: str, changes: list[LogChange]) -> None:
        """Note that a log has a name."""
        old_name = self._names.get(log_id)
        if old_name == name:
            return
        other = self._holder(name)
        if other is not None:  # it is gone, or renamed: that is reported when it is seen
            self._delete(other, changes)
        if old_name is not None:
            del self._ids[bucket_of(old_name)][old_name]
        self._names[log_id] = name
        self._ids.setdefault(bucket_of(name), {})[name] = log_id
        kind = LogChangeKind.CREATED if old_name is None else LogChangeKind.RENAMED
        changes.append(LogChange(kind=kind, name=name, log_id=log_id, old_name=old_name))

    def _delete(self, log_id: str, changes: list[LogChange]) -> None:
        name = self._names.pop(log_id)
        del self._ids[bucket_of(name)][name]
        changes.append(LogChange(kind=LogChangeKind.DELETED, name=name, log_id=log_id))
