"""Stored values: what is written is what is read, new fields are no hindrance, damage is named.

Method: one value of each kind; for ledgers Hypothesis makes values, and damages bytes.  Every
damaged value is either read as some valid value or refused with `CorruptMetadataError`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import CorruptMetadataError
from dlcore.base.ids import BookieId
from dlcore.ledger.metadata.values import (
    BookieCookie,
    BookieRegistration,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from dlcore.log.metadata.segment import Extent
from dlcore.log.metadata.values import (
    Chunk,
    CommitRecord,
    LockHolder,
    LogHead,
    OpenSegment,
    SegmentEnd,
    StagedLedger,
    Totals,
    UpkeepRequest,
    pack,
)
from dlcore.metadata.binding import NamespaceBinding
from dlcore.metadata.port import Versioned
from dlcore.metadata.stored import LAYOUT, decode, decode_or_tell, encode
from dlcore.ops.autorecovery.values import ElectedAuditor, ReplicaCheckRun, UnderReplicatedLedger
from tests.fixtures.ledgers import bookies
from tests.fixtures.log_states import LOG

INT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(min_size=1, max_size=20)
HEX = st.text("0123456789abcdef", min_size=32, max_size=32)

LEDGER = LedgerMetadata(
    ledger_id=42,
    quorum=QuorumConfig(ensemble_size=2, write_quorum_size=2, ack_quorum_size=1),
    state=LedgerState.OPEN,
    ensembles=(Ensemble(0, (BookieId("b1", "1" * 32), BookieId("b2", "2" * 32))),),
    token="t",
    created_ms=1,
    custom={"log": "clicks"},
)
REGISTRATION = BookieRegistration(
    name="b1",
    incarnation="1" * 32,
    address="[::1]:80",
    read_only=True,
    rack="/r1",
    free_bytes=7,
    total_bytes=2**62,
    session="s",
    control_address="host.example:65535",
)
COOKIE = BookieCookie(name="b1", incarnation="1" * 32, cluster_id="c", created_ms=1)
_EXTENTS = pack([Extent(ledger_id=7, first_entry_id=3, last_entry_id=9, record_count=100)])
_TOTALS = Totals(entries=1, records=2, size_bytes=3)
PACKED = [
    LEDGER,
    LogHead(
        max_lssn=3,
        sealed=True,
        max_txid=7,
        end=(3, 5),
        merged_lssns=(1, 2),
        segment=OpenSegment(
            created_ms=1, start_sequence_id=2, chunk_count=1, chunked=_TOTALS, packed=_EXTENTS
        ),
    ),
    SegmentEnd(
        created_ms=1,
        completed_ms=2,
        start_sequence_id=3,
        chunk_count=4,
        chunked=_TOTALS,
        packed=_EXTENTS,
    ),
    Chunk(covers=2, first_entry_id=3, first_sequence_id=4, packed=_EXTENTS),
]
READABLE = [
    REGISTRATION,
    COOKIE,
    LOG,
    NamespaceBinding(cluster_id="c" * 32, created_ms=1),
    LockHolder(owner="o", token="t"),
    UpkeepRequest(name="clicks", log_id="1" * 32, from_lssn=3),
    CommitRecord(
        version=3,
        token="t",
        committed=2,
        run="r",
        thread="1",
        seen=2,
        last_ns=5,
        superseded=("q",),
        committed_ms=7,
    ),
    StagedLedger(
        ledger_id=7, identity="job", owner="o", created_ms=1, extents=2, committed=((1, 3), (5, 5))
    ),
    UnderReplicatedLedger(
        ledger_id=2**40, missing=bookies("AB"), since_ms=7, findings=3, attempts=2, reason="lost"
    ),
    ElectedAuditor(owner="host:1", token="1" * 32),
    ReplicaCheckRun(started_ms=1, finished_ms=2, ledgers=3, under_replicated=4, unknown=5),
]


def _name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", PACKED, ids=_name)
def test_packed_values(value: msgspec.Struct) -> None:
    """They come back; new fields behind them are no hindrance, other layouts and damage are."""
    kind, packed = type(value), encode(value)
    assert decode(kind, packed, source="p") == value
    fields = msgspec.msgpack.decode(packed)
    found = decode(kind, msgspec.msgpack.encode([*fields, "new"]), source="p")
    assert found == value
    assert encode(found) == packed  # a release that stores it again drops what it does not know
    with pytest.raises(CorruptMetadataError, match=f"at p has layout version 9.*reads {LAYOUT}"):
        decode(kind, msgspec.msgpack.encode([9, "anything"]), source="p")
    for damaged in (b"", packed[:-1], msgspec.msgpack.encode([LAYOUT, -5, -5, -5, -5])):
        with pytest.raises(CorruptMetadataError, match=f"{kind.__name__} at p does not parse"):
            decode(kind, damaged, source="p")


@pytest.mark.parametrize("value", READABLE, ids=_name)
def test_values_that_people_look_at(value: msgspec.Struct) -> None:
    """They are JSON; the same holds."""
    kind, text = type(value), encode(value)
    assert decode(kind, text, source="p") == value
    fields = msgspec.json.decode(text)
    assert decode(kind, msgspec.json.encode({**fields, "new": 1}), source="p") == value
    with pytest.raises(CorruptMetadataError, match="layout version 9"):
        decode(kind, b'{"layout": 9}', source="p")
    for damaged in (b"", text[:-1], b'{"layout": 2}', b"[]"):
        with pytest.raises(CorruptMetadataError, match=f"{kind.__name__} at p does not parse"):
            decode(kind, damaged, source="p")


def test_one_that_is_damaged_hides_no_other() -> None:
    """It is reported, and left out like an absent one."""
    reported: list[CorruptMetadataError] = []

    def read(node: Versioned | None) -> LedgerMetadata | None:
        return decode_or_tell(LedgerMetadata, node, source="p", tell=reported.append)

    assert read(Versioned(encode(LEDGER), 0)) == LEDGER
    assert read(None) is None
    assert reported == []
    assert read(Versioned(b"no ledger", 0)) is None
    assert ["LedgerMetadata at p does not parse" in str(error) for error in reported] == [True]


def test_the_size_of_a_ledger_and_of_a_head() -> None:
    """There are many ledgers, and each change writes a head: neither is wasteful."""
    ledger = replace(
        LEDGER,
        quorum=QuorumConfig(),
        ensembles=(Ensemble(0, tuple(BookieId(f"10.0.0.{n}:3181", "f" * 32) for n in range(3))),),
        token="e" * 32,
        created_ms=1_700_000_000_000,
        custom={},
    )
    assert len(encode(ledger)) < 220
    assert len(encode(LogHead())) < 40


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerMetadata:
    """Any valid ledger metadata."""
    ack, write, ensemble = sorted(draw(st.lists(st.integers(1, 5), min_size=3, max_size=3)))
    members = st.lists(
        st.builds(BookieId, TEXT, HEX), min_size=ensemble, max_size=ensemble, unique=True
    )
    firsts = sorted({0, *draw(st.lists(INT64, max_size=3))})
    state = draw(st.sampled_from(LedgerState))
    is_closed = state is LedgerState.CLOSED
    return LedgerMetadata(
        ledger_id=draw(INT64),
        quorum=QuorumConfig(ensemble_size=ensemble, write_quorum_size=write, ack_quorum_size=ack),
        state=state,
        ensembles=tuple(Ensemble(first, tuple(draw(members))) for first in firsts),
        token=draw(st.text(max_size=40)),
        created_ms=draw(INT64),
        last_entry_id=draw(st.integers(-1, 2**63 - 1)) if is_closed else -1,
        length_bytes=draw(INT64) if is_closed else 0,
        custom=draw(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3)),
    )


@given(ledgers())
def test_a_ledger_comes_back_equal(metadata: LedgerMetadata) -> None:
    """And equal metadata gives equal bytes: a lost reply is classified by comparing them."""
    value = encode(metadata)
    assert decode(LedgerMetadata, value, source="/here") == metadata
    turned = replace(metadata, custom=dict(reversed(list(metadata.custom.items()))))
    assert encode(turned) == value


@given(ledgers(), st.data())
def test_a_damaged_ledger_is_read_or_refused(metadata: LedgerMetadata, data: st.DataObject) -> None:
    """Nothing but `CorruptMetadataError` comes out, and what is read is valid."""
    value = bytearray(encode(metadata))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(value[: data.draw(st.integers(0, len(value)))])
    for damaged in (bytes(value), cut):
        try:
            found = decode(LedgerMetadata, damaged, source="/dlog/ledgers/x")
        except CorruptMetadataError as error:
            assert "/dlog/ledgers/x" in str(error)  # noqa: PT017  # some values are still valid
        else:
            assert decode(LedgerMetadata, encode(found), source="/here") == found


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(value: bytes) -> None:
    """Values of a stranger."""
    for example in (*PACKED, *READABLE):
        try:
            decode(type(example), value, source="/here")
        except CorruptMetadataError:
            continue


_LEDGER_FIELDS = LedgerMetadata.__struct_fields__
_B1, _B2 = ["b1", "1" * 32], ["b2", "2" * 32]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"state": 4}, "Invalid enum value 4"),
        ({"quorum": [2, 2, 3]}, "expected E >= Qw >= Qa >= 1"),
        ({"ensembles": []}, "ensembles must start at entry 0"),
        ({"ensembles": [[1, [_B1, _B2]]]}, "ensembles must start at entry 0"),
        ({"ledger_id": -1}, "`int` >= 0"),
        ({"length_bytes": -1, "state": 3}, "`int` >= 0"),
        ({"last_entry_id": -2, "state": 3}, "`int` >= -1"),
        ({"last_entry_id": 5}, "before CLOSED"),
        ({"length_bytes": 5, "state": 2}, "before CLOSED"),
        ({"ensembles": [[0, [["", "1" * 32], _B2]]]}, "`str` of length >= 1"),
        ({"ensembles": [[0, [["b1", ""], _B2]]]}, "`str` of length >= 1"),
        ({"ensembles": [[0, [_B1]]]}, "an ensemble of 1 bookies"),
        ({"ensembles": [[0, [_B1, _B1]]]}, "one bookie twice"),
    ],
    ids=str,
)
def test_a_ledger_that_contradicts_itself_is_refused(change: dict[str, Any], problem: str) -> None:
    """The message says where the value stands and what is wrong with it."""
    fields = dict(zip(_LEDGER_FIELDS, msgspec.msgpack.decode(encode(LEDGER)), strict=True))
    value = msgspec.msgpack.encode(list({**fields, **change}.values()))
    with pytest.raises(CorruptMetadataError, match=f"at /here .*{problem}"):
        decode(LedgerMetadata, value, source="/here")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": ""}, "length >= 1 .*name"),
        ({"incarnation": ""}, "length >= 1 .*incarnation"),
        ({"address": "host"}, "regex .*address"),
        ({"address": ":80"}, "regex .*address"),
        ({"address": "host:http"}, "regex .*address"),
        ({"control_address": "host"}, "regex .*control_address"),
        ({"free_bytes": -1}, "`int` >= 0 .*free_bytes"),
        ({"total_bytes": -1}, "`int` >= 0 .*total_bytes"),
    ],
    ids=str,
)
def test_a_registration_without_its_parts_is_refused(change: dict[str, Any], problem: str) -> None:
    """No client connects to half an address."""
    with pytest.raises(CorruptMetadataError, match=f"at /here .*{problem}"):
        decode(BookieRegistration, encode(replace(REGISTRATION, **change)), source="/here")


@pytest.mark.parametrize("field", ["name", "incarnation", "cluster_id"])
def test_a_cookie_without_its_parts_is_refused(field: str) -> None:
    """A cookie without a cluster would fit any."""
    with pytest.raises(CorruptMetadataError, match=f"at /here .*{field}"):
        decode(BookieCookie, encode(replace(COOKIE, **{field: ""})), source="/here")


def test_quorums_that_contradict_each_other() -> None:
    """They are reported as damage, with the path."""
    text = encode(LOG).replace(b"[3,3,2]", b"[3,3,9]")
    with pytest.raises(CorruptMetadataError, match="at p contradicts itself"):
        decode(type(LOG), text, source="p")


def test_identities() -> None:
    """A registration and a cookie name their bookie."""
    assert REGISTRATION.bookie == COOKIE.bookie == BookieId("b1", "1" * 32)
