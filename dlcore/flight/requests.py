"""Requests of the actions of a proxy: one JSON object each."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import LogId
from dlcore.log.metadata.values import Mark

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors from the JSON of a client: it is invalid, of the wrong type, or nested too deeply."""
_MessageT = TypeVar("_MessageT", bound=Message)


def parsed(kind: type[_MessageT], data: bytes) -> _MessageT:
    """Parse a message of a client; gRPC itself would report an invalid one as a defect.

    Raises: ConfigurationError: the message is invalid.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        article = "an" if name[0] in "AE" else "a"
        raise ConfigurationError(
            f"a message is no {name}: {error}; expected {article} {name} as protobuf, with its "
            "texts in UTF-8"
        ) from error


class LogRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An action on one log."""

    log: str


class ChangeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log to change.  With the log's id a retried request takes effect once, and succeeds."""

    log: str
    log_id: LogId | None = None


class RenameRequest(ChangeRequest, forbid_unknown_fields=True, kw_only=True):
    """A log, and its new name."""

    new_name: str


class ForkRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log, and a new one that begins with its records before the position `at`, or all.

    A client that retries the request after a lost answer sends the same `new_log_id`.
    """

    log: str
    new_name: str
    at: str | None = None
    new_log_id: LogId | None = None


class SettingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log, and changes of its settings by name; null unsets one."""

    log: str
    log_id: LogId | None = None
    changes: dict[str, object] = {}


class CreateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A log to create; with a schema, which is an Arrow message, it is a typed log.

    A client that retries the request after a lost answer sends the same `log_id`.
    """

    log: str
    schema: bytes | None = None
    log_id: LogId | None = None
    settings: dict[str, object] = {}


class SchemaRequest(msgspec.Struct, forbid_unknown_fields=True):
    """New columns of a typed log, as an Arrow message; `log_id` refuses another log of the name."""

    log: str
    schema: bytes
    log_id: str | None = None


class TruncateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The new first position of a log: one of `dlsn`, `txid` and `timestamp_ms`."""

    log: str
    log_id: LogId | None = None
    dlsn: str | None = None
    txid: int | None = None
    timestamp_ms: int | None = None


class StreamRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log as a stream of bytes; with `flush` its owner first flushes all accepted records."""

    log: str
    log_id: LogId | None = None
    flush: bool = False


class ProducerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A log, and the name of a producer that will write to it."""

    log: str
    producer: str


class NoRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An action without arguments; its body may be empty."""


class RulesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Changes of the rules of access, as texts; without any, the answer has the rules."""

    add: list[str] = []
    remove: list[str] = []


class SubscriptionsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log, and a subscriber with a stored position; without one, all of them."""

    log: str
    log_id: LogId | None = None
    subscriber: str | None = None


class MoveRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The new position of a subscriber, stored if its state is still `mark`.

    `token` identifies the client that holds the subscription from then on.  If a reader of
    `dlcore` holds it by a lock, the request waits if `waits` is set.
    """

    log: str
    log_id: LogId | None = None
    subscriber: str
    dlsn: str
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    mark: Mark | None = None
    waits: bool = False


class ForgetRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A subscriber to forget, if its state is still `mark`."""

    log: str
    log_id: LogId | None = None
    subscriber: str
    mark: Mark


class SeenPosition(msgspec.Struct, frozen=True):
    """A stored position, and the mark of its state."""

    dlsn: str
    mark: Mark
