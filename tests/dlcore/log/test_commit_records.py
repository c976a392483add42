"""Commit records: kept for identities that go on, removed for those of one append."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from dlcore.base.errors import MetadataConnectionError
from dlcore.metadata.port import ANY_VERSION
from tests.fixtures.memory_namespace import MemoryCluster, on_log, read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.log.metadata.segment import StagedExtent
    from dlcore.metadata.port import Op


async def stage(namespace: DirectNamespace, *, identity: str) -> StagedExtent:
    """Stage one record."""
    async with await namespace.open_staging_writer(identity=identity) as writer:
        await writer.write_batch("clicks", pa.record_batch({"value": [b"a"]}))
        (extent,) = await writer.stage()
    return extent


@pytest.mark.parametrize("lost", [None, "applied", "not applied"])
def test_the_record_of_an_identity_of_one_append(lost: str | None) -> None:
    """It goes once the commit is known; the append itself still tells what became of it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        record_path = cluster.paths.commit("once")
        append = await namespace.begin_append("once", 1, keep_record=False)
        extent = await stage(namespace, identity="once")
        if lost is not None:
            cluster.stores["a"].lose_next_reply(applied=lost == "applied")
        seen = watch_for(cluster, record_path)
        result = await append.commit([extent])
        assert result.committed
        assert await append.commit([extent]) == result
        assert await append.commit() == result
        assert seen() > 0
        await namespace.log_context.tidier.settled()
        assert record_path not in cluster.tree.dump()
        assert [r.payload for r in await read_all(log)] == [b"a"]

    on_log(body)


def watch_for(cluster: MemoryCluster, path: str) -> Callable[[], int]:
    """Return what tells how often the node was there when something changed."""
    seen: list[str] = []
    apply = cluster.tree._apply

    def apply_and_look(ops: Sequence[Op], session: int) -> None:
        apply(ops, session)
        seen.extend(op.path for op in ops if op.path == path and path in cluster.tree.dump())

    cluster.tree._apply = apply_and_look  # type: ignore[method-assign]
    return lambda: len(seen)


def test_a_record_that_cannot_be_removed_stays() -> None:
    """The append is committed nevertheless."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        extent = await stage(namespace, identity="job")
        append = await namespace.begin_append("job", 1, keep_record=False)
        store = cluster.stores["a"]
        delete = store.delete

        async def refuse(path: str, *, version: int = ANY_VERSION) -> None:
            if path == cluster.paths.commit("job"):
                raise MetadataConnectionError("planted")
            await delete(path, version=version)

        store.delete = refuse  # type: ignore[method-assign]
        assert (await append.commit([extent])).committed
        await namespace.log_context.tidier.settled()
        assert cluster.paths.commit("job") in cluster.tree.dump()

    on_log(body)


def test_another_append_s_record_is_not_removed() -> None:
    """Even if another appender takes the identity for its own."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        namespace = cluster.namespaces[0]
        first = await namespace.begin_append("job", 1, keep_record=False)
        assert (await first.commit([await stage(namespace, identity="job")])).committed
        second = await namespace.begin_append("job", 2)
        assert (await second.commit([await stage(namespace, identity="job")])).committed
        late = await namespace.begin_append("job", 2, keep_record=False)
        assert (await late.commit([])).already_committed
        await namespace.log_context.tidier.settled()
        assert cluster.paths.commit("job") in cluster.tree.dump()

    on_log(body)
