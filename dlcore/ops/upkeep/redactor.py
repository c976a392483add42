"""Redacts logs: prepares each, and performs what its `Redaction` decides."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, assert_never

from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    MetadataVersionError,
    NodeExistsError,
    NoNodeError,
    OwnershipAcquireFailedError,
    UnsupportedError,
)
from dlcore.base.features import REDACTION
from dlcore.base.machines import run_to_end
from dlcore.log.entries.redacted_rows import RowRedactor
from dlcore.log.metadata.changes import plan_complete
from dlcore.log.metadata.redactions import StoredRedaction, digest_of
from dlcore.log.staging.commit import held_log
from dlcore.log.typed.conditions import parse_conditions
from dlcore.log.upkeep.removal import remove_truncated
from dlcore.metadata.binding import ClusterFeatures
from dlcore.metadata.one_node import persistently
from dlcore.metadata.session_node import session_lock
from dlcore.metadata.stored import encode
from dlcore.ops.upkeep.config import UpkeepConfig
from dlcore.ops.upkeep.expiry import complete_unowned
from dlcore.ops.upkeep.redaction import (
    Call,
    Left,
    Redaction,
    RedactionState,
    Rewrite,
    Rewritten,
    Signal,
    Wait,
)
from dlcore.ops.upkeep.redaction_copies import RunCopier
from dlcore.ops.upkeep.redaction_purge import Purger
from dlcore.ops.upkeep.redaction_scan import RedactionScanner
from dlcore.ops.upkeep.strays import looked_into, tier_urls

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from dlcore.log.cold.table_format import TableForm
    from dlcore.log.context import LogContext
    from dlcore.log.metadata.owner import StagingOwner
    from dlcore.log.metadata.redactions import VersionedRedaction
    from dlcore.log.metadata.values import LogMetadata
    from dlcore.log.staging.commit import HeldLog
    from dlcore.metadata.port import Op
    from dlcore.ops.upkeep.redaction import Event, Run, Scanned, Work

_TURN_PATIENCE_S = 30.0
_TURN_POLL_S = 0.1


class Preparation:
    """Looks for obstacles before a log is redacted, and completes its segment in progress."""

    def __init__(self, context: LogContext, log: LogMetadata) -> None:
        self._context = context
        self._log = log

    async def obstacles(self) -> tuple[str, ...]:
        """Return sentences on what else has the rows, and is not redacted.

        Raises:
            DLError: the metadata or a store does not answer.
        """
        context = self._context
        found = []
        restored = context.paths.restored
        if await persistently(lambda: context.store.get(restored, fresh=True)) is not None:
            found.append(
                "the metadata was imported: nothing is deleted before dlog metadata accept"
            )
        settings = await context.logs.read_settings(self._log)
        if settings.table not in (None, "delta"):
            found.append(
                f"the log has a table of the kind {settings.table}, whose versions are not "
                "redacted: unset `table` and delete the table first"
            )
        for tier in await tier_urls(context):
            folder = f"{tier}/{context.cluster_id}/{self._log.log_id}"
            with looked_into(tier):
                forms = await _forms_in(context, folder)
            found += [
                f"in {folder} is a table of the kind {form.kind} that does not follow the log any "
                f"more: {form.remake} first"
                for form in forms
                if (tier, form.kind) != (settings.tier_url, settings.table)
            ]
        return tuple(found)

    async def complete(self) -> None:
        """Complete the segment in progress: without a writer, or in a turn that it gives.

        Raises:
            OwnershipAcquireFailedError: a writer has it, and gives no turn.
            DLError: the metadata or bookies do not answer.
        """
        logs, loop = self._context.logs, asyncio.get_running_loop()
        until_s = loop.time() + _TURN_PATIENCE_S
        while True:
            at = await complete_unowned(self._context, await logs.read(self._log))
            if at.head.segment is None:
                return
            held = await self._held()
            if held is not None and held.holder.turn == "refused":
                break
            if held is not None and await self._complete_in_turn(held):
                return
            if loop.time() >= until_s:
                break
            await asyncio.sleep(_TURN_POLL_S)
        who = "a writer" if held is None else held.holder.described(self._context.client_id)
        raise OwnershipAcquireFailedError(
            f"segment {at.head.max_lssn} of log {self._log.name!r} is in progress and has such "
            f"rows, and {who} writes it: close that writer, or wait until the segment is completed "
            "(segment_age_max_s, segment_bytes_max), and run the command again"
        )

    async def _held(self) -> HeldLog | None:
        path = self._context.logs.paths_of(self._log).lock
        node = await persistently(lambda: self._context.store.get(path, fresh=True))
        return held_log(self._context.paths, self._log, node)

    async def _complete_in_turn(self, held: HeldLog) -> bool:
        """Complete the segment if the writer gives a turn, else ask for one, as appends do."""
        context = self._context
        at = await context.logs.read(self._log)
        gives = held.gives_turn_at(at)
        ops: list[Op] = []
        if gives:
            # The transaction ends the turn, and the writer goes on in the next segment.
            ops.append(held.turned("free"))
            if at.head.segment is not None:
                paths, now_ms = context.logs.paths_of(self._log), context.clock.now_ms()
                ops += plan_complete(paths, at, now_ms=now_ms, closing=None).ops
        elif held.holder.turn == "free":
            ops.append(held.turned("asked"))
        # Another change was first: the caller looks again.
        with contextlib.suppress(MetadataVersionError, NoNodeError):
            if ops:
                await context.store.multi(ops)
                return gives
        return False


async def _forms_in(context: LogContext, folder: str) -> list[TableForm]:
    from dlcore.log.cold.tables import forms_in  # it loads Arrow

    return await forms_in(context.cold.objects, folder)


_LOCK_PATIENCE_S = 60.0
_LOCK_POLL_S = 0.5


class Receipt(NamedTuple):
    """The result of a redaction.

    Attributes:
        log: the log.
        done: what was asked for, and what was changed and removed.
        is_purged: whether old copies of records are gone from all files.
        left: why some files may still have the rows, a sentence each.
    """

    log: LogMetadata
    done: StoredRedaction
    is_purged: bool
    left: tuple[str, ...]


class Found(NamedTuple):
    """The result of a scan: rows to redact, in so many segments, and what would forbid that."""

    log: str
    rows: int
    open_rows: int
    segments: int
    extents: int
    cold_extents: int
    obstacles: tuple[str, ...]
    kept: tuple[str, ...]


class RowConditions(NamedTuple):
    """The conditions of rows that are redacted: as text, without their values, and as a matcher."""

    text: str
    shape: str
    redactor: RowRedactor


class _Patience:
    """The time to wait for old copies to go, from the first wait on."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._end_s: float | None = None

    def has_passed(self) -> bool:
        """Return whether the time is over; it begins with the first call."""
        now_s = asyncio.get_running_loop().time()
        self._end_s = self._end_s or now_s + self._patience_s
        return now_s >= self._end_s


class LogRedactor:
    """Redacts one log.

    Args:
        context: the namespace's adapters.
        owner: the owner of the ledgers that are being filled.
        log: the log.
        rows: those that are redacted.
        config: the pace of copying, and its limits.
        patience_s: how long to wait for old copies to go, after the log has the rows no more.
        report: called with sentences on what is done, or waited for.

    Raises:
        ConfigurationError: the conditions do not fit.
        UnsupportedError: the log has no columns, or one that cannot be null.
    """

    @classmethod
    async def open(
        cls,
        context: LogContext,
        owner: StagingOwner,
        name: str,
        where: str,
        *,
        config: UpkeepConfig | None = None,
        patience_s: float = 3600.0,
        report: Callable[[str], None] = lambda _: None,
    ) -> LogRedactor:
        """Return a redactor of the log of that name.

        Raises:
            LogNotFoundError: there is no such log.
            ConfigurationError: the conditions do not fit.
            UnsupportedError: the log has no columns, or one that cannot be null.
        """
        conditions = parse_conditions(where)
        log = await context.logs.find(name)
        (schema,) = await context.logs.read_schemas([log])
        if schema is None:
            raise UnsupportedError(
                f"log {name!r} is a log of bytes, and has no columns: only rows of typed logs can "
                "be redacted"
            )
        redactor = RowRedactor(name, schema, conditions)
        shape = " and ".join(each.shape for each in conditions)
        return cls(
            context,
            owner,
            log,
            rows=RowConditions(where, shape, redactor),
            config=config or UpkeepConfig(),
            patience_s=patience_s,
            report=report,
        )

    def __init__(
        self,
        context: LogContext,
        owner: StagingOwner,
        log: LogMetadata,
        *,
        rows: RowConditions,
        config: UpkeepConfig,
        patience_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._context = context
        self._owner = owner
        self._log = log
        self._rows = rows
        self._patience = _Patience(patience_s)
        self._report = report
        self._scanner = RedactionScanner(
            context,
            owner,
            policy=config.merge,
            progress=lambda count: report(f"{count} entries were read"),
        )
        self._copier = RunCopier(context, owner, config, log=log, redactor=rows.redactor)
        self._purger = Purger(context, owner, log)
        self._preparation = Preparation(context, log)

    async def look(self) -> Found:
        """Return what would be redacted; nothing is changed."""
        seen = await self._scan()
        return Found(
            log=self._log.name,
            rows=seen.rows,
            open_rows=seen.open_rows,
            segments=len({each.lssn for each in seen.runs}) + (seen.open_rows > 0),
            extents=sum(len(each.parts) for each in seen.runs),
            cold_extents=sum(len(each.parts) for each in seen.runs if each.is_cold),
            obstacles=seen.obstacles,
            kept=seen.kept,
        )

    async def redact(self, *, purge: bool = False) -> Receipt:
        """Redact the log, and wait until old copies are gone; return the receipt.

        Without such a row nothing is done, unless `purge` asks for old copies to go in any case:
        those of records that were truncated, merged or tiered before.

        Raises:
            UnsupportedError: the feature `redaction` is not finalized, or something else has the
                rows, too, as a fork has.
            OwnershipAcquireFailedError: a writer has the segment that must be completed, or a
                worker does the log's upkeep.
            DLError: a part of the cluster does not answer; the same command goes on later.
        """
        await ClusterFeatures(self._context.store, self._context.paths).require(REDACTION)
        machine = Redaction()
        async with self._locked():
            await self._require_same()
            if purge:
                await self._begin()
            # First: truncated segments that may go now need no copy.
            await remove_truncated(self._context, await self._context.logs.read(self._log))
            try:
                await run_to_end(machine, Signal.BEGIN, self._answer_of)
            finally:
                with contextlib.suppress(DLError):  # a worker of auto-recovery does it later
                    await self._copier.tidy()
        return Receipt(
            log=self._log,
            done=self._purger.last or self._new(),
            is_purged=machine.state is RedactionState.DONE,
            left=machine.left,
        )

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncGenerator[None, None]:
        """Keep workers of auto-recovery from merging and tiering the log meanwhile."""
        path = self._context.paths.upkeep_lock(self._log.log_id)
        token = self._owner.token.encode()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _LOCK_PATIENCE_S
        while True:
            async with session_lock(self._context.store, path, token) as is_ours:
                if is_ours:
                    yield
                    return
            if loop.time() >= until_s:
                raise OwnershipAcquireFailedError(
                    f"a worker of auto-recovery does the upkeep of log {self._log.name!r}, or "
                    "another client redacts it: try again later"
                )
            self._report("waiting for the worker that does the log's upkeep")
            await asyncio.sleep(_LOCK_POLL_S)

    async def _require_same(self) -> None:
        """Refuse other conditions than those of a redaction that is not finished."""
        begun = await self._purger.read()
        if begun and digest_of(self._rows.text, begun.stored.salt) != begun.stored.digest:
            raise ConfigurationError(
                f"log {self._log.name!r} has a redaction that is not finished, where "
                f"{begun.stored.shape}: run the command with the same text as then first"
            )

    async def _answer_of(self, effect: Work) -> Event:
        match effect:
            case Call.SCAN:
                self._report("the log is read")
                seen = await self._scan()
                if seen.kept:
                    await self._begin()
                return seen
            case Call.COMPLETE:
                await self._preparation.complete()
                return Signal.COMPLETED
            case Rewrite(run):
                return Rewritten(await self._rewrite(run))
            case Call.FINISH:
                await self._purger.finish()
                return Signal.FINISHED
            case Wait(s, left):
                return await self._pause(s, left)
            case Call():
                return await self._step(effect)
            case _:
                assert_never(effect)

    async def _step(self, call: Call) -> Event:
        steps: dict[Call, Callable[[], Awaitable[Sequence[str]]]] = {
            Call.FOLLOW: self._purger.follow,
            Call.DROP: self._purger.drop,
            Call.DELETE: self._purger.delete,
            Call.ASK: self._purger.ask,
        }
        left = await steps[call]()
        await self._purger.read()
        return Left(tuple(left))

    async def _pause(self, s: float, left: Sequence[str]) -> Event:
        if self._patience.has_passed():
            return Signal.PATIENCE_OVER
        self._report("waiting: " + "; ".join(left))
        await asyncio.sleep(s)
        return Signal.PAUSE_OVER

    async def _scan(self) -> Scanned:
        begun = await self._purger.read()
        seen = await self._scanner.scan(self._log, self._rows.redactor, is_begun=begun is not None)
        if not seen.rows:
            return seen
        return replace(seen, obstacles=(*seen.obstacles, *await self._preparation.obstacles()))

    async def _rewrite(self, run: Run) -> bool:
        begun = await self._begin()
        ledgers = {part.ledger_id for part in run.parts}
        self._report(
            f"segment {run.lssn}: {len(run.parts)} extents are copied without {run.rows} rows"
        )

        def note(rows: int) -> Op:
            return begun.put(rows=rows, segments=(run.lssn,), ledgers=ledgers)

        is_there = await self._copier.copy(run, note)
        await self._purger.read()
        return is_there

    async def _begin(self) -> VersionedRedaction:
        """Return the redaction as it is stored, which exists from now on."""
        found = await self._purger.read()
        if found is None:
            path = self._context.paths.redaction(self._log.log_id)
            with contextlib.suppress(NodeExistsError):  # its answer was lost
                await self._context.store.create(path, encode(self._new()), make_parents=True)
            found = await self._purger.begun()
        return found

    def _new(self) -> StoredRedaction:
        # The text has the values that are to go, so the node gets its digest, salted against
        # guesses.
        clock, salt = self._context.clock, secrets.token_hex(16)
        return StoredRedaction(
            name=self._log.name,
            log_id=self._log.log_id,
            token=clock.new_token(),
            begun_ms=clock.now_ms(),
            shape=self._rows.shape,
            salt=salt,
            digest=digest_of(self._rows.text, salt),
        )
