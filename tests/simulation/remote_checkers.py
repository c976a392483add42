"""Invariants of programs over proxies: the answers to their writers, and their snapshots.

A program numbers its records from 0 for each log and name.  The bytes of a record are those of its
number, so a record that is in the log twice is found by the checkers of logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import now_ms, require

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from dlcore.base.errors import ProducerFencedError
    from dlcore.log.metadata.values import LogKey
    from dlcore.log.reading.scan import LogSnapshot
    from tests.simulation.log_checkers import LogCheckers, Reading
    from tests.simulation.proxy_checkers import ProxyCheckers

ACKNOWLEDGED = "P1 AcknowledgedRecordsAreThereInOrder"
AS_IN_THE_LOG = "P3 ProxyReadersSeeTheLog"
KEPT_S = 1.5
"""In runs with programs a producer whose name was made for one writer is known for so long."""
FORGOTTEN_S = 3.0
"""And is forgotten after so long; a producer with a name of its own never is."""


class Remote:
    """The records of one producer of a log, over all writers of its name, and the answers."""

    def __init__(
        self,
        checkers: ProxyCheckers,
        key: LogKey,
        name: str,
        on_violation: Callable[[BaseException], None],
    ) -> None:
        self._logs = checkers.logs
        self._key = key
        self._name = name
        self._on_violation = on_violation
        self._produced = checkers.new_producer(key.log_id, name)
        self._writing = self._logs.new_writing(key.log_id, key.name)
        self._next = self._sent = 0
        self._written_ms: list[int] = []  # of each record, when it was written last
        self._heard_ms = now_ms()

    def on_begin(self, next_sequence: int) -> None:
        """P1: a writer of its name goes on behind all that was acknowledged, and was written."""
        known = max(self._produced.known, default=-1)
        require(
            ACKNOWLEDGED,
            holds=known < next_sequence <= self._sent,
            message=f"{self._name} goes on with record {next_sequence} of log {self._key.name}, "
            f"wrote {self._sent} before, and {known} was acknowledged",
        )
        left = (each for each in range(next_sequence) if each not in self._produced.known)
        self._produced.on_durable((each, self._payload(each)) for each in left)
        self._writing = self._logs.new_writing(self._key.log_id, self._key.name)
        self._next = next_sequence
        del self._written_ms[next_sequence:]

    def on_write(self, count: int) -> tuple[list[int], list[bytes]]:
        """Return the numbers and the bytes of the next records, which it is going to write."""
        numbers = list(range(self._next, self._next + count))
        self._next += count
        self._sent = max(self._sent, self._next)
        self._written_ms += [now_ms()] * count
        payloads = [self._payload(each) for each in numbers]
        self._writing.on_write(payloads)
        return numbers, payloads

    def _payload(self, number: int) -> bytes:
        return f"{self._name}/{self._key.log_id[:8]}/{number}".encode()

    def on_answer(self, numbers: Sequence[int], future: asyncio.Future[DLSN | None]) -> None:
        """L1, P1: it learns that these records are durable, and if so, exactly where."""
        if future.cancelled() or future.exception() is not None:
            return
        payloads, dlsn = [self._payload(each) for each in numbers], future.result()
        try:
            if dlsn is not None:
                self._writing.on_acknowledged(payloads, dlsn)
            self._produced.on_durable(zip(numbers, payloads, strict=True))
            self._heard_ms = max(self._heard_ms, self._written_ms[numbers[-1]])
        except Exception as violation:  # noqa: BLE001  # whatever it is, it ends the run
            self._on_violation(violation)

    def on_fenced(self, error: ProducerFencedError) -> None:
        """P1: its writer, whose name no one else has, learns that the log does not know it."""
        silent_s = (now_ms() - self._heard_ms) / 1000
        require(
            ACKNOWLEDGED,
            holds=silent_s >= KEPT_S,
            message=f"{self._name} wrote {silent_s:g} s ago what is acknowledged, and is "
            f"forgotten: {error}",
        )

    def durable(self) -> list[bytes]:
        """Return the records that it knows to be durable."""
        return [each.payload for each in self._produced.known.values()]

    def on_read_back(self, written: Sequence[bytes], reading: Reading) -> None:
        """P3: a reader of the log from its start after a commit gets all of it."""
        truncated, known = self._logs.truncated(self._key.log_id), self._logs.known
        there, places = {*reading.payloads}, known(self._key.log_id)
        missed = [
            each
            for each in written
            if each not in there
            # Where it is may be unknown, if it was truncated before anybody read it.
            and (places[each][0] >= truncated if each in places else truncated == DLSN.INITIAL)
        ]
        require(
            AS_IN_THE_LOG,
            holds=not missed,
            message=f"{self._name} committed {missed[:3]} to log {self._key.name}, and does not "
            "read it",
        )


@dataclass(slots=True)
class _Known:
    """The furthest bounds in snapshots of a log."""

    first: DLSN = DLSN.INITIAL
    end: DLSN = DLSN.INITIAL


class SnapshotCheckers:
    """The content of all snapshots that clients took through proxies."""

    def __init__(self, logs: LogCheckers) -> None:
        self.logs = logs
        self._known: dict[str, _Known] = {}  # by log id

    def begin(self, names: Sequence[str]) -> Looking:
        """A client is going to ask for snapshots."""
        return Looking(self, names)

    def known(self, log_id: str) -> _Known:
        """Return how far snapshots went."""
        return self._known.setdefault(log_id, _Known())

    def on_scanned(self, snapshot: LogSnapshot, reading: Reading) -> None:
        """P3: a reader got all that a snapshot names, and nothing else."""
        log_id = snapshot.log_id
        known, truncated = self.logs.known(log_id), self.logs.truncated(log_id)
        got = {known[each][0] for each in reading.payloads}
        wanted = {
            each for each in self.logs.places(log_id) if snapshot.first <= each < snapshot.end
        }
        wrong = [each for each in sorted(got ^ wanted) if each in got or each >= truncated]
        require(
            AS_IN_THE_LOG,
            holds=not wrong,
            message=f"{snapshot} names or leaves out {wrong[:3]} in one of the two wrongly",
        )


class Looking:
    """One look at some logs, from when it was asked for."""

    def __init__(self, checkers: SnapshotCheckers, names: Sequence[str]) -> None:
        self._checkers = checkers
        self._names = names
        logs = checkers.logs
        self._ids = dict(logs.life.names)
        self._renames = len(logs.life.renamed)
        self._floors = {
            log_id: (checkers.known(log_id).first, checkers.known(log_id).end, logs.end(log_id))
            for log_id in self._ids.values()
        }

    def on_answered(self, found: Mapping[str, LogSnapshot | None]) -> None:
        """P3: they are of the logs that have the names, and none is behind an earlier one.

        A caller that asked for them after a record was acknowledged, or shown, finds it in them.
        """
        life = self._checkers.logs.life
        has_moved = len(life.renamed) > self._renames
        for name in self._names:
            snapshot, log_id = found[name], self._ids.get(name)
            if not has_moved and life.names.get(name) == log_id:
                found_id = None if snapshot is None else snapshot.log_id
                require(
                    AS_IN_THE_LOG,
                    holds=found_id == log_id,
                    message=f"a snapshot of {name} is of log id {found_id}, the log is {log_id}",
                )
            if snapshot is not None:
                self._check(snapshot)

    def _check(self, snapshot: LogSnapshot) -> None:
        known = self._checkers.known(snapshot.log_id)
        if snapshot.log_id in self._floors:
            first, end, floor = self._floors[snapshot.log_id]
            require(
                AS_IN_THE_LOG,
                holds=snapshot.first >= first and snapshot.end >= end,
                message=f"{snapshot} came after one from {first} to {end}",
            )
            require(
                AS_IN_THE_LOG,
                holds=snapshot.end >= floor
                or self._checkers.logs.truncated(snapshot.log_id) >= floor,
                message=f"{snapshot} was asked for when the log was readable up to {floor}",
            )
        known.first, known.end = max(known.first, snapshot.first), max(known.end, snapshot.end)
