"""The actions of DoAction: one JSON object in the body, one in the answer."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from dlcore.backends.direct.log import DirectLog
from dlcore.backends.direct.namespace import create_identified
from dlcore.base.access.rights import Rule
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
from dlcore.base.health import Readiness
from dlcore.base.ids import DLSN, validate_log_name
from dlcore.flight import actions, answers
from dlcore.flight.actions import described
from dlcore.flight.answers import (
    AccessRules,
    BegunProducer,
    CommittedAppend,
    ForkedLog,
    LivingProxies,
    NoAnswer,
    OwnedLogs,
    ProxyHealth,
    ReleasedLog,
    SettingsOfLog,
    StreamEnd,
    TruncatedLog,
)
from dlcore.flight.put import parse_schema
from dlcore.flight.requests import (
    MALFORMED,
    ChangeRequest,
    CreateRequest,
    ForkRequest,
    LogRequest,
    NoRequest,
    ProducerRequest,
    RenameRequest,
    RulesRequest,
    SchemaRequest,
    SeenPosition,
    SettingsRequest,
    StreamRequest,
    TruncateRequest,
)
from dlcore.log.metadata.values import LogKey
from dlcore.log.reading.subscriptions import SubscriptionHold, list_subscriptions
from dlcore.proxy.reading.planning import Planning

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.tls_in_use import TlsInUse
    from dlcore.base.health import Check
    from dlcore.flight.actions import Action, AppendRequest
    from dlcore.flight.needs import Pass
    from dlcore.flight.requests import ForgetRequest, MoveRequest, SubscriptionsRequest
    from dlcore.log.staging.faces import StagedAppend
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.writing.owner import LogOwner
    from dlcore.proxy.writing.put import PutService


class Subscriptions:
    """The stored positions of subscribers that read through one proxy.

    These clients have no ZooKeeper sessions, so tokens identify them.
    """

    def __init__(self, namespace: DirectNamespace) -> None:
        self._context = namespace.log_context

    async def show(self, request: SubscriptionsRequest) -> answers.Subscriptions:
        """Return the positions of a log by subscriber.  Raises: LogNotFoundError, MetadataError."""
        log = await self._key_of(request)
        found = await list_subscriptions(self._context, log, request.subscriber)
        return answers.Subscriptions(
            {
                subscriber: SeenPosition(str(seen.position), seen.mark)
                for subscriber, seen in found.items()
            }
        )

    async def _key_of(self, request: SubscriptionsRequest | MoveRequest | ForgetRequest) -> LogKey:
        """Return the log of a request; its id, if given, finds the log under a new name as well."""
        if request.log_id is None:
            return await self._context.logs.find(request.log)
        return LogKey(name=request.log, log_id=request.log_id)

    async def move(self, request: MoveRequest) -> answers.MovedSubscription:
        """Store a position by compare-and-set; return the new mark.

        Raises:
            SubscriptionMovedError: the stored state differs from the request's mark.
            OwnershipAcquireFailedError: a reader of `dlcore` holds the subscriber's lock.
            OverCapacityError: the log keeps as many positions as it may.
            LogNotFoundError, ConfigurationError, MetadataError.
        """
        position = DLSN.parse(request.dlsn)
        hold = SubscriptionHold(self._context, await self._key_of(request), request.subscriber)
        timeout_s = self._context.config.lock_timeout_s if request.waits else 0
        try:
            mark = await hold.move(
                position, token=request.token, mark=request.mark, timeout_s=timeout_s
            )
        finally:
            await hold.release()
        return answers.MovedSubscription(mark)

    async def forget(self, request: ForgetRequest) -> answers.NoAnswer:
        """Remove a subscription that has no reader.  Raises: as `move`."""
        hold = SubscriptionHold(self._context, await self._key_of(request), request.subscriber)
        try:
            await hold.forget(request.mark)
        finally:
            await hold.release()
        return answers.NoAnswer()


class Appends:
    """Performs atomic appends for clients without access to the metadata store.

    Any proxy can perform an append, as a `StagedAppend` of `dlcore`.  The client chooses the
    append's token and keeps it for all attempts.  By the token any proxy recognizes an append whose
    answer was lost.
    """

    def __init__(self, namespace: DirectNamespace) -> None:
        self._namespace = namespace

    async def commit(self, request: AppendRequest) -> CommittedAppend:
        """Append staged extents to their logs: all or nothing, once.

        Raises: as `StagedAppend.commit`.
        """
        async with await self._begin(request) as append:
            result = await append.commit(request.all_extents(), replaces=request.replaces)
        return CommittedAppend(result.already_committed)

    async def abort(self, request: AppendRequest) -> NoAnswer:
        """Drop staged extents, unless they are committed.  Raises: MetadataError."""
        async with await self._begin(request) as append:
            await append.abort(request.all_extents())
        return NoAnswer()

    async def _begin(self, request: AppendRequest) -> StagedAppend:
        if not request.token:
            raise ConfigurationError("token='': expected a string that is unique to the append")
        return await self._namespace.begin_append(
            request.identity,
            request.version,
            shared=request.shared,
            run=request.run,
            lock_timeout_s=request.lock_timeout_s,
            strict=request.strict,
            after=request.after,
            token=request.token,
        )


Drain: TypeAlias = "Callable[[], Awaitable[None]]"
Report: TypeAlias = "Callable[[], dict[str, object]]"
_Request = TypeVar("_Request", bound=msgspec.Struct)
_Answer = TypeVar("_Answer", bound=msgspec.Struct)


class Actions:
    """Performs the actions of `dlcore.flight.actions`, for one proxy."""

    def __init__(
        self,
        namespace: DirectNamespace,
        membership: Membership,
        owner: LogOwner,
        puts: PutService,
        drain: Drain,
        undrain: Drain,
        balance: Report,
        tls: TlsInUse | None,
        checks: Mapping[str, Check],
    ) -> None:
        self._namespace = namespace
        self._membership = membership
        self._owner_of_logs = owner
        self._puts = puts
        self._drain_proxy = drain
        self._undrain_proxy = undrain
        self._balance = balance
        self._tls = tls
        self._checks = checks
        self._handlers: dict[str, tuple[Action[Any, Any], Callable[[Any], Awaitable[Any]]]] = {}
        self._handle(actions.CREATE, self._create)
        self._handle(actions.MERGE_SCHEMA, self._merge_schema)
        self._handle(actions.DELETE, self._delete)
        self._handle(actions.RENAME, self._rename)
        self._handle(actions.FORK, self._fork)
        self._handle(actions.SEAL, self._seal)
        self._handle(actions.SETTINGS, self._settings)
        self._handle(actions.TRUNCATE, self._truncate)
        self._handle(actions.STREAM_END, self._stream_end)
        self._handle(actions.OWNER, self._owner)
        self._handle(actions.LOGS, self._logs)
        self._handle(actions.RELEASE, self._release)
        self._handle(actions.DRAIN, self._drain)
        self._handle(actions.UNDRAIN, self._undrain)
        self._handle(actions.HEALTH, self._health)
        self._handle(actions.PROXIES, self._proxies)
        self._handle(actions.ACCESS_RULES, self._access_rules)
        self._handle(actions.PRODUCER_INIT, self._producer_init)
        appends = Appends(namespace)
        self._handle(actions.COMMIT_APPEND, appends.commit)
        self._handle(actions.ABORT_APPEND, appends.abort)
        planning = Planning(namespace)
        self._handle(actions.POSITIONS, planning.positions)
        self._handle(actions.SNAPSHOTS, planning.snapshots)
        self._handle(actions.SCHEMAS, planning.schemas)
        self._handle(actions.PLACES, planning.places)
        subscriptions = Subscriptions(namespace)
        self._handle(actions.SUBSCRIPTIONS, subscriptions.show)
        self._handle(actions.MOVE_SUBSCRIPTION, subscriptions.move)
        self._handle(actions.DELETE_SUBSCRIPTION, subscriptions.forget)
        missing = {each.name for each in actions.ACTIONS} - self._handlers.keys()
        assert not missing, f"no handler for {missing}"

    def _handle(
        self,
        action: Action[_Request, _Answer],
        handler: Callable[[_Request], Awaitable[_Answer]],
    ) -> None:
        self._handlers[action.name] = (action, handler)

    async def perform(self, name: str, body: bytes, entry: Pass) -> bytes:
        """Perform an action of a caller that has the rights for it; return its answer.

        Raises:
            UnknownActionError: there is no such action.
            ConfigurationError: the body does not fit the action.
            AccessDeniedError: the caller lacks a right.
            DLError: an error of the action.
        """
        if name not in self._handlers:
            raise UnknownActionError(
                f"action {name!r}: expected one of {', '.join(self._handlers)}"
            )
        action, handler = self._handlers[name]
        try:
            request = msgspec.json.decode(body or b"{}", type=action.request)
        except MALFORMED as error:
            raise ConfigurationError(f"action {name!r}: {error}: {described(action)}") from error
        await entry.require(action.needs.of(request), entrance=f"DoAction/{name}")
        if action is actions.DRAIN:  # it goes on, even if its caller leaves
            return msgspec.json.encode(await handler(request))
        async with self._membership.outages.bounded():
            return msgspec.json.encode(await handler(request))

    async def _create(self, request: CreateRequest) -> NoAnswer:
        schema = None if request.schema is None else parse_schema(request.schema)
        settings = LogSettings().changed(request.settings)
        await create_identified(
            self._namespace, request.log, log_id=request.log_id, settings=settings, schema=schema
        )
        return NoAnswer()

    async def _merge_schema(self, request: SchemaRequest) -> NoAnswer:
        log = await self._find(request)
        await log.update_schema(parse_schema(request.schema), merge=True)
        return NoAnswer()

    async def _delete(self, request: ChangeRequest) -> NoAnswer:
        try:
            async with self._changed(request) as log:
                await log.delete()
        except LogNotFoundError as error:
            await self._require_done(request, None, error)
        return NoAnswer()

    async def _rename(self, request: RenameRequest) -> NoAnswer:
        try:
            async with self._changed(request) as log:
                await log.rename(request.new_name)
        except LogNotFoundError as error:
            await self._require_done(request, request.new_name, error)
        return NoAnswer()

    async def _fork(self, request: ForkRequest) -> ForkedLog:
        at = None if request.at is None else DLSN.parse(request.at)
        forked = await self._namespace.fork_log(
            request.log, request.new_name, at=at, log_id=request.new_log_id
        )
        return ForkedLog(str(forked))

    async def _settings(self, request: SettingsRequest) -> SettingsOfLog:
        log = await self._find(request)
        if request.changes:
            return SettingsOfLog(await log.update_settings(**request.changes))
        return SettingsOfLog(await log.get_settings())

    async def _seal(self, request: ChangeRequest) -> NoAnswer:
        if request.log_id is not None:  # a client that has the log open goes on after a rename
            present = (await self._find(request)).name
            request = msgspec.structs.replace(request, log=present)
        try:
            async with self._changed(request) as log:
                await log.mark_end_of_stream()
        except EndOfStreamError:
            if request.log_id is None:
                raise
        return NoAnswer()

    async def _find(
        self,
        request: ChangeRequest | SchemaRequest | SettingsRequest | TruncateRequest | StreamRequest,
    ) -> DirectLog:
        """Open a log by its id if the request has one, even if the log was renamed since."""
        context = self._namespace.log_context
        found = await context.logs.find(validate_log_name(request.log), request.log_id)
        return DirectLog(context, found, context.config)

    @asynccontextmanager
    async def _changed(self, request: ChangeRequest) -> AsyncGenerator[DirectLog, None]:
        """Open a log to change it; if this proxy owns it, release it first, so the lock is free."""
        name = validate_log_name(request.log)
        log = await self._owner_of_logs.writers.open(name)
        if request.log_id not in (None, log.log_id):
            raise LogNotFoundError(
                f"log {name!r} has the id {log.log_id}, and the request expects {request.log_id}: "
                "another log has this name now"
            )
        await self._owner_of_logs.release(name)
        try:
            with self._owner_of_logs.writers.redirecting(name):
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
            text = f"log {request.log!r} is called {found!r} by now"
            if name is None:
                raise LogRenamedError(f"{text}: open it by that name") from error
            raise LogRenamedError(
                f"{text}; an earlier attempt may have renamed it before that"
            ) from error

    async def _truncate(self, request: TruncateRequest) -> TruncatedLog:
        log = await self._find(request)
        dlsn = None if request.dlsn is None else DLSN.parse(request.dlsn)
        changed = await log.truncate(dlsn, txid=request.txid, timestamp_ms=request.timestamp_ms)
        return TruncatedLog(changed)

    async def _stream_end(self, request: StreamRequest) -> StreamEnd:
        name = validate_log_name(request.log)
        if request.flush:
            owned = await self._owner_of_logs.get(name, log_id=request.log_id)
            try:
                await owned.writer.commit()
            except (WriteError, AlreadyClosedError) as error:
                text = LogNotReadyError(f"log {name!r} was released: try again")
                raise owned.ending or text from error
        log = await self._find(request)
        position, is_sealed = await log.find_stream_end()
        return StreamEnd(position, is_sealed)

    async def _logs(self, _: NoRequest) -> OwnedLogs:
        return OwnedLogs(self._owner_of_logs.owned())

    async def _release(self, request: LogRequest) -> ReleasedLog:
        return ReleasedLog(await self._owner_of_logs.release(validate_log_name(request.log)))

    async def _drain(self, _: NoRequest) -> NoAnswer:
        await self._drain_proxy()
        return NoAnswer()

    async def _undrain(self, _: NoRequest) -> NoAnswer:
        await self._undrain_proxy()
        return NoAnswer()

    async def _producer_init(self, request: ProducerRequest) -> BegunProducer:
        name = validate_log_name(request.log)
        log = await self._owner_of_logs.get(name)
        claim, sequence = await self._puts.begin(name, log, request.producer)
        return BegunProducer(claim, sequence)

    async def _owner(self, request: LogRequest) -> answers.LogOwner:
        try:
            log = await self._namespace.log_context.logs.find(validate_log_name(request.log))
        except LogNotFoundError:  # a log of this name will be written there when it is created
            return answers.LogOwner(self._membership.preferred(request.log), None)
        return answers.LogOwner(await self._membership.owner_of(log), log.log_id)

    async def _health(self, _: NoRequest) -> ProxyHealth:
        reasons = Readiness.of(self._checks).reasons
        return ProxyHealth(
            location=self._membership.location,
            serves=reasons["registered"] is None,
            logs=len(self._owner_of_logs),
            balance=self._balance(),
            degraded=reasons["metadata_store"],
            expires_at_ms=None if self._tls is None else self._tls.expires_at_ms,
            clock_ms=self._namespace.ports.clock.now_ms(),
        )

    async def _access_rules(self, request: RulesRequest) -> AccessRules:
        rules = self._namespace.access_rules
        changed = await rules.change(
            add=map(Rule.parse, request.add), remove=map(Rule.parse, request.remove)
        )
        return AccessRules(list(map(str, changed)))

    async def _proxies(self, _: NoRequest) -> LivingProxies:
        return LivingProxies(sorted(self._membership.live))
