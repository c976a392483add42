"""Positions of subscribers over an endpoint: the last reader that took one moves it, once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from dlcore.backends.flight.subscriptions import show
from dlcore.base import backoff
from dlcore.base.errors import (
    LogNotFoundError,
    MetadataConnectionError,
    OverCapacityError,
    OwnershipAcquireFailedError,
    SubscriptionMovedError,
)
from dlcore.base.ids import DLSN
from dlcore.log.metadata.values import LogKey, Mark
from dlcore.log.reading.holding import Seen
from dlcore.log.reading.subscriptions import SubscriptionHold
from dlcore.proxy.actions import Actions
from tests.dlcore.backends.test_lost_answers import losing_the_answer
from tests.dlcore.backends.test_writing import remote
from tests.dlcore.proxy.test_actions import refused
from tests.fixtures.aio import until
from tests.fixtures.interrupted_store import InterruptedStore
from tests.fixtures.memory_namespace import MemoryCluster, on_log, record
from tests.fixtures.served_proxies import Proxies, with_proxies

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dlcore.backends.direct.log import DirectLog
    from dlcore.backends.flight.log import FlightLog
    from dlcore.flight.needs import Pass
    from dlcore.metadata.port import MetadataStore
    from tests.fixtures.simulated_store import SimulatedStore


async def both(served: Proxies, count: int = 5) -> tuple[DirectLog, FlightLog]:
    """Return the log of the core, with records of an entry each, and the one over proxies."""
    direct = await served.cluster.namespaces[0].open_log("clicks")
    async with await direct.open_writer() as writer:
        for txid in range(count):
            await writer.write(record(txid))
    await served.start()
    return direct, await remote(served)


def test_the_last_reader_that_takes_it_has_it() -> None:
    """Another one over an endpoint, or of the core, which holds off others as long as it reads."""

    async def scenario(served: Proxies) -> None:
        direct, log = await both(served)
        first = await log.open_reader(subscriber="s")
        async with await log.open_reader(subscriber="s") as second:
            await second.commit(DLSN(1, 2, 0))
            for _ in range(2):
                with pytest.raises(SubscriptionMovedError):
                    await first.commit(DLSN(1, 4, 0))
            async with await direct.open_reader(subscriber="s") as by_lock:
                assert (await by_lock.read_bulk(1))[0].txid == 2
                with pytest.raises(SubscriptionMovedError):
                    await second.commit(DLSN(1, 4, 0))
                for call in (
                    log.open_reader(subscriber="s"),
                    log.move_subscription("s", txid=3),
                    log.delete_subscription("s"),
                ):
                    with pytest.raises(OwnershipAcquireFailedError, match="subscriber 's'"):
                        await call
                await by_lock.commit()
        assert await log.get_subscriptions() == {"s": DLSN(1, 3, 0)}
        late = await log.open_reader(subscriber="s")
        assert await log.move_subscription("s", txid=1) == DLSN(1, 1, 0)
        assert await log.move_subscription("s", timestamp_ms=0) == DLSN(1, 0, 0)
        assert await log.move_subscription("s") == DLSN.INITIAL
        with pytest.raises(SubscriptionMovedError):
            await late.commit()
        assert await log.delete_subscription("s")
        assert not await log.delete_subscription("s")
        for each in (first, late):
            await each.aclose()

    with_proxies("clicks")(scenario)


def test_a_reader_of_the_core_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the proxy's configuration says; the client names the holder, after a while."""
    caplog.set_level(logging.WARNING, logger="dlcore.backends")
    monkeypatch.setattr(backoff, "REPORTED_AFTER_S", 0.05)

    async def scenario(served: Proxies) -> None:
        direct, log = await both(served)
        context = served.namespaces[0].log_context
        object.__setattr__(context, "config", replace(context.config, lock_timeout_s=60))
        async with await direct.open_reader(subscriber="s") as by_lock:
            waiting = asyncio.create_task(log.open_reader(subscriber="s"))
            with pytest.raises(OwnershipAcquireFailedError):  # a move does not wait
                await log.move_subscription("s")
            await until(lambda: bool(warnings()))
            assert not waiting.done()
            await by_lock.commit(DLSN(1, 3, 0))
        async with await waiting as reader:
            assert reader.position == DLSN(1, 3, 0)
        (only,) = warnings()
        assert only.startswith("log 'clicks': another reader has subscriber 's': direct since 2023")
        assert only.endswith("; waiting for as long as the proxy does")

    def warnings() -> list[str]:
        return [each.message for each in caplog.records if each.name.startswith("dlcore.backends")]

    with_proxies("clicks")(scenario)


def test_a_completed_call_is_not_done_again() -> None:
    """If the answer is lost it is asked for again, and no stored position is overwritten."""

    async def scenario(served: Proxies) -> None:
        direct, log = await both(served)
        with losing_the_answer("move_subscription"):
            reader = await log.open_reader(subscriber="s")
        with losing_the_answer("move_subscription"):
            await reader.commit(DLSN(1, 2, 0))
        await reader.commit(DLSN(1, 1, 0))
        assert await log.get_subscriptions() == {"s": DLSN(1, 1, 0)}

        async def take() -> None:
            async with await direct.open_reader(subscriber="s") as other:
                await other.commit(DLSN(1, 3, 0))

        with (
            losing_the_answer("move_subscription", take),
            pytest.raises(SubscriptionMovedError),
        ):
            await reader.commit(DLSN(1, 4, 0))
        assert await log.get_subscriptions() == {"s": DLSN(1, 3, 0)}
        tokens: list[str] = []

        async def note_and_take() -> None:
            tokens.append((await show(log._calls, log._log))["s"].mark.token)
            await take()

        with losing_the_answer("move_subscription", note_and_take):  # taken twice
            again = await log.open_reader(subscriber="s")
        # A reader that was replaced does not come back as the same one.
        assert (await show(log._calls, log._log))["s"].mark.token not in tokens
        await again.commit(DLSN(1, 4, 0))
        with losing_the_answer("delete_subscription"):
            assert await log.delete_subscription("s")
        assert await log.get_subscriptions() == {}
        with pytest.raises(SubscriptionMovedError):
            await again.commit()
        await log.move_subscription("s", txid=3)
        with (
            losing_the_answer("delete_subscription", take),
            pytest.raises(SubscriptionMovedError),
        ):
            await log.delete_subscription("s")
        for each in (reader, again):
            await each.aclose()

    with_proxies("clicks")(scenario)


def test_a_commit_whose_end_is_not_known_is_no_end() -> None:
    """No proxy answered in time, or no caller waited for it: the next one goes on behind it."""

    async def scenario(served: Proxies) -> None:
        _, log = await both(served)
        reader = await log.open_reader(subscriber="s")
        perform = Actions.perform

        async def perform_silently(self: Actions, name: str, body: bytes, entry: Pass) -> bytes:
            await perform(self, name, body, entry)
            raise MetadataConnectionError("the answer is lost")

        log._calls.patience_s = 0.001
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Actions, "perform", perform_silently)
            with pytest.raises(MetadataConnectionError):
                await reader.commit(DLSN(1, 2, 0))
        log._calls.patience_s = 60.0
        assert reader.committed == DLSN.INITIAL  # as far as it knows
        await reader.commit(DLSN(1, 3, 0))
        assert await log.get_subscriptions() == {"s": reader.committed} == {"s": DLSN(1, 3, 0)}
        answered = asyncio.Event()

        async def stop() -> None:
            answered.set()
            await asyncio.Event().wait()

        with losing_the_answer("move_subscription", stop):
            task = asyncio.create_task(reader.commit(DLSN(1, 4, 0)))
            await answered.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await reader.commit(DLSN(1, 1, 0))
        assert await log.get_subscriptions() == {"s": DLSN(1, 1, 0)}
        await reader.aclose()

    with_proxies("clicks")(scenario)


def test_a_late_answer_changes_nothing() -> None:
    """A request that was given up, and is carried out after those that followed it."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        key = LogKey(name="clicks", log_id=log.log_id)

        @contextlib.asynccontextmanager
        async def held() -> AsyncIterator[SubscriptionHold]:
            hold = SubscriptionHold(log._context, key, "s")  # as each request has its own
            try:
                yield hold
            finally:
                await hold.release()

        async def move(entry: int, mark: Mark | None, token: str = "me") -> Mark:
            async with held() as hold:
                return await hold.move(DLSN(1, entry, 0), token=token, mark=mark, timeout_s=0)

        async def forget(mark: Mark) -> None:
            async with held() as hold:
                await hold.forget(mark)

        first = await move(1, None)
        assert await move(1, None) == first == Mark(1, "me")
        second = await move(2, first)
        for late in (None, first):
            with pytest.raises(SubscriptionMovedError):
                await move(1, late)
        assert await move(2, first) == second
        await forget(second)
        await forget(second)
        assert await move(1, None) == first
        async with held() as hold:
            assert await hold.look() == Seen(DLSN(1, 1, 0), first)
        await move(2, first, "you")
        with pytest.raises(SubscriptionMovedError):  # as often moved, by another one
            await move(3, second)
        with pytest.raises(SubscriptionMovedError):
            await forget(second)
        assert await log.get_subscriptions() == {"s": DLSN(1, 2, 0)}

    on_log(body)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("at", range(1, 8))
def test_lost_replies_of_the_metadata_store(at: int, *, applied: bool) -> None:
    """Whichever request of a move it is, the position is stored once."""

    async def body(cluster: MemoryCluster, log: DirectLog) -> None:
        wrapped: list[InterruptedStore] = []

        def wrap(store: SimulatedStore) -> MetadataStore:
            wrapped.append(InterruptedStore(store))
            return cast("MetadataStore", wrapped[0])

        other = await cluster.open("b", wrap=wrap)

        async def lose() -> None:
            cluster.stores["b"].lose_next_reply(applied=applied)

        key = LogKey(name="clicks", log_id=log.log_id)
        hold = SubscriptionHold(other.log_context, key, "s")
        wrapped[0].arm(at, lose)
        mark = await hold.move(DLSN(1, 1, 0), token="me", mark=None, timeout_s=0)
        await hold.release()
        hold = SubscriptionHold(other.log_context, key, "s")
        wrapped[0].arm(at, lose)
        assert await hold.move(DLSN(1, 2, 0), token="me", mark=mark, timeout_s=0) == Mark(2, "me")
        wrapped[0].disarm()
        assert await log.get_subscriptions() == {"s": DLSN(1, 2, 0)}

    on_log(body)


def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that has too many takes no other."""
    monkeypatch.setattr("dlcore.log.reading.holding.SUBSCRIPTIONS_MAX", 2)

    async def scenario(served: Proxies) -> None:
        _, log = await both(served)
        for name in ("a", "b"):
            await log.move_subscription(name, txid=1)
        log._calls.patience_s = 0.01
        for call in (log.move_subscription("c"), log.open_reader(subscriber="c")):
            with pytest.raises(OverCapacityError, match="has 2 subscriptions"):
                await call
        await log.move_subscription("a", txid=2)

    with_proxies("clicks")(scenario)


def test_subscriptions_go_with_their_log() -> None:
    """One that is made again under its name has none of them; one that is renamed has all."""

    async def scenario(served: Proxies) -> None:
        _, log = await both(served)
        namespace = served.cluster.namespaces[0]
        reader = await log.open_reader(subscriber="s")
        await reader.commit(DLSN(1, 1, 0))
        await namespace.rename_log("clicks", "older")
        await reader.commit(DLSN(1, 2, 0))
        assert await log.get_subscriptions() == {"s": DLSN(1, 2, 0)}
        await namespace.delete_log("older")
        await namespace.create_log("clicks")
        with pytest.raises(SubscriptionMovedError):
            await reader.commit(DLSN(1, 3, 0))
        for call in (
            log.get_subscriptions(),
            log.move_subscription("s"),
            log.delete_subscription("s"),
            log.open_reader(subscriber="s"),
        ):
            with pytest.raises(LogNotFoundError):
                await call
        assert await (await remote(served)).get_subscriptions() == {}
        await reader.aclose()

    with_proxies("clicks")(scenario)


def test_clients_of_other_languages() -> None:
    """By name, with a mark as it came."""

    async def scenario(served: Proxies) -> None:
        await both(served)
        client = await served.start()
        kept = {"log": "clicks", "subscriber": "s"}
        assert await client.act("subscriptions", log="clicks") == {"subscriptions": {}}
        moved = await client.act("move_subscription", **kept, dlsn="1:1:0", token="me")
        moved = await client.act("move_subscription", **kept, dlsn="1:2:0", token="me", **moved)
        found = {"s": {"dlsn": "1:2:0", **moved}}
        assert await client.act("subscriptions", log="clicks") == {"subscriptions": found}
        assert await client.act("subscriptions", **kept) == {"subscriptions": found}
        assert await client.act("delete_subscription", **kept, **moved) == {}
        assert await client.act("subscriptions", **kept) == {"subscriptions": {}}
        for status, body in (
            ("FAILED_PRECONDITION", {"dlsn": "1:1:0", "token": "me", **moved}),
            ("INVALID_ARGUMENT", {"dlsn": "1:1:0", "token": ""}),
            ("INVALID_ARGUMENT", {"dlsn": "later", "token": "me"}),
            ("INVALID_ARGUMENT", {"dlsn": "1:1:0", "token": "me", "log_id": "../x"}),
        ):
            assert (await refused(client, "move_subscription", **kept, **body))[0] == status

    with_proxies("clicks")(scenario)
