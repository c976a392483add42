"""Acknowledgements of one stream: what it sent, what is durable, what its client knows.  No I/O.

Theory of operation.  Batches are accepted in the order in which they came, and become durable in
that order.  An acknowledgement says how many records of the stream are durable, in all, and where
the last of them is: so several that are due are one, and a client that reads none of them makes
nobody keep anything.  The window is what may be accepted and not durable; a batch is taken while
there is any room, so that one larger than the window passes by itself.

Invariants: what was told never falls, and is never above what is durable; that is never above what
was accepted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """A batch that ends with this record of the stream, which is at this position.

    The last `together` records of it are side by side in one entry; None: the position is not known
    any more, for the batch was durable when it came again.
    """

    records: int
    dlsn: DLSN | None
    together: int


@dataclass(frozen=True, slots=True)
class Ack:
    """So many records of the stream are durable, the last one at this position, if it is known.

    `ends` has each batch since the last acknowledgement, if the client wants it.
    """

    records: int
    dlsn: DLSN | None
    ends: tuple[BatchEnd, ...] = ()


class StreamAcks:
    """The books of one stream."""

    def __init__(self, *, window_records: int, window_bytes: int, positions: bool = False) -> None:
        self._window_records = window_records
        self._window_bytes = window_bytes
        # Of each batch its records, how many of them are written anew, and its bytes.
        self._pending: deque[tuple[int, int, int]] = deque()
        self._ends: list[BatchEnd] | None = [] if positions else None  # not told
        self._pending_records = 0
        self._pending_bytes = 0
        self._durable: Ack | None = None
        self._told = 0

    def __repr__(self) -> str:
        durable = 0 if self._durable is None else self._durable.records
        return f"<StreamAcks durable={durable} pending={self._pending_records} told={self._told}>"

    @property
    def has_room(self) -> bool:
        """Whether the next batch may be taken."""
        return (
            self._pending_records < self._window_records
            and self._pending_bytes < self._window_bytes
        )

    @property
    def is_settled(self) -> bool:
        """Whether all that was accepted is durable, and told."""
        return not self._pending and (self._durable is None or self._durable.records == self._told)

    def accepted(self, records: int, size_bytes: int, *, fresh: int | None = None) -> None:
        """Note a batch that was handed over to be written, of which the last `fresh` are new."""
        assert records > 0
        self._pending.append((records, records if fresh is None else fresh, size_bytes))
        self._pending_records += records
        self._pending_bytes += size_bytes

    def durable(self, dlsn: DLSN | None) -> None:
        """Note that the oldest batch is durable, its last record at this position."""
        records, fresh, size_bytes = self._pending.popleft()
        self._pending_records -= records
        self._pending_bytes -= size_bytes
        before = 0 if self._durable is None else self._durable.records
        self._durable = Ack(before + records, dlsn)
        if self._ends is not None:
            together = 0 if dlsn is None else min(fresh, dlsn.slot_id + 1)
            self._ends.append(BatchEnd(before + records, dlsn, together))

    def next_ack(self) -> Ack | None:
        """Return what to tell the client now; None if it knows all there is."""
        ack = self._durable
        if ack is None or ack.records == self._told:
            return None
        self._told = ack.records
        if self._ends is None:
            return ack
        ends, self._ends = tuple(self._ends), []
        return Ack(ack.records, ack.dlsn, ends)
