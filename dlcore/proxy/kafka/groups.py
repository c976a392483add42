"""The groups of Kafka's consumers at a proxy: each has its coordinator, which may be this one.

All proxies that serve Kafka's clients choose the same coordinator of a group, as they choose the
owner of a log.  Another one answers NOT_COORDINATOR, and the client asks for it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, assert_never

from kio.schema.errors import ErrorCode

from dlcore.base.access.rights import Right
from dlcore.base.background import fulfil
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    OwnershipAcquireFailedError,
    SubscriptionMovedError,
)
from dlcore.base.ids import require_identity
from dlcore.flight.needs import Need
from dlcore.proxy.kafka import group as machines, messages
from dlcore.proxy.kafka.codes import code_of
from dlcore.proxy.kafka.group import Answered, Group, Joined
from dlcore.proxy.kafka.positions import NO_OFFSET, Positions
from dlcore.proxy.kafka.topics import log_in, node_of
from dlcore.proxy.rendezvous import preferred_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.rights import Principal
    from dlcore.log.metadata.values import Mark
    from dlcore.proxy.gatekeeper import Entry
    from dlcore.proxy.kafka.group import Effect, Event
    from dlcore.proxy.kafka.messages import Request, Response
    from dlcore.proxy.membership import Membership
    from dlcore.proxy.reading.serving import ReadPath

GROUPS_MAX = 1000
"""Most groups with members at a proxy; further members get an error, and try again."""
SAID_BYTES_MAX = 32 * 1024
"""Most bytes that a member says of itself when it joins."""
SESSION_S = (1.0, 300.0)
"""The shortest and the longest session of a member."""
_ROUND_MAX_S = 1800.0
_NEVER = timedelta(0)
_GROUP = 0
_NO_TRANSACTIONS = "proxies serve no transactions (docs/kafka-protocol.md)"


class _RefusedError(Exception):
    """A call of a group is refused with a code."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True, eq=False)
class _Led:
    """A group with members that is coordinated here."""

    principal: Principal
    """The principal of its first member; all are of it."""
    token: str
    """By this the subscriptions of the group are claimed."""
    machine: Group = field(default_factory=Group)
    waiting: dict[int, asyncio.Future[Effect]] = field(default_factory=dict)
    marks: dict[str, Mark | None] = field(default_factory=dict)  # by log
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of calls that change a position
    timer: asyncio.TimerHandle | None = None


class Groups:
    """The groups that this proxy coordinates, and the positions of all."""

    def __init__(self, namespace: DirectNamespace, membership: Membership, reads: ReadPath) -> None:
        self._membership = membership
        self._clock = namespace.log_context.clock
        self._positions = Positions(namespace, reads)
        self._led: dict[str, _Led] = {}
        self._calls = count()
        self._known: tuple[int, dict[str, tuple[str, int]]] = (-1, {})

    def close(self) -> None:
        """Forget all groups; their members join again elsewhere."""
        for name, led in list(self._led.items()):
            self._drop(name, led)

    async def perform(self, request: Request, make: Response, entry: Entry) -> Any:
        """Return the answer to a call of groups.  Raises: MetadataError."""
        match request.call:
            case messages.FIND_COORDINATOR:
                return await self._find(request, make)
            case messages.JOIN_GROUP:
                return await self._join(request, make, entry)
            case messages.SYNC_GROUP:
                return await self._sync(request, make, entry)
            case messages.HEARTBEAT:
                return await self._short(request, make, entry, "HeartbeatResponse")
            case messages.LEAVE_GROUP:
                return await self._short(request, make, entry, "LeaveGroupResponse")
            case messages.OFFSET_COMMIT:
                return await self._commit(request, make, entry)
            case _:
                return await self._fetch(request, make, entry)

    # The coordinator

    async def _coordinator(self, group: str) -> tuple[str | None, tuple[str, int]]:
        """Return the location of a group's coordinator, and its address for Kafka's clients."""
        changes = self._membership.changes
        if self._known[0] != changes:
            async with self._membership.outages.bounded():
                self._known = changes, await self._membership.kafka_addresses()
        addresses = self._known[1]
        location = preferred_owner(f"group {group}", addresses)
        return location, addresses.get(location or "", ("", -1))

    async def _find(self, request: Request, make: Response) -> Any:
        code, reason = ErrorCode.none, None
        location, (host, port) = await self._coordinator(request.body.key)
        if getattr(request.body, "key_type", _GROUP) != _GROUP:
            # The one error after which all clients give up, and tell the reason.
            code, reason = ErrorCode.transactional_id_authorization_failed, _NO_TRANSACTIONS
        elif location is None:
            code = ErrorCode.coordinator_not_available
        found = code is ErrorCode.none and location is not None
        return make.of(
            "FindCoordinatorResponse",
            throttle_time=_NEVER,
            error_code=code,
            error_message=reason,
            node_id=node_of(location) if found and location else -1,
            host=host if found else "",
            port=port if found else -1,
        )

    async def _led_here(self, group: str, entry: Entry, *, joins: bool = False) -> _Led | None:
        """Return a group that is coordinated here; None: it has no members.

        Raises: _RefusedError.
        """
        try:
            require_identity("subscriber", group)
        except ConfigurationError as error:
            raise _RefusedError(ErrorCode.invalid_group_id) from error
        location, _ = await self._coordinator(group)
        if location != self._membership.location:
            raise _RefusedError(ErrorCode.not_coordinator)
        led, principal = self._led.get(group), entry.caller.principal
        if led is None and joins:
            if len(self._led) >= GROUPS_MAX:
                raise _RefusedError(ErrorCode.coordinator_load_in_progress)
            led = self._led[group] = _Led(principal, self._clock.new_token())
        if led is not None and led.principal != principal:
            raise _RefusedError(ErrorCode.group_authorization_failed)
        return led

    # Members

    async def _join(self, request: Request, make: Response, entry: Entry) -> Any:
        asked = request.body
        session_s = asked.session_timeout.total_seconds()
        round_s = session_s
        if hasattr(asked, "rebalance_timeout"):
            round_s = asked.rebalance_timeout.total_seconds()
        try:
            said = _said_by(asked, session_s)
            led = await self._led_here(asked.group_id, entry, joins=True)
            assert led is not None
            found = await self._asked(
                asked.group_id,
                led,
                lambda call, now_s: machines.Join(
                    call=call,
                    member=asked.member_id,
                    new=f"{request.client or 'client'}-{self._clock.new_token()}",
                    kind=asked.protocol_type,
                    protocols=said,
                    session_s=session_s,
                    rebalance_s=min(max(round_s, session_s), _ROUND_MAX_S),
                    now_s=now_s,
                ),
            )
        except _RefusedError as error:
            found = Joined(call=-1, code=error.code, member=asked.member_id)
        joined = found if isinstance(found, Joined) else _refused_join(found, asked.member_id)
        return make.of(
            "JoinGroupResponse",
            throttle_time=_NEVER,
            error_code=joined.code,
            generation_id=joined.generation,
            protocol_name=joined.protocol,
            leader=joined.leader,
            member_id=joined.member,
            members=tuple(
                make.of("JoinGroupResponseMember", member_id=name, metadata=said)
                for name, said in joined.members
            ),
        )

    async def _sync(self, request: Request, make: Response, entry: Entry) -> Any:
        asked = request.body
        answered = await self._answered(
            asked.group_id,
            entry,
            lambda call, now_s: machines.Sync(
                call=call,
                member=asked.member_id,
                generation=asked.generation_id,
                assignments={each.member_id: each.assignment for each in asked.assignments},
                now_s=now_s,
            ),
        )
        return make.of(
            "SyncGroupResponse",
            throttle_time=_NEVER,
            error_code=answered.code,
            assignment=answered.assignment,
        )

    async def _short(self, request: Request, make: Response, entry: Entry, kind: str) -> Any:
        """Perform a heartbeat, or let a member leave."""
        asked = request.body

        def event(call: int, now_s: float) -> Event:
            if request.call == messages.LEAVE_GROUP:
                return machines.Leave(call=call, member=asked.member_id, now_s=now_s)
            return machines.Heartbeat(
                call=call, member=asked.member_id, generation=asked.generation_id, now_s=now_s
            )

        answered = await self._answered(asked.group_id, entry, event)
        return make.of(kind, throttle_time=_NEVER, error_code=answered.code)

    async def _answered(
        self, group: str, entry: Entry, event: Callable[[int, float], Event]
    ) -> Answered:
        """Return the machine's answer to a call of a member, or that it is none."""
        try:
            led = await self._led_here(group, entry)
        except _RefusedError as error:
            return Answered(-1, error.code)
        if led is None:
            return Answered(-1, ErrorCode.unknown_member_id)
        found = await self._asked(group, led, event)
        assert isinstance(found, Answered)
        return found

    async def _asked(self, group: str, led: _Led, event: Callable[[int, float], Event]) -> Effect:
        """Hand a call to the machine, and wait for its answer."""
        loop, call = asyncio.get_running_loop(), next(self._calls)
        answer: asyncio.Future[Effect] = loop.create_future()
        led.waiting[call] = answer
        try:
            self._handle(group, led, event(call, loop.time()))
            return await answer
        finally:
            # Not by `answer.done()`: a task that is cancelled cancels the future that it waits for.
            if led.waiting.pop(call, None) is not None:
                self._handle(group, led, machines.Gone(call=call, now_s=loop.time()))

    def _handle(self, group: str, led: _Led, event: Event) -> None:
        for effect in led.machine.handle(event):
            match effect:
                case Joined(call=call) | Answered(call=call):
                    if call in led.waiting:
                        fulfil(led.waiting.pop(call), effect)
                case _:
                    assert_never(effect)
        if led.timer is not None:
            led.timer.cancel()
            led.timer = None
        due_s = led.machine.due_s
        if due_s is not None:
            led.timer = asyncio.get_running_loop().call_at(due_s, self._passed, group, led)
        elif not len(led.machine) and self._led.get(group) is led:
            del self._led[group]

    def _passed(self, group: str, led: _Led) -> None:
        self._handle(group, led, machines.Passed(now_s=asyncio.get_running_loop().time()))

    def _drop(self, group: str, led: _Led) -> None:
        """Forget a group, unless it was forgotten before; its members join anew."""
        if self._led.get(group) is not led:
            return
        del self._led[group]
        if led.timer is not None:
            led.timer.cancel()
        for call, answer in led.waiting.items():
            fulfil(answer, Answered(call, ErrorCode.unknown_member_id))
        led.waiting.clear()

    # Positions

    async def _commit(self, request: Request, make: Response, entry: Entry) -> Any:
        asked = request.body
        topics = []
        for topic in asked.topics:
            parts = []
            for part in topic.partitions:
                code = await self._stored(request, topic.name, part, entry)
                parts.append(
                    make.of(
                        "OffsetCommitResponsePartition",
                        partition_index=part.partition_index,
                        error_code=code,
                    )
                )
            topics.append(
                make.of("OffsetCommitResponseTopic", name=topic.name, partitions=tuple(parts))
            )
        return make.of("OffsetCommitResponse", throttle_time=_NEVER, topics=tuple(topics))

    async def _stored(self, request: Request, topic: str, part: Any, entry: Entry) -> ErrorCode:
        asked = request.body
        group, offset, led = asked.group_id, part.committed_offset, None
        try:
            name = log_in(topic, part.partition_index)
            await entry.require([Need(Right.READ, name)])
            led = await self._led_here(group, entry)
            generation = asked.generation_id_or_member_epoch
            if led is None:
                return await self._store_without_member(asked, name, offset)
            answered = await self._answered(
                group,
                entry,
                lambda call, now_s: machines.Commit(
                    call=call, member=asked.member_id, generation=generation, now_s=now_s
                ),
            )
            if answered.code is not ErrorCode.none:
                return answered.code
            # Two commits at once would expect the same mark, and the second one would drop the
            # group.
            async with led.turn:
                if name not in led.marks:
                    _, led.marks[name] = await self._positions.find(group, name, led.token)
                led.marks[name] = await self._positions.store(
                    group, name, offset, token=led.token, mark=led.marks[name]
                )
        except _RefusedError as error:
            return error.code
        except SubscriptionMovedError:
            # Another coordinator has claimed it, or an operator moved it.  A group that has formed
            # anew meanwhile has seen that.
            if led is not None:
                self._drop(group, led)
            return ErrorCode.unknown_member_id
        except DLError as error:
            return _position_code_of(error)
        return ErrorCode.none

    async def _store_without_member(self, asked: Any, name: str, offset: int) -> ErrorCode:
        """Store an offset for a client that is no member of a group: the last one stays."""
        if asked.member_id or asked.generation_id_or_member_epoch >= 0:
            return ErrorCode.unknown_member_id
        _, mark = await self._positions.find(asked.group_id, name, None)
        await self._positions.store(
            asked.group_id, name, offset, token=self._clock.new_token(), mark=mark
        )
        return ErrorCode.none

    async def _fetch(self, request: Request, make: Response, entry: Entry) -> Any:
        asked = request.body
        code, topics = ErrorCode.none, []
        if asked.topics is None:
            code = ErrorCode.invalid_request  # a group does not know in which logs it has positions
        for topic in asked.topics or ():
            parts = []
            for index in topic.partition_indexes:
                failed, offset = await self._fetched(asked.group_id, topic.name, index, entry)
                parts.append(
                    make.of(
                        "OffsetFetchResponsePartition",
                        partition_index=index,
                        committed_offset=offset,
                        metadata="",
                        error_code=failed,
                    )
                )
            topics.append(
                make.of("OffsetFetchResponseTopic", name=topic.name, partitions=tuple(parts))
            )
        return make.of(
            "OffsetFetchResponse", throttle_time=_NEVER, topics=tuple(topics), error_code=code
        )

    async def _fetched(
        self, group: str, topic: str, index: int, entry: Entry
    ) -> tuple[ErrorCode, int]:
        try:
            name = log_in(topic, index)
            await entry.require([Need(Right.READ, name)])
            led = await self._led_here(group, entry)
            if led is None:
                return ErrorCode.none, (await self._positions.find(group, name, None))[0]
            async with led.turn:
                offset, led.marks[name] = await self._positions.find(group, name, led.token)
        except _RefusedError as error:
            return error.code, NO_OFFSET
        except DLError as error:
            return _position_code_of(error), NO_OFFSET
        return ErrorCode.none, offset


def _said_by(asked: Any, session_s: float) -> dict[str, bytes]:
    """Return what a member says of itself by each protocol.  Raises: _RefusedError."""
    said = {each.name: each.metadata for each in asked.protocols}
    if not SESSION_S[0] <= session_s <= SESSION_S[1]:
        raise _RefusedError(ErrorCode.invalid_session_timeout)
    if sum(map(len, said.values())) > SAID_BYTES_MAX:
        raise _RefusedError(ErrorCode.invalid_request)
    return said


def _refused_join(answered: Answered, member: str) -> Joined:
    return Joined(call=answered.call, code=answered.code, member=member)


def _position_code_of(error: DLError) -> ErrorCode:
    """Return the code for a position that was not stored or found."""
    if isinstance(error, (OwnershipAcquireFailedError, SubscriptionMovedError)) or error.retriable:
        return ErrorCode.coordinator_load_in_progress  # clients try again
    return code_of(error)
