"""Rules of access in a run: proxies judge each call by them, while a client changes them.

Everybody proves a name.  One stranger has no right from the beginning to the end.  Some producers
and readers lose theirs for a while, in the midst of their streams.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, TypeAlias

from dlcore.base.access.rights import Principal, Proof, Right, Rule, Scope
from dlcore.base.errors import AccessDeniedError, DLError
from dlcore.flight.tickets import Ticket
from dlcore.proxy.callers import Callers, Stay
from dlcore.proxy.gatekeeper import Entry, Gatekeeper
from dlcore.proxy.outages import Outages
from tests.fixtures.passes import FreePass
from tests.simulation.calls import End
from tests.simulation.life_checkers import require
from tests.simulation.proxy_checkers import ENDED_SOON, NONE_UNASKED, ONLY_THE_DENIED
from tests.simulation.proxy_clients import PATIENCE_S, first_message, payload_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.membership import Membership
    from tests.simulation.calls import Call, Context
    from tests.simulation.log_process import LogProcess
    from tests.simulation.logs import Logs
    from tests.simulation.proxies import Proxies

_ENDED_S = {"DoGet": 1.5, "DoPut": 5.0}
"""A stream of rows may have a message on its way; one of records ends what it has accepted."""
_STRANGER = "stranger"
_GIVEN_BACK_S = 0.5
_ALL = tuple(Right)
_DENIABLE = (
    *((f"producer-{number}", Right.APPEND) for number in range(2)),
    *((f"fetcher-{number}", Right.READ) for number in range(2)),
)


class Free(FreePass):
    """A call in a run without rules."""

    def __init__(self, context: Context) -> None:
        self.stay = Stay(self.caller, context.peer())


Entered: TypeAlias = "Free | Entry"


class ChangingRules:
    """The rules of a run, and the process that changes them."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._rng = logs.world.rng
        self._denials: tuple[Rule, ...] = ()
        self.denied = {_STRANGER}
        """The callers that were denied something at some time."""

    async def start(self, setup: LogProcess, names: tuple[str, ...]) -> None:
        """Store the first rules, before any proxy reads them."""
        self._denials = tuple(
            _rule(name, (right,), Scope.LOG, log)
            for (name, right), log in itertools.product(_DENIABLE, names)
        )
        everybody = Rule(principal="*", rights=_ALL, scope=Scope.NAMESPACE)
        stranger = _rule(_STRANGER, _ALL, Scope.NAMESPACE)
        await setup.namespace.access_rules.change(add=[everybody, stranger])
        self._logs.supervise("ruler", self._change)

    async def _change(self, process: LogProcess) -> None:
        rng = self._rng
        await self._logs.sleep(rng.uniform(0.0, 1.0))
        denials = rng.sample(self._denials, rng.choice((0, 1, 3)))
        self.denied |= {rule.principal.partition(":")[2] for rule in denials}
        removed = [rule for rule in self._denials if rule not in denials]
        rules = process.namespace.access_rules
        stored = await rules.read()
        await rules.change(add=denials, remove=[rule for rule in removed if rule in stored])
        process.note(f"denies {'; '.join(map(str, denials)) or 'none'}")
        self._logs.world.faults["changed rules"] += 1

    async def give_back(self, process: LogProcess) -> None:
        """Give everybody but the stranger their rights, again and again, until it is cancelled."""
        while True:
            rules = process.namespace.access_rules
            stored = await rules.read()
            await rules.change(remove=[rule for rule in self._denials if rule in stored])
            await asyncio.sleep(_GIVEN_BACK_S)


def _rule(name: str, rights: tuple[Right, ...], scope: Scope, log: str = "") -> Rule:
    principal = str(Principal(Proof.CERTIFICATE, name))
    return Rule(principal=principal, rights=rights, scope=scope, name=log, deny=True)


class GateKept:
    """The gate of one proxy, and what must hold of it."""

    def __init__(
        self,
        process: LogProcess,
        membership: Membership,
        config: ProxyConfig,
        rules: ChangingRules,
    ) -> None:
        self._process = process
        self._rules = rules
        self._outages = Outages(process.namespace.log_context.store)
        callers = Callers(membership, config)
        self._keeper = Gatekeeper(process.namespace, callers, self._outages, config, audit=None)
        self._lost_at: dict[int, float] = {}

    async def start(self) -> None:
        """Read the rules, and follow them."""
        await self._keeper.start()

    async def aclose(self) -> None:
        """Follow no more."""
        await self._keeper.aclose()
        self._outages.close()

    async def serve(
        self, context: Context, entrance: str, serve: Callable[[Entered], Awaitable[None]]
    ) -> None:
        """Let a call in, and serve it."""
        try:
            async with self._keeper.enter(context, entrance) as entry:  # type: ignore[arg-type]
                await serve(entry)
        except AccessDeniedError as error:
            (common_name,) = context.auth_context()["x509_common_name"]
            name = common_name.decode()
            require(
                ONLY_THE_DENIED,
                holds=name in self._rules.denied,
                message=f"{self._process.name} refused {name}: {error}",
            )
            self._process.world.faults["denied call"] += name != _STRANGER
            raise

    def check_lost(self) -> None:
        """A3: a stream that lost its right ends, whatever it waits for."""
        self._keeper._gate.validate()
        now = self._process.world.loop.time()
        lost = [
            number
            for number, entry in self._keeper._entered.items()
            if entry.lost is not None and entry.entrance in _ENDED_S
        ]
        self._lost_at = {number: self._lost_at.get(number, now) for number in lost}
        for number, since in self._lost_at.items():
            entry = self._keeper._entered[number]
            require(
                ENDED_SOON,
                holds=now - since <= _ENDED_S[entry.entrance],
                message=f"{self._process.name}: {entry.entrance} of {entry.caller} goes on "
                f"{now - since:.1f} s after {entry.lost}",
            )


class Stranger:
    """Asks for everything, and is given nothing."""

    def __init__(self, proxies: Proxies, logs: list[str]) -> None:
        self.name = _STRANGER
        self._proxies = proxies
        self._rng = proxies.rng
        self._logs = logs

    async def run(self) -> None:
        """Try, until the end is near."""
        while not self._proxies.is_ending:
            try:
                await self._try(self._rng.choice((self._put, self._get, self._ask)))
            except (DLError, TimeoutError) as error:
                self._proxies.note(self.name, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._rng.expovariate(5.0))

    async def _try(self, begin: Callable[[], Call]) -> None:
        call = begin()
        try:
            answer = await asyncio.wait_for(call.take(), PATIENCE_S)
            is_refused = isinstance(answer, End) and answer.error is not None
            require(NONE_UNASKED, holds=is_refused, message=f"{self.name} got {answer!r:.200}")
            self._proxies.count("stranger refused")
        finally:
            call.cancel()

    def _put(self) -> Call:
        call = self._proxies.at(self._proxies.some_location()).put(self.name)
        call.send(first_message({"log": self._rng.choice(self._logs)}))
        call.send(payload_message([b"of a stranger"], None))
        return call

    def _get(self) -> Call:
        ticket = Ticket(log=self._rng.choice(self._logs), follow=self._rng.random() < 0.5)
        return self._proxies.at(self._proxies.some_location()).get(self.name, ticket.encode())

    def _ask(self) -> Call:
        body = f'{{"log": "{self._rng.choice(self._logs)}"}}'.encode()
        action = self._rng.choice(("release", "positions", "truncate", "drain"))
        proxy = self._proxies.at(self._proxies.some_location())
        return proxy.ask(self.name, action, body)
