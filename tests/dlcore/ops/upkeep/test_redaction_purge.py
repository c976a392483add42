"""Old copies of redacted rows: each that cannot go yet is reported, and goes later."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from dlcore.base.errors import (
    ConfigurationError,
    ObjectStoreError,
    UnexpectedError,
    UnsupportedError,
)
from dlcore.ledger.metadata.values import BookieCookie, Erased, Erasure
from dlcore.log.cold.delta_format import before_last_checkpoint
from dlcore.log.metadata import redactions
from dlcore.log.upkeep.staged import list_staged, settle
from dlcore.metadata.stored import decode, encode
from dlcore.ops.upkeep.redaction_purge import Purger
from dlcore.ops.upkeep.tierer import LogTierer
from tests.dlcore.ops.upkeep.test_merger import forget_ledgers
from tests.dlcore.ops.upkeep.test_redactor import (
    CONFIG,
    NEEDLE,
    SCHEMA,
    TIER,
    WRITING,
    Scene,
    on_scene,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.log.cold.objects import ListedObject
    from dlcore.metadata.port import MetadataStore


def test_versions_before_the_last_checkpoint_go() -> None:
    """Goal: the newest version can still be read, by its checkpoint; what is not known stays."""
    names = [f"{number:020}.json" for number in range(4)]
    assert before_last_checkpoint([*names, "_last_checkpoint"]) == []
    parts = [f"{2:020}.checkpoint.parquet", f"{1:020}.checkpoint.0000000001.parquet"]
    gone = before_last_checkpoint([*names, *parts, "_last_checkpoint", f"{0:020}.crc"])
    assert sorted(gone) == sorted([names[0], names[1], parts[1], f"{0:020}.crc"])


def test_truncated_rows_that_stay_are_reported() -> None:
    """Goal: a log that keeps truncated segments keeps the rows; once they go, nothing is left."""

    async def body(scene: Scene) -> None:
        log = await scene.namespace.open_log("clicks")
        await log.update_settings(retention_s=10_000_000, explicit_truncation=True)
        segments = await log.get_log_segments()
        await log.truncate(segments[2].start)
        receipt = await (await scene.redactor()).redact()
        assert [each.split(", and has")[0] for each in receipt.left] == [
            "segment 1 is truncated",
            "segment 2 is truncated",
        ]
        await log.update_settings(retention_s=None, explicit_truncation=False)
        assert (await (await scene.redactor()).redact()).left == ()
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_purging_removes_copies_of_records_that_the_log_has_no_more() -> None:
    """Goal: rows that were truncated before are in no file either, if that is asked for."""

    async def body(scene: Scene) -> None:
        log = await scene.namespace.open_log("clicks")
        await log.truncate((await log.get_log_segments())[-1].start)
        await scene.namespace.log_context.tidier.settled()
        where = "name = 'unknown'"
        receipt = await (await scene.redactor(where=where)).redact()
        assert (receipt.done.rows, receipt.done.objects, receipt.is_purged) == (0, 0, False)
        assert any(".parquet" in each for each in scene.copies())
        receipt = await (await scene.redactor(where=where)).redact(purge=True)
        assert (receipt.done.rows, receipt.left, receipt.is_purged) == (0, (), True)
        assert receipt.done.objects > 0
        assert not any(".parquet" in each for each in scene.copies())

    on_scene(body)


def test_a_silent_tier_is_reported_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: an operator whose own tier answers learns why another one has to, before and after."""

    async def body(scene: Scene) -> None:
        async def refuse(url: str) -> AsyncGenerator[Sequence[ListedObject], None]:
            if url.startswith(TIER):
                raise ObjectStoreError(f"listing {url}: Permission denied")
            yield ()

        monkeypatch.setattr(scene.objects, "list_below", refuse)
        found = f"tier {TIER} must .*Permission denied; see dlog cluster tiers.*forget-tier {TIER}"
        with pytest.raises(ObjectStoreError, match=found):
            await (await scene.redactor()).redact()
        receipt = await (await scene.redactor(where="name = 'unknown'")).redact(purge=True)
        assert re.search(found, "; ".join(receipt.left))

    on_scene(body)


def test_copies_of_earlier_merges_and_tiers_go_too() -> None:
    """Goal: ledgers that wait for their grace, of a log that has been renamed."""

    async def body(scene: Scene) -> None:
        context = scene.namespace.log_context
        await scene.namespace.rename_log("clicks", "hits")
        await scene.namespace.rename_log("hits", "clicks")
        tierer = LogTierer(context, scene.namespace.staging_owner, CONFIG)
        scene.cluster.clocks["driver"].current_ms += 10_000
        assert await tierer.tier(await context.logs.find("clicks")) > 0
        assert len(scene.copies()) > 0
        receipt = await (await scene.redactor()).redact()
        assert receipt.left == ()
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)


def test_the_ledgers_of_a_redaction_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the node stays within what a metadata store takes; the error says what helps."""

    async def body(scene: Scene) -> None:
        monkeypatch.setattr(redactions, "LEDGERS_MAX", 2)
        with pytest.raises(
            UnsupportedError, match="more than 2 ledgers are replaced: let a worker"
        ):
            await (await scene.redactor()).redact()

    on_scene(body)


async def answer(scene: Scene, name: str, token: str, erased: Erased) -> None:
    """Answer as a bookie."""
    store, path = scene.namespace.log_context.store, scene.cluster.paths.erasure_at(token, name)
    await store.delete(path) if await store.get(path) else None
    await store.create(path, encode(erased))


def test_it_ends_when_all_bookies_have_answered() -> None:
    """Goal: each bookie that has a cookie is asked; reasons are reported; then nothing is left."""

    async def body(scene: Scene) -> None:
        store, paths = scene.namespace.log_context.store, scene.cluster.paths
        for name in ("bookie-1", "away"):
            cookie = BookieCookie(
                name=name, incarnation="i", cluster_id=scene.cluster.cluster_id, created_ms=0
            )
            await store.create(paths.cookie(name), encode(cookie), make_parents=True)
        receipt = await (await scene.redactor()).redact()
        assert receipt.left == (
            "bookie away is down, and erases when it is back",
            "bookie bookie-1 has not answered yet",
        )
        assert receipt.done.rows == 20
        (token,) = await store.get_children(paths.erasures) or []
        request = decode(Erasure, (await _node(store, paths.erasure(token))).value, source=token)
        assert len(request.ledgers) == len(receipt.done.ledgers)
        await answer(scene, "away", token, Erased(incarnation="earlier"))
        await answer(scene, "bookie-1", token, Erased(incarnation="i", waits="no room"))
        receipt = await (await scene.redactor()).redact()
        assert receipt.left == (
            "bookie away is down, and erases when it is back",
            "bookie bookie-1: no room",
        )
        with pytest.raises(ConfigurationError, match="has a redaction that is not finished, where"):
            await (await scene.redactor(where="user_id = 43")).redact()
        for name in ("away", "bookie-1"):
            await answer(scene, name, token, Erased(incarnation="i"))
        receipt = await (await scene.redactor()).redact()
        assert (receipt.left, receipt.done.rows) == ((), 20)
        assert await store.get_children(paths.erasures) == []

    on_scene(body)


async def two_purgers(scene: Scene) -> tuple[Purger, Purger]:
    """Return two clients of a redaction that waits for one bookie, as after a lost session."""
    context, paths = scene.namespace.log_context, scene.cluster.paths
    cookie = BookieCookie(
        name="away", incarnation="i", cluster_id=scene.cluster.cluster_id, created_ms=0
    )
    await context.store.create(paths.cookie("away"), encode(cookie), make_parents=True)
    left = (await (await scene.redactor()).redact()).left
    assert left == ("bookie away is down, and erases when it is back",)
    owner, log = scene.namespace.staging_owner, await context.logs.find("clicks")
    return Purger(context, owner, log), Purger(context, owner, log)


def test_a_client_that_was_overtaken_asks_no_bookie_again() -> None:
    """Goal: once a redaction is finished, no request of it appears, which would stay for ever."""

    async def body(scene: Scene) -> None:
        store, paths = scene.namespace.log_context.store, scene.cluster.paths
        slow, fast = await two_purgers(scene)
        undropped = slow._undropped

        async def overtaken(ids: Sequence[int]) -> list[str]:
            await fast.finish()
            return await undropped(ids)

        with patch.object(slow, "_undropped", overtaken):
            assert await slow.ask() == ("another client goes on with the same redaction",)
        assert await store.get_children(paths.erasures) == []
        with pytest.raises(UnexpectedError, match="was removed meanwhile: run the command again"):
            await slow.ask()

    on_scene(body)


def test_requests_and_answers_that_come_meanwhile_go_with_their_redaction() -> None:
    """Goal: who finishes a redaction looks again after each change of it, and leaves nothing."""

    async def body(scene: Scene) -> None:
        store, paths = scene.namespace.log_context.store, scene.cluster.paths
        slow, fast = await two_purgers(scene)
        (token,) = await store.get_children(paths.erasures) or []
        requests, answers, looks = fast._requests, fast._answers, list[str]()

        async def disturbed(of: str) -> list[str]:
            found = await requests(of)
            looks.append(of)
            if len(looks) == 1:  # it has seen the request, and none of its answers
                await fast._withdraw(token)
            elif len(looks) == 2:  # it has seen no request
                await slow.ask()
            return found

        async def answered(request: str) -> list[str]:
            found = await answers(request)
            if len(looks) == 3:  # it has seen the request, and no answer
                await answer(scene, "away", token, Erased(incarnation="i"))
            return found

        with (
            patch.object(fast, "_requests", disturbed),
            patch.object(fast, "_answers", answered),
        ):
            await fast.finish()
        assert len(looks) == 4
        assert await store.get_children(paths.erasures) == []
        assert await fast.read() is None
        await fast.finish()

    on_scene(body)


async def _node(store: MetadataStore, path: str) -> Any:
    return await store.get(path)


def test_ledgers_that_cannot_go_yet_are_reported_and_bookies_are_asked_later() -> None:
    """Goal: a repair may still copy, an append still fill; no answer counts that came before."""

    async def body(scene: Scene) -> None:
        context = scene.namespace.log_context
        task = await scene.cluster.open("task", config=WRITING)
        writer = await task.open_staging_writer(identity="job")
        await writer.write_batch("clicks", pa.record_batch([[42], [NEEDLE]], schema=SCHEMA))
        extents = await writer.stage()
        append = await scene.namespace.begin_append("job", 1)
        assert (await append.commit(extents)).committed
        await scene.write(5)  # completes the segment of the append
        (ledger_id,) = await list_staged(context, "job")
        receipt = await (await scene.redactor()).redact()
        assert receipt.left == (
            f"ledger {ledger_id} is being filled by an append (dlog staging list)",
            "bookies are asked once these ledgers are deleted",
        )
        await writer.aclose()
        await settle(context, [ledger_id])
        lock = scene.cluster.paths.repair_lock(ledger_id)
        await context.store.create(lock, b"a worker", ephemeral=True, make_parents=True)
        receipt = await (await scene.redactor()).redact()
        assert receipt.left[0] == f"ledger {ledger_id} is being repaired"
        await context.store.delete(lock)
        assert (await (await scene.redactor()).redact()).left == ()
        forget_ledgers(scene.cluster)
        assert scene.copies() == []

    on_scene(body)
