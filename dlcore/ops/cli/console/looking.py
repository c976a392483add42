"""Reads what the console shows, through proxies or directly; and follows a log, in bounded events.

Events are ``start`` (the columns of a typed log, or null), ``records``, ``end`` (the log is sealed)
and ``failed``.  A comment is sent while nothing comes, so that a page that is gone is noticed.  The
next records are read when the page has taken those before, so a slow page reads slowly.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from dlcore.backends.flight.endpoint import Endpoint, token_at
from dlcore.backends.flight.planning import act
from dlcore.base.background import side_tasks, together
from dlcore.base.clock import steady_s
from dlcore.base.errors import DLError, EndOfStreamError, UnsupportedError
from dlcore.base.records import NotLessThan, RecordField
from dlcore.flight import actions
from dlcore.flight.requests import NoRequest
from dlcore.ops.cli.console import values
from dlcore.ops.cli.console.values import end_count, payload_value, row_value
from dlcore.ops.cli.rows import RowReader, TypedRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from dlcore.api.log import DistributedLogManager
    from dlcore.api.namespace import Namespace
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.log.reading.rows_reader import AsyncLogReader
    from dlcore.ops.autorecovery.listing import RepairList


_AT_ONCE = 8
_PROXY_S = 3.0
_LEDGERS_MAX = 1_000
_PROXIES_MAX = 100
_SHARE_MAX = 0.05
"""Share of the time in which names are listed, however many pages are open."""


class Looking:
    """Answers about a cluster and its logs; `repairs` are the ledgers that lack copies."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        endpoint: str | None,
        tls: TlsFiles | None,
        token: Callable[[], str] | None,
        repairs: RepairList | None,
    ) -> None:
        self._namespace = namespace
        self._endpoint = endpoint
        self._tls = tls
        self._token = token
        self._repairs = repairs
        self._rates = values.Rates()
        self._few = asyncio.Semaphore(_AT_ONCE)
        self._listing = asyncio.Lock()
        self._known: list[str] = []
        self._due_s = 0.0

    async def cluster(self) -> dict[str, Any]:
        """Return bookies, proxies, and ledgers that lack copies; null for what proxies do not tell.

        Raises: DLError.
        """
        namespace = self._namespace
        locations = await namespace.get_proxies()
        healths = await together(*map(self._health, locations[:_PROXIES_MAX]))
        found: dict[str, Any] = {"proxies": healths, "bookies": None, "recovery": None}
        with suppress(UnsupportedError):
            bookies = await namespace.get_bookies()
            found["bookies"] = sorted(map(values.bookie_value, bookies), key=lambda b: b["name"])
        if self._repairs is not None:
            found["recovery"] = await self._recovery(self._repairs)
        return found

    async def _recovery(self, repairs: RepairList) -> dict[str, Any]:
        lacking = 0
        async with aclosing(repairs.ledger_ids()) as ids:
            async for _ in ids:
                lacking += 1
                if lacking > _LEDGERS_MAX:
                    break
        return {
            "auditor": await repairs.read_auditor() is not None,
            "paused": await repairs.is_paused(),
            "under_replicated": min(lacking, _LEDGERS_MAX),
            "more": lacking > _LEDGERS_MAX,
        }

    async def _health(self, location: str) -> dict[str, Any]:
        tls = self._tls if location.startswith("grpc+tls://") else None
        token = token_at(location, self._token, endpoint=self._endpoint, tls=self._tls)
        try:
            async with (
                self._few,
                Endpoint(location, patience_s=_PROXY_S, tls=tls, token=token) as calls,
            ):
                health = await act(calls, actions.HEALTH, NoRequest())
        except DLError as error:
            return {"location": location, "state": "no answer", "logs": None, "detail": str(error)}
        state = "serving" if health.serves else "draining"
        return {
            "location": location,
            "state": "degraded" if health.degraded else state,
            "logs": health.logs,
            "detail": health.degraded or "",
        }

    async def logs(self, part: str, after: str) -> dict[str, Any]:
        """Return a page of the logs whose names contain `part`, with rates and lags.

        Raises: DLError.
        """
        names, is_more = values.matching(await self._names(), part, after)
        snapshots = await self._namespace.get_snapshots(names, fresh=True)
        positions = await together(*map(self._positions, names))
        now_s = steady_s()
        rows = []
        for name, found in zip(names, positions, strict=True):
            snapshot = snapshots[name]
            if snapshot is None:
                continue  # it was deleted meanwhile
            count = values.end_count(snapshot)
            rate = self._rates.of(snapshot.log_id, count, now_s=now_s)
            rows.append(values.log_row(snapshot, rate=rate, positions=found))
        return {"logs": rows, "more": is_more}

    async def _names(self) -> list[str]:
        """Return all names, read again after a while: each list reads every name there is."""
        # One list at a time: pages that come meanwhile wait for it, and use it.
        async with self._listing:
            began_s = steady_s()
            if began_s >= self._due_s:
                self._known = await self._namespace.get_logs()
                now_s = steady_s()
                self._due_s = now_s + (now_s - began_s) / _SHARE_MAX
        return self._known

    async def _positions(self, name: str) -> dict[str, DLSN] | None:
        try:
            async with self._few, await self._namespace.open_log(name) as manager:
                return await manager.get_subscriptions()
        except DLError:
            return None  # the log is gone, or its positions are not for this user

    async def log(self, name: str) -> dict[str, Any]:
        """Return one log: status, segments, settings, columns and subscribers.

        Raises: DLError.
        """
        async with await self._namespace.open_log(name) as manager:
            snapshot = await manager.get_snapshot()
            schema = await manager.get_schema()
            count = values.end_count(snapshot)
            return {
                "status": values.status_value(await manager.status()),
                "picture": values.picture_value(snapshot),
                "settings": msgspec.structs.asdict(await manager.get_settings()),
                "columns": None
                if schema is None
                else [{"name": field.name, "type": str(field.type)} for field in schema],
                "subscribers": await self._subscribers(manager),
                "records_per_s": self._rates.of(snapshot.log_id, count, now_s=steady_s()),
            }

    async def _subscribers(self, manager: DistributedLogManager) -> list[dict[str, Any]]:
        positions = await manager.get_subscriptions()
        if not positions:
            return []
        # The end is read after the positions, which are then at or before it.
        snapshot = await manager.get_snapshot()
        wanted = [max(position, snapshot.first) for position in positions.values()]
        *places, end = await self._namespace.find_places(
            [(snapshot, min(each, snapshot.end)) for each in (*wanted, snapshot.end)]
        )
        return values.subscriber_values(positions, dict(zip(positions, places, strict=True)), end)


RECORDS_MAX = 100
"""Records of an event."""
PAUSE_S = 0.2
"""Least time between two events: at most 500 records a second."""
LAST_RECORDS = 20
"""Records before the end with which a tail begins."""
KEEP_S = 5.0


def event(name: str, value: object) -> bytes:
    """Return an event in the format of server-sent events."""
    return f"event: {name}\ndata: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def record_value(record: LogRecordWithDLSN | TypedRow) -> dict[str, Any]:
    """Return a record as the page shows it."""
    found: dict[str, Any] = {
        "dlsn": str(record.dlsn),
        "txid": str(record.txid),
        "timestamp_ms": record.timestamp_ms,
    }
    if isinstance(record, TypedRow):
        return found | {"row": row_value(record.row)}
    return found | payload_value(record.payload)


async def follow(
    manager: DistributedLogManager, *, dlsn: DLSN | None, timestamp_ms: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a tail; without a start from the last records on."""
    try:
        if dlsn is None and timestamp_ms is None:
            count = end_count(await manager.get_snapshot())
            last = NotLessThan(RecordField.SEQUENCE_ID, max(0, count - LAST_RECORDS))
            dlsn = (await manager.find_place(last)).dlsn
        schema = await manager.get_schema()
        yield event("start", None if schema is None else schema.names)
        opened = await manager.open_reader(dlsn=dlsn, timestamp_ms=timestamp_ms)
        async with RowReader(opened) if opened.is_typed else opened as reader:
            async for data in _records(reader):
                yield data
    except EndOfStreamError:
        yield event("end", None)
    except DLError as error:
        yield event("failed", str(error))


async def _next(reader: AsyncLogReader | RowReader) -> Sequence[LogRecordWithDLSN | TypedRow]:
    return await reader.read_bulk(RECORDS_MAX)


async def _records(reader: AsyncLogReader | RowReader) -> AsyncGenerator[bytes, None]:
    while True:
        async with side_tasks() as tasks:
            # A task, because a timeout of `wait` does not cancel the read.
            reading = tasks.start(_next(reader), name="reading for a tail")
            while not (await asyncio.wait({reading}, timeout=KEEP_S))[0]:
                yield b": waiting\n\n"
        yield event("records", [record_value(record) for record in reading.result()])
        await asyncio.sleep(PAUSE_S)
