"""Tasks stage and a driver commits, without Spark: once, all of it or nothing.

Goal: a wrong use names the right one, and no record of a failed write is seen.
Method: a real cluster; this process is task and driver.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore import SharedStaging
from dlcore.base.errors import (
    AppendMismatchError,
    LogNotFoundError,
    OwnershipAcquireFailedError,
    TransactionIdOutOfOrderError,
)
from dlcore.base.records import LogRecord
from dlcore.log.staging.commit_driver import CommitDriver
from dlcore.metadata.attempts import Store
from dlcore.sync import open_namespace
from dlspark.commit import AppendIdentity
from dlspark.options import Mode, WriteOptions
from dlspark.schema import WriteColumns
from dlspark.sessions import close_shared_namespace
from dlspark.staging import abort_staged, commit_staged, stage_rows
from tests.fixtures.spark import list_staged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlcore.log.staging.commit import Event, Work
    from dlspark.commit import StagedTask

pytestmark = pytest.mark.integration

VALUES = WriteColumns(has_txid=False, has_log=False)
TXIDS = WriteColumns(has_txid=True, has_log=False)
LOGS = WriteColumns(has_txid=False, has_log=True)
WAIT_S = 60


class Target:
    """A fresh log, and the options of a write to it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.log = f"staging/{uuid4().hex}"
        self.append = AppendIdentity(identity=uuid4().hex, version=1)
        self.options = self.parse(log=self.log)
        with open_namespace(uri) as namespace:
            namespace.create_log(self.log)

    def parse(self, **options: str) -> WriteOptions:
        """Parse options of a write to this cluster."""
        return WriteOptions.parse({"uri": self.uri, **options}, Mode.BATCH)

    def stage(self, *values: bytes, partition: int = 0, **columns: list[object]) -> StagedTask:
        """Stage rows as a task."""
        batch = pa.RecordBatch.from_pydict({"value": [*values], **columns})
        return stage_rows(
            [batch],
            options=self.options,
            columns=TXIDS if "txid" in columns else VALUES,
            append=self.append,
            partition_id=partition,
        )

    def payloads(self) -> list[bytes]:
        """Return what the log holds."""
        with (
            open_namespace(self.uri) as namespace,
            namespace.open_log(self.log) as log,
            log.open_reader() as reader,
        ):
            return [record.payload for record in reader.read_bulk(1_000)]


@pytest.fixture
def target(namespace_uri: str) -> Iterator[Target]:
    """A target; what this process opened for it is closed."""
    made = Target(namespace_uri)
    yield made
    close_shared_namespace(made.options.address)


def test_a_batch_is_committed_once_in_the_order_of_its_partitions(target: Target) -> None:
    """Nothing is seen before; a second run is skipped, and what it staged is dropped."""
    tasks = [target.stage(b"c", partition=1), target.stage(b"a", b"b", partition=0)]
    assert target.payloads() == []
    commit_staged(tasks, options=target.options)
    assert target.payloads() == [b"a", b"b", b"c"]
    commit_staged([target.stage(b"a", b"b", b"c")], options=target.options)
    assert target.payloads() == [b"a", b"b", b"c"]


def test_settings_of_the_log_hold_for_the_sink(target: Target) -> None:
    """Sizes of entries and segments, and compression; rows of a task keep their order."""
    values = [b"%04d" % n + b"x" * 96 for n in range(1_000)]
    sizes = []
    for compression in ("none", "zstd"):
        with open_namespace(target.uri) as namespace, namespace.open_log(target.log) as log:
            log.update_settings(entry_bytes=4_096, segment_bytes_max=1_000, compression=compression)
        target.append = replace(target.append, version=target.append.version + 1)
        commit_staged(
            [target.stage(*values), target.stage(*values, partition=1)], options=target.options
        )
        with open_namespace(target.uri) as namespace, namespace.open_log(target.log) as log:
            segments = log.get_snapshot().segments
            sizes.append(segments[-1].size_bytes)
            assert len(segments) == 2 * len(sizes), "each task's extent fills a segment"
            assert all(segment.entry_count >= 25 for segment in segments)
    assert sizes[1] < sizes[0] / 2
    with open_namespace(target.uri) as namespace, namespace.open_log(target.log) as log:
        assert log.read().to_arrow()["value"].to_pylist() == values * 4


def test_a_stream_on_an_old_checkpoint_gets_an_error_with_a_remedy(target: Target) -> None:
    """Its batch would be skipped, and its records lost; a user's own versions may come again."""
    target.append = replace(target.append, version=7)
    commit_staged([target.stage(b"a")], options=target.options)
    target.append = replace(target.append, version=6)
    commit_staged([target.stage(b"skipped")], options=target.options)
    target.append = replace(target.append, is_stream=True)
    with pytest.raises(AppendMismatchError, match=r"version 7 was .* start with a new checkpoint"):
        commit_staged([target.stage(b"refused")], options=target.options)
    assert target.payloads() == [b"a"]


def test_a_batch_of_a_stream_is_known_by_the_id_of_its_log(target: Target) -> None:
    """Renamed between two runs of a batch, with rows or without, a log has it once.

    One that was created again under the old name is another log.
    """
    query, old, new = f"stream:{uuid4().hex}", target.log, f"{target.log}-new"

    def commit(version: int, *values: bytes) -> None:
        shared = SharedStaging(identity=query, round=str(version))
        target.append = AppendIdentity(
            identity=query, version=version, shared=shared, is_stream=True, is_of_log=True
        )
        target.options = target.parse(log=target.log)
        commit_staged([target.stage(*values)], options=target.options)

    def rename(name: str) -> None:
        with open_namespace(target.uri) as namespace:
            namespace.rename_log(target.log, name)
        target.log = name

    commit(1, b"a")
    rename(new)
    commit(1, b"a")
    commit(2)
    rename(old)
    with pytest.raises(AppendMismatchError, match="version 2 was"):
        commit(1, b"a")
    rename(new)
    commit(3, b"b")
    assert target.payloads() == [b"a", b"b"]
    target.log = old
    with open_namespace(target.uri) as namespace:
        namespace.create_log(old)
    close_shared_namespace(target.options.address)  # as in a run of the query that begins now
    commit(3, b"b")
    assert target.payloads() == [b"b"]


def test_a_commit_that_stands_still_while_another_run_commits(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that nothing was committed; when it goes on, it is skipped."""
    query = f"stream:{uuid4().hex}"
    shared = SharedStaging(identity=query, round="1")
    target.append = AppendIdentity(
        identity=query, version=1, shared=shared, is_stream=True, is_of_log=True
    )
    late, other = target.stage(b"a"), target.stage(b"a")
    perform, stands_still, goes_on = CommitDriver._answer_of, threading.Event(), threading.Event()

    async def wait_and_perform(self: CommitDriver, work: Work) -> Event:
        if isinstance(work, Store) and not stands_still.is_set():
            stands_still.set()
            await asyncio.to_thread(goes_on.wait, WAIT_S)
        return await perform(self, work)

    monkeypatch.setattr(CommitDriver, "_answer_of", wait_and_perform)
    with ThreadPoolExecutor(1) as driver:
        commit = driver.submit(commit_staged, [late], options=target.options)
        assert stands_still.wait(WAIT_S)
        commit_staged([other], options=target.options)
        goes_on.set()
        commit.result(WAIT_S)
    assert target.payloads() == [b"a"]


def test_an_aborted_batch_leaves_no_record(target: Target) -> None:
    """Nor a ledger; its version may be written again."""
    task = target.stage(b"lost")
    assert len(list_staged(target.uri, target.append.identity)[0]) == 1
    assert target.payloads() == [], "nothing is to be read before the commit"
    abort_staged([task, None], address=target.options.address)
    assert list_staged(target.uri, target.append.identity)[0] == set()
    abort_staged([None], address=target.options.address)
    abort_staged([None], address=target.options.address, append=target.append)
    assert target.payloads() == []
    commit_staged([target.stage(b"kept")], options=target.options)
    assert target.payloads() == [b"kept"]


def test_nothing_to_write_is_no_error(target: Target) -> None:
    """Spark calls for a write without rows or tasks too."""
    commit_staged([], options=target.options)
    commit_staged([target.stage()], options=target.options)
    assert target.payloads() == []


def test_transaction_ids_out_of_order_are_refused_with_advice(target: Target) -> None:
    """Within a task and between partitions; the log holds nothing of either."""
    advice = r"sort with orderBy\(\"txid\"\) before the write, or leave the column txid out"
    with pytest.raises(TransactionIdOutOfOrderError, match=advice):
        target.stage(b"a", b"b", txid=[2, 1])
    tasks = [
        target.stage(b"a", partition=0, txid=[5]),
        target.stage(b"b", partition=1, txid=[4]),
    ]
    with pytest.raises(TransactionIdOutOfOrderError, match=advice):
        commit_staged(tasks, options=target.options)
    assert target.payloads() == []
    commit_staged([target.stage(b"a", txid=[5])], options=target.options)
    target.append = replace(target.append, version=2)
    with pytest.raises(TransactionIdOutOfOrderError, match="if this repeats a write") as repeated:
        commit_staged([target.stage(b"b", txid=[4])], options=target.options)
    assert "orderBy" not in str(repeated.value), "it would not help"
    target.append = replace(target.append, version=3)
    with pytest.raises(TransactionIdOutOfOrderError, match=r"those that replace .* write higher"):
        commit_staged([target.stage(b"b", txid=[4])], options=target.options, replaces=True)
    assert target.payloads() == [b"a"]


def test_a_row_for_a_log_that_does_not_exist_says_how_to_create_it(target: Target) -> None:
    """By the name in the row."""
    missing = f"{target.log}/missing"
    batch = pa.RecordBatch.from_pydict({"value": [b"a", b"b"], "log": [target.log, missing]})
    with pytest.raises(LogNotFoundError, match=f"create it with: dlog log create {missing}"):
        stage_rows(
            [batch],
            options=target.parse(),
            columns=LOGS,
            append=target.append,
            partition_id=0,
        )
    assert target.payloads() == []


def test_a_log_that_was_deleted_is_created_again_by_the_next_task(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same process too; where it goes during a write, the error says what helps."""
    options = target.parse(createLog="true")
    batch = pa.RecordBatch.from_pydict({"value": [b"a"], "log": [target.log]})

    def stage() -> StagedTask:
        return stage_rows(
            [batch], options=options, columns=LOGS, append=target.append, partition_id=0
        )

    stage()
    with open_namespace(target.uri) as namespace:
        namespace.delete_log(target.log)
    with monkeypatch.context() as patch:
        patch.setattr("dlspark.staging.require_logs", lambda *_, **__: None)
        with pytest.raises(LogNotFoundError, match="deleted during the write: write again"):
            stage()
    commit_staged([stage()], options=options)
    assert target.payloads() == [b"a"]


def test_a_log_that_another_writes_is_waited_for_as_long_as_set(target: Target) -> None:
    """Then the owner is named, and what to do."""
    options = target.parse(log=target.log, lockTimeoutMs="100")
    task = target.stage(b"a")
    with (
        open_namespace(target.uri) as namespace,
        namespace.open_log(target.log) as log,
        log.open_writer() as writer,
    ):
        writer.write(LogRecord(txid=1, payload=b"theirs"))
        with pytest.raises(OwnershipAcquireFailedError, match=r"wait longer .* lockTimeoutMs"):
            commit_staged([task], options=options)
    commit_staged([task], options=options)
    assert target.payloads() == [b"theirs", b"a"]
