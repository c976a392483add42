"""The codes of Kafka for dlog's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode

from dlcore.base.errors import (
    AccessDeniedError,
    AlreadyClosedError,
    AlreadyTruncatedError,
    ConfigurationError,
    DLError,
    EndOfStreamError,
    InvalidEntryError,
    InvalidLogNameError,
    LogElsewhereError,
    LogModeError,
    LogNotFoundError,
    LogNotReadyError,
    LogRecordTooLongError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    ProducerFencedError,
    SchemaMismatchError,
    SequenceGapError,
    WriteError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_READING: Mapping[type[DLError], ErrorCode] = {
    AccessDeniedError: ErrorCode.topic_authorization_failed,
    AlreadyTruncatedError: ErrorCode.offset_out_of_range,
    InvalidEntryError: ErrorCode.corrupt_message,
    LogNotFoundError: ErrorCode.unknown_topic_or_partition,
    OverCapacityError: ErrorCode.kafka_storage_error,
}
_WRITING: Mapping[type[DLError], ErrorCode] = {
    AccessDeniedError: ErrorCode.topic_authorization_failed,
    AlreadyClosedError: ErrorCode.not_leader_or_follower,
    ConfigurationError: ErrorCode.invalid_record,
    EndOfStreamError: ErrorCode.policy_violation,
    InvalidLogNameError: ErrorCode.invalid_topic_exception,
    LogElsewhereError: ErrorCode.not_leader_or_follower,
    LogModeError: ErrorCode.policy_violation,
    LogNotFoundError: ErrorCode.unknown_topic_or_partition,
    LogNotReadyError: ErrorCode.not_leader_or_follower,
    LogRecordTooLongError: ErrorCode.message_too_large,
    OwnershipAcquireFailedError: ErrorCode.not_leader_or_follower,
    ProducerFencedError: ErrorCode.invalid_producer_epoch,
    SchemaMismatchError: ErrorCode.invalid_record,
    SequenceGapError: ErrorCode.out_of_order_sequence_number,
    WriteError: ErrorCode.not_leader_or_follower,
}
"""The codes for records that were not written."""


def code_of(error: DLError) -> ErrorCode:
    """Return the code for an error; clients retry after those of errors that are retriable."""
    return _found(error, _READING, ErrorCode.kafka_storage_error)


def write_code_of(error: DLError) -> ErrorCode:
    """Return the code for an error by which records were not written."""
    return _found(error, _WRITING, ErrorCode.not_enough_replicas)


def _found(
    error: DLError, codes: Mapping[type[DLError], ErrorCode], retriable: ErrorCode
) -> ErrorCode:
    for kind in type(error).__mro__:
        if kind in codes:
            return codes[kind]
    return retriable if error.retriable else ErrorCode.unknown_server_error
