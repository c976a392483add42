"""The life of logs in a run: renames, seals, settings, watches, subscriptions.

Logs change their names among a few, are sealed by processes that do not write them, keep their
records for some seconds, and have subscribers.  Sessions of those who must notice nothing, or must
notice, end now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    AlreadyClosedError,
    AlreadyTruncatedError,
    DLError,
    EndOfStreamError,
    LogExistsError,
    OwnershipAcquireFailedError,
)
from dlcore.base.ids import DLSN
from tests.simulation.life_checkers import SETTINGS, SUBSCRIBED, WATCHED, Watching, require
from tests.simulation.log_types import TYPED
from tests.simulation.redactions import PRIVATE
from tests.simulation.stored_log import Position

if TYPE_CHECKING:
    from dlcore.log.reading.reader import DirectReader
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs

OTHER_NAMES = ("d", "e")
"""The later names of the logs of a run."""
_FOLLOWED = "s"
"""A log that keeps its name, and gets no records."""
_EXPLICIT = LogSettings(retention_s=5.0, explicit_truncation=True, segment_bytes_max=300)
_RETENTIONS_S = (None, 0.5, 3.0)
_SUBSCRIBER = "sub"
_PATIENCE_S = 60.0


def settings_of_new(name: str) -> LogSettings:
    """Return what a log of this name is created with: one keeps truncated records for a while."""
    return _EXPLICIT if name == "b" else LogSettings()


class Life:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._rng = logs.world.rng
        self._checkers = logs.world.log_checkers

    def start(self) -> None:
        """Start all processes."""
        for role, work in (
            ("renamer", self._rename),
            ("sealer", self._seal),
            ("settler", self._settle),
            ("watcher", self._watch),
            ("follower-of-settings", self._follow_settings),
            ("subscriber-0", self._subscribe),
            ("subscriber-1", self._subscribe),
        ):
            self._logs.supervise(role, work)

    def _some_name(self) -> str:
        names = self._checkers.life.names.keys() - {_FOLLOWED, TYPED, PRIVATE}
        return self._rng.choice(sorted(names)) if names else "a"

    def _lose(self, process: LogProcess) -> None:
        """End the session now and then, or lose the next reply."""
        chance = self._rng.random()
        if self._logs.is_over or not process.client.is_alive:
            return
        if chance < 0.05:
            process.note("loses its session")
            process.client.store.inner.expire()
        elif chance < 0.15:
            process.client.store.inner.lose_next_reply(applied=self._rng.random() < 0.6)

    # Names

    async def _rename(self, process: LogProcess) -> None:
        """Rename a log; make another one of the name that is free now."""
        await self._logs.sleep(self._rng.uniform(0.0, 1.0))
        old, new = self._some_name(), self._rng.choice((*self._logs.names, *OTHER_NAMES))
        log = await process.namespace.open_log(old)
        begin = len(self._checkers.life.renamed)
        for _ in range(self._rng.choice((0, 0, 1, 2))):  # of the lock, of the change itself
            process.client.store.inner.lose_next_reply(applied=self._rng.random() < 0.6)
        try:
            await log.rename(new)
        except LogExistsError:
            if new in OTHER_NAMES:
                other = await process.namespace.open_log(new)
                process.note(f"deletes log {new} for good")
                self._checkers.life.on_delete(other.log_id)
                await other.delete()
            return
        process.note(f"renamed log {old} to {new}")
        self._checkers.life.check_renamed(log.log_id, new, begin)
        if old in self._logs.names:
            await self._logs.create_again(process.namespace, old)

    # Ends

    async def _seal(self, process: LogProcess) -> None:
        """Seal a log that no client writes to; replace one that is sealed."""
        await self._logs.sleep(self._rng.uniform(0.5, 2.0))
        log = await process.namespace.open_log(self._some_name(), config=process.config)
        if await log.is_end_of_stream_marked():
            await self._logs.replace_log(process, log)
        elif self._rng.random() < 0.4:
            process.note(f"seals log {log.name}")
            self._lose(process)
            await log.mark_end_of_stream()

    # Settings

    async def _settle(self, process: LogProcess) -> None:
        """Change for how long a log keeps its records, and how large its segments are."""
        rng = self._rng
        await self._logs.sleep(rng.uniform(0.0, 1.5))
        log = await process.namespace.open_log(self._some_name())
        self._lose(process)
        if (await log.get_settings()).explicit_truncation or rng.random() < 0.4:
            await log.update_settings(
                entry_bytes=rng.choice((None, 30, 2000)),
                segment_bytes_max=rng.choice((None, 300, 1_200)),
                segment_age_max_s=rng.choice((None, 0.3, 2.0)),
            )
        else:
            settings = await log.update_settings(retention_s=rng.choice(_RETENTIONS_S))
            process.note(f"log {log.name} keeps records for {settings.retention_s} s")

    async def _follow_settings(self, process: LogProcess) -> None:
        """L10: whatever happens to its session, a writer learns what its log's settings say."""
        rng = self._rng
        config = replace(process.config, lock_enabled=False)
        log = await process.namespace.open_log(_FOLLOWED, config=config, create_if_missing=True)
        writer = await log.open_writer()
        machine = writer.machine
        try:
            while not self._logs.is_over:
                self._lose(process)
                with contextlib.suppress(DLError):
                    await log.update_settings(entry_bytes=rng.choice((None, 50, 500, 5000)))
                await self._logs.sleep(rng.expovariate(2.0))
            wanted = config.with_settings(await log.get_settings()).entry_bytes
            deadline = asyncio.get_running_loop().time() + _PATIENCE_S
            while machine.transmitter.entry_bytes != wanted:
                require(
                    SETTINGS,
                    holds=asyncio.get_running_loop().time() < deadline,
                    message=f"a writer of log {log.name} fills entries with "
                    f"{machine.transmitter.entry_bytes} bytes, and its settings say {wanted}",
                )
                await asyncio.sleep(0.5)
        finally:
            with contextlib.suppress(DLError):
                await writer.aclose()

    # Watches

    async def _watch(self, process: LogProcess) -> None:
        """L9: follow the names; in the end the reported names are those there are."""
        watching = Watching(self._checkers.life)
        watch = process.namespace.watch_logs()
        deadline = 0.0
        try:
            while True:
                self._lose(process)
                timeout_s = 10.0 if self._logs.is_over else self._rng.choice((0.01, 0.1, 1.0))
                try:
                    watching.on_changes(await watch.take(timeout_s=timeout_s))
                except AlreadyClosedError:
                    return  # with its process
                except DLError as error:
                    process.note(f"watches on after {type(error).__name__}")
                if not self._logs.is_over:
                    continue
                if watching.is_complete and watch.names == sorted(self._checkers.life.names):
                    return
                now = asyncio.get_running_loop().time()
                deadline = deadline or now + _PATIENCE_S
                require(WATCHED, holds=now < deadline, message=watching.explain())
        finally:
            await watch.aclose()

    # Subscriptions

    async def _subscribe(self, process: LogProcess) -> None:
        """L11: read on where the subscriber was, and keep the position."""
        rng = self._rng
        name = self._some_name() if rng.random() < 0.3 else self._logs.names[0]
        log = await process.namespace.open_log(name, config=process.config)
        if rng.random() < 0.1:
            with contextlib.suppress(OwnershipAcquireFailedError):
                await log.delete_subscription(_SUBSCRIBER)
        try:
            reader = await log.open_reader(subscriber=_SUBSCRIBER)
        except AlreadyTruncatedError:
            await log.move_subscription(_SUBSCRIBER)
            return
        moves = partial(self._checkers.life.moves, log.log_id, _SUBSCRIBER)
        require(
            SUBSCRIBED,
            holds=reader.committed in {each.dlsn for each in moves()} or not moves(),
            message=f"a subscriber of log {log.name} begins at {reader.committed}, where it never "
            "was",
        )
        # A reader that begins at the very first position reads whatever is there.
        begins = reader.committed == DLSN.INITIAL
        start = DLSN.INITIAL if begins else reader.position
        async with reader:
            reading = self._checkers.new_reading(log.log_id, log.name, start)
            for _ in range(rng.randint(1, 12)):
                self._lose(process)
                try:
                    reading.on_records(await reader.read_bulk(5, timeout_s=rng.uniform(0.0, 0.4)))
                except AlreadyTruncatedError:
                    reading.on_truncated()
                    return
                except EndOfStreamError:
                    return
                await self._commit(reader, log.log_id)
                await self._logs.sleep(rng.expovariate(3.0))

    async def _commit(self, reader: DirectReader, log_id: str) -> None:
        moves = partial(self._checkers.life.moves, log_id, _SUBSCRIBER)
        assert reader._hold is not None
        begin, token = len(moves()), reader._hold._hold.token
        position = await reader.commit()
        # The node may have been deleted since, and its history with it.
        is_there = Position(position, token) in moves()[min(begin, len(moves())) :]
        require(
            SUBSCRIBED,
            holds=is_there or len(moves()) < begin or not moves(),
            message=f"a reader learned that {position} is stored, and it is not",
        )
