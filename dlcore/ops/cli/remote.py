"""Commands that ask proxies, if an endpoint is given instead of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import LogNotFoundError

if TYPE_CHECKING:
    import pyarrow as pa

    from dlcore.base.ids import DLSN
    from dlcore.base.records import NotLessThan
    from dlcore.base.tls import TlsFiles
    from dlcore.log.reading.scan import LogSnapshot
    from dlcore.remote.namespace import RemoteNamespace


async def snapshot_of(namespace: RemoteNamespace, log: str) -> LogSnapshot:
    """Return a snapshot of a log.  Raises: LogNotFoundError."""
    snapshot = (await namespace.get_snapshots([log]))[log]
    if snapshot is None:
        raise LogNotFoundError(f"log {log!r} does not exist")
    return snapshot


async def release(endpoint: str, log: str, *, patience_s: float, tls: TlsFiles | None) -> bool:
    """Make the owner of a log release it; False if it has no owner.  Raises: LogNotFoundError."""
    from dlcore.flight import actions
    from dlcore.flight.requests import LogRequest
    from dlcore.remote.endpoint import Endpoint
    from dlcore.remote.planning import act

    request = LogRequest(log=log)
    async with Endpoint(endpoint, patience_s=patience_s, tls=tls) as calls:
        owner = await act(calls, actions.OWNER, request)
    if owner.log_id is None:
        raise LogNotFoundError(f"log {log!r} does not exist")
    async with Endpoint(owner.location or endpoint, patience_s=patience_s, tls=tls) as calls:
        return (await act(calls, actions.RELEASE, request)).released


async def remote_status(namespace: RemoteNamespace, log: str) -> dict[str, object]:
    """Return the fields of `dlog log show` that proxies know."""
    from dlcore.api.schemas import describe_schema

    info = await (await namespace.open_log(log)).get_info()
    schema = await remote_schema(namespace, log)
    return {
        "log": log,
        "schema": None if schema is None else describe_schema(schema),
        "records": info.records,
        "sealed": info.sealed,
        "first_dlsn": info.first,
        "last_dlsn": info.last,
    }


async def remote_schema(namespace: RemoteNamespace, log: str) -> pa.Schema | None:
    """Return the columns of a typed log; None for a byte log.  Raises: LogNotFoundError."""
    schemas = await namespace.get_schemas([log])
    if log not in schemas:
        raise LogNotFoundError(f"log {log!r} does not exist")
    schema: pa.Schema | None = schemas[log]
    return schema


async def remote_deletion(namespace: RemoteNamespace, log: str) -> str:
    """Return the effect of a log's deletion, as text."""
    records = (await (await namespace.open_log(log)).get_info()).records
    return f"Delete log {log} with {records} records"


async def remote_count(
    namespace: RemoteNamespace, log: str, start: DLSN | None, end: DLSN | None
) -> int:
    """Return how many records a log holds between two positions."""
    snapshot = await snapshot_of(namespace, log)
    first = max(start or snapshot.first, snapshot.first)
    last = min(end or snapshot.end, snapshot.end)
    low, high = await namespace.find_places([(snapshot, first), (snapshot, last)])
    return max(0, high.sequence_id - low.sequence_id)


async def remote_position(
    namespace: RemoteNamespace, log: str, wanted: NotLessThan
) -> tuple[DLSN, DLSN]:
    """Return the position of a record, and the end of its log."""
    snapshot = await snapshot_of(namespace, log)
    (place,) = await namespace.find_places([(snapshot, wanted)])
    return place.dlsn, snapshot.end
