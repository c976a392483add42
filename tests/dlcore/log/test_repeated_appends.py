"""Appends that another process tries again, and extents that are not what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from dlcore.base.errors import ConfigurationError, DuplicateAppendError
from dlcore.log.metadata.commits import AppendRun
from tests.fixtures.memory_namespace import MemoryCluster, on_log
from tests.fixtures.staged_records import payloads_of, stage

if TYPE_CHECKING:
    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.reading.scan import CommitResult

RUN = AppendRun(token="run-1", begun_ns=0)


@pytest.mark.parametrize("kind", ["append", "skip", "conflict"])
def test_an_append_that_another_process_tries_again(kind: str) -> None:
    """By its token it is known for done, however it counts, and never made again."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace, other = cluster.namespaces[0], await cluster.open("other")
        first = await namespace.begin_append("job", 1, run=replace(RUN, commits_ns=50))
        assert (await first.commit([await stage(namespace, "first")])).committed
        run = {
            "append": replace(RUN, begun_ns=50, commits_ns=60),  # by the appender's own clock
            "skip": replace(RUN, token="run-2"),
            "conflict": replace(RUN, begun_ns=49),
        }[kind]
        extent = await stage(namespace, "second")
        for number, at in enumerate((namespace, other, other)):
            append = await at.begin_append("job", 1, run=run, token="the same")
            if kind == "conflict":
                with pytest.raises(DuplicateAppendError, match="no order"):
                    await append.commit([extent])
            else:
                result = await append.commit([extent])
                assert result.committed is (kind == "append" and number == 0)
                assert result.already_committed is not result.committed
        expected = ["first", "second"] if kind == "append" else ["first"]
        assert await payloads_of(log) == expected

    on_log(body)


def test_an_append_that_is_tried_again_late_is_known() -> None:
    """Its run has gone on since its answer: that the late one overlaps the next says nothing."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace, other = cluster.namespaces[0], await cluster.open("other")
        extents = [await stage(namespace, text) for text in ("first", "second", "third")]
        runs = [replace(RUN, begun_ns=each, commits_ns=each + 5) for each in (0, 10, 20)]

        async def commit(at: DirectNamespace, number: int) -> CommitResult:
            append = await at.begin_append("job", 1, run=runs[number], token=f"token-{number}")
            return await append.commit([extents[number]])

        for number in range(3):
            assert (await commit(namespace, number)).committed
            for late in range(number):
                assert (await commit(other, late)).already_committed
        assert await payloads_of(log) == ["first", "second", "third"]

    on_log(body)


def test_a_ledger_of_another_staging_is_refused() -> None:
    """Whatever is said of it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        extent = msgspec.structs.replace(await stage(namespace, "a"), identity="thief")
        append = await namespace.begin_append("thief", 1)
        with pytest.raises(ConfigurationError, match="is of 'job': it cannot be committed"):
            await append.commit([extent])
        assert await payloads_of(log) == []

    on_log(body)
