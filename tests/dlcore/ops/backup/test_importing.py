"""Export and import by their drivers: over servers, half made, refused, and in use.

Goal: the tree of an import is that of the export, made completely or not at all, on every kind of
metadata store; an export ends while much changes.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dlcore.base.errors import ConfigurationError, CorruptMetadataError, MetadataError
from dlcore.base.features import own_release
from dlcore.ledger.metadata.store import LedgerStore
from dlcore.metadata.binding import Restored, ensure_namespace, finalize_features, read_binding
from dlcore.metadata.paths import NamespacePaths
from dlcore.metadata.port import ANY_VERSION, Put, Versioned
from dlcore.metadata.stored import decode
from dlcore.ops.backup.archive import Export, packed, unpacked
from dlcore.ops.backup.exporting import export_namespace
from dlcore.ops.backup.importing import (
    IDS_SKIPPED,
    accept_restore,
    import_namespace,
    mark_of,
)
from tests.fixtures.aio import run
from tests.fixtures.memory_namespace import ManualClock, memory_cluster, record
from tests.fixtures.metadata_backend import Backend, backend, play
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from dlcore.metadata.port import MetadataStore

__all__ = ["backend"]
CLOCK = ManualClock("backup")


async def made(store: MetadataStore, root: str) -> NamespacePaths:
    """Return the paths of a namespace with something in it."""
    paths = NamespacePaths(f"{root}/one")
    await ensure_namespace(store, paths, CLOCK)
    await store.put(paths.ledger_idgen, b"17", version=-1)
    await store.create(paths.access_rules, b"rules")
    await store.create(paths.garbage_release("b"), b"x", make_parents=True)
    await store.create(paths.proxy("here"), b"", ephemeral=True)
    await store.create(paths.ledger(3), b"closed", make_parents=True)
    return paths


def test_there_and_back(backend: Backend) -> None:
    """The import is the export but for the next id, the mark, and what does not outlive a session.

    It is one namespace on every store, so a user may move between them.
    """

    async def scenario(store: MetadataStore, root: str) -> None:
        paths, other = await made(store, root), NamespacePaths(f"{root}/a/two")
        export, copy = await export_namespace(store, paths, CLOCK)
        assert (copy.logs, copy.ledgers, copy.missing) == (0, 1, ())
        assert export.header.cluster_id == (await read_binding(store, paths)).cluster_id
        count = await import_namespace(store, other, CLOCK, export)
        assert await read_binding(store, other) == await read_binding(store, paths)
        assert await LedgerStore(store, other).next_ledger_id() == 17 + IDS_SKIPPED
        again, _ = await export_namespace(store, other, CLOCK)
        assert count == len(again.nodes)
        expected = dict(export.nodes)
        expected["/ledgers/idgen"] = b"%d" % (17 + IDS_SKIPPED)
        restored = again.nodes["/bookies/restored"]
        assert decode(Restored, restored, source="").exported_ms == export.header.exported_ms
        assert again.nodes == expected | {"/bookies/restored": restored}
        assert "/access-rules" in expected
        assert not any("garbage/" in path or "proxies/" in path for path in expected)
        assert await accept_restore(store, other)
        assert not await accept_restore(store, other)

    play(backend, scenario)


def test_a_log_that_lacks_a_node_is_left_out() -> None:
    """Found out by a second pass, for its head has not changed; the file names it again."""

    async def main() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("driver")
            context = namespace.log_context
            for name in ("whole", "damaged"):
                async with await namespace.open_log(name, create_if_missing=True) as log:
                    for number in range(2):
                        async with await log.open_writer() as writer:
                            await writer.write(record(number))
            store, known = context.store, await context.logs.find("damaged")
            await store.delete(context.logs.paths_of(known).segment(1))
            export, copy = await export_namespace(store, context.paths, CLOCK)
        (left_out,) = copy.left_out
        assert (left_out.log, copy.logs) == ("damaged", 1)
        again = unpacked(packed(export), source="file").header
        assert (again.left_out, again.logs) == (copy.left_out, 1)

    run(main())


def test_finalized_features_come_along() -> None:
    """The binding that has them is of another layout."""

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create("/t")
        paths, other = await made(store, "/t"), NamespacePaths("/u")
        bound = await finalize_features(store, paths, own_release().features)
        export, _ = await export_namespace(store, paths, CLOCK)
        await import_namespace(store, other, CLOCK, export)
        assert await read_binding(store, other) == bound
        with pytest.raises(ConfigurationError, match="there is a namespace at /u already"):
            await import_namespace(store, other, CLOCK, export)

    run(main())


def test_only_into_nothing() -> None:
    """Refused: a namespace, nodes of others, and an export of something else."""

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create("/t")
        paths = await made(store, "/t")
        export, _ = await export_namespace(store, paths, CLOCK)
        with pytest.raises(ConfigurationError, match="there is a namespace at /t/one already"):
            await import_namespace(store, paths, CLOCK, export)
        with pytest.raises(ConfigurationError, match=r"nodes of others \(one\)"):
            await import_namespace(store, NamespacePaths("/t"), CLOCK, export)
        with pytest.raises(CorruptMetadataError, match="of no namespace"):
            await import_namespace(store, NamespacePaths("/u"), CLOCK, Export(export.header, {}))
        assert await store.get("/u") is None

    run(main())


def test_an_interrupted_import_begins_again() -> None:
    """Before the end there is no namespace; the next import removes what the first one made."""

    async def main() -> None:
        tree = SimulatedTree()
        store = tree.connect()
        await store.create("/t")
        export, _ = await export_namespace(store, await made(store, "/t"), CLOCK)
        paths = NamespacePaths("/t/two")
        await store.create(paths.root)
        await store.create(mark_of(paths))
        await store.create(paths.ledger(9), b"left", make_parents=True)
        with pytest.raises(ConfigurationError, match="no dlog namespace"):
            await read_binding(store, paths)
        await import_namespace(store, paths, CLOCK, export)
        assert await store.get(paths.ledger(9)) is None
        assert await store.get(mark_of(paths)) is None
        assert (await read_binding(store, paths)).cluster_id == export.header.cluster_id

    run(main())


def test_a_server_that_does_not_number_its_transactions() -> None:
    """No export is better than one of several moments."""

    async def main() -> None:
        store = SimulatedTree().connect()
        await store.create("/t")
        paths = await made(store, "/t")
        get_many = store.get_many

        async def old(paths: list[str], **how: Any) -> list[Versioned | None]:
            found = await get_many(paths, **how)
            return [each and replace(each, created=0, changed=0) for each in found]

        store.get_many = old  # type: ignore[method-assign,assignment]
        with pytest.raises(MetadataError, match="does not number its transactions"):
            await export_namespace(store, paths, CLOCK)

    run(main())


class Restless:
    """A store in which the heads change several times between any two reads."""

    def __init__(self, store: MetadataStore, path: str, *, changes: int) -> None:
        self._store = store
        self._path = path
        self.changes = changes

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def get_many(self, paths: list[str], *, fresh: bool = False) -> list[Versioned | None]:
        """Read, after two changes."""
        if self.changes:
            self.changes -= 1
            node = await self._store.get(self._path)
            assert node is not None
            await self._store.multi([Put(self._path, node.value, ANY_VERSION)] * 2)
        return await self._store.get_many(paths, fresh=fresh)


def test_logs_that_change_too_fast() -> None:
    """An export waits for a moment in which a head changes at most once, and ends without it."""

    async def main() -> None:
        async with memory_cluster() as cluster:
            namespace = await cluster.open("a")
            await namespace.create_log("clicks")
            context = namespace.log_context
            head = context.paths.log_of((await context.logs.find("clicks")).log_id).head
            store = Restless(context.store, head, changes=30)
            _, copy = await export_namespace(store, context.paths, CLOCK)  # type: ignore[arg-type]
            assert (copy.logs, store.changes) == (1, 0)
            store.changes = 10**9
            with pytest.raises(MetadataError, match=r"too fast .* in 10 passes: 1 nodes .*/heads/"):
                await export_namespace(store, context.paths, CLOCK)  # type: ignore[arg-type]

    run(asyncio.wait_for(main(), 60))
