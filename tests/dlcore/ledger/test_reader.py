"""A reader beside a metadata store whose servers are not all up to date.

Goal: a LAC read never trusts an ensemble that was replaced.  Method: a store that answers with what
it knew until it is asked to catch up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from dlcore.config import LedgerClientConfig
from dlcore.ledger.reader import LedgerReader
from dlcore.ledger.store import LedgerStore
from dlcore.metadata.memory import MemoryTree
from dlcore.metadata.paths import NamespacePaths
from dlcore.transport.memory import MemoryBookie, MemoryBookieClient
from tests.fixtures.aio import run
from tests.fixtures.ledgers import LEDGER_ID, bookie, metadata_of

if TYPE_CHECKING:
    from dlcore.metadata.memory import MemoryStore
    from dlcore.metadata.port import MetadataStore, Versioned

PATHS = NamespacePaths("/dlog")


class LaggingStore:
    """A session with a server that learns of changes only when it is made to."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._known: dict[str, Versioned | None] = {}

    async def get(self, path: str) -> Versioned | None:
        """Return the node as it was after the last `sync`."""
        if path not in self._known:
            self._known[path] = await self._store.get(path)
        return self._known[path]

    async def sync(self, path: str) -> None:
        """Catch up."""
        await self._store.sync(path)
        self._known.clear()


def test_a_published_lac_is_seen_through_a_lagging_server() -> None:
    """The bookies of the old ensemble would answer, and know less."""

    async def scenario() -> None:
        tree = MemoryTree()
        store = tree.connect()
        ledgers = LedgerStore(store, PATHS)
        await store.create(PATHS.ledgers, make_parents=True)
        versioned = await ledgers.create(metadata_of((0, "ABC")))
        members = {name: MemoryBookie(bookie(name)) for name in "ABCDEF"}
        for name in "ABC":
            members[name].write_lac(LEDGER_ID, 4)
        lagging = LedgerStore(cast("MetadataStore", LaggingStore(tree.connect())), PATHS)
        reader = LedgerReader(
            (await lagging.read(LEDGER_ID)).metadata,
            bookies=MemoryBookieClient(members.values()),
            ledgers=lagging,
            config=LedgerClientConfig(),
        )
        assert await reader.read_last_add_confirmed() == 4
        await ledgers.write(metadata_of((0, "ABC"), (5, "DEF")), version=versioned.version)
        for name in "DEF":
            members[name].write_lac(LEDGER_ID, 9)
        assert (await reader.refresh()).last_ensemble.first_entry_id == 0
        assert await reader.read_last_add_confirmed() == 9

    run(scenario())
