"""The actions of DoAction: one JSON object in the body, one in the answer."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from dlcore.api.manager import DistributedLogManager
from dlcore.base.config import LogSettings
from dlcore.base.errors import (
    AlreadyClosedError,
    ConfigurationError,
    EndOfStreamError,
    LogNotFoundError,
    LogNotReadyError,
    LogRenamedError,
    OwnershipAcquireFailedError,
    UnknownActionError,
    WriteError,
)
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.flight.appends import AppendRequest
from dlcore.flight.planning import (
    LogsRequest,
    PlacesRequest,
    PositionsRequest,
    SnapshotsRequest,
)
from dlcore.flight.put import parse_schema
from dlcore.flight.requests import (
    MALFORMED,
    ChangeRequest,
    CreateRequest,
    ForgetRequest,
    LogRequest,
    MoveRequest,
    NoRequest,
    ProducerRequest,
    RenameRequest,
    SchemaRequest,
    SettingsRequest,
    StreamRequest,
    SubscriptionsRequest,
    TruncateRequest,
)
from dlcore.log.metadata.values import LogKey
from dlcore.proxy.reading.planning import Planning
from dlcore.proxy.reading.subscriptions import Subscriptions
from dlcore.proxy.writing.appends import Appends

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from dlcore.api.namespace import Namespace
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.writing.owner import LogOwner
    from dlcore.proxy.writing.put import PutService

Answer: TypeAlias = dict[str, object]
Drain: TypeAlias = "Callable[[], Awaitable[None]]"
Told: TypeAlias = "Callable[[], Answer]"


_R = TypeVar("_R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class _Action:
    text: str
    request: type[msgspec.Struct]
    perform: Callable[[msgspec.Struct], Awaitable[Answer]]


class Actions:
    """The actions of one proxy, by name."""

    def __init__(
        self,
        namespace: Namespace,
        membership: Membership,
        owner: LogOwner,
        puts: PutService,
        drain: Drain,
        undrain: Drain,
        balance: Told,
    ) -> None:
        self._namespace = namespace
        self._membership = membership
        self._owner_of_logs = owner
        self._puts = puts
        self._drain_proxy = drain
        self._undrain_proxy = undrain
        self._balance = balance
        self._actions: dict[str, _Action] = {}
        self._add_those_on_logs()
        self._add("owner", "Return the proxy that owns a log: {log}.", LogRequest, self._owner)
        self._add("logs", "List the logs that this proxy owns: {}.", NoRequest, self._logs)
        self._add("release", "Release a log: {log}.", LogRequest, self._release)
        self._add("drain", "Release all logs and acquire none: {}.", NoRequest, self._drain)
        self._add("undrain", "Acquire logs again after a drain: {}.", NoRequest, self._undrain)
        self._add(
            "producer_init",
            "Begin an incarnation of a producer, which fences earlier ones: {log, producer}.",
            ProducerRequest,
            self._producer_init,
        )
        appends = Appends(namespace)
        self._add(
            "commit_append",
            "Append staged extents, all or nothing, once: {identity, version, token, extents}.",
            AppendRequest,
            appends.commit,
        )
        text = "Drop staged extents: {identity, version, token, extents}."
        self._add("abort_append", text, AppendRequest, appends.abort)
        self._add_those_of_readers(namespace)
        text = "Return whether this proxy acquires logs, and its load: {}."
        self._add("health", text, NoRequest, self._health)
        self._add("proxies", "List the locations of live proxies: {}.", NoRequest, self._proxies)

    def _add_those_of_readers(self, namespace: Namespace) -> None:
        planning = Planning(namespace)
        self._add(
            "positions",
            "Return the ends of a log, and the positions of records: {log, at}.",
            PositionsRequest,
            planning.positions,
        )
        self._add(
            "snapshots",
            "Return snapshots of logs, for planners of reads: {logs, known}.",
            SnapshotsRequest,
            planning.snapshots,
        )
        text = "Return the columns of logs, for planners of reads: {logs}."
        self._add("schemas", text, LogsRequest, planning.schemas)
        text = "Find records of logs, for planners of reads: {searches}."
        self._add("places", text, PlacesRequest, planning.places)
        subscriptions = Subscriptions(namespace)
        self._add(
            "subscriptions",
            "Return the stored positions of subscribers: {log, log_id, subscriber}.",
            SubscriptionsRequest,
            subscriptions.show,
        )
        self._add(
            "move_subscription",
            "Store a position by compare-and-set: "
            "{log, log_id, subscriber, dlsn, token, mark, waits}.",
            MoveRequest,
            subscriptions.move,
        )
        self._add(
            "delete_subscription",
            "Forget a stored position: {log, log_id, subscriber, mark}.",
            ForgetRequest,
            subscriptions.forget,
        )

    def _add_those_on_logs(self) -> None:
        self._add(
            "create",
            "Create a log: {log, log_id, settings}; with {schema} it is a typed log.",
            CreateRequest,
            self._create,
        )
        text = "Delete a log and its data: {log, log_id}."
        self._add("delete", text, ChangeRequest, self._delete)
        text = "Give a log another name: {log, log_id, new_name}."
        self._add("rename", text, RenameRequest, self._rename)
        text = "Seal a log, so that no record can follow: {log, log_id}."
        self._add("seal", text, ChangeRequest, self._seal)
        self._add(
            "truncate",
            "Drop the records of a log below one: {log, log_id, dlsn | txid | timestamp_ms}.",
            TruncateRequest,
            self._truncate,
        )
        self._add(
            "merge_schema",
            "Add columns to a typed log, or widen their types: {log, schema}.",
            SchemaRequest,
            self._merge_schema,
        )
        text = "Return the end of a log's bytes: {log, log_id, flush}."
        self._add("stream_end", text, StreamRequest, self._stream_end)
        text = "Return the settings of a log, or change some of them: {log, log_id, changes}."
        self._add("settings", text, SettingsRequest, self._settings)

    def _add(
        self, name: str, text: str, request: type[_R], perform: Callable[[_R], Awaitable[Answer]]
    ) -> None:
        self._actions[name] = _Action(text, request, perform)  # type: ignore[arg-type]

    def described(self) -> list[tuple[str, str]]:
        """Return the name and the description of each action."""
        return [(name, action.text) for name, action in self._actions.items()]

    async def perform(self, name: str, body: bytes) -> bytes:
        """Perform an action; return its answer.

        Raises:
            UnknownActionError: there is no such action.
            ConfigurationError: the body does not fit the action.
            DLError: an error of the action.
        """
        action = self._actions.get(name)
        if action is None:
            raise UnknownActionError(f"action {name!r}: expected one of {', '.join(self._actions)}")
        try:
            request = msgspec.json.decode(body or b"{}", type=action.request)
        except MALFORMED as error:
            raise ConfigurationError(f"action {name!r}: {error}: {action.text}") from error
        if name == "drain":  # not bounded: a timeout would cancel a drain halfway
            return msgspec.json.encode(await action.perform(request))
        async with self._membership.outages.bounded():
            return msgspec.json.encode(await action.perform(request))

    async def _create(self, request: CreateRequest) -> Answer:
        schema = None if request.schema is None else parse_schema(request.schema)
        settings = LogSettings().changed(request.settings)
        await self._namespace.create_log(
            request.log, schema=schema, log_id=request.log_id, settings=settings
        )
        return {}

    async def _merge_schema(self, request: SchemaRequest) -> Answer:
        log = await self._namespace.open_log(request.log)
        await log.update_schema(parse_schema(request.schema), merge=True)
        return {}

    async def _delete(self, request: ChangeRequest) -> Answer:
        try:
            async with self._changed(request) as log:
                await log.delete()
        except LogNotFoundError as error:
            await self._require_done(request, None, error)
        return {}

    async def _rename(self, request: RenameRequest) -> Answer:
        try:
            async with self._changed(request) as log:
                await log.rename(request.new_name)
        except LogNotFoundError as error:
            await self._require_done(request, request.new_name, error)
        return {}

    async def _settings(self, request: SettingsRequest) -> Answer:
        log = await self._find(request)
        if request.changes:
            return {"settings": await log.update_settings(**request.changes)}
        return {"settings": await log.get_settings()}

    async def _seal(self, request: ChangeRequest) -> Answer:
        try:
            async with self._changed(request) as log:
                await log.mark_end_of_stream()
        except EndOfStreamError:
            if request.log_id is None:
                raise
        return {}

    async def _find(
        self, request: SettingsRequest | TruncateRequest | StreamRequest
    ) -> DistributedLogManager:
        """Open a log by its id if the request has one, even if the log was renamed since."""
        context = self._namespace.log_context
        found = await context.logs.find(validate_log_name(request.log), request.log_id)
        return DistributedLogManager(context, found, context.config)

    @asynccontextmanager
    async def _changed(self, request: ChangeRequest) -> AsyncGenerator[DistributedLogManager, None]:
        """Open a log to change it; if this proxy owns it, release it first, so the lock is free."""
        name = validate_log_name(request.log)
        log = await self._owner_of_logs.open(name)
        if request.log_id not in (None, log.log_id):
            raise LogNotFoundError(
                f"log {name!r} has the id {log.log_id}, and the request expects {request.log_id}: "
                "another log has this name now"
            )
        await self._owner_of_logs.release(name)
        try:
            with self._owner_of_logs.redirecting(name):
                yield log
        except OwnershipAcquireFailedError as error:
            if error.owner != self._membership.location:
                raise
            # An earlier attempt has not ended, or a client began to write here meanwhile.
            raise LogNotReadyError(f"log {name!r} is in use here: try again") from error

    async def _require_done(
        self, request: ChangeRequest, name: str | None, error: LogNotFoundError
    ) -> None:
        """Raise unless an earlier attempt succeeded: the log is gone, or has the new name."""
        if request.log_id is None:
            raise error
        key = LogKey(name=request.log, log_id=request.log_id)
        try:
            found = (await self._namespace.log_context.logs.find_again(key)).name
        except LogNotFoundError:
            if name is None:
                return
            raise
        if found != name:
            told = f"log {request.log!r} is called {found!r} by now"
            if name is None:
                raise LogRenamedError(f"{told}: open it by that name") from error
            raise LogRenamedError(
                f"{told}; an earlier attempt may have renamed it before that"
            ) from error

    async def _truncate(self, request: TruncateRequest) -> Answer:
        log = await self._find(request)
        dlsn = None if request.dlsn is None else DLSN.parse(request.dlsn)
        changed = await log.truncate(dlsn, txid=request.txid, timestamp_ms=request.timestamp_ms)
        return {"truncated": changed}

    async def _stream_end(self, request: StreamRequest) -> Answer:
        name = validate_log_name(request.log)
        if request.flush:
            owned = await self._owner_of_logs.get(name, log_id=request.log_id)
            try:
                await owned.writer.commit()
            except (WriteError, AlreadyClosedError) as error:
                told = LogNotReadyError(f"log {name!r} was released: try again")
                raise owned.ending or told from error
        log = await self._find(request)
        position, is_sealed = await log.get_stream_end()
        return {"position": position, "sealed": is_sealed}

    async def _logs(self, _: NoRequest) -> Answer:
        return {"logs": self._owner_of_logs.owned()}

    async def _release(self, request: LogRequest) -> Answer:
        return {"released": await self._owner_of_logs.release(validate_log_name(request.log))}

    async def _drain(self, _: NoRequest) -> Answer:
        await self._drain_proxy()
        return {}

    async def _undrain(self, _: NoRequest) -> Answer:
        await self._undrain_proxy()
        return {}

    async def _producer_init(self, request: ProducerRequest) -> Answer:
        name = validate_log_name(request.log)
        log = await self._owner_of_logs.get(name)
        claim, sequence = await self._puts.begin(name, log, request.producer)
        return {"producer": claim, "sequence": sequence}

    async def _owner(self, request: LogRequest) -> Answer:
        try:
            log = await self._namespace.log_context.logs.find(validate_log_name(request.log))
        except LogNotFoundError:  # a log of this name will be written there when it is created
            return {"location": self._membership.preferred(request.log), "log_id": None}
        return {"location": await self._membership.owner_of(log), "log_id": log.log_id}

    async def _health(self, _: NoRequest) -> Answer:
        here = self._membership.location
        serves = here in self._membership.live
        answer: Answer = {
            "location": here,
            "serves": serves,
            "logs": len(self._owner_of_logs),
            "balance": self._balance(),
        }
        reason = self._membership.outages.reason
        return answer if reason is None else answer | {"degraded": reason}

    async def _proxies(self, _: NoRequest) -> Answer:
        return {"locations": sorted(self._membership.live)}
