"""The lock of a writer that is gone: deleted if it is that one's, and no other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fixtures.memory_namespace import MemoryCluster, on_log, record

if TYPE_CHECKING:
    import pytest

    from dlcore.backends.direct.log import DirectLog


def test_the_lock_of_the_one_that_was_meant_is_deleted() -> None:
    """Once; another writer's lock stays, and so does one's own."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        owner = await cluster.open("gone")
        logs = (await cluster.open("b")).log_context.logs
        assert not await logs.locks.break_one(log._log, "gone"), "there is none yet"
        writer = await (await owner.open_log("clicks")).open_writer()
        assert not await owner.log_context.logs.locks.break_one(log._log, "gone"), "it is its own"
        assert not await logs.locks.break_one(log._log, "other"), "another writer has it"
        held = await logs.locks.holder_of(log._log)
        assert held is not None
        assert held.owner == "gone"
        assert await logs.locks.break_one(log._log, "gone")
        assert await logs.locks.holder_of(log._log) is None
        assert not await logs.locks.break_one(log._log, "gone")
        await writer.abort()

    on_log(body)


def test_a_lock_whose_owner_is_at_work_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its deletion the owner writes to it, as it does at each turn."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        writer = await (await (await cluster.open("owner")).open_log("clicks")).open_writer()
        logs = (await cluster.open("b")).log_context.logs
        delete, owners = logs._store.delete, cluster.stores["owner"]

        async def late(path: str, **more: Any) -> None:
            node = await owners.get(path)
            assert node is not None
            await owners.put(path, node.value, version=node.version)
            await delete(path, **more)

        monkeypatch.setattr(logs._store, "delete", late)
        assert not await logs.locks.break_one(log._log, "owner")
        assert await logs.locks.holder_of(log._log) is not None
        await writer.write(record(1))
        await writer.aclose()

    on_log(body)
