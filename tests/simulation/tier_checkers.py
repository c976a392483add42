"""Invariants of tiers, judged by what is in the object store and in every state of the metadata.

That records are the same from objects is judged where records are (`log_checkers.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import depth, now_ms, require
from tests.simulation.stored_ledger import read_ledger
from tests.simulation.stored_log import completed_segments_of, extents_in, read_head, read_tier
from tests.simulation.type_checkers import PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Op, Versioned
    from tests.fixtures.simulated_store import SimulatedTree
    from tests.simulation.cold_store import ColdStore
    from tests.simulation.stored_ledger import StoredLedger
    from tests.simulation.stored_log import StoredExtent
    from tests.simulation.tables import Catalog

STAY = "T1 NamedObjectsStay"
READ_BACK = "T2 ReadBackBeforeLedgersGo"
AGED = "T3 OnlyOldSegmentsGo"
DONE = "T4 OldSegmentsGo"
SAME = "T5 ObjectsSayWhatReadersGet"
TIER_INVARIANTS = (STAY, READ_BACK, AGED, DONE, SAME)

_PLACE = ("_lssn", "_entry", "_slot", "_txid", "_sequence_id", "_timestamp")


class TierCheckers:
    """Judges cold ledgers and their objects.

    Args:
        tree: the metadata.
        paths: the namespace's nodes.
        epoch_ms: what clocks of processes show when virtual time begins.
    """

    def __init__(self, *, tree: SimulatedTree, paths: NamespacePaths, epoch_ms: int) -> None:
        self._tree = tree
        self._paths = paths
        self._epoch_ms = epoch_ms
        self._store: ColdStore | None = None
        self._named: dict[str, tuple[str, ...]] = {}  # by path of a ledger: its objects
        self._owners: dict[str, str] = {}  # by object: the path of its ledger
        self.after_ms = 0
        """The least age at which segments go, by the settings of any log at any time."""
        self.count = 0
        """How many cold extents took the place of others."""

    def watch(self, store: ColdStore) -> None:
        """Judge what happens in a store."""
        self._store = store
        store.on_deleted = self._check_deleted

    # Objects

    def _check_deleted(self, url: str) -> None:
        """T1: no ledger names it."""
        require(
            STAY,
            holds=url not in self._owners,
            message=f"{url} is deleted, and {self._owners.get(url)} names it",
        )
        catalog = self._catalog
        if catalog is not None:
            catalog.check_deleted(url)

    @property
    def _catalog(self) -> Catalog | None:
        return None if self._store is None else self._store.catalog

    def on_metadata(self, ops: Iterable[Op]) -> None:
        """T1: what a ledger names from now on is there."""
        if self._store is None:
            return
        for op in ops:
            if depth(op.path, self._paths.ledgers) != 3:
                continue
            for url in self._named.pop(op.path, ()):
                del self._owners[url]
            node = self._tree._find(op.path)
            urls = () if node is None else read_ledger(node.value).objects
            for url in urls:
                require(
                    STAY,
                    holds=url in self._store.objects,
                    message=f"{op.path} names {url}, which is not there",
                )
                self._owners[url] = op.path
            if urls:
                self._named[op.path] = urls

    # Objects that take the place of ledgers

    def is_cold(self, ledger_id: int) -> bool:
        """Return whether a ledger that is there is cold."""
        ledger = self._ledger(ledger_id)
        return ledger is not None and ledger.is_cold

    def _ledger(self, ledger_id: int) -> StoredLedger | None:
        node = self._tree._find(self._paths.ledger(ledger_id))
        return None if node is None else read_ledger(node.value)

    def check_swap(self, ledger_id: int, path: str, value: bytes) -> None:
        """T2, T3: a node of a log names a cold ledger for the first time."""
        ledger = self._ledger(ledger_id)
        assert ledger is not None
        assert self._store is not None
        self.count += 1
        require(
            READ_BACK,
            holds=bool(ledger.objects),
            message=f"{path} names ledger {ledger_id}, which has no objects",
            ledger_id=ledger_id,
        )
        for url in ledger.objects:
            stored = self._store.objects[url]
            require(
                READ_BACK,
                holds=stored.is_read_back,
                message=f"{path} names ledger {ledger_id}, and {url} was not read back whole",
                ledger_id=ledger_id,
            )
        (extent,) = (each for each in extents_in(path, value) if each.ledger == ledger_id)
        rows = sum(_rows_of(self._store.objects[url].data) for url in ledger.objects)
        require(
            READ_BACK,
            holds=rows == extent.records,
            message=f"{path} has {extent.records} records in ledger {ledger_id}, not {rows}",
            ledger_id=ledger_id,
        )
        age_ms = now_ms() - (extent.last_ms - self._epoch_ms)
        require(
            AGED,
            holds=age_ms >= self.after_ms,
            message=f"{path}: ledger {ledger_id} was tiered at an age of {age_ms} ms",
            ledger_id=ledger_id,
        )

    # The end

    def leftovers(self) -> Iterator[str]:
        """Yield the objects that no ledger names."""
        if self._store is not None:
            found = [url for url in self._store.objects if url not in self._owners]
            catalog = self._catalog
            for url in found:
                if catalog is None or not catalog.is_kept(url):
                    yield f"object {url}"

    def waiting(self, nodes: Mapping[str, Versioned]) -> list[str]:
        """Return the completed segments that should be in objects by now, and are not."""
        found = []
        for head_path in (each for each in nodes if depth(each, self._paths.heads) == 2):
            settings = nodes.get(f"{head_path}/settings")
            tier = None if settings is None else read_tier(settings.value)
            if tier is None:
                continue
            head = read_head(nodes[head_path].value)
            before_ms = now_ms() + self._epoch_ms - tier.after_ms
            for path in completed_segments_of(head_path, nodes):
                lssn = int(path.rpartition("/")[2])
                extents = _extents_of(path, nodes)
                is_old = all(each.last_ms <= before_ms for each in extents)
                stays = lssn == head.producers_lssn or DLSN(lssn, 0, 0) < head.first_active
                if is_old and not stays and not all(self.is_cold(e.ledger) for e in extents):
                    found.append(path)
        return found

    def check_done(self) -> None:
        """T4: after healing all that is old enough is in objects."""
        waiting = self.waiting(self._tree.dump())
        require(DONE, holds=not waiting, message=f"{waiting[:3]} are old, and not in objects")
        if self._catalog is not None:
            self._catalog.check_followed(list(self._owners), self._is_segment_cold)

    def tables_follow(self) -> bool:
        """Return whether the tables have what is cold."""
        if self._catalog is None:
            return True
        found = self._catalog.differences(list(self._owners), self._is_segment_cold)
        return next(found, None) is None

    def _is_segment_cold(self, path: str) -> bool:
        extents = _extents_of(path, self._tree.dump())
        return all(self.is_cold(each.ledger) for each in extents)

    def check_rows(self, places: Mapping[bytes, tuple[DLSN, int, int, int]]) -> None:
        """T5: each row that a reader was given stands in its object as the reader got it.

        Args:
            places: of each payload its position, sequence id, transaction id and timestamp.
        """
        for url in self._owners:
            assert self._store is not None
            table = pq.read_table(pa.BufferReader(self._store.objects[url].data))
            payloads = table["value" if "value" in table.column_names else PAYLOAD].to_pylist()
            columns = [table[name].to_pylist() for name in _PLACE[:5]]
            columns.append(table["_timestamp"].cast(pa.int64()).to_pylist())
            for payload, *place in zip(payloads, *columns, strict=True):
                known = places.get((payload or b"").rstrip(b" "))
                lssn, entry, slot, txid, sequence_id, time_ms = place
                found = (DLSN(lssn, entry, slot), sequence_id, txid, time_ms)
                require(
                    SAME,
                    holds=known is None or known == found,
                    message=f"{url} has {payload!r} at {found}, and a reader got it at {known}",
                )


def _extents_of(path: str, nodes: Mapping[str, Versioned]) -> list[StoredExtent]:
    """Return the extents of a completed segment and of its chunks."""
    below = [each for each in nodes if each == path or each.startswith(f"{path}/")]
    return [e for each in below for e in extents_in(each, nodes[each].value)]


def _rows_of(data: bytes) -> int:
    rows: int = pq.read_metadata(pa.BufferReader(data)).num_rows
    return rows
