"""Requests of the actions of a proxy: one JSON object each."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import LogId
from dlcore.log.metadata.values import Mark

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the JSON of a client may raise: it is none, not of the kind, or nested without an end."""
_MessageT = TypeVar("_MessageT", bound=Message)


def parsed(kind: type[_MessageT], data: bytes) -> _MessageT:
    """Return a message of a client.  gRPC itself would take one that is none for a defect.

    Raises: ConfigurationError: it is none.
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
    """A log to change; by its id it is done once, and asked for again told that it is done."""

    log: str
    log_id: LogId | None = None


class RenameRequest(ChangeRequest, forbid_unknown_fields=True, kw_only=True):
    """A log, and what it is to be called."""

    new_name: str


class SettingsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log, and what to change of its settings, by name; null unsets one."""

    log: str
    log_id: LogId | None = None
    changes: dict[str, object] = {}


class CreateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A log to create, with an id that it may be given; with a schema, as an Arrow message, typed.

    Who asks again, since an answer was lost, gives the same id.
    """

    log: str
    schema: bytes | None = None
    log_id: LogId | None = None
    settings: dict[str, object] = {}


class SchemaRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Columns that a typed log gets, as an Arrow message."""

    log: str
    schema: bytes


class TruncateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to keep of a log: one of the three says where it begins."""

    log: str
    log_id: LogId | None = None
    dlsn: str | None = None
    txid: int | None = None
    timestamp_ms: int | None = None


class StreamRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log that is a stream of bytes; `flush` first what its owner has accepted."""

    log: str
    log_id: LogId | None = None
    flush: bool = False


class ProducerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Who is about to write to a log."""

    log: str
    producer: str


class NoRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An action that says nothing more; its body may be empty."""


class SubscriptionsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A log, and for whom it keeps a position: one, or all for whom it does."""

    log: str
    log_id: LogId | None = None
    subscriber: str | None = None


class MoveRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a subscriber goes on, who is `token` from then on, and was seen at `mark` before.

    One that somebody holds by a lock is waited for, if that is said.
    """

    log: str
    log_id: LogId | None = None
    subscriber: str
    dlsn: str
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    mark: Mark | None = None
    waits: bool = False


class ForgetRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A subscriber to forget, as he was seen."""

    log: str
    log_id: LogId | None = None
    subscriber: str
    mark: Mark


class SeenPosition(msgspec.Struct, frozen=True):
    """A position that is kept, and the mark of its state."""

    dlsn: str
    mark: Mark
