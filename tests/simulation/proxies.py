"""Proxies in a run, and the writers and readers of logs through them.

A proxy is all that `dlcore.proxy` has below gRPC, in a process that dies, pauses, loses its session
or leaves in good order; another one takes its place, at the same address or a new one.  Producers
send records again that were not acknowledged, to whichever proxy they are sent.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from dlcore.base.access.rights import Right
from dlcore.base.errors import DLError, ProxyUnavailableError
from dlcore.base.proto import flight_pb2 as pb
from dlcore.flight.needs import Need
from dlcore.flight.tickets import Ticket, ticket_of
from dlcore.proxy.actions import Actions
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.health import Health
from dlcore.proxy.membership import Membership
from dlcore.proxy.metrics import checks
from dlcore.proxy.reading.serving import ReadPath
from dlcore.proxy.writing.forwarding import Forwarding
from dlcore.proxy.writing.owner import LogOwner
from dlcore.proxy.writing.put import PutService
from dlcore.proxy.writing.staging import Stagings
from tests.fixtures.passes import FREE
from tests.simulation.calls import Call
from tests.simulation.checkers import BOUNDED, LIVE
from tests.simulation.life_checkers import require
from tests.simulation.log_process import LogProcess
from tests.simulation.proxy_appends import Conditional, Stager
from tests.simulation.proxy_checkers import ProxyCheckers
from tests.simulation.proxy_clients import Producer, Reader
from tests.simulation.proxy_consumers import SHIFTED, Consumer, shift_names
from tests.simulation.proxy_remotes import Program
from tests.simulation.proxy_rules import ChangingRules, Free, GateKept, Stranger
from tests.simulation.truth import InvariantViolatedError
from tests.simulation.world import EPOCH_MS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator

    from tests.simulation.calls import Context
    from tests.simulation.logs import Logs
    from tests.simulation.proxy_rules import Entered
    from tests.simulation.sinks import SinkClient
    from tests.simulation.world import World

    _Client: TypeAlias = Producer | Stager | Reader | Consumer | Program | SinkClient | Stranger

PROXIED = ("p", "q")
"""The logs that are written through proxies in a run that has them."""
_KNOWN_MAX = 3
"""Clients know so many of the latest locations; some are of proxies that are gone."""
_PRODUCERS = 3
_CONDITIONALS = 2
_STAGERS = 2
_CONSUMERS = 3
_PROGRAMS = 3
_READERS = 4
_STOP_GRACE_S = 0.5
_LOOK_S = 0.05
_WRONG_SHARE = 0.02
_ENDING_S_MAX = 120.0


class Proxy:
    """One proxy in its process."""

    def __init__(
        self,
        world: World,
        process: LogProcess,
        probe: Callable[[str], Coroutine[Any, Any, bool]],
        rules: ChangingRules | None,
    ) -> None:
        rng = world.rng
        self._world = world
        self._process = process
        self.location = process.namespace.log_context.client_id
        self.config = ProxyConfig(
            window_records=rng.choice((4, 16)),
            window_bytes=rng.choice((100, 10_000)),
            # The real client gathers records, and what is larger than the limit passes alone.
            pending_bytes_max=rng.choice((4_000 if world.plan.has_remotes else 150, 100_000)),
            ring_bytes_max=rng.choice((1_500, 3_000, 1 << 20)),
            catching_up_max=rng.choice((1, 3)),
            lock_timeout_s=1.0,
            staging_max=rng.choice((1, 4)),
            idle_release_s=rng.choice((0.5, 60.0)),
        )
        namespace = process.namespace
        context = namespace.log_context
        self._membership = Membership(context.store, context.paths, self.location, probe=probe)
        self._gate = GateKept(process, self._membership, self.config, rules) if rules else None
        self.reads = ReadPath(namespace, self._membership, self.config)
        self.owner = LogOwner(namespace, self._membership, self.config)
        self.stagings = Stagings(namespace, self.config)
        forwarding = Forwarding(self._membership, None)
        self.puts = PutService(self.owner, forwarding, self.stagings, self.config)
        self._actions = Actions(
            namespace,
            self._membership,
            self.owner,
            self.puts,
            self.owner.drain,
            self.owner.undrain,
            dict,
            None,
            checks(self._membership, Health(), None),
        )
        self._calls: dict[asyncio.Task[Any], None] = {}
        self._has_ended = False

    @property
    def serves(self) -> bool:
        """Whether it takes connections."""
        return not self._has_ended and self._process.client.is_alive

    async def start(self) -> None:
        """Appear among the live ones."""
        if self._gate is not None:
            await self._gate.start()
        await self._membership.join()

    def put(self, caller: str) -> Call:
        """Begin a DoPut of a client."""

        async def serve(context: Context) -> None:
            context.on_read = self._check_bounds

            async def take(entry: Entered) -> None:
                await self.puts.serve(context, entry, entry.stay)  # type: ignore[arg-type]

            await self._count(context, "DoPut", take)

        return Call(self._world, caller, self._process.client, serve)

    def get(self, caller: str, ticket: bytes) -> Call:
        """Begin a DoGet of a client."""

        async def serve(context: Context) -> None:
            async def give(entry: Entered) -> None:
                with entry.stay.ending_block():
                    asked_for = Ticket.decode(ticket)
                    await entry.require([Need(Right.READ, asked_for.log, asked_for.log_id)])
                    sending = partial(entry.stay.send, context.write)
                    await self.reads.do_get(asked_for, sending)

            await self._count(context, "DoGet", give)

        return Call(self._world, caller, self._process.client, serve)

    def get_info(self, caller: str, asked: bytes) -> Call:
        """Begin a GetFlightInfo of a client."""

        async def serve(context: Context) -> None:
            async def tell(entry: Entered) -> None:
                descriptor = pb.FlightDescriptor.FromString(asked)
                asked_for = ticket_of(descriptor)
                await entry.require([Need(Right.DESCRIBE, asked_for.log, asked_for.log_id)])
                info = await self.reads.get_flight_info(descriptor, asked_for)
                await context.write(info.SerializeToString())

            await self._count(context, "GetFlightInfo", tell)

        return Call(self._world, caller, self._process.client, serve)

    def ask(self, caller: str, action: str, body: bytes) -> Call:
        """Begin a DoAction of a client; it is answered by one message."""

        async def serve(context: Context) -> None:
            async def act(entry: Entered) -> None:
                await context.write(await self._actions.perform(action, body, entry))

            await self._count(context, "DoAction", act)

        return Call(self._world, caller, self._process.client, serve)

    async def _count(
        self, context: Context, entrance: str, serve: Callable[[Entered], Awaitable[None]]
    ) -> None:
        call = asyncio.current_task()
        assert call is not None
        if self._has_ended:
            raise ProxyUnavailableError(f"no proxy serves at {self.location} any more")
        self._calls[call] = None
        try:
            if self._gate is None:
                await serve(Free(context))
            else:
                await self._gate.serve(context, entrance, serve)
        finally:
            del self._calls[call]

    async def act(self, name: str, **body: object) -> None:
        """Do what an operator asks for."""
        self._process.note(f"is asked to {name} {body}")
        await self._actions.perform(name, json.dumps(body).encode(), FREE)

    def _check_bounds(self) -> None:
        """I9: what it holds for its clients stays within its limits."""
        config = self.config
        for wake in (wake for log in self.owner._logs.values() for wake in log.streams.open):
            acks = wake.__self__._machine._acks  # type: ignore[attr-defined]
            records, _, size_bytes = acks._pending[-1] if acks._pending else (0, 0, 0)
            require(
                BOUNDED,
                holds=acks._pending_records - records < config.window_records
                and acks._pending_bytes - size_bytes < config.window_bytes,
                message=f"{self.location}: a stream with {acks} took more than its window",
            )
        taken, kept = self.puts._budget._taken, self.reads.followed.budget.size_bytes
        require(
            BOUNDED,
            holds=taken <= config.pending_bytes_max and kept <= config.ring_bytes_max,
            message=f"{self.location} holds {taken} bytes of streams, and {kept} of rings",
        )

    def check_rights(self) -> None:
        """A3: a stream that lost its right is over soon."""
        if self._gate is not None:
            self._gate.check_lost()

    async def leave(self) -> None:
        """Stop in good order, as a proxy does that is asked to."""
        await self.owner.drain()
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=_STOP_GRACE_S)
        self._has_ended = True
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self.stagings.aclose()
        await self.owner.aclose()

    def check_idle(self) -> None:
        """I9: nothing is left of calls that have ended."""
        left = {
            "calls": len(self._calls),
            "bytes of streams": self.puts._budget._taken,
            "bytes of rings": self.reads.followed.budget.size_bytes,
            "followed logs": len(self.reads.followed),
            "streams": sum(len(log.streams) for log in self.owner._logs.values()),
        }
        found = {what: count for what, count in left.items() if count}
        require(BOUNDED, holds=not found, message=f"{self.location} is left with {found}")

    async def aclose(self) -> None:
        """End, however far it came; idempotent."""
        self._has_ended = True
        self.owner._unsubscribe()
        await self.owner._idle_looks.aclose()
        await self.owner.changes.aclose()
        if self._gate is not None:
            await self._gate.aclose()
        await self.reads.aclose()
        await self._membership.aclose()


class Proxies:
    """The roles."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._world = logs.world
        self.rng = logs.world.rng
        self.log_checkers = logs.world.log_checkers
        self.checkers = ProxyCheckers(self.log_checkers)
        self._at: dict[str, Proxy] = {}  # the proxy that serves at a location, or did last
        self._keeps_locations = self.rng.random() < 0.5
        self._rules = ChangingRules(logs) if logs.world.plan.has_rules else None
        self._clients: list[_Client] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.is_ending = False

    async def start(self, setup: LogProcess, log_ids: dict[str, str]) -> None:
        """Start all processes."""
        if self._rules is not None:
            await self._rules.start(setup, PROXIED)
        for number in range(self.rng.choice((2, 2, 3))):
            self._logs.supervise(
                f"proxy-{number}", self._serve, identity=partial(self._location, number)
            )
        self._clients += self._some_clients(log_ids)
        self._world.callers += [each.name for each in self._clients]
        self._tasks = [self._world.spawn(each.run()) for each in self._clients]

    def _some_clients(self, log_ids: dict[str, str]) -> Iterator[_Client]:
        plan, names = self._world.plan, sorted(log_ids)
        if self._rules is not None:
            yield Stranger(self, names)
        yield from self._some_programs(names)
        # Beside programs and sinks there are few others: such a run is no longer than the rest.
        few = int(plan.has_remotes or plan.has_sinks)
        for number in range(few or _PRODUCERS):
            log = self.rng.choice(names)
            yield Producer(self, f"producer-{number}", log, log_ids[log])
        for number in range(few or _CONDITIONALS):
            log = self.rng.choice(names)
            yield Conditional(self, f"guarded-{number}", log, log_ids[log])
        for number in range(few or _STAGERS):
            yield Stager(self, f"stager-{number}", names)
        for number in range(few or _READERS):
            yield Reader(self, f"fetcher-{number}", log_ids)
        if plan.has_consumers or plan.has_remotes:
            self._logs.supervise("shifter", partial(shift_names, self._logs))
        if plan.has_consumers:
            for number in range(_CONSUMERS):
                yield Consumer(self, f"consumer-{number}", names, is_last=number == 0)

    def _some_programs(self, names: list[str]) -> Iterator[_Client]:
        plan, sinks = self._world.plan, self._logs.sinks
        if plan.has_remotes:
            for number in range(_PROGRAMS if sinks is None else 1):
                yield Program(self, f"program-{number}", [*names, *SHIFTED])
        if sinks is not None:
            yield from sinks.clients(self)

    def _location(self, number: int, life: int) -> str:
        return f"grpc://proxy-{number}:{0 if self._keeps_locations else life}"

    # Proxies

    async def _serve(self, process: LogProcess) -> None:
        """Serve for some time, or to the end."""
        rng, loop = self.rng, self._world.loop
        async with self._serving(process) as proxy:
            until = loop.time() + rng.choice((3.0, 60.0)) * rng.random()
            while not self._logs.is_over and loop.time() < until:
                await asyncio.sleep(_LOOK_S)
                proxy.check_rights()
                if rng.random() < 0.01:
                    await proxy.act("release", log=rng.choice(PROXIED))

    @asynccontextmanager
    async def _serving(self, process: LogProcess) -> AsyncIterator[Proxy]:
        """Run a proxy in a process, which leaves in good order unless the process dies."""
        proxy = Proxy(self._world, process, self._refuses, self._rules)
        location = proxy.location
        try:
            await proxy.start()
            process.note(f"serves at {location}")
            self._at.pop(location, None)
            self._at[location] = proxy
            yield proxy
            process.note("leaves")
            self.count("planned move", len(proxy.owner))
            await proxy.leave()
            proxy.check_idle()
        finally:
            await proxy.aclose()

    async def _refuses(self, location: str) -> bool:
        """Tell a proxy whether no proxy serves where another one did; now and then it is wrong."""
        await asyncio.sleep(self.rng.uniform(0.0, _LOOK_S))
        proxy = self._at.get(location)
        is_wrong = self.rng.random() < _WRONG_SHARE
        self.count("live proxy taken for dead", is_wrong)
        return is_wrong or proxy is None or not proxy.serves

    # Their face for clients

    def some_location(self) -> str:
        """Return a location where a proxy serves, or served, if there is one."""
        return self.rng.choice(self.locations() or [""])

    def locations(self) -> list[str]:
        """Return the locations that clients know."""
        return list(self._at)[-_KNOWN_MAX:]

    def at(self, location: str) -> Proxy:
        """Return the proxy that serves at a location, or did last.  Raises:
        ProxyUnavailableError."""
        if location not in self._at:
            raise ProxyUnavailableError(f"no proxy serves at {location}")
        return self._at[location]

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self._world.trace.note(who, what)

    def fail(self, violation: BaseException) -> None:
        """End the run: a promise was broken."""
        self._world.fail(violation)

    def now_ms(self) -> int:
        """Return the time."""
        return EPOCH_MS + int(1000 * self._world.loop.time())

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something after a while, unless the end is near by then."""
        self._world.loop.call_later(delay_s, lambda: self.is_ending or action())

    def count(self, what: str, times: int = 1) -> None:
        """Count what happened."""
        self._world.faults[what] += times

    # The end

    async def finish(self) -> None:
        """I8: through a proxy that nothing happens to all goes on that waited."""
        process = LogProcess(
            self._world, "proxy-last", identity="grpc://proxy-last:0", rolls_soon=False
        )
        self._at.clear()
        async with self._serving(process):
            self.is_ending = True
            await self._enlarge_segments(process)
            async with self._rights_given_back(process):
                _, left = await asyncio.wait(self._tasks, timeout=_ENDING_S_MAX / 2)
                if left and not self._world.plan.auto_recoveries:
                    await self._recover_logs()
                _, left = await asyncio.wait(self._tasks, timeout=_ENDING_S_MAX / 2)
            if left:
                raise InvariantViolatedError(LIVE, f"{len(left)} clients of proxies do not end")
        await process.client.aclose()

    async def _enlarge_segments(self, process: LogProcess) -> None:
        """Let no settings make the last proxy roll soon, for the reason in `LogProcess`."""
        for name in await process.namespace.get_logs():
            try:
                log = await process.namespace.open_log(name)
                if (await log.get_settings()).segment_bytes_max is not None:
                    await log.update_settings(segment_bytes_max=None)
            except DLError as error:
                process.note(f"log {name} keeps small segments: {type(error).__name__}: {error}")

    async def _recover_logs(self) -> None:
        """End recoveries that their processes did not end, as an operator where nothing else does.

        A log whose writer lives is left alone: it has recovered the log itself.
        """
        operator = LogProcess(self._world, "operator")
        for name in await operator.namespace.get_logs():
            try:
                await (await operator.namespace.open_log(name)).recover()
            except DLError as error:
                operator.note(f"log {name} is not recovered: {type(error).__name__}: {error}")
        await operator.client.aclose()

    @asynccontextmanager
    async def _rights_given_back(self, process: LogProcess) -> AsyncIterator[None]:
        """Let everybody come to an end, during the block."""
        if self._rules is None:
            yield
            return
        giving = self._world.spawn(self._rules.give_back(process))
        try:
            yield
        finally:
            giving.cancel()
            await asyncio.wait([giving])

    def check_whole(self) -> None:
        """Judge the answers to clients, once everything that there is was read."""
        self.checkers.check_whole()
        self.count("proxied record", self.checkers.delivered_count)
