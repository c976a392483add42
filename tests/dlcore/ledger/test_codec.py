"""Metadata values as bytes: what is written is what is read, and damage is named.

Method: Hypothesis makes values and damages bytes; every damaged value is either read as some valid
value or refused with `CorruptMetadataError`, never with anything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dlcore.config import QuorumConfig
from dlcore.errors import CorruptMetadataError
from dlcore.ids import BookieId
from dlcore.ledger.codec import (
    BookieCookie,
    BookieRegistration,
    decode_cookie,
    decode_ledger,
    decode_registration,
    encode_cookie,
    encode_ledger,
    encode_registration,
)
from dlcore.ledger.metadata import Ensemble, LedgerMetadata, LedgerState
from dlcore.proto import metadata_pb2

INT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(min_size=1, max_size=20)
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerMetadata:
    """Any valid ledger metadata."""
    ack, write, ensemble = sorted(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)))
    bookies = st.lists(
        st.builds(BookieId, TEXT, HEX), min_size=ensemble, max_size=ensemble, unique=True
    )
    firsts = sorted({0, *draw(st.lists(INT64, max_size=3))})
    state = draw(st.sampled_from(LedgerState))
    is_closed = state is LedgerState.CLOSED
    return LedgerMetadata(
        ledger_id=draw(INT64),
        quorum=QuorumConfig(ensemble_size=ensemble, write_quorum_size=write, ack_quorum_size=ack),
        state=state,
        ensembles=tuple(Ensemble(first, tuple(draw(bookies))) for first in firsts),
        token=draw(st.text(max_size=40)),
        created_ms=draw(INT64),
        last_entry_id=draw(st.integers(-1, 2**63 - 1)) if is_closed else -1,
        length_bytes=draw(INT64) if is_closed else 0,
        custom=draw(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3)),
    )


LEDGER = LedgerMetadata(
    ledger_id=42,
    quorum=QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=1),
    state=LedgerState.OPEN,
    ensembles=(Ensemble(0, (BookieId("b1", "1" * 32), BookieId("b2", "2" * 32))),),
    token="t",
    created_ms=1,
    custom={"log": "clicks"},
)


@given(ledgers())
def test_a_ledger_comes_back_equal(metadata: LedgerMetadata) -> None:
    """And equal metadata gives equal bytes: a lost reply is classified by comparing them."""
    value = encode_ledger(metadata)
    assert decode_ledger(value) == metadata
    assert encode_ledger(decode_ledger(value)) == value
    turned = replace(metadata, custom=dict(reversed(list(metadata.custom.items()))))
    assert encode_ledger(turned) == value


@given(ledgers(), st.data())
def test_a_damaged_ledger_is_read_or_refused(metadata: LedgerMetadata, data: st.DataObject) -> None:
    """Nothing but `CorruptMetadataError` comes out, and what is read is valid."""
    value = bytearray(encode_ledger(metadata))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(value[: data.draw(st.integers(0, len(value)))])
    for damaged in (bytes(value), cut):
        try:
            found = decode_ledger(damaged, source="/dlog/ledgers/x")
        except CorruptMetadataError as error:
            assert "/dlog/ledgers/x" in str(error)  # noqa: PT017  # some values are still valid
        else:
            assert decode_ledger(encode_ledger(found)) == found


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    """Values of a stranger."""
    for decode in (decode_ledger, decode_registration, decode_cookie):
        try:
            decode(value)
        except CorruptMetadataError:
            continue


def ref(name: str = "b1", incarnation: str = "1" * 32) -> metadata_pb2.BookieRef:
    """Return a bookie as a message."""
    return metadata_pb2.BookieRef(name=name, incarnation=incarnation)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "format version 2, this release reads 1"),
        ({"version": 0}, "format version 0"),
        ({"state": 4}, "4 is not a valid LedgerState"),
        ({"state": 0}, "0 is not a valid LedgerState"),
        ({"ack_quorum_size": 3}, "expected E >= Qw >= Qa >= 1"),
        ({"ensembles": []}, "ensembles must start at entry 0"),
        ({"ledger_id": -1}, "negative"),
        ({"length_bytes": -1, "state": 3}, "negative"),
        ({"last_entry_id": -2, "state": 3}, "negative"),
        ({"last_entry_id": 5}, "before CLOSED"),
        ({"length_bytes": 5, "state": 2}, "before CLOSED"),
        (
            {"ensembles": [metadata_pb2.Ensemble(bookies=[ref("")])]},
            "bookie name is missing",
        ),
        (
            {"ensembles": [metadata_pb2.Ensemble(bookies=[ref(incarnation="")])]},
            "incarnation of bookie b1 is missing",
        ),
        ({"ensembles": [metadata_pb2.Ensemble(bookies=[ref()])]}, "an ensemble of 1 bookies"),
        ({"ensembles": [metadata_pb2.Ensemble(bookies=[ref(), ref()])]}, "one bookie twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ledger_that_contradicts_itself_is_refused(change: dict[str, Any], problem: str) -> None:
    """The message says where the value stands and what is wrong with it."""
    message = metadata_pb2.LedgerMetadata.FromString(encode_ledger(LEDGER))
    for key, value in change.items():
        message.ClearField(key)  # type: ignore[arg-type]  # the field is chosen at run time
        if isinstance(value, list):
            getattr(message, key).extend(value)
        else:
            setattr(message, key, value)
    with pytest.raises(CorruptMetadataError, match=f"/here: .*{problem}"):
        decode_ledger(message.SerializeToString(), source="/here")


@given(TEXT, HEX, st.sampled_from(["127.0.0.1:1", "host.example:65535", "[::1]:80"]), st.booleans())
def test_a_registration_comes_back_equal(
    name: str, incarnation: str, address: str, read_only: bool
) -> None:
    """And names its bookie."""
    registration = BookieRegistration(
        name=name,
        incarnation=incarnation,
        address=address,
        read_only=read_only,
        rack=f"/{name}",
        free_bytes=7,
        total_bytes=2**62,
        session=incarnation,
    )
    assert decode_registration(encode_registration(registration)) == registration
    assert registration.bookie == BookieId(name, incarnation)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "the name is missing"),
        ({"incarnation": ""}, "the incarnation is missing"),
        ({"address": "host"}, "address 'host' is not host:port"),
        ({"address": ":80"}, "address ':80' is not host:port"),
        ({"address": "host:http"}, "is not host:port"),
        ({"free_bytes": -1}, "-1 free of 0 bytes"),
        ({"total_bytes": -1}, "0 free of -1 bytes"),
    ],
)
def test_a_registration_without_its_parts_is_refused(change: dict[str, Any], problem: str) -> None:
    """Nobody connects to half an address."""
    registration = BookieRegistration(name="b1", incarnation="1" * 32, address="h:1")
    with pytest.raises(CorruptMetadataError, match=f"/here: .*{problem}"):
        decode_registration(encode_registration(replace(registration, **change)), source="/here")


@given(TEXT, HEX, HEX, INT64)
def test_a_cookie_comes_back_equal(
    name: str, incarnation: str, cluster_id: str, created_ms: int
) -> None:
    """And names its bookie."""
    cookie = BookieCookie(
        name=name, incarnation=incarnation, cluster_id=cluster_id, created_ms=created_ms
    )
    assert decode_cookie(encode_cookie(cookie)) == cookie
    assert cookie.bookie == BookieId(name, incarnation)


@pytest.mark.parametrize(
    ("field", "what"),
    [("name", "name"), ("incarnation", "incarnation"), ("cluster_id", "cluster id")],
)
def test_a_cookie_without_its_parts_is_refused(field: str, what: str) -> None:
    """A cookie without a cluster would fit any."""
    cookie = BookieCookie(name="b1", incarnation="1" * 32, cluster_id="c", created_ms=1)
    with pytest.raises(CorruptMetadataError, match=f"/here: the {what} is missing"):
        decode_cookie(encode_cookie(replace(cookie, **{field: ""})), source="/here")  # type: ignore[arg-type]  # the field is chosen at run time
