"""The steps that the writer's machine asks of its driver, and the answers to callers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dlcore.base.errors import DLError
    from dlcore.log.metadata.changes import SegmentLimits
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead

_Ticket = TypeVar("_Ticket")


class Ending(enum.Enum):
    """How a writer ends in good order."""

    SEAL = "seal"
    CLOSE = "close"
    ASIDE = "aside"
    """A pause for an append: until `step_back` the writer takes no record and opens no extent."""


class WriterState(enum.Enum):
    """The state of the machine; FAILED and CLOSED are final."""

    OPENING = "opening"
    """The writer has no segment: the first entry starts one."""
    OPEN = "open"
    ROLLING = "rolling"
    """Nothing is sent: our segment is completed now, and the next one started or the log ended."""
    SUSPENDED = "suspended"
    FAILED = "failed"
    SEALED = "sealed"
    CLOSED = "closed"


STATE_AFTER = {
    Ending.SEAL: WriterState.SEALED,
    Ending.CLOSE: WriterState.CLOSED,
    Ending.ASIDE: WriterState.OPENING,
}


@dataclass(frozen=True, slots=True)
class AppendEntry:
    """Step: once the ledger has capacity, append the result of `next_entry`.

    When it is durable, answer with `entry_durable`, in order.
    """


@dataclass(frozen=True, slots=True)
class CloseLedger:
    """Step: append nothing more to the ledger of the segment; answer with `ledger_closed`.

    The transaction of the next change closes the ledger, so that a roll needs one transaction.
    """


@dataclass(frozen=True, slots=True)
class StartSegment:
    """Step: plan and apply the next segment's start; answer `segment_started` or `overtaken`."""

    at: VersionedHead
    closing: Extent | None
    limits: SegmentLimits | None = None
    """Given if it may continue in the segment in progress, unless that is full."""


@dataclass(frozen=True, slots=True)
class CompleteSegment:
    """Step: plan and apply the end of our segment; answer with `completed` or `overtaken`.

    If it `ends`, this ends the writer or the log; else the segment was old and no record waits.  If
    it `stays`, only the extent ends, and the segment goes on with those of others.
    """

    at: VersionedHead
    closing: Extent | None
    seal: bool
    ends: bool = True
    stays: bool = False


@dataclass(frozen=True, slots=True)
class RecoverLog:
    """Step: complete the segment that another writer left open; answer with `recovered`."""

    at: VersionedHead


@dataclass(frozen=True, slots=True)
class Finish:
    """Step: nothing is left to do; answer with `finished`."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Step: answer with `fail`."""

    error: DLError


Step: TypeAlias = (
    AppendEntry | CloseLedger | StartSegment | CompleteSegment | RecoverLog | Finish | GiveUp
)


@dataclass(frozen=True, slots=True)
class Acknowledge(Generic[_Ticket]):
    """Effect: the records of an entry are durable; answer the tickets of its slots."""

    lssn: int
    entry_id: int
    slots: list[int]
    tickets: list[_Ticket]
    """One for each of `slots`."""


@dataclass(frozen=True, slots=True)
class Refuse(Generic[_Ticket]):
    """Effect: answer these tickets with the error."""

    tickets: list[_Ticket]
    error: DLError


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Ticket]):
    """Effect: the log is sealed, or the writer closed, as this ticket asked."""

    ticket: _Ticket


Effect: TypeAlias = Acknowledge[_Ticket] | Refuse[_Ticket] | Ended[_Ticket]
