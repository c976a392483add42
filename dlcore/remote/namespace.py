"""The async API of a namespace over an endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003  # for `get_type_hints`
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.clock import SystemClock
from dlcore.base.closing import AsyncClosing
from dlcore.base.config import LogSettings, require_bounded, require_kind, require_positive
from dlcore.base.errors import (
    LogExistsError,
    LogNotFoundError,
)
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import actions
from dlcore.flight.requests import (
    CreateRequest,
    LogRequest,
    SchemaRequest,
)
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.merged import AsyncMergedReader
from dlcore.remote import planning
from dlcore.remote.endpoint import LIST_ANSWER_S, Endpoint
from dlcore.remote.log import RemoteLog
from dlcore.remote.staging import RemoteStagedAppend, RemoteStagingWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pyarrow as pa

    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.base.tls import TlsFiles
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange
    from dlcore.remote.reader import RemoteRecord

PATIENCE_S = 60.0


async def open_namespace(
    endpoint: str, *, patience_s: float = PATIENCE_S, tls: TlsFiles | None = None
) -> RemoteNamespace:
    """Open the namespace that the proxies at ``grpc://host:port,host:port`` serve.

    With ``grpc+tls://`` connections are encrypted.  `tls` names the trusted certificate authorities
    and the client's own certificate; without it the system's authorities are trusted.  If no proxy
    answers, calls fail after `patience_s`.

    Raises: ConfigurationError: the endpoint is invalid, or `tls` does not fit it.
    """
    return RemoteNamespace(endpoint, patience_s=patience_s, tls=tls)


class RemoteNamespace(AsyncClosing):
    """A collection of logs; used on one event loop.  Use `open_namespace`."""

    def __init__(self, endpoint: str, *, patience_s: float, tls: TlsFiles | None = None) -> None:
        require_kind("patience_s", patience_s, float)
        require_bounded("patience_s", patience_s, may_be_endless=True)
        self.patience_s = patience_s
        require_positive(self, "patience_s")
        self.endpoint = endpoint
        self._calls = Endpoint(endpoint, patience_s=patience_s, tls=tls)
        self._snapshots = planning.RemoteSnapshots(self._calls)

    def __repr__(self) -> str:
        return f"<RemoteNamespace {self.endpoint}>"

    async def get_logs(self, prefix: str | None = None) -> list[str]:
        """Return the sorted names of all logs, or of those that start with `prefix`.

        Raises: ProxyUnavailableError, MetadataError.
        """
        found: dict[str, None] = {}  # a retried call returns names again
        criteria = pb.Criteria(expression=(prefix or "").encode())
        asking = self._calls.stream("ListFlights", lambda: criteria, within_s=LIST_ANSWER_S)
        async with asking as messages:
            async for data in messages:
                found["/".join(pb.FlightInfo.FromString(data).flight_descriptor.path)] = None
        return sorted(found)

    async def get_snapshots(
        self,
        names: Sequence[str],
        *,
        fresh: bool = True,  # accepted as in `dlcore`: snapshots of proxies are always fresh
    ) -> dict[str, LogSnapshot | None]:
        """Return a snapshot of each log; None for those that do not exist.

        Raises: LedgerReadError, MetadataError, ProxyUnavailableError.
        """
        return await self._snapshots.take(names)

    async def get_schemas(self, names: Sequence[str]) -> dict[str, pa.Schema | None]:
        """Return each existing log's schema, None if of bytes.  Raises: as `get_snapshots`."""
        return await planning.get_schemas(self._calls, names)

    async def find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        """Return the place of the first record of each search, in its snapshot.

        Raises: LogNotFoundError: a log is gone; and as `get_snapshots`.
        """
        return await planning.find_places(self._calls, wanted)

    def scan(self, part: ScanRange) -> AsyncGenerator[ScanBatch, None]:
        """Yield the records of a range of a snapshot.

        Raises: AlreadyTruncatedError, LogNotFoundError; and as `get_snapshots`.
        """
        return planning.scan(self._calls, part, patience_s=self.patience_s)

    async def create_log(
        self, name: str, *, settings: LogSettings | None = None, schema: pa.Schema | None = None
    ) -> None:
        """Create a byte log, or a typed log if `schema` is given; `settings` are stored with it.

        Raises: LogExistsError, InvalidLogNameError, MetadataError; ProxyUnavailableError: the log
            may be created, or not.
        """
        request = CreateRequest(
            log=name,
            schema=None if schema is None else schema.serialize().to_pybytes(),
            log_id=SystemClock().new_token(),  # so that a retry finds the log that it created
            settings=msgspec.to_builtins(settings or LogSettings()),
        )
        await planning.act(self._calls, actions.CREATE, request)

    async def delete_log(self, name: str) -> None:
        """Delete a log and its data, after its owner has released it.

        Raises:
            LogNotFoundError: there is no such log.
            OwnershipAcquireFailedError: a writer that is no proxy owns the log.
            MetadataError; ProxyUnavailableError: the log may be deleted, or not.
        """
        await (await self._find(name)).delete()

    async def rename_log(self, name: str, new_name: str) -> None:
        """Give a log another name, at once for all clients.

        Raises: LogExistsError: there is a log `new_name`; else as `delete_log`.
        """
        await (await self._find(name)).rename(new_name)

    async def _find(self, name: str) -> RemoteLog:
        """Return a log with its id, by which a proxy recognizes a change that is retried."""
        asked = LogRequest(validate_log_name(name))
        answer = await planning.act(self._calls, actions.OWNER, asked)
        if answer.log_id is None:
            raise LogNotFoundError(f"log {name!r} does not exist at {self.endpoint}")
        return RemoteLog(self._calls, LogKey(name=name, log_id=answer.log_id))

    async def log_exists(self, name: str) -> bool:
        """Return whether the log exists.  Raises: MetadataError, ProxyUnavailableError."""
        return name in await self.get_schemas([validate_log_name(name)])

    async def merge_schema(self, name: str, schema: pa.Schema) -> None:
        """Add columns to a typed log, or widen their types.

        Raises: SchemaMismatchError: the log cannot have these columns; LogNotFoundError; and as
            `create_log`.
        """
        request = SchemaRequest(name, schema.serialize().to_pybytes())
        await planning.act(self._calls, actions.MERGE_SCHEMA, request)

    async def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,  # proxies always keep it, because a client may lose the answer
        strict: bool = False,
    ) -> RemoteStagedAppend:
        """Begin an atomic append to any number of logs.  Arguments: those of `dlcore`."""
        return RemoteStagedAppend.begin(
            self._calls,
            identity,
            version,
            shared=shared,
            run=run,
            lock_timeout_s=lock_timeout_s,
            strict=strict,
            patience_s=self.patience_s,
        )

    async def open_staging_writer(
        self, *, identity: str, shared: bool = False
    ) -> RemoteStagingWriter:
        """Open a writer whose records enter logs when an append commits them.

        With `shared` proxies keep its ledgers open for other writers of the same identity.
        """
        return RemoteStagingWriter(self._calls, identity, shared=shared, patience_s=self.patience_s)

    async def open_log(self, name: str, *, create_if_missing: bool = False) -> RemoteLog:
        """Open a log; with `create_if_missing` a missing log is created as a byte log.

        Raises: LogNotFoundError, InvalidLogNameError, ProxyUnavailableError.
        """
        if create_if_missing and not await self.log_exists(name):
            with suppress(LogExistsError):
                await self.create_log(name)
        info = await planning.get_info(self._calls, validate_log_name(name))
        return RemoteLog(self._calls, LogKey(name=name, log_id=info.log_id))

    async def open_merged_reader(
        self,
        names: Sequence[str],
        *,
        txid: int | None = None,
        timestamp_ms: int | None = None,
        positions: Mapping[str, DLSN] | None = None,
    ) -> AsyncMergedReader[RemoteRecord]:
        """Open a reader over several logs.  Arguments and errors: those of `dlcore`."""
        return await AsyncMergedReader.open(
            self.open_log, names, positions, txid=txid, timestamp_ms=timestamp_ms
        )

    async def aclose(self) -> None:
        """Close the connections; its readers stop working."""
        await self._calls.aclose()
