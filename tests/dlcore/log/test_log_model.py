"""A whole log against a list: writers, crashes, recovery, rolls, truncation, seals and readers.

Goal: whatever is done in whatever order, what can be read is what was acknowledged and not
truncated, once and in order, for readers from the start, by transaction id, and along the tail.
Method: the real client over a metadata store and bookies in memory; Hypothesis chooses what happens
next, and makes a failing history short.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlcore.base.errors import AlreadyTruncatedError, EndOfStreamError, LogEmptyError
from tests.fixtures.lateness import OwnTimeLoop
from tests.fixtures.lengths import amount
from tests.fixtures.memory_namespace import CONFIG, MemoryCluster, read_all, record

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, TypeVar

    from dlcore.backends.direct.log import DirectLog
    from dlcore.base.ids import DLSN
    from dlcore.log.reading.reader import DirectReader
    from dlcore.log.writing.writer import DirectWriter

    _Result = TypeVar("_Result")

LIMIT_S = 60
SMALL = replace(CONFIG, segment_bytes_max=2_000, entry_bytes=1_000)
"""A segment holds some records only."""


class WholeLog(RuleBasedStateMachine):
    """`self.written` is the model: positions, transaction ids and payloads, all acknowledged."""

    @initialize()
    def start(self) -> None:
        """Make an empty log."""
        self.runner = asyncio.Runner(loop_factory=OwnTimeLoop)
        self.cluster = MemoryCluster()
        self.written: list[tuple[DLSN, int, bytes]] = []
        self.dropped = 0
        self.tailed = 0
        self.is_sealed = False
        self.clients = 0
        self.writer: DirectWriter | None = None
        self.tail: DirectReader | None = None
        self.log = self.run(self._make())

    async def _make(self) -> DirectLog:
        await self.cluster.start()
        namespace = await self.cluster.open("maker", config=SMALL)
        await namespace.create_log("clicks")
        return await namespace.open_log("clicks")

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work`, which may not take for ever."""
        return self.runner.run(asyncio.wait_for(work, LIMIT_S))

    @precondition(lambda self: not self.is_sealed)
    @rule(sizes=st.lists(st.integers(0, 900), min_size=1, max_size=4), step=st.integers(0, 3))
    def write(self, sizes: list[int], step: int) -> None:
        """Write records, of which the first has a transaction id some steps further."""
        self.run(self._write(sizes, step))

    async def _write(self, sizes: list[int], step: int) -> None:
        if self.writer is None:
            self.clients += 1
            namespace = await self.cluster.open(f"writer-{self.clients}", config=SMALL)
            self.writer = await (await namespace.open_log("clicks")).open_writer()
        txid = (self.written[-1][1] if self.written else 0) + step
        payloads = [bytes([len(self.written) % 256]) * size for size in sizes]
        positions = [await self.writer.write(record(txid, payload)) for payload in payloads]
        await self.writer.commit()
        self.written += [(at, txid, p) for at, p in zip(positions, payloads, strict=True)]

    @precondition(lambda self: self.writer is not None)
    @rule(crashes=st.booleans())
    def end_writer(self, *, crashes: bool) -> None:
        """Close the writer, or let it die with its segment open; the next one recovers it."""
        assert self.writer is not None
        self.run(self.writer.abort() if crashes else self.writer.aclose())
        self.writer = None

    @precondition(lambda self: self.writer is None and not self.is_sealed)
    @rule()
    def recover(self) -> None:
        """Complete what a dead writer left, or nothing."""
        self.run(self.log.recover())

    @precondition(lambda self: self.writer is None and not self.is_sealed)
    @rule()
    def seal(self) -> None:
        """Nothing can follow."""
        self.run(self.log.mark_end_of_stream())
        self.is_sealed = True

    @precondition(lambda self: self.written)
    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        """Truncate at some record, also at one that is gone, beside any writer."""
        at = int(share * (len(self.written) - 1))
        changed = self.run(self.log.truncate(self.written[at][0]))
        assert changed == (at > self.dropped)
        self.dropped = max(self.dropped, at)

    @rule()
    def read_along_the_tail(self) -> None:
        """A reader that stays open gets what it has not seen; truncated records are an error."""
        self.run(self._tail())

    async def _tail(self) -> None:
        if self.tail is None:
            self.tail = await self.log.open_reader()
            self.tailed = self.dropped
        try:
            while found := await self.tail.read_bulk(100, until_caught_up=True):
                expected = self.written[self.tailed : self.tailed + len(found)]
                assert [(r.dlsn, r.txid, r.payload) for r in found] == expected
                self.tailed += len(found)
            assert self.tailed == len(self.written)
        except EndOfStreamError:
            assert self.is_sealed
            assert self.tailed == len(self.written)
        except AlreadyTruncatedError:
            assert self.tailed < self.dropped
            await self.tail.aclose()
            self.tail = None

    @rule(data=st.data())
    def find_a_transaction_id(self, data: st.DataObject) -> None:
        """The first record that is not less, or the end."""
        left = self.written[self.dropped :]
        txid = data.draw(st.integers(0, (left[-1][1] if left else 0) + 1))
        found = self.run(self.log.get_dlsn_not_less_than_txid(txid))
        expected = next((dlsn for dlsn, each, _ in left if each >= txid), None)
        if expected is None:
            expected = self.run(self.log.get_snapshot()).end
        assert found == expected

    @invariant()
    def what_is_read_is_what_was_written(self) -> None:
        """From the start, with counts and both ends."""
        if not hasattr(self, "runner"):
            return
        left = self.written[self.dropped :]
        records = self.run(read_all(self.log))
        assert [(r.dlsn, r.txid, r.payload) for r in records] == left
        assert [r.sequence_id for r in records] == list(range(self.dropped, len(self.written)))
        assert self.run(self.log.get_log_record_count()) == len(left)
        assert self.run(self.log.is_end_of_stream_marked()) == self.is_sealed
        if left:
            assert self.run(self.log.get_first_dlsn()) == left[0][0]
            assert self.run(self.log.get_last_dlsn()) == left[-1][0]
            assert self.run(self.log.get_last_txid()) == left[-1][1]
        else:
            with pytest.raises(LogEmptyError):
                self.run(self.log.get_first_dlsn())

    def teardown(self) -> None:
        """Close everything."""
        if hasattr(self, "runner"):
            self.run(self.cluster.aclose())
            self.runner.close()


WholeLog.TestCase.settings = settings(
    max_examples=amount(25, sampled=10), stateful_step_count=30, deadline=None
)
TestWholeLog = WholeLog.TestCase
