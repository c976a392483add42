"""Bugs of the sink of Spark, and of those who stage and commit for it, put back on purpose."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace

from dlcore.backends.flight.staging import FlightStagingWriter
from dlcore.log.metadata.commits import decide
from dlcore.log.staging import commit as commits
from dlcore.log.staging.commit import Commit, Plan
from dlcore.proxy.actions import Appends
from dlcore.proxy.writing.staging import Stagings
from dlspark import commit, sessions, staging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.flight.actions import AppendRequest
    from dlcore.log.metadata.commits import Decision
    from dlcore.log.metadata.values import CommitRecord
    from dlcore.log.staging.faces import StagedAppend

# The sink


@contextlib.contextmanager
def repeated_batches_have_other_identities() -> Iterator[None]:
    """The identity of a batch is new in each commit, so that no one knows it again."""
    committed_as, numbers = staging._committed_as, itertools.count()

    def unique(*about: Any) -> str:
        return f"{committed_as(*about)}{next(numbers)}"

    with patch.object(staging, "_committed_as", unique):
        yield


@contextlib.contextmanager
def extents_are_in_the_order_of_messages() -> Iterator[None]:
    """Rows come in the order in which tasks ended, not in that of partitions."""
    join_messages = commit.join_messages

    def joined(messages: Sequence[Any]) -> Any:
        found = join_messages(messages)
        return found and (
            found[0],
            [extent for task in messages if task for extent in task.extents],
        )

    with patch.object(staging, "join_messages", joined):
        yield


@contextlib.contextmanager
def a_stream_skips_old_batches() -> Iterator[None]:
    """A query that goes on from an old checkpoint gets the answer that its batch is there."""
    stream_identity = commit._stream_identity

    def lax(*about: Any, **more: Any) -> Any:
        return with_fields(stream_identity(*about, **more), is_stream=False)

    with patch.object(commit, "_stream_identity", lax):
        yield


@contextlib.contextmanager
def a_batch_writes_once_to_a_target() -> Iterator[None]:
    """The writes of a batch are not counted: the second one is taken for the first."""
    stream_identity = commit._stream_identity

    def uncounted(*about: Any, **_: Any) -> Any:
        return stream_identity(*about)

    with patch.object(commit, "_stream_identity", uncounted):
        yield


@contextlib.contextmanager
def a_worker_keeps_the_rows_of_a_failed_task() -> Iterator[None]:
    """Records of a failed task are staged with the next one."""

    def put_back(key: Any, writer: Any, *, keep: bool) -> None:
        if keep:
            sessions._put_back(key, writer)
        else:
            writer.close(delete=True)

    with patch.object(sessions, "_give_up", put_back):
        yield


# The commit


@contextlib.contextmanager
def older_runs_count_on() -> Iterator[None]:
    """A run that another one has followed comes back, and its appends count as the newer one's."""

    def forgetful(record: CommitRecord | None, **more: Any) -> Decision:
        return decide(record and replace(record, superseded=()), **more)

    with patch.object(commits, "decide", forgetful):
        yield


@contextlib.contextmanager
def a_commit_tells_what_it_planned_first() -> Iterator[None]:
    """An append that was overtaken tells where its rows would have been."""
    plan = Commit._plan

    def first(self: Commit, *about: Any) -> Any:
        planned = plan(self, *about)
        if not isinstance(planned, Plan):
            return planned
        logs = self.__dict__.setdefault("_planned_first", planned.logs)
        return with_fields(planned, logs=logs)

    with patch.object(Commit, "_plan", first):
        yield


# Proxies


@contextlib.contextmanager
def a_proxy_keeps_the_rows_of_a_broken_stream() -> Iterator[None]:
    """Records of a broken stream are staged with the next one of its identity."""
    give_up = Stagings._give_up

    async def put_back(self: Stagings, target: Any, writer: Any) -> None:
        if target.shared:
            self._put_back(target, writer)
        else:
            await give_up(self, target, writer)

    with patch.object(Stagings, "_give_up", put_back):
        yield


@contextlib.contextmanager
def proxies_do_not_count_writes() -> Iterator[None]:
    """An append over a proxy is of no run, so that the second one of a batch is skipped."""
    begin = Appends._begin

    async def uncounted(self: Appends, request: AppendRequest) -> StagedAppend:
        return await begin(self, replace(request, run=None))

    with patch.object(Appends, "_begin", uncounted):
        yield


@contextlib.contextmanager
def proxies_skip_old_batches() -> Iterator[None]:
    """An append over a proxy is skipped by its number, also one from an old checkpoint."""
    begin = Appends._begin

    async def lax(self: Appends, request: AppendRequest) -> StagedAppend:
        return await begin(self, replace(request, strict=False))

    with patch.object(Appends, "_begin", lax):
        yield


@contextlib.contextmanager
def proxies_know_no_append_again() -> Iterator[None]:
    """Each proxy that is asked to commit gives the append a token of its own."""
    begin = Appends._begin

    async def anew(self: Appends, request: AppendRequest) -> StagedAppend:
        token = self._namespace.log_context.clock.new_token()
        return await begin(self, replace(request, token=token))

    with patch.object(Appends, "_begin", anew):
        yield


# The remote client


@contextlib.contextmanager
def what_was_sent_is_not_sent_again() -> Iterator[None]:
    """Rows that a proxy got before it was lost are not kept for the next one."""
    end_call = FlightStagingWriter._end_call

    async def forget(self: FlightStagingWriter) -> None:
        await end_call(self)
        if self._kept.messages is not None:
            self._kept.messages.clear()

    with patch.object(FlightStagingWriter, "_end_call", forget):
        yield


ON_THE_CLUSTER = (
    a_batch_writes_once_to_a_target,
    a_commit_tells_what_it_planned_first,
    a_stream_skips_old_batches,
    a_worker_keeps_the_rows_of_a_failed_task,
    extents_are_in_the_order_of_messages,
    older_runs_count_on,
    repeated_batches_have_other_identities,
)
OVER_PROXIES = (
    a_proxy_keeps_the_rows_of_a_broken_stream,
    proxies_do_not_count_writes,
    proxies_know_no_append_again,
    proxies_skip_old_batches,
    what_was_sent_is_not_sent_again,
)
MUTANTS = (*ON_THE_CLUSTER, *OVER_PROXIES)
