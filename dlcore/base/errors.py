"""Every error that dlog raises: one tree, drawn here.

``code`` is a stable number, which programs compare and ``--json`` shows.  ``retriable`` says
whether the same call may succeed later without a change by the caller.

    DLError
    ├── ConfigurationError              an option, URI or argument is wrong: nothing was done
    │   ├── InvalidLogNameError
    │   ├── InvalidNamespaceUriError
    │   ├── UnsupportedError            proxies do not offer it, or only proxies do
    │   └── UnknownActionError          a proxy has no action of that name
    ├── UnauthenticatedError            the caller did not prove who it is
    ├── AccessDeniedError               the caller has no right to it
    ├── AlreadyClosedError              the object was closed by its owner
    ├── MetadataError                   the metadata store
    │   ├── MetadataConnectionError     no answer: the operation may or may not have happened
    │   ├── MetadataSessionExpiredError
    │   ├── MetadataVersionError        compare-and-set lost
    │   ├── NodeExistsError
    │   ├── NoNodeError
    │   ├── NodeNotEmptyError
    │   ├── TransactionTooLargeError    too large for one request: nothing was done
    │   └── CorruptMetadataError        the value does not parse, or contradicts itself
    ├── BookieError                     one bookie's answer about one request
    │   ├── NoSuchLedgerError           proven: it never held the ledger
    │   ├── NoSuchEntryError            proven: it does not hold the entry
    │   ├── LedgerFencedError           a recoverer took the ledger over
    │   ├── BookieReadOnlyError
    │   ├── BookieOverloadedError
    │   ├── BookieUnavailableError      no answer in time, or no connection: unknown
    │   ├── BookieStorageError          disk error or damaged data: unknown
    │   ├── WrongIncarnationError       another (perhaps empty) bookie answers at that address
    │   ├── DigestMismatchError         bytes do not match their checksum
    │   ├── EntryTooLargeError
    │   ├── BadRequestError
    │   └── BookieAccessDeniedError     no certificate, and no capability for the request
    ├── LedgerError                     a replicated ledger as a whole
    │   ├── LedgerNotFoundError
    │   ├── LedgerExistsError
    │   ├── LedgerClosedError
    │   ├── LedgerRecoveryError         recovery got an unknown answer, and stopped
    │   ├── LedgerReadError             no replica of an entry that must exist is readable
    │   ├── ObjectStoreError            a store of cold ledgers gave no answer, or another object
    │   ├── NotEnoughBookiesError
    │   └── DecommissionError           ledgers still need the bookie, or it runs
    └── LogError                        a log
        ├── LogNotFoundError
        │   └── LogRenamedError
        ├── LogExistsError
        ├── LogEmptyError
        ├── LogRecordTooLongError
        ├── TransactionIdOutOfOrderError
        ├── EndOfStreamError
        ├── AlreadyTruncatedError
        ├── OwnershipAcquireFailedError
        ├── LogModeError                the log's mode does not allow this kind of writer
        ├── LogElsewhereError           another proxy serves the log
        ├── ProxyUnavailableError       no proxy of an endpoint answers
        ├── ReaderIdleError             no record for longer than the reader may wait
        ├── ReaderStalledError          a proxy needs the memory of a client that receives nothing
        ├── OverCapacityError
        ├── LogNotReadyError            the next segment is being started, or the lock is lost
        ├── SubscriptionMovedError      another reader owns the stored position now
        ├── SchemaMismatchError         records or columns do not fit the schema
        ├── SequenceGapError            records of a producer before these are missing
        ├── ProducerFencedError         a later incarnation of the producer writes, or none is known
        ├── ConditionFailedError        the log's last record is another than the append expects
        ├── TableError                  a log's table is not as its log needs it
        ├── WriteError                  the writer failed earlier and refuses further writes
        ├── WriteCancelledError         a write queued behind one that failed
        ├── InvalidEntryError           an entry's body is not in a log writer's format
        ├── EncryptionKeyError          the key of an encrypted log is not among the client's
        ├── AppendAbortedError          a staged append can no longer commit
        ├── DuplicateAppendError        appends of one identity and version overlapped
        ├── AppendSupersededError       a later run of the appender appends this version
        ├── AppendMismatchError         another append has the identity and version
        └── UnexpectedError             an invariant of the stored state is broken
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

_Error = TypeVar("_Error", bound="DLError")


class DLError(Exception):
    """Root of the tree."""

    code: ClassVar[int] = 500
    retriable: ClassVar[bool] = False


def copied(error: _Error) -> _Error:
    """Return an equal error to raise: one that is raised repeatedly collects tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error
    return copy


class ConfigurationError(DLError):
    """An option, URI or argument is wrong; the message names it, its value and the rule."""

    code = 400


class InvalidLogNameError(ConfigurationError):
    """The log name breaks the naming rules."""

    code = 602


class InvalidNamespaceUriError(ConfigurationError):
    """The namespace URI does not parse."""

    code = 604


class UnsupportedError(ConfigurationError):
    """Proxies do not offer it, or only proxies do, or a feature that it needs is not finalized."""

    code = 606


class UnknownActionError(ConfigurationError):
    """A proxy has no action of that name; a later release may have it."""

    code = 605


class UnauthenticatedError(DLError):
    """The caller did not prove who it is: its token is refused or has expired, or it has none."""

    code = 401


class AccessDeniedError(DLError):
    """The caller is known, and has no right to what it asked for; the message names both."""

    code = 403


class AlreadyClosedError(DLError):
    """The object was closed by its owner."""

    code = 502


class MetadataError(DLError):
    """The metadata store failed."""

    code = 506


class MetadataConnectionError(MetadataError):
    """No answer from the metadata store: the operation may or may not have happened."""

    code = 505
    retriable = True


class MetadataSessionExpiredError(MetadataError):
    """The metadata session is gone, with every ephemeral node and lock that it held."""

    code = 507
    retriable = True


class MetadataVersionError(MetadataError):
    """Compare-and-set lost: the node has another version."""

    code = 508


class NodeExistsError(MetadataError):
    """The node to create exists."""

    code = 530


class NoNodeError(MetadataError):
    """The node does not exist."""

    code = 531


class NodeNotEmptyError(MetadataError):
    """The node to delete has children."""

    code = 532


class TransactionTooLargeError(MetadataError):
    """A change is larger than one request of the metadata store: nothing was done."""

    code = 548


class CorruptMetadataError(MetadataError):
    """A metadata value does not parse, has an unknown version, or contradicts itself."""

    code = 521


class BookieError(DLError):
    """One bookie's answer about one request."""

    code = 700


class NoSuchLedgerError(BookieError):
    """Proven: this bookie never held an entry of the ledger."""

    code = 701


class NoSuchEntryError(BookieError):
    """Proven: this bookie does not hold the entry."""

    code = 702


class LedgerFencedError(BookieError):
    """A recoverer took the ledger over; the writer must stop."""

    code = 703


class BookieReadOnlyError(BookieError):
    """The bookie accepts no ordinary writes (its disk is full)."""

    code = 704


class BookieOverloadedError(BookieError):
    """The bookie has too many bytes in flight and rejected the request early."""

    code = 705
    retriable = True


class BookieUnavailableError(BookieError):
    """No answer in time, or no connection: whether the request took effect is unknown."""

    code = 706
    retriable = True


class BookieStorageError(BookieError):
    """The bookie's disk failed or its data is damaged: the answer is unknown, never "no"."""

    code = 707


class WrongIncarnationError(BookieError):
    """Another incarnation answers at the bookie's address (its disk was replaced or wiped)."""

    code = 708


class DigestMismatchError(BookieError):
    """An entry's bytes do not match its checksum or its ids."""

    code = 523


class EntryTooLargeError(BookieError):
    """The entry exceeds the bookie's limit."""

    code = 709


class BadRequestError(BookieError):
    """The request is invalid."""

    code = 710


class BookieAccessDeniedError(BookieError):
    """The connection has neither a certificate nor a capability for the request: nothing is done.

    The message names the ledger, the right that is missing, and why a capability did not give it.
    """

    code = 711


class LedgerError(DLError):
    """A replicated ledger as a whole."""

    code = 720


class LedgerNotFoundError(LedgerError):
    """No metadata for the ledger: it was never created, or was deleted."""

    code = 721


class LedgerExistsError(LedgerError):
    """The ledger to create exists and belongs to another client."""

    code = 722


class LedgerClosedError(LedgerError):
    """The ledger is closed and accepts no more entries."""

    code = 723


class LedgerRecoveryError(LedgerError):
    """Recovery met an unknown answer and stopped; the ledger stays IN_RECOVERY, try again later."""

    code = 724
    retriable = True


class LedgerReadError(LedgerError):
    """No replica of an entry that must exist is readable.

    ``is_damaged``: each replica was read and is damaged; another try will not help.
    """

    code = 725
    retriable = True

    def __init__(self, message: str, *, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


class ObjectStoreError(LedgerError):
    """The store of cold ledgers did not answer, refused, or holds another object than it should.

    With `is_damaged` it is known that an object is missing, or is not what was stored.
    """

    code = 727
    retriable = True

    def __init__(self, message: str, *, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


class NotEnoughBookiesError(LedgerError):
    """Fewer usable bookies than the ensemble needs."""

    code = 726
    retriable = True


class DecommissionError(LedgerError):
    """A bookie cannot be decommissioned yet: it runs, or ledgers need it; see the message."""

    code = 525


class LogError(DLError):
    """A log."""

    code = 500


class LogNotFoundError(LogError):
    """The log does not exist in this namespace."""

    code = 510


class LogRenamedError(LogNotFoundError):
    """The log has another name since it was opened, and the call needs its name."""

    code = 533


class LogExistsError(LogError):
    """The new name belongs to a log already."""

    code = 522


class LogEmptyError(LogError):
    """The log holds no record, so it has no first or last one."""

    code = 509


class LogRecordTooLongError(LogError):
    """The record exceeds the maximum record size; the writer stays usable."""

    code = 413


class TransactionIdOutOfOrderError(LogError):
    """A transaction id is lower than one before it, or than one already in the log."""

    code = 513


class EndOfStreamError(LogError):
    """The log is sealed, or the reader reached its seal."""

    code = 512


class AlreadyTruncatedError(LogError):
    """The requested position was truncated."""

    code = 511


class OwnershipAcquireFailedError(LogError):
    """Another writer owns the log; ``owner`` names it."""

    code = 302

    def __init__(self, message: str, *, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


class LogModeError(LogError):
    """The log's mode does not allow this kind of writer: only proxies, or no proxies."""

    code = 309


class LogElsewhereError(LogError):
    """Another proxy serves the log, at `location`."""

    code = 307
    retriable = True

    def __init__(self, message: str, *, location: str = "") -> None:
        super().__init__(message)
        self.location = location


class ProxyUnavailableError(LogError):
    """No proxy of an endpoint answered in time; a repeated read continues at its position."""

    code = 308
    retriable = True


class OverCapacityError(LogError):
    """A limit on outstanding work or on a rate is reached.

    `retry_after_s` is the time until it is expected to be over, 0 if that is not known.
    """

    code = 517
    retriable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReaderIdleError(LogError):
    """A reader got no record for `LogConfig.reader_idle_error_s`; it can be called again."""

    code = 550
    retriable = True


class ReaderStalledError(LogError):
    """A proxy's client received nothing for long, and others needed the memory; it can continue."""

    code = 555
    retriable = True


class LogNotReadyError(LogError):
    """The writer accepts no record now: it starts a segment, or has lost the log for the moment.

    It is raised only with `LogConfig.fail_while_rolling`, and by a proxy.  A proxy may give the
    time until the next try; `retry_after_s` is 0 if it does not.
    """

    code = 518
    retriable = True

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SubscriptionMovedError(LogError):
    """A stored position belongs to another reader now, or was moved or deleted."""

    code = 549


class SchemaMismatchError(LogError):
    """Records to write, columns to read, or a new schema do not fit the log's schema."""

    code = 551


class SequenceGapError(LogError):
    """Records of a producer do not follow its last one; `expected` is the next sequence."""

    code = 552

    def __init__(self, message: str, *, expected: int = -1) -> None:
        super().__init__(message)
        self.expected = expected


class ProducerFencedError(LogError):
    """A later incarnation of a producer writes, or the log has forgotten this one: begin again."""

    code = 553


class ConditionFailedError(LogError):
    """A log's last record is not the one that an append expects; nothing is written.

    `last` is the position of the last record as text; None if the log holds no record.
    """

    code = 554

    def __init__(self, message: str, *, last: str | None = None) -> None:
        super().__init__(message)
        self.last = last


class TableError(LogError):
    """The table of a log is ahead of it, of another log, or was changed by another program."""

    code = 560


class WriteError(LogError):
    """The writer failed earlier and refuses further writes."""

    code = 514


class WriteCancelledError(LogError):
    """The write was queued behind one that failed, and was never sent."""

    code = 516


class InvalidEntryError(LogError):
    """An entry's body is not in the format of a log writer."""

    code = 520


class EncryptionKeyError(LogError):
    """A log is encrypted, and the key is not among those that this process has."""

    code = 556


class AppendAbortedError(LogError):
    """A staged append can no longer commit: it was aborted, or its staged data was removed."""

    code = 540


class DuplicateAppendError(LogError):
    """Two appends of one run, identity and version came from threads, and have no fixed order."""

    code = 541


class AppendSupersededError(LogError):
    """A later run of the appender has begun to append the same version; this one must stop."""

    code = 542


class AppendMismatchError(LogError):
    """The version is older than the last committed one, or was committed to other logs.

    If it were skipped, an appender that continues from an old or copied state would lose records.
    """

    code = 543


class UnexpectedError(LogError):
    """Stored state breaks an invariant; the message says which."""

    code = 600
