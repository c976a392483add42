"""Metadata values of logs to bytes and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import DecodeError

from dlcore.config import QuorumConfig
from dlcore.errors import ConfigurationError, CorruptMetadataError
from dlcore.log.metadata import CommitRecord, LockHolder, LogMetadata, MaxLssn, StagedLedger
from dlcore.log.segment import Extent, LogSegment, SegmentState, Truncation
from dlcore.proto import metadata_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

_VERSION = 1
_Value = TypeVar("_Value")


def _parse(message: Any, value: bytes, what: str, build: Callable[[Any], _Value]) -> _Value:
    """Parse `value` into `message`, check its format version, and build the value of it."""
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise CorruptMetadataError(f"{what} does not parse: {error}") from error
    if message.version != _VERSION:
        raise CorruptMetadataError(
            f"{what} has format version {message.version}, expected {_VERSION}"
        )
    try:
        return build(message)
    except (ValueError, ConfigurationError) as error:
        raise CorruptMetadataError(f"{what} contradicts itself: {error}") from error


def encode_log(log: LogMetadata) -> bytes:
    """Encode the metadata of a log."""
    message = pb.LogMetadata(
        version=_VERSION,
        log_id=log.log_id,
        created_ms=log.created_ms,
        ensemble_size=log.quorum.ensemble_size,
        write_quorum_size=log.quorum.write_quorum_size,
        ack_quorum_size=log.quorum.ack_quorum_size,
        name=log.name,
    )
    return message.SerializeToString()


def decode_log(value: bytes, *, path: str) -> LogMetadata:
    """Decode the metadata of a log; `CorruptMetadataError` names `path`."""
    return _parse(pb.LogMetadata(), value, f"log metadata at {path}", _log_of)


def _log_of(message: Any) -> LogMetadata:
    return LogMetadata(
        name=message.name,
        log_id=message.log_id,
        created_ms=message.created_ms,
        quorum=QuorumConfig(
            ensemble_size=message.ensemble_size,
            write_quorum_size=message.write_quorum_size,
            ack_quorum_size=message.ack_quorum_size,
        ),
    )


def encode_max_lssn(value: MaxLssn) -> bytes:
    """Encode the guard of a log's segment list."""
    message = pb.MaxLssn(version=_VERSION, max_lssn=value.max_lssn, sealed=value.sealed)
    return message.SerializeToString()


def decode_max_lssn(value: bytes, *, path: str) -> MaxLssn:
    """Decode the guard of a log's segment list."""
    return _parse(
        pb.MaxLssn(),
        value,
        f"highest segment number at {path}",
        lambda m: MaxLssn(max_lssn=m.max_lssn, sealed=m.sealed),
    )


def encode_max_txid(txid: int) -> bytes:
    """Encode a log's highest committed transaction id (-1: none)."""
    return str(txid).encode()


def decode_max_txid(value: bytes, *, path: str) -> int:
    """Decode a log's highest committed transaction id."""
    try:
        return int(value)
    except ValueError as error:
        raise CorruptMetadataError(
            f"transaction id at {path} is {value!r}, expected decimal text"
        ) from error


def encode_lock(holder: LockHolder) -> bytes:
    """Encode the holder of a writer lock."""
    return pb.LockHolder(
        version=_VERSION, owner=holder.owner, token=holder.token
    ).SerializeToString()


def decode_lock(value: bytes, *, path: str) -> LockHolder:
    """Decode the holder of a writer lock."""
    return _parse(
        pb.LockHolder(),
        value,
        f"writer lock at {path}",
        lambda m: LockHolder(owner=m.owner, token=m.token),
    )


def encode_segment(segment: LogSegment) -> bytes:
    """Encode a segment."""
    message = pb.LogSegment(
        version=_VERSION,
        lssn=segment.lssn,
        state=segment.state.value,
        created_ms=segment.created_ms,
        completed_ms=segment.completed_ms,
        start_sequence_id=segment.start_sequence_id,
        extents=[_message_of(extent) for extent in segment.extents],
        truncation=segment.truncation.value,
        min_active_entry_id=segment.min_active_entry_id,
        min_active_slot_id=segment.min_active_slot_id,
    )
    return message.SerializeToString()


def _message_of(extent: Extent) -> pb.Extent:
    return pb.Extent(
        ledger_id=extent.ledger_id,
        first_entry_id=extent.first_entry_id,
        last_entry_id=0 if extent.last_entry_id is None else extent.last_entry_id,
        open=extent.is_open,
        record_count=extent.record_count,
        size_bytes=extent.size_bytes,
        first_txid=extent.first_txid,
        last_txid=extent.last_txid,
        txid_assigned=extent.txid_assigned,
        timestamp_floor_ms=extent.timestamp_floor_ms,
        last_timestamp_ms=extent.last_timestamp_ms,
    )


def decode_segment(value: bytes, *, path: str) -> LogSegment:
    """Decode a segment."""
    return _parse(pb.LogSegment(), value, f"segment at {path}", _segment_of)


def _segment_of(message: Any) -> LogSegment:
    return LogSegment(
        lssn=message.lssn,
        state=SegmentState(message.state),
        created_ms=message.created_ms,
        completed_ms=message.completed_ms,
        start_sequence_id=message.start_sequence_id,
        extents=tuple(_extent_of(extent) for extent in message.extents),
        truncation=Truncation(message.truncation),
        min_active_entry_id=message.min_active_entry_id,
        min_active_slot_id=message.min_active_slot_id,
    )


def _extent_of(message: Any) -> Extent:
    if not message.open and message.last_entry_id < message.first_entry_id:
        raise ValueError(
            f"extent of ledger {message.ledger_id} ends at entry {message.last_entry_id}, "
            f"before its first {message.first_entry_id}"
        )
    return Extent(
        ledger_id=message.ledger_id,
        first_entry_id=message.first_entry_id,
        last_entry_id=None if message.open else message.last_entry_id,
        record_count=message.record_count,
        size_bytes=message.size_bytes,
        first_txid=message.first_txid,
        last_txid=message.last_txid,
        txid_assigned=message.txid_assigned,
        timestamp_floor_ms=message.timestamp_floor_ms,
        last_timestamp_ms=message.last_timestamp_ms,
    )


def encode_commit(record: CommitRecord) -> bytes:
    """Encode the last commit of an identity."""
    message = pb.CommitRecord(
        version=_VERSION,
        committed_version=record.version,
        token=record.token,
        committed=record.committed,
        run=record.run,
        seen=record.seen,
        last_ns=record.last_ns,
        superseded=record.superseded,
        conflicting=record.conflicting,
    )
    return message.SerializeToString()


def decode_commit(value: bytes, *, path: str) -> CommitRecord:
    """Decode the last commit of an identity."""
    return _parse(
        pb.CommitRecord(),
        value,
        f"commit record at {path}",
        lambda m: CommitRecord(
            version=m.committed_version,
            token=m.token,
            committed=m.committed,
            run=m.run,
            seen=m.seen,
            last_ns=m.last_ns,
            superseded=tuple(m.superseded),
            conflicting=m.conflicting,
        ),
    )


def encode_staged(staged: StagedLedger) -> bytes:
    """Encode a staged ledger."""
    message = pb.StagedLedger(
        version=_VERSION,
        ledger_id=staged.ledger_id,
        log=staged.log,
        log_id=staged.log_id,
        owner=staged.owner,
        created_ms=staged.created_ms,
        committed=staged.committed,
    )
    return message.SerializeToString()


def decode_staged(value: bytes, *, path: str) -> StagedLedger:
    """Decode a staged ledger."""
    return _parse(
        pb.StagedLedger(),
        value,
        f"staged ledger at {path}",
        lambda m: StagedLedger(
            ledger_id=m.ledger_id,
            log=m.log,
            log_id=m.log_id,
            owner=m.owner,
            created_ms=m.created_ms,
            committed=m.committed,
        ),
    )
