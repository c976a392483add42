"""Acknowledgements of one stream: its accepted, durable and acknowledged records.  No I/O.

Theory of operation.  Batches are accepted in the order of their arrival, and become durable in that
order.  An acknowledgement is cumulative: it has the number of durable records of the stream, and
the position of the last one.  Therefore several due acknowledgements become one, and nothing piles
up for a client that reads none.  The window bounds the records that are accepted and not durable.
A batch is accepted while the window has any room, so that one larger than the window passes alone.

Invariants: the acknowledged number never falls; acknowledged <= durable <= accepted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The end of a batch: its last record is number `records` of the stream, at `dlsn`.

    The last `together` records of the batch are consecutive in one entry.  `dlsn` is None if the
    position is not known any more, because the batch was durable already when it came again.
    """

    records: int
    dlsn: DLSN | None
    together: int


@dataclass(frozen=True, slots=True)
class Ack:
    """The first `records` records of the stream are durable; `dlsn` is the last position, if known.

    `ends` has the batches since the last acknowledgement, if the client wants positions.
    """

    records: int
    dlsn: DLSN | None
    ends: tuple[BatchEnd, ...] = ()


class StreamAcks:
    """The counts of one stream."""

    def __init__(self, *, window_records: int, window_bytes: int, positions: bool = False) -> None:
        self._window_records = window_records
        self._window_bytes = window_bytes
        # For each batch: its records, the number of new ones among them, and its bytes.
        self._pending: deque[tuple[int, int, int]] = deque()
        self._ends: list[BatchEnd] | None = [] if positions else None  # since the last ack
        self._pending_records = 0
        self._pending_bytes = 0
        self._durable: Ack | None = None
        self._told = 0

    def __repr__(self) -> str:
        durable = 0 if self._durable is None else self._durable.records
        return f"<StreamAcks durable={durable} pending={self._pending_records} told={self._told}>"

    @property
    def has_room(self) -> bool:
        """Whether the next batch may be accepted."""
        return (
            self._pending_records < self._window_records
            and self._pending_bytes < self._window_bytes
        )

    @property
    def is_settled(self) -> bool:
        """Whether all accepted records are durable and acknowledged."""
        return not self._pending and (self._durable is None or self._durable.records == self._told)

    def accepted(self, records: int, size_bytes: int, *, fresh: int | None = None) -> None:
        """Note a batch that was handed to the writer; only its last `fresh` records are new."""
        assert records > 0
        self._pending.append((records, records if fresh is None else fresh, size_bytes))
        self._pending_records += records
        self._pending_bytes += size_bytes

    def durable(self, dlsn: DLSN | None) -> None:
        """Note that the oldest batch is durable; its last record is at `dlsn`, if known."""
        records, fresh, size_bytes = self._pending.popleft()
        self._pending_records -= records
        self._pending_bytes -= size_bytes
        before = 0 if self._durable is None else self._durable.records
        self._durable = Ack(before + records, dlsn)
        if self._ends is not None:
            # The last entry has `slot_id + 1` records up to this one.  Fewer are new ones of this
            # batch if the entry begins with records of other batches.
            together = 0 if dlsn is None else min(fresh, dlsn.slot_id + 1)
            self._ends.append(BatchEnd(before + records, dlsn, together))

    def next_ack(self) -> Ack | None:
        """Return the acknowledgement to send now; None if the client knows all durable records."""
        ack = self._durable
        if ack is None or ack.records == self._told:
            return None
        self._told = ack.records
        if self._ends is None:
            return ack
        ends, self._ends = tuple(self._ends), []
        return Ack(ack.records, ack.dlsn, ends)
