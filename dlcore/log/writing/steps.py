"""The steps that the writer's machine asks of its driver, and the answers that callers get."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from dlcore.errors import DLError
    from dlcore.log.metadata.changes import SegmentLimits
    from dlcore.log.metadata.segment import Extent
    from dlcore.log.metadata.values import VersionedHead

_Ticket = TypeVar("_Ticket")


class Ending(enum.Enum):
    """What ends a writer in good order."""

    SEAL = "seal"
    CLOSE = "close"
    ASIDE = "aside"
    """For a while only: until `step_back` no record is accepted and no extent begun."""


class WriterState(enum.Enum):
    """Where the machine is; FAILED and CLOSED are final."""

    OPENING = "opening"
    """No segment is ours: the first entry starts one."""
    OPEN = "open"
    ROLLING = "rolling"
    """Nothing is sent: our segment is being completed, and the next one started or the end made."""
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
    """Step: once the ledger has capacity, append what `next_entry` returns.

    When it is durable comes `entry_durable`, in order.
    """


@dataclass(frozen=True, slots=True)
class CloseLedger:
    """Step: append nothing more to the ledger of the segment; answer with `ledger_closed`.

    It is closed in the transaction of the change that follows, which is so the only one of a roll.
    """


@dataclass(frozen=True, slots=True)
class StartSegment:
    """Step: plan and apply the next segment's start; answer `segment_started` or `overtaken`."""

    at: VersionedHead
    closing: Extent | None
    limits: SegmentLimits | None = None
    """Of one that goes on in the segment in progress, unless it is full."""


@dataclass(frozen=True, slots=True)
class CompleteSegment:
    """Step: plan and apply the end of our segment; answer with `completed` or `overtaken`.

    It ends the writer, or the log, if it `ends`; else the segment was old and nothing is written.
    If it `stays`, only the extent ends, and the segment goes on with those of others.
    """

    at: VersionedHead
    closing: Extent | None
    seal: bool
    ends: bool = True
    stays: bool = False


@dataclass(frozen=True, slots=True)
class RecoverLog:
    """Step: complete the segment that another left open; answer with `recovered`."""

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
    """Effect: the records of an entry are durable; tell who holds the tickets of its slots."""

    lssn: int
    entry_id: int
    slots: list[int]
    tickets: list[_Ticket]
    """As many as `slots`."""


@dataclass(frozen=True, slots=True)
class Refuse(Generic[_Ticket]):
    """Effect: tell who holds these tickets the error."""

    tickets: list[_Ticket]
    error: DLError


@dataclass(frozen=True, slots=True)
class Ended(Generic[_Ticket]):
    """Effect: the log is sealed, or the writer closed, as this ticket asked for."""

    ticket: _Ticket


Effect: TypeAlias = Acknowledge[_Ticket] | Refuse[_Ticket] | Ended[_Ticket]
