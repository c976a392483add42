"""Invariants of the Spark sink, judged by the requests of drivers, their answers, and the logs.

The bytes of a row say which attempt of which task staged it, so that each commit that was asked for
has rows of its own, though they are of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import require

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from dlcore.base.errors import DLError
    from dlcore.log.reading.scan import CommitResult
    from tests.simulation.log_checkers import LogCheckers

BATCH_ONCE = "S1 BatchesAreThereOnceInTheirOrder"
WHERE_ANSWERED = "S2 BatchesAreWhereTheirAnswersSaid"
NEWEST = "S3 OnlyTheNewestRunGoesOn"
SINK_INVARIANTS = (BATCH_ONCE, WHERE_ANSWERED, NEWEST)


class WriteId(NamedTuple):
    """A write of a query: the n-th one of a batch, to its target."""

    query: str
    batch: int
    ordinal: int
    target: str
    """The id of the log; empty if the rows choose their logs."""


@dataclass(slots=True, eq=False)
class Asked:
    """A commit that a driver asked for: its rows in their order, by the id of the log."""

    rows: Mapping[str, Sequence[bytes]]
    log_ids: Mapping[str, str]
    """By the names that logs had when the rows were staged."""
    answered: dict[str, tuple[DLSN, DLSN]] = field(default_factory=dict)
    """Where its rows are, by the id of the log, if that was reported."""
    has_failed: bool = False
    """The driver learned that nothing of it is there, nor will be."""


@dataclass(slots=True)
class _Write:
    asked: list[Asked] = field(default_factory=list)
    is_committed: bool = False
    """A driver learned that it is there."""


class SinkCheckers:
    """Records the answers that drivers get, and judges them."""

    def __init__(self, logs: LogCheckers) -> None:
        self._logs = logs
        self._writes: dict[WriteId, _Write] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """By query and target, the last batch that is known to be committed."""

    def begin(self, write: WriteId, rows: Mapping[tuple[str, str], Sequence[bytes]]) -> Asked:
        """A driver is going to commit rows, by the name and the id of their log."""
        for (log, log_id), payloads in rows.items():
            self._logs.new_writing(log_id, log).on_write(payloads)
        asked = Asked(
            {log_id: payloads for (_, log_id), payloads in rows.items()}, dict(rows.keys())
        )
        self._writes.setdefault(write, _Write()).asked.append(asked)
        return asked

    def newest(self, write: WriteId) -> int:
        """Return the last batch of its query that is known to be committed to its target."""
        return self._newest.get((write.query, write.target), -1)

    def on_answered(
        self, write: WriteId, asked: Asked, result: CommitResult | None, *, newest: int
    ) -> None:
        """S3: the driver learns that the batch is there; `newest` was so before it asked.

        `result` is the commit's answer about it, None if nothing had to be committed.
        """
        require(
            NEWEST,
            holds=newest <= write.batch,
            message=f"{write} is called committed, and batch {newest} had been before",
        )
        known = self._writes[write]
        known.is_committed = True
        key = (write.query, write.target)
        self._newest[key] = max(self._newest.get(key, -1), write.batch)
        for log, (first, end) in ({} if result is None else result.logs).items():
            log_id = asked.log_ids[log]
            asked.answered[log_id] = (first, end)
            last = DLSN(end.lssn, end.entry_id - 1, 0)
            self._logs.new_writing(log_id, log).on_visible(last)

    def on_refused(self, write: WriteId, error: DLError, *, may_be: bool) -> None:
        """S3: the driver learns that the batch is no more its own."""
        require(
            NEWEST,
            holds=may_be,
            message=f"{write} is refused, and no other goes on: {error}",
        )

    # In the end

    def check_whole(self, log_ids: Collection[str]) -> None:
        """Judge all answers, once the logs that there are were read whole."""
        for write_id, write in self._writes.items():
            self._check(write_id, write, log_ids)
        for log_id in log_ids:
            self._check_order(log_id)

    def _check(self, write_id: WriteId, write: _Write, log_ids: Collection[str]) -> None:
        """S1, S2: the rows of at most one of the commits are there, all of them, in their order."""
        there = [each for each in write.asked if each.answered or any(self._seen(each))]
        seen = [[*self._seen(each)] for each in there]
        require(
            BATCH_ONCE,
            holds=len(there) <= 1,
            message=f"{write_id} is there {len(there)} times: {seen}",
        )
        require(
            BATCH_ONCE,
            holds=not any(each.has_failed for each in there),
            message=f"{write_id} was called failed, and is there: {seen}",
        )
        require(
            BATCH_ONCE,
            holds=bool(there)
            or not write.is_committed
            or any(self._may_be_cut(each, log_ids) for each in write.asked),
            message=f"{write_id} was called committed, and nothing of it is readable",
        )
        for asked in there:
            missing = [*self._missing(asked, log_ids)]
            require(
                BATCH_ONCE,
                holds=not missing,
                message=f"of {write_id} {missing[:3]} are not readable",
            )
            for log_id, payloads in asked.rows.items():
                self._check_places(write_id, log_id, payloads)
            for log_id, (first, end) in asked.answered.items():
                self._check_answered(write_id, log_id, asked.rows[log_id], first, end)

    def _seen(self, asked: Asked) -> Iterator[bytes]:
        """Yield the rows that anybody ever read."""
        for log_id, payloads in asked.rows.items():
            known = self._logs.known(log_id)
            yield from (each for each in payloads if each in known)

    def _may_be_cut(self, asked: Asked, log_ids: Collection[str]) -> bool:
        """Return whether a log of it is gone or was truncated, before anybody read the rows."""
        return any(
            log_id not in log_ids or self._logs.truncated(log_id) > DLSN.INITIAL
            for log_id in asked.rows
        )

    def _missing(self, asked: Asked, log_ids: Collection[str]) -> Iterator[bytes]:
        """Yield the rows that no one read, though their log is there and was not truncated."""
        for log_id, payloads in asked.rows.items():
            known, truncated = self._logs.known(log_id), self._logs.truncated(log_id)
            first = asked.answered.get(log_id, (DLSN.INITIAL,))[0]
            if log_id in log_ids and first >= truncated:
                yield from (each for each in payloads if each not in known)

    def _check_places(self, write_id: WriteId, log_id: str, payloads: Sequence[bytes]) -> None:
        """S1: they lie side by side, in the order of partitions."""
        known = self._logs.known(log_id)
        begins = {known[each][1] - n for n, each in enumerate(payloads) if each in known}
        require(
            BATCH_ONCE,
            holds=len(begins) <= 1,
            message=f"the rows of {write_id} are not side by side, in their order: "
            f"{[known.get(each) for each in payloads]} in log id {log_id}",
        )

    def _check_answered(
        self, write_id: WriteId, log_id: str, payloads: Sequence[bytes], first: DLSN, end: DLSN
    ) -> None:
        """S2: the reported place of a batch has its rows, and nothing else."""
        known = self._logs.known(log_id)
        there = {payload for payload, place in known.items() if first <= place[0] < end}
        seen = {each for each in payloads if each in known}
        start = known[payloads[0]][0] if payloads[0] in known else first
        require(
            WHERE_ANSWERED,
            holds=there == seen and start == first,
            message=f"{write_id} was reported at {first} … {end} of log id {log_id}; there are "
            f"{sorted(there)[:3]}, and it begins at {start}",
        )

    def _check_order(self, log_id: str) -> None:
        """S1: the batches of a query follow each other, and the writes of a batch."""
        last: dict[tuple[str, str], WriteId] = {}
        for write_id in self._in_log(log_id):
            key = (write_id.query, write_id.target)
            before = last.get(key, write_id)
            require(
                BATCH_ONCE,
                holds=before <= write_id,
                message=f"in log id {log_id} {write_id} follows {before}",
            )
            last[key] = write_id

    def _in_log(self, log_id: str) -> Iterable[WriteId]:
        known = self._logs.known(log_id)
        places = {
            known[payload][0]: write_id
            for write_id, write in self._writes.items()
            for asked in write.asked
            for payload in asked.rows.get(log_id, ())
            if payload in known
        }
        return [places[each] for each in sorted(places)]
