"""The gate of a proxy, driven: it reads and watches the rules, and stands before every call.

A call enters with its caller.  It then requires what its request needs, at once or piece by piece.
A stream that loses its right takes no more records or sends no more, and is refused, within moments
of the change of the rules.
The audit log has a line of each denial, and of each call that manages or truncates.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, assert_never

from dlcore.base.access.audit import AuditLine
from dlcore.base.access.gate import Asked, End, Ended, Event, Gate, Refuse, RulesDamaged, RulesRead
from dlcore.base.access.rights import ANONYMOUS, Caller, Demand, Right
from dlcore.base.errors import (
    AccessDeniedError,
    CorruptMetadataError,
    DLError,
    LogNotFoundError,
    LogNotReadyError,
    UnauthenticatedError,
)
from dlcore.base.ids import validate_log_name
from dlcore.flight.calls import host_of
from dlcore.metadata.one_node import persistently
from dlcore.proxy.callers import Stay

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.base.access.audit_file import AuditFile
    from dlcore.flight.calls import Context
    from dlcore.flight.needs import Need
    from dlcore.metadata.one_node import NodeFollower
    from dlcore.proxy.callers import Callers
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.outages import Outages

logger = logging.getLogger(__name__)

_AUDITED = frozenset({Right.MANAGE, Right.TRUNCATE})
"""The audit log has a line of each call that needs one of these rights, done or failed."""


class Gatekeeper:
    """The gate of one proxy.

    Args:
        namespace: the namespace of the rules; the caller closes it.
        callers: finds out who calls.
        outages: ends a lookup during an outage of the metadata store.
        config: the proxy's configuration.
        audit: the audit log; None: denials and management are only in the program's log.
    """

    def __init__(
        self,
        namespace: DirectNamespace,
        callers: Callers,
        outages: Outages,
        config: ProxyConfig,
        audit: AuditFile | None,
    ) -> None:
        self._callers = callers
        context = namespace.log_context
        self._logs = context.logs
        self._outages = outages
        self._rules = namespace.access_rules
        self._audit = audit
        self._gate = Gate(super_users=frozenset(config.super_user_names))
        self._numbers = count()
        self._entered: dict[int, Entry] = {}
        self._follower: NodeFollower | None = None

    async def start(self) -> None:
        """Read the rules, and begin to follow them.  Raises: MetadataError."""
        await self._look()
        self._follower = self._rules.follow(self._look)

    async def aclose(self) -> None:
        """Stop following."""
        if self._follower is not None:
            await self._follower.aclose()

    @asynccontextmanager
    async def enter(self, context: Context, entrance: str) -> AsyncGenerator[Entry, None]:
        """Let a call in, for a block; the block requires what the call needs.

        Raises: the error of the block, or AccessDeniedError: the call lost its right.
        """
        try:
            caller = await self._callers.of(context)
        except UnauthenticatedError as error:
            self.tell_unproven(host_of(context), context.peer(), entrance, error)
            raise
        async with self.enter_as(caller, context.peer(), entrance) as entry:
            yield entry

    @asynccontextmanager
    async def enter_as(
        self, caller: Caller, peer: str, entrance: str
    ) -> AsyncGenerator[Entry, None]:
        """Let a call of a known caller in, for a block, as `enter` does.

        `peer` names its connection, on which later tokens make streams last longer.
        """
        with self._callers.stay(caller, peer) as stay:
            entry = Entry(self, next(self._numbers), stay, entrance)
            self._entered[entry.number] = entry
            try:
                yield entry
            except BaseException as error:
                # Also if the client is gone, or the call has failed by a defect: it has begun.
                if entry.is_audited or error is entry.lost:
                    self._tell(entry, f"{type(error).__name__}: {error}")
                raise
            else:
                if entry.is_audited:
                    self._tell(entry, "ok")
            finally:
                del self._entered[entry.number]
                self._handle(Ended(entry.number))

    def tell_unproven(
        self, host: str, peer: str, entrance: str, error: UnauthenticatedError
    ) -> None:
        """Tell that a call was refused for want of a proof of its caller."""
        stay = Stay(Caller(ANONYMOUS, host), peer)
        entry = Entry(self, next(self._numbers), stay, entrance)
        self._tell(entry, str(error), is_denial=True)

    async def require(self, entry: Entry, needs: Sequence[Need]) -> None:
        """Require the needs of a call.  Use `Entry.require`."""
        demands: dict[Demand, None] = {}
        for need in needs:
            if need.log is None:
                demands[Demand(need.right)] = None
                continue
            name = validate_log_name(need.log)
            demands[Demand(need.right, name)] = None
            if need.log_id is None:
                continue
            # By its id the call reaches the log under its present name, which the rules may deny.
            if self._gate.has_rules:
                present = await self._name_of(name, need.log_id)
                demands[Demand(need.right, present)] = None
            else:
                entry.is_looked_up = False
        entry.demands.update(demands)
        try:
            self._handle(Asked(entry.number, entry.caller.principal, tuple(demands)))
        except AccessDeniedError as error:
            entry.is_audited = False  # its line is written here
            self._tell(entry, str(error), is_denial=True)
            if entry.caller.forwarder is not None:  # it may drain, and its client have the right
                raise LogNotReadyError(
                    f"{entry.caller.forwarder} forwards this call, and is not live: try again"
                ) from error
            raise
        if any(demand.right in _AUDITED for demand in demands):
            # Before the call takes effect: what cannot be recorded is refused.
            if self._audit is not None:
                self._audit.require_writable()
            entry.is_audited = True

    def may(self, caller: Caller, demand: Demand) -> bool:
        """Return whether a caller may do something.  Use `Entry.may`."""
        return self._gate.judge(caller.principal, demand) is None

    async def _name_of(self, name: str, log_id: str) -> str:
        """Return the present name of a log; `name` if it is gone, as the call will find out."""
        try:
            async with self._outages.bounded():
                return (await self._logs.find(name, log_id)).name
        except LogNotFoundError:
            return name

    def _handle(self, event: Event) -> None:
        for effect in self._gate.handle(event):
            match effect:
                case Refuse(_, error):
                    raise error
                case End(call, error):
                    self._entered[call].lose(error)
                case _:
                    assert_never(effect)

    def _tell(self, entry: Entry, result: str, *, is_denial: bool = False) -> None:
        line = AuditLine(
            principal=str(entry.caller.principal),
            address=entry.caller.address,
            entrance=entry.entrance,
            resource=", ".join(map(str, entry.demands)),
            result=result,
        )
        logger.info("%s from %s: %s: %s", line.principal, line.address, line.entrance, result)
        if self._audit is None:
            return
        if is_denial:
            self._audit.write_denial(line)
        else:
            self._audit.write(line)

    async def _look(self) -> None:
        try:
            rules = await persistently(self._rules.read)
        except CorruptMetadataError as error:
            logger.warning(
                "the rules of access are damaged, only super users pass: %s; to do: as a super "
                "user write the rules anew (dlog acl clear, dlog acl allow)",
                error,
            )
            self._handle(RulesDamaged(str(error)))
            return
        had_rules = self._gate.has_rules
        self._handle(RulesRead(rules))
        if self._gate.has_rules and not had_rules:
            # The present names of their logs were not looked up.
            for entry in self._entered.values():
                if not entry.is_looked_up:
                    entry.lose(LogNotReadyError("the namespace has rules of access now: try again"))


class Entry:
    """One call behind the gate."""

    def __init__(self, keeper: Gatekeeper, number: int, stay: Stay, entrance: str) -> None:
        self.number = number
        self.stay = stay
        """The time for which the call may last, if it is a stream."""
        self.entrance = entrance
        self.demands: dict[Demand, None] = {}
        """All that the call needed so far, in order."""
        self.is_audited = False
        """Whether the audit log gets a line of the call's end."""
        self.is_looked_up = True
        """Whether the present name of each log that it named with an id was looked up."""
        self.lost: DLError | None = None
        """The error with which the call is ended from here."""
        self._keeper = keeper

    @property
    def caller(self) -> Caller:
        """The caller."""
        return self.stay.caller

    async def require(self, needs: Sequence[Need], *, entrance: str | None = None) -> None:
        """Require what a request of the call needs; see `Pass`."""
        self.entrance = entrance or self.entrance
        await self._keeper.require(self, needs)

    def may(self, demand: Demand) -> bool:
        """Return whether the caller may do something; the audit log gets no line."""
        return self._keeper.may(self.caller, demand)

    def lose(self, error: DLError) -> None:
        """End the call, if it is a stream; another one has begun, and runs to its end."""
        self.lost = error
        self.stay.end(error)
