"""Bugs of renaming, retention, seals, watches, settings and subscriptions, put back on purpose."""

from __future__ import annotations

import contextlib
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakSet

from msgspec.structs import replace

from dlcore.base.ids import DLSN
from dlcore.log.metadata import changes
from dlcore.log.metadata.names import KnownNames
from dlcore.log.reading.holding import Hold, Take
from dlcore.log.reading.subscriptions import SubscriptionHold
from dlcore.log.reading.watching import NameLooks
from dlcore.log.upkeep import removal, retention
from dlcore.log.writing import changing
from dlcore.log.writing.writer import SettingsFollower
from dlcore.metadata.port import ANY_VERSION, Create, Delete, Put
from dlcore.ops.upkeep import expiry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.log.metadata.changes import Change
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.reading.holding import Effect, NodeRead
    from dlcore.metadata.port import Op


@contextlib.contextmanager
def _renames_leave_out(kind: type[Op]) -> Iterator[None]:
    plan_rename = changes.plan_rename

    def part(*about: Any) -> tuple[LogMetadata, tuple[Op, ...]]:
        renamed, ops = plan_rename(*about)
        return renamed, tuple(op for op in ops if not isinstance(op, kind))

    with patch.object(changing, "plan_rename", part):
        yield


@contextlib.contextmanager
def renames_leave_the_head_alone() -> Iterator[None]:
    """A client that knows a log by an older name learns no other; two renames both succeed."""
    with _renames_leave_out(Put):
        yield


@contextlib.contextmanager
def renames_leave_the_old_name() -> Iterator[None]:
    """Two names show one log."""
    with _renames_leave_out(Delete):
        yield


@contextlib.contextmanager
def renames_take_the_name_of_others() -> Iterator[None]:
    """A log that has the new name loses it, and no one can find it any more."""
    plan_rename = changes.plan_rename

    def part(*about: Any) -> tuple[LogMetadata, tuple[Op, ...]]:
        renamed, ops = plan_rename(*about)
        (create,) = (op for op in ops if isinstance(op, Create))
        others = tuple(op for op in ops if op is not create)
        return renamed, (*others, Put(create.path, create.value, ANY_VERSION))

    with patch.object(changing, "plan_rename", part):
        yield


@contextlib.contextmanager
def unanswered_renames_count_as_done() -> Iterator[None]:
    """A client without an answer reports that the log was renamed."""

    async def is_named(*_: Any) -> bool:
        return True

    with patch.object(changing, "_is_named", is_named):
        yield


@contextlib.contextmanager
def retention_takes_one_segment_more() -> Iterator[None]:
    """The segment after the last one that is too old goes, too."""
    first_kept = retention.first_kept

    def more(head: Any, ends: Sequence[Any], *, kept_from_ms: int) -> DLSN | None:
        dlsn = first_kept(head, ends, kept_from_ms=kept_from_ms)
        if dlsn is None or dlsn.lssn >= head.max_lssn:
            return dlsn
        return DLSN(dlsn.lssn + 1, 0, 0)

    with patch.object(expiry, "first_kept", more):
        yield


@contextlib.contextmanager
def segments_are_as_old_as_their_beginning() -> Iterator[None]:
    """Records that were written last go with the first ones of their segment."""
    with contextlib.ExitStack() as stack:
        for module in (retention, expiry, removal):
            stack.enter_context(patch.object(module, "last_write_ms", lambda end: end.created_ms))
        yield


@contextlib.contextmanager
def idle_logs_keep_their_last_segment() -> Iterator[None]:
    """A part that no one completes is never too old."""
    with patch.object(expiry, "must_complete", lambda *_, **__: False):
        yield


@contextlib.contextmanager
def truncated_records_do_not_wait_for_their_time() -> Iterator[None]:
    """Explicit truncation and a retention: truncated records go while they are young."""
    with patch.object(removal, "kept_from_ms", lambda *_, **__: None):
        yield


@contextlib.contextmanager
def truncation_goes_back() -> Iterator[None]:
    """The later of two truncations counts, though it says less."""

    def plan(paths: Any, at: Any, dlsn: DLSN) -> Change:
        draft = changes._Draft(paths, at)
        draft.head = replace(at.head, first_active=(dlsn.lssn, dlsn.entry_id, dlsn.slot_id))
        return draft.finish()

    with patch.object(changing, "plan_truncate", plan):
        yield


@contextlib.contextmanager
def sealed_logs_grow() -> Iterator[None]:
    """No one looks whether a log is sealed."""
    with patch.object(changes, "require_unsealed", lambda _: None):
        yield


@contextlib.contextmanager
def watches_forget_what_changes_while_they_look() -> Iterator[None]:
    """A change after a read, and before that was noted, is missed."""
    look = NameLooks.look

    async def forgetful(self: NameLooks) -> None:
        before = list(self.due)
        await look(self)
        for bucket in before:
            self.due.pop(bucket, None)

    with patch.object(NameLooks, "look", forgetful):
        yield


@contextlib.contextmanager
def watches_do_not_ask_what_became_of_a_name() -> Iterator[None]:
    """A log that is deleted for good is never reported as deleted."""
    with patch.object(KnownNames, "to_ask", lambda *_: []):
        yield


@contextlib.contextmanager
def writers_follow_the_first_change_only() -> Iterator[None]:
    """A writer that got its log's settings once does not get them again."""
    read = SettingsFollower._read
    have_read: WeakSet[SettingsFollower] = WeakSet()

    async def once(self: SettingsFollower) -> None:
        if self in have_read:
            await self._context.logs.read_settings(self._log)
        else:
            await read(self)
            have_read.add(self)

    with patch.object(SettingsFollower, "_read", once):
        yield


@contextlib.contextmanager
def positions_are_written_over() -> Iterator[None]:
    """A reader that was replaced moves the subscription of the one that replaced it."""
    commit = SubscriptionHold.commit

    async def blind(self: SubscriptionHold, position: DLSN) -> None:
        self._hold._version = ANY_VERSION
        await commit(self, position)

    async def ensure_locked(_: SubscriptionHold) -> None:
        pass

    with (
        patch.object(SubscriptionHold, "commit", blind),
        patch.object(SubscriptionHold, "ensure_locked", ensure_locked),
    ):
        yield


@contextlib.contextmanager
def subscribers_begin_anew() -> Iterator[None]:
    """A consumer that takes a subscription over begins at the start of the log."""
    node_read = Hold._node_read

    def anew(self: Hold, node: NodeRead) -> Effect:
        if isinstance(self._running.job, Take) and node.stored is not None:
            node = with_fields(node, stored=replace(node.stored, position=(1, 0, 0)))
        return node_read(self, node)

    with patch.object(Hold, "_node_read", anew):
        yield


@contextlib.contextmanager
def unanswered_positions_count_as_stored() -> Iterator[None]:
    """A reader whose position was not stored gets the answer that it was."""
    commit = SubscriptionHold.commit

    async def hopeful(self: SubscriptionHold, position: DLSN) -> None:
        async def without_a_look() -> None:
            raise _UnansweredError

        with patch.object(self, "_read", without_a_look):
            try:
                await commit(self, position)
            except _UnansweredError:
                self._hold._version += 1

    with patch.object(SubscriptionHold, "commit", hopeful):
        yield


class _UnansweredError(Exception):
    """There was no answer."""


MUTANTS = (
    idle_logs_keep_their_last_segment,
    positions_are_written_over,
    renames_leave_the_head_alone,
    renames_leave_the_old_name,
    renames_take_the_name_of_others,
    retention_takes_one_segment_more,
    sealed_logs_grow,
    segments_are_as_old_as_their_beginning,
    subscribers_begin_anew,
    truncated_records_do_not_wait_for_their_time,
    truncation_goes_back,
    unanswered_positions_count_as_stored,
    unanswered_renames_count_as_done,
    watches_do_not_ask_what_became_of_a_name,
    watches_forget_what_changes_while_they_look,
    writers_follow_the_first_change_only,
)
