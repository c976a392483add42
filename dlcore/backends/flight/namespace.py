"""The namespace over proxies: it needs no bookies and no ZooKeeper."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from dlcore.api.namespace import Namespace
from dlcore.backends.flight import planning
from dlcore.backends.flight.endpoint import LIST_ANSWER_S, Endpoint
from dlcore.backends.flight.log import FlightLog, client_config
from dlcore.base.access.rights import require_present, texts_of
from dlcore.base.clock import SystemClock
from dlcore.base.config import (
    require_bounded,
    require_kind,
    require_positive,
)
from dlcore.base.errors import LogExistsError, LogNotFoundError
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight import actions
from dlcore.flight.requests import (
    CreateRequest,
    ForkRequest,
    LogRequest,
    NoRequest,
    RulesRequest,
)
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.scan_driver import by_entry
from dlcore.log.typed.arrow import schema_of
from dlcore.log.typed.schema import LogSchema, schemas_to_write

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from dlcore.backends.flight.bearer import Token
    from dlcore.backends.flight.staging import FlightStagedAppend, FlightStagingWriter
    from dlcore.base.access.tls import TlsFiles
    from dlcore.base.config import LogConfig, LogSettings
    from dlcore.base.records import NotLessThan, RecordPlace
    from dlcore.log.metadata.commits import AppendRun, SharedStaging
    from dlcore.log.reading.scan import LogSnapshot, ScanBatch, ScanRange
    from dlcore.log.reading.scan_run import ScanRun

PATIENCE_S = 60.0


async def open_namespace(
    endpoint: str,
    *,
    patience_s: float = PATIENCE_S,
    tls: TlsFiles | None = None,
    token: Token | None = None,
    config: LogConfig | None = None,
) -> FlightNamespace:
    """Open the namespace that the proxies at ``grpc://host:port,host:port`` serve.

    With ``grpc+tls://`` connections are encrypted.  `tls` names the trusted certificate authorities
    and the client's own certificate; without it the system's authorities are trusted.  `token`
    proves who calls.  If no proxy answers, calls fail after `patience_s`.

    Raises: ConfigurationError: the endpoint is invalid, or `tls` does not fit it.
    """
    return FlightNamespace(endpoint, patience_s=patience_s, tls=tls, token=token, config=config)


class FlightNamespace(Namespace):
    """A collection of logs that proxies serve; used on one event loop.  Use `open_namespace`."""

    def __init__(
        self,
        endpoint: str,
        *,
        patience_s: float,
        tls: TlsFiles | None = None,
        token: Token | None = None,
        config: LogConfig | None = None,
    ) -> None:
        require_kind("patience_s", patience_s, float)
        require_bounded("patience_s", patience_s, may_be_endless=True)
        self.patience_s = patience_s
        require_positive(self, "patience_s")
        self._endpoint = endpoint
        self._config = client_config(config)
        self._calls = Endpoint(endpoint, patience_s=patience_s, tls=tls, token=token)
        self._snapshots = planning.FlightSnapshots(self._calls)

    @property
    @override
    def uri(self) -> str:
        return self._endpoint

    @override
    async def _get_logs(self, prefix: str) -> list[str]:
        found: dict[str, None] = {}  # a retried call returns names again
        criteria = pb.Criteria(expression=prefix.encode())
        asking = self._calls.stream("ListFlights", lambda: criteria, within_s=LIST_ANSWER_S)
        async with asking as messages:
            async for data in messages:
                found["/".join(pb.FlightInfo.FromString(data).flight_descriptor.path)] = None
        return sorted(found)

    @override
    async def _get_snapshots(
        self, names: Sequence[str], *, fresh: bool
    ) -> dict[str, LogSnapshot | None]:
        return await self._snapshots.take(names)

    @override
    async def _get_schemas(
        self, names: Sequence[str], *, for_write: bool
    ) -> dict[str, pa.Schema | None]:
        targets = await planning.get_targets(self._calls, names, for_write=for_write)
        if for_write:
            return schemas_to_write(targets)
        return {name: target.schema for name, target in targets.items()}

    @override
    async def _find_places(
        self, wanted: Sequence[tuple[LogSnapshot, DLSN | NotLessThan]]
    ) -> list[RecordPlace]:
        return await planning.find_places(self._calls, wanted)

    @override
    def scan(self, part: ScanRange) -> AsyncGenerator[ScanBatch, None]:
        return by_entry(self._scan_runs(part))

    def _scan_runs(self, part: ScanRange) -> AsyncGenerator[ScanRun, None]:
        """Yield the records of a range, many entries at a time.  Raises: as `scan`."""
        return planning.scan(self._calls, part, patience_s=self.patience_s)

    @override
    async def _create_log(
        self,
        name: str,
        *,
        config: LogConfig | None,
        settings: LogSettings,
        schema: LogSchema | None,
    ) -> None:
        if config is not None:
            self._unsupported("create_log(config=…)")
        request = CreateRequest(
            log=name,
            schema=None if schema is None else schema_of(schema.latest).serialize().to_pybytes(),
            log_id=SystemClock().new_token(),  # so that a retry finds the log that it created
            settings=msgspec.to_builtins(settings),
        )
        await planning.act(self._calls, actions.CREATE, request)

    @override
    async def delete_log(self, name: str, *, damaged: bool = False) -> None:
        if damaged:
            self._unsupported("delete_log(damaged=True)")
        await (await self._find(name)).delete()

    @override
    async def rename_log(self, name: str, new_name: str) -> None:
        await (await self._find(name)).rename(new_name)

    @override
    async def fork_log(self, name: str, new_name: str, *, at: DLSN | None = None) -> DLSN:
        request = ForkRequest(
            log=validate_log_name(name),
            new_name=validate_log_name(new_name),
            at=None if at is None else str(at),
            new_log_id=SystemClock().new_token(),  # so that a retry finds the log that it made
        )
        return DLSN.parse((await planning.act(self._calls, actions.FORK, request)).at)

    async def _find(self, name: str) -> FlightLog:
        """Return a log with its id, by which a proxy recognizes a change that is retried."""
        name = validate_log_name(name)
        answer = await planning.act(self._calls, actions.OWNER, LogRequest(name))
        if answer.log_id is None:
            raise LogNotFoundError(f"log {name!r} does not exist at {self.uri}")
        return FlightLog(self._calls, LogKey(name=name, log_id=answer.log_id), self._config)

    @override
    async def get_access_rules(self) -> list[str]:
        return (await planning.act(self._calls, actions.ACCESS_RULES, RulesRequest())).rules

    @override
    async def change_access_rules(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        request = RulesRequest(add=texts_of(add), remove=texts_of(remove))
        require_present(await self.get_access_rules(), request.remove)
        return (await planning.act(self._calls, actions.ACCESS_RULES, request)).rules

    @override
    async def get_proxies(self) -> list[str]:
        return (await planning.act(self._calls, actions.PROXIES, NoRequest())).locations

    @override
    async def log_exists(self, name: str) -> bool:
        return name in await self.get_schemas([validate_log_name(name)])

    @override
    async def begin_append(
        self,
        identity: str,
        version: int,
        *,
        shared: SharedStaging | None = None,
        run: AppendRun | None = None,
        lock_timeout_s: float | None = None,
        keep_record: bool = True,  # see `Namespace`: proxies always keep it
        strict: bool = False,
        after: int | None = None,
    ) -> FlightStagedAppend:
        if after is not None:
            self._unsupported("begin_append(after=…)")
        self._calls.require_open()
        from dlcore.backends.flight.staging import (
            FlightStagedAppend,  # most commands append nothing
        )

        return FlightStagedAppend.begin(
            self._calls,
            identity,
            version,
            shared=shared,
            run=run,
            lock_timeout_s=lock_timeout_s,
            strict=strict,
            patience_s=self.patience_s,
        )

    @override
    async def open_staging_writer(
        self, *, identity: str, shared: bool = False
    ) -> FlightStagingWriter:
        from dlcore.backends.flight.staging import FlightStagingWriter

        self._calls.require_open()
        return FlightStagingWriter(self._calls, identity, shared=shared, patience_s=self.patience_s)

    @override
    async def open_log(
        self, name: str, *, config: LogConfig | None = None, create_if_missing: bool = False
    ) -> FlightLog:
        name = validate_log_name(name)
        own = self._config if config is None else client_config(config)
        if create_if_missing and not await self.log_exists(name):
            with suppress(LogExistsError):
                await self.create_log(name)
        info = await planning.get_info(self._calls, name)
        return FlightLog(self._calls, LogKey(name=name, log_id=info.log_id), own)

    @override
    async def aclose(self) -> None:
        await self._calls.aclose()
