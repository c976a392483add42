"""The machine that mends a damaged object, and what the chain says of objects: no I/O."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlcore.base.config import QuorumConfig
from dlcore.base.errors import (
    CorruptMetadataError,
    DLError,
    LedgerNotFoundError,
    MetadataConnectionError,
    ObjectStoreError,
)
from dlcore.base.machines import CallFailed, Ended
from dlcore.ledger.metadata.values import COLD_LAYOUT, LedgerMetadata, LedgerState, StoredObject
from dlcore.log.cold.facts import (
    EXTENTS_NOTED_MAX,
    ObjectFacts,
    difference,
    end_entry_of,
    noted_origin,
    origin_of,
    url_of,
)
from dlcore.ops.upkeep.mending import (
    ATTEMPTS_MAX,
    TWINS_MAX,
    Check,
    Effect,
    Event,
    Have,
    List,
    Listed,
    Make,
    MendRun,
    MendState,
    Name,
    Named,
    Read,
    ReadBack,
    Signal,
    Write,
    Written,
)
from tests.dlcore.ops.upkeep.test_tiering import extent

FOLDER = "s3://bucket/logs/c/l/4"
GONE = LedgerNotFoundError("ledger 1 does not exist")
AWAY = ObjectStoreError("503")


def ledger_of(*sums: int | None) -> LedgerMetadata:
    """Return a cold ledger of objects with two entries and five records each, and these sums."""
    objects = [StoredObject(2 * n, 5 * n, f"7-t-{n}-1.parquet", 100, s) for n, s in enumerate(sums)]
    return LedgerMetadata(
        layout=COLD_LAYOUT,
        ledger_id=7,
        quorum=QuorumConfig(),
        state=LedgerState.CLOSED,
        ensembles=(),
        token="t",
        created_ms=1,
        last_entry_id=2 * len(sums) - 1,
        length_bytes=300,
        custom={"log": "clicks"},
        folder=FOLDER,
        objects=tuple(objects),
    )


LEDGER = ledger_of(10, 11, 12)
FACTS = ObjectFacts(
    cluster_id="c",
    log_id="l",
    lssn=4,
    schema_id=0,
    first_entry=32,
    entries=2,
    first_sequence_id=50,
    records=5,
    first_txid=1,
    last_txid=2,
    crc32c=11,
)
OTHER = replace(FACTS, crc32c=99)


class Run:
    """A machine over the second of three objects."""

    def __init__(self, ledger: LedgerMetadata = LEDGER, number: int = 1) -> None:
        self.machine = MendRun(ledger, number, damage="is missing", unique=1000)

    def handle(self, event: Event) -> Effect:
        """Feed an event."""
        effect = self.machine.handle(event)
        self.machine.validate()
        return effect

    def listing(self, *urls: str) -> Effect:
        """Let bookies have nothing, and the folder these objects; return what follows."""
        assert self.handle(Signal.BEGIN) == Make()
        assert self.handle(CallFailed(GONE)) == List()
        return self.handle(Listed([(each, 80) for each in urls]))

    def failed(self, effect: Effect) -> DLError:
        """Require that it has ended with an error."""
        assert isinstance(effect, Ended)
        assert isinstance(effect.outcome, DLError)
        assert self.machine.state is MendState.FAILED
        return effect.outcome


@pytest.mark.parametrize(
    ("is_stored", "state"), [(True, MendState.MENDED), (False, MendState.OVERTAKEN)]
)
def test_an_object_is_made_of_the_old_ledgers(is_stored: bool, state: MendState) -> None:
    """The new object has a name of its own, and is read back before the ledger names it."""
    run = Run()
    assert run.handle(Signal.BEGIN) == Make()
    assert run.handle(Have(FACTS, 90)) == Write("7-t-1-1001.parquet")
    assert run.handle(Written()) == Check("7-t-1-1001.parquet", 90)
    before, _, after = LEDGER.objects
    new = StoredObject(2, 5, "7-t-1-1001.parquet", 90, 11)
    assert run.handle(ReadBack(FACTS)) == Name(replace(LEDGER, objects=(before, new, after)))
    assert run.handle(Named(is_stored)) == Ended(is_stored)
    assert run.machine.state is state


def test_an_object_is_made_of_another_one_in_the_folder() -> None:
    """The newest comes first; one that differs, or cannot be read, is passed over."""
    run = Run()
    own = url_of(LEDGER, 2)
    assert run.listing(f"{FOLDER}/8-t-0-1", f"{FOLDER}/7-t-1-1", own, f"{FOLDER}/9-t-0-1") == Read(
        f"{FOLDER}/7-t-1-1", 80
    )
    assert run.handle(Have(OTHER, 80)) == Read(f"{FOLDER}/8-t-0-1", 80)
    assert run.handle(CallFailed(AWAY)) == Read(f"{FOLDER}/9-t-0-1", 80)
    assert run.handle(Have(FACTS, 80)) == Write("7-t-1-1001.parquet")


def test_a_hole_is_reported_with_all_that_was_tried() -> None:
    """Its entries, its object, and each source."""
    run = Run()
    assert run.handle(Signal.BEGIN) == Make()
    assert run.handle(Have(OTHER, 90)) == List()
    assert run.handle(Listed([(f"{FOLDER}/9-t-0-1", 80)])) == Read(f"{FOLDER}/9-t-0-1", 80)
    error = run.failed(run.handle(CallFailed(ObjectStoreError("no Parquet", is_damaged=True))))
    assert str(error) == (
        f"entries 2 to 3 of ledger 7 of log 'clicks' are lost with object {FOLDER}/"
        "7-t-1-1.parquet: is missing; on bookies: crc32c 99, and the chain says 11; another "
        "object of the folder: no Parquet"
    )
    assert isinstance(error, ObjectStoreError)
    assert error.is_damaged
    run = Run()
    assert "there is no other object in its folder" in str(run.failed(run.listing()))


def test_nothing_proves_what_an_earlier_release_wrote() -> None:
    """No source is used without a sum."""
    run = Run(ledger_of(None), 0)
    error = run.failed(run.handle(Signal.BEGIN))
    assert "nothing proves another one" in str(error)


@pytest.mark.parametrize("event", [CallFailed(AWAY), ReadBack(OTHER)])
def test_another_name_after_a_failure_and_then_no_more(event: Event) -> None:
    """Whether it was stored is not known, and what differs is never named."""
    run = Run()
    run.handle(Signal.BEGIN)
    run.handle(Have(FACTS, 90))
    for attempt in range(2, ATTEMPTS_MAX + 1):
        if isinstance(event, ReadBack):
            run.handle(Written())
        assert run.handle(event) == Write(f"7-t-1-100{attempt}.parquet")
    if isinstance(event, ReadBack):
        run.handle(Written())
    error = run.failed(run.handle(event))
    assert isinstance(error, ObjectStoreError)
    assert not error.is_damaged


def test_stores_that_are_away_end_it() -> None:
    """The metadata at any step, the objects where they are listed; no hole is reported."""
    away = MetadataConnectionError("no answer")
    run = Run()
    run.handle(Signal.BEGIN)
    assert run.failed(run.handle(CallFailed(away))) is away
    run = Run()
    run.handle(Signal.BEGIN)
    run.handle(CallFailed(GONE))
    assert run.failed(run.handle(CallFailed(AWAY))) is AWAY
    run = Run()
    run.handle(Signal.BEGIN)
    run.handle(Have(FACTS, 90))
    run.handle(Written())
    run.handle(ReadBack(FACTS))
    assert run.failed(run.handle(CallFailed(away))) is away


def test_some_of_many_objects_are_read() -> None:
    """The folder of a segment that was tiered again and again has many."""
    run, count = Run(), 0
    effect = run.listing(*(f"{FOLDER}/{n}-t-0-1" for n in range(10, 10 + 2 * TWINS_MAX)))
    while isinstance(effect, Read):
        count += 1
        effect = run.handle(Have(OTHER, 80))
    run.failed(effect)
    assert count == TWINS_MAX


@pytest.mark.parametrize(
    ("number", "changed", "reason"),
    [
        (1, {}, ""),
        (1, {"entries": 3}, "entries 3, and the chain says 2"),
        (1, {"records": 6}, "records 6, and the chain says 5"),
        (1, {"crc32c": 6}, "crc32c 6, and the chain says 11"),
        (1, {"log_id": "m"}, "place ['c', 'm', '4'], and the chain says ['c', 'l', '4']"),
        (1, {"lssn": 5}, "place ['c', 'l', '5'], and the chain says ['c', 'l', '4']"),
        (2, {"crc32c": 12, "records": 9}, ""),  # how many the last one has, only the sum knows
        (2, {"crc32c": 12, "entries": 1}, "entries 1, and the chain says 2"),
    ],
)
def test_the_difference_to_the_chain(number: int, changed: dict[str, object], reason: str) -> None:
    """Each fact that the chain has is compared."""
    assert difference(LEDGER, number, replace(FACTS, **changed)) == reason
    assert difference(ledger_of(None), 0, FACTS) == ""
    assert [end_entry_of(LEDGER, n) for n in range(3)] == [2, 4, 6]


def test_the_origin_of_a_cold_ledger() -> None:
    """It is noted with the ledger, unless it is long, and what cannot be read counts as none."""
    extents = (extent(1), extent(2, entries=5))
    noted = replace(LEDGER, custom=noted_origin(3, 44, extents))
    origin = origin_of(noted)
    assert origin is not None
    assert (origin.entry, origin.sequence_id, origin.extents) == (3, 44, extents)
    assert origin_of(LEDGER) is None
    assert noted_origin(3, 44, [extent(1)] * (EXTENTS_NOTED_MAX + 1)) == {}
    assert noted_origin(3, 44, [extent(1)] * EXTENTS_NOTED_MAX)
    assert origin_of(replace(LEDGER, custom={"origin": "["})) is None
    odd = origin_of(replace(LEDGER, custom={"origin": '{"entry":1,"sequence_id":2,"packed":[3]}'}))
    assert odd is not None
    with pytest.raises(CorruptMetadataError):
        assert odd.extents
