"""Ledger metadata, registrations and cookies as bytes and back.

Every value begins with its format version; a value that does not parse, is of another version or
contradicts itself is `CorruptMetadataError`, whatever a caller passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dlcore.config import DEFAULT_RACK, QuorumConfig
from dlcore.errors import ConfigurationError, CorruptMetadataError
from dlcore.ids import BookieId
from dlcore.ledger.metadata import Ensemble, LedgerMetadata, LedgerState
from dlcore.proto import metadata_pb2

FORMAT_VERSION = 1

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieRegistration:
    """What a live bookie says of itself: who it is and where (``host:port``) it answers.

    Entries are at `address`, the control service at `control_address`.

    The space is that of its disk a while ago, a total of 0 means not known.  The session changes
    with each new registration and not while one is kept up to date.
    """

    name: str
    incarnation: str
    address: str
    read_only: bool = False
    rack: str = DEFAULT_RACK
    free_bytes: int = 0
    total_bytes: int = 0
    session: str = ""
    control_address: str = ""

    @property
    def bookie(self) -> BookieId:
        """The bookie that this registers."""
        return BookieId(self.name, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieCookie:
    """The identity of a bookie's data; it must agree in every data directory and here."""

    name: str
    incarnation: str
    cluster_id: str
    created_ms: int

    @property
    def bookie(self) -> BookieId:
        """The bookie whose data this marks."""
        return BookieId(self.name, self.incarnation)


def encode_ledger(metadata: LedgerMetadata) -> bytes:
    """Return `metadata` as bytes; equal metadata gives equal bytes."""
    message = metadata_pb2.LedgerMetadata(
        version=FORMAT_VERSION,
        ledger_id=metadata.ledger_id,
        ensemble_size=metadata.quorum.ensemble_size,
        write_quorum_size=metadata.quorum.write_quorum_size,
        ack_quorum_size=metadata.quorum.ack_quorum_size,
        state=metadata.state.value,
        ensembles=[_ensemble_message(ensemble) for ensemble in metadata.ensembles],
        token=metadata.token,
        created_ms=metadata.created_ms,
        last_entry_id=metadata.last_entry_id,
        length_bytes=metadata.length_bytes,
        custom=dict(metadata.custom),
    )
    return message.SerializeToString(deterministic=True)


def _ensemble_message(ensemble: Ensemble) -> metadata_pb2.Ensemble:
    return metadata_pb2.Ensemble(
        first_entry_id=ensemble.first_entry_id,
        bookies=[
            metadata_pb2.BookieRef(name=bookie.name, incarnation=bookie.incarnation)
            for bookie in ensemble.bookies
        ],
    )


def decode_ledger(value: bytes, *, source: str = "ledger metadata") -> LedgerMetadata:
    """Parse what `encode_ledger` wrote; `source` (a path) names the value in errors."""
    message = parse_message(metadata_pb2.LedgerMetadata(), value, source)
    try:
        metadata = LedgerMetadata(
            ledger_id=message.ledger_id,
            quorum=QuorumConfig(
                ensemble_size=message.ensemble_size,
                write_quorum_size=message.write_quorum_size,
                ack_quorum_size=message.ack_quorum_size,
            ),
            state=LedgerState(message.state),
            ensembles=tuple(_decode_ensemble(each, source) for each in message.ensembles),
            token=message.token,
            created_ms=message.created_ms,
            last_entry_id=message.last_entry_id,
            length_bytes=message.length_bytes,
            custom=dict(message.custom),
        )
    except (ConfigurationError, CorruptMetadataError, ValueError) as error:
        raise CorruptMetadataError(f"{source}: {error}") from error
    _check_end(metadata, source)
    return metadata


def _decode_ensemble(message: metadata_pb2.Ensemble, source: str) -> Ensemble:
    bookies = tuple(
        BookieId(_required(ref.name, "bookie name", source), ref.incarnation)
        for ref in message.bookies
    )
    for bookie in bookies:
        _required(bookie.incarnation, f"incarnation of bookie {bookie.name}", source)
    return Ensemble(message.first_entry_id, bookies)


def _check_end(metadata: LedgerMetadata, source: str) -> None:
    is_closed = metadata.state is LedgerState.CLOSED
    if metadata.ledger_id < 0 or metadata.length_bytes < 0 or metadata.last_entry_id < -1:
        raise CorruptMetadataError(f"{source}: a negative id or length in {metadata}")
    if not is_closed and (metadata.last_entry_id, metadata.length_bytes) != (-1, 0):
        raise CorruptMetadataError(
            f"{source}: last entry {metadata.last_entry_id} and length {metadata.length_bytes} "
            f"in state {metadata.state.name}, expected -1 and 0 before CLOSED"
        )


def encode_registration(registration: BookieRegistration) -> bytes:
    """Return `registration` as bytes."""
    return metadata_pb2.BookieRegistration(
        version=FORMAT_VERSION,
        name=registration.name,
        incarnation=registration.incarnation,
        address=registration.address,
        read_only=registration.read_only,
        rack=registration.rack,
        free_bytes=registration.free_bytes,
        total_bytes=registration.total_bytes,
        session=registration.session,
        control_address=registration.control_address,
    ).SerializeToString(deterministic=True)


def decode_registration(value: bytes, *, source: str = "bookie registration") -> BookieRegistration:
    """Parse what `encode_registration` wrote; `source` (a path) names the value in errors."""
    message = parse_message(metadata_pb2.BookieRegistration(), value, source)
    for address in (message.address, message.control_address or message.address):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise CorruptMetadataError(f"{source}: address {address!r} is not host:port")
    if message.free_bytes < 0 or message.total_bytes < 0:
        raise CorruptMetadataError(
            f"{source}: {message.free_bytes} free of {message.total_bytes} bytes"
        )
    return BookieRegistration(
        name=_required(message.name, "name", source),
        incarnation=_required(message.incarnation, "incarnation", source),
        address=message.address,
        read_only=message.read_only,
        rack=message.rack or DEFAULT_RACK,
        free_bytes=message.free_bytes,
        total_bytes=message.total_bytes,
        session=message.session,
        control_address=message.control_address,
    )


def encode_cookie(cookie: BookieCookie) -> bytes:
    """Return `cookie` as bytes."""
    return metadata_pb2.BookieCookie(
        version=FORMAT_VERSION,
        name=cookie.name,
        incarnation=cookie.incarnation,
        cluster_id=cookie.cluster_id,
        created_ms=cookie.created_ms,
    ).SerializeToString(deterministic=True)


def decode_cookie(value: bytes, *, source: str = "bookie cookie") -> BookieCookie:
    """Parse what `encode_cookie` wrote; `source` (a path) names the value in errors."""
    message = parse_message(metadata_pb2.BookieCookie(), value, source)
    return BookieCookie(
        name=_required(message.name, "name", source),
        incarnation=_required(message.incarnation, "incarnation", source),
        cluster_id=_required(message.cluster_id, "cluster id", source),
        created_ms=message.created_ms,
    )


def parse_message(message: M, value: bytes, source: str) -> M:
    """Fill `message` from `value` and check its format version; `source` names it in errors."""
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise CorruptMetadataError(f"{source}: {len(value)} bytes do not parse") from error
    version = getattr(message, "version", None)
    if version != FORMAT_VERSION:
        raise CorruptMetadataError(
            f"{source}: format version {version}, this release reads {FORMAT_VERSION}"
        )
    return message


def _required(text: str, what: str, source: str) -> str:
    if not text:
        raise CorruptMetadataError(f"{source}: the {what} is missing")
    return text
