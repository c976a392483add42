"""What auto-recovery keeps in the metadata store, as values, as bytes and back."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.ids import BookieId
from dlcore.ledger.codec import FORMAT_VERSION, parse_message
from dlcore.proto import metadata_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderReplicatedLedger:
    """A ledger on the list: which members are lost (none: entries are missing), since when.

    `findings` counts how often it was found, `attempts` how often its repair did not finish, and
    `reason` says why the last one did not (empty: none was made).
    """

    ledger_id: int
    missing: tuple[BookieId, ...]
    since_ms: int
    findings: int = 1
    attempts: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """Who is the auditor: for people, and exactly."""

    owner: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCheckRun:
    """A full replica check, and what it found; `unknown` are ledgers of which some bookie did not
    answer.

    Of one that is under way `finished_ms` says when this was written, and ledgers from
    `next_ledger_id` on were not looked at yet.
    """

    started_ms: int
    finished_ms: int
    ledgers: int
    under_replicated: int
    unknown: int
    next_ledger_id: int = 0


def encode_under_replicated(ledger: UnderReplicatedLedger) -> bytes:
    """Return `ledger` as bytes."""
    return metadata_pb2.UnderReplicatedLedger(
        version=FORMAT_VERSION,
        ledger_id=ledger.ledger_id,
        missing=[
            metadata_pb2.BookieRef(name=each.name, incarnation=each.incarnation)
            for each in ledger.missing
        ],
        since_ms=ledger.since_ms,
        findings=ledger.findings,
        attempts=ledger.attempts,
        reason=ledger.reason,
    ).SerializeToString(deterministic=True)


def decode_under_replicated(value: bytes, *, source: str) -> UnderReplicatedLedger:
    """Parse what `encode_under_replicated` wrote; `source` (a path) names the value in errors."""
    message = parse_message(metadata_pb2.UnderReplicatedLedger(), value, source)
    return UnderReplicatedLedger(
        ledger_id=message.ledger_id,
        missing=tuple(BookieId(each.name, each.incarnation) for each in message.missing),
        since_ms=message.since_ms,
        findings=message.findings,
        attempts=message.attempts,
        reason=message.reason,
    )


def encode_office(office: Office) -> bytes:
    """Return `office` as bytes."""
    return metadata_pb2.AuditorOffice(
        version=FORMAT_VERSION, owner=office.owner, token=office.token
    ).SerializeToString(deterministic=True)


def decode_office(value: bytes, *, source: str) -> Office:
    """Parse what `encode_office` wrote."""
    message = parse_message(metadata_pb2.AuditorOffice(), value, source)
    return Office(owner=message.owner, token=message.token)


def encode_check_run(run: ReplicaCheckRun) -> bytes:
    """Return `run` as bytes."""
    return metadata_pb2.ReplicaCheckRun(
        version=FORMAT_VERSION,
        started_ms=run.started_ms,
        finished_ms=run.finished_ms,
        ledgers=run.ledgers,
        under_replicated=run.under_replicated,
        unknown=run.unknown,
        next_ledger_id=run.next_ledger_id,
    ).SerializeToString(deterministic=True)


def decode_check_run(value: bytes, *, source: str) -> ReplicaCheckRun:
    """Parse what `encode_check_run` wrote."""
    message = parse_message(metadata_pb2.ReplicaCheckRun(), value, source)
    return ReplicaCheckRun(
        started_ms=message.started_ms,
        finished_ms=message.finished_ms,
        ledgers=message.ledgers,
        under_replicated=message.under_replicated,
        unknown=message.unknown,
        next_ledger_id=message.next_ledger_id,
    )
