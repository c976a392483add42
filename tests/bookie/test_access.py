"""Goal: a session without a certificate does what its capabilities give, and nothing else.

Method: exact effects of sessions over the real wire; a key of the test signs the capabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bookie.serving.access import Access
from bookie.serving.session import (
    NoteDenial,
    OpenStream,
    Read,
    SessionState,
    Signal,
    Step,
    Stepped,
    StoreEach,
    StoreLac,
    StoreRun,
)
from dlcore.base.access.capability import (
    ALL_RIGHTS,
    EVERYTHING,
    LIFETIME_S_MAX,
    SKEW_S,
    Grant,
    LedgerRight,
    Signer,
    Verifier,
    new_private_key,
)
from dlcore.base.errors import BookieAccessDeniedError
from dlcore.wire.fields import Status
from dlcore.wire.messages import (
    Add,
    Authorize,
    Durable,
    Failed,
    Follow,
    ReadEntries,
    ReadEntry,
    ReadHeld,
    ReadLac,
    Request,
    WriteLac,
    encode,
)
from tests.fixtures.raw_wire import adds, kind_of, raw_connection
from tests.fixtures.served_bookie import BOOKIE, client_of, frame_of, run, serve
from tests.fixtures.session_bench import RUN, WINDOW, Bench, only, refusals, sent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bookie.serving.session import Effect

SIGNER = Signer(new_private_key())
LEDGER = 5
DENIED = BookieAccessDeniedError


class Restricted(Bench):
    """A session whose client has no certificate."""

    def __init__(self, *capabilities: bytes) -> None:
        super().__init__()
        self.now_s = 1_800_000_000.0
        self.verifier = Verifier(lambda: self.now_s)
        self.verifier.use([SIGNER.public_key])
        self.session.access = Access(self.verifier)
        for each in capabilities:
            self.take(Authorize(each))

    def capability(self, *grants: Grant, lifetime_s: int = 60) -> bytes:
        """Return one that is valid from now on."""
        return SIGNER.sign(grants, expires_s=int(self.now_s) + lifetime_s)

    def give(self, *grants: Grant, lifetime_s: int = 60) -> None:
        """Present one."""
        assert not sent(self.take(Authorize(self.capability(*grants, lifetime_s=lifetime_s))))

    def reason(self, request: Request | Add) -> str:
        """Return why a request is denied."""
        effects = [*self.take(request), *self.handle(Signal.FLUSH)]
        (failed,) = sent(effects)
        assert isinstance(failed, Failed)
        return failed.detail


def of(rights: LedgerRight, **entries: int) -> Grant:
    """Return a grant of the ledger."""
    return Grant.of(LEDGER, rights, **entries)


REQUESTS: Sequence[tuple[Request | Add, LedgerRight]] = (
    (ReadLac(1, LEDGER, fence=False), LedgerRight.READ),
    (ReadHeld(1, LEDGER), LedgerRight.READ),
    (ReadEntry(1, LEDGER, 3, fence=False), LedgerRight.READ),
    (ReadEntries(1, LEDGER, 3, 9, 1, 1000, WINDOW), LedgerRight.READ),
    (Follow(1, LEDGER, 3, WINDOW), LedgerRight.READ),
    (ReadLac(1, LEDGER, fence=True), LedgerRight.READ | LedgerRight.FENCE),
    (ReadEntry(1, LEDGER, 3, fence=True), LedgerRight.READ | LedgerRight.FENCE),
    (WriteLac(1, LEDGER, 3), LedgerRight.ADD),
    (adds(frame_of(LEDGER, 3)), LedgerRight.ADD),
    (Add(1, True, [frame_of(LEDGER, 3)]), LedgerRight.ADD | LedgerRight.RECOVER),
)


def is_done(effects: Sequence[Effect]) -> bool:
    """Return whether the request of these effects is carried out."""
    done = (Read, OpenStream, StoreEach, StoreRun, StoreLac)
    return any(isinstance(each, done) for each in effects)


@pytest.mark.parametrize(
    "rights", [LedgerRight(number) for number in range(1, int(ALL_RIGHTS) + 1)]
)
@pytest.mark.parametrize(("request_", "needed"), REQUESTS)
def test_each_request_needs_its_rights(
    request_: Request | Add, needed: LedgerRight, rights: LedgerRight
) -> None:
    """All sets of rights, one by one: it is carried out with them, and else denied."""
    bench = Restricted()
    bench.give(of(rights))
    effects = bench.take(request_)
    if needed in rights:
        assert is_done(effects)
        assert not bench.session.writes.is_flush_due
    else:
        assert not is_done(effects)
        assert [each.reason[:11] for each in only(effects, NoteDenial)] == ["no right to"]
        assert refusals(bench.handle(Signal.FLUSH)) == {1: DENIED}


@pytest.mark.parametrize(("request_", "_needed"), REQUESTS)
def test_nothing_is_done_without_a_capability(
    request_: Request | Add, _needed: LedgerRight
) -> None:
    """Nor with one of another ledger; the answer says so, and names the ledger."""
    bench = Restricted()
    reason = bench.reason(request_)
    assert f"in ledger {LEDGER}" in reason
    assert "presented no capability for it" in reason
    other = Restricted()
    other.give(Grant.of(LEDGER - 1, ALL_RIGHTS), Grant.of(LEDGER + 1, ALL_RIGHTS))
    assert "presented no capability for it" in other.reason(request_)


@pytest.mark.parametrize(
    "request_",
    [
        ReadEntry(1, LEDGER, 9, fence=False),
        ReadEntry(1, LEDGER, 20, fence=False),
        ReadEntries(1, LEDGER, 9, 12, 1, 1000, WINDOW),
        ReadEntries(1, LEDGER, 12, 20, 1, 1000, WINDOW),
        Follow(1, LEDGER, 9, WINDOW),
        Follow(1, LEDGER, 12, WINDOW),
        adds(frame_of(LEDGER, 9)),
    ],
)
def test_entries_beside_those_of_the_grant_stay_closed(request_: Request | Add) -> None:
    """Such as those that were truncated before it was made."""
    bench = Restricted()
    bench.give(of(ALL_RIGHTS, first_entry_id=10, last_entry_id=19))
    assert "no right" in bench.reason(request_)
    assert is_done(bench.take(ReadEntries(2, LEDGER, 10, 19, 1, 1000, WINDOW)))


def test_the_part_that_a_turn_takes_is_judged_alone() -> None:
    """A message may be too long for the client's trust, and its first part allowed."""
    bench = Restricted()
    bench.give(of(ALL_RIGHTS, first_entry_id=0, last_entry_id=1))
    bench.session.trust.level = 2
    effects = bench.take(adds(*(frame_of(LEDGER, number) for number in range(3))))
    assert is_done(effects)
    assert not only(effects, NoteDenial)
    assert bench.session.intake.rest


def test_adds_with_a_right_are_stored_from_a_mixed_message() -> None:
    """Those of another ledger are denied one by one, whatever comes between them."""
    bench = Restricted()
    bench.give(of(LedgerRight.ADD))
    frames = [frame_of(LEDGER, 0), frame_of(6, 0), frame_of(LEDGER, 1), frame_of(6, 1)]
    effects = bench.take(adds(*frames))
    stored = [
        (each.add.first_request_id, list(each.add.frames)) for each in only(effects, StoreEach)
    ]
    assert stored == [(1, frames[:1]), (3, frames[2:3])]
    assert len(only(effects, NoteDenial)) == 1
    assert refusals(bench.handle(Signal.FLUSH)) == {2: DENIED, 4: DENIED}
    run = adds(*(frame_of(LEDGER, number) for number in range(RUN)), first=5)
    assert only(bench.take(run), StoreRun)


def test_a_capability_ends_at_its_time() -> None:
    """A later one of the same rights takes its place; the answer tells when it was over."""
    bench = Restricted()
    bench.give(of(LedgerRight.READ), lifetime_s=60)
    bench.now_s += 60 + SKEW_S + 1
    assert "it expired 61 s ago" in bench.reason(ReadLac(1, LEDGER, fence=False))
    bench.give(of(LedgerRight.READ))
    assert is_done(bench.take(ReadLac(2, LEDGER, fence=False)))


def test_requests_of_several_capabilities_may_alternate() -> None:
    """Whichever gave the right to the request before."""
    bench = Restricted()
    bench.give(of(LedgerRight.READ, last_entry_id=9))
    bench.give(Grant.of(6, LedgerRight.ADD))
    for number in (1, 3, 5):
        assert is_done(bench.take(ReadEntry(number, LEDGER, number, fence=False)))
        assert is_done(bench.take(adds(frame_of(6, number), first=number + 1)))
    assert "the capability gives ADD" in bench.reason(ReadEntry(8, 6, 0, fence=False))
    assert "no capability for it" in bench.reason(ReadEntry(9, LEDGER, 10, fence=False))


@pytest.mark.parametrize("ends", ["with its time", "with its key"])
def test_one_for_everything_gives_all_until_it_ends(ends: str) -> None:
    """Each request, of any ledger; then nothing of it is left."""
    bench = Restricted()
    bench.give(EVERYTHING)
    for number, (request_, _) in enumerate(REQUESTS, 1):
        first: Any = number  # the first field of each is its id
        assert is_done(bench.take(type(request_)(first, *request_[1:])))
    if ends == "with its time":
        bench.now_s += 60 + SKEW_S + 1
    else:
        bench.verifier.use([])
    assert "of the capability: it" in bench.reason(ReadLac(99, LEDGER, fence=False))


def test_a_verified_capability_ends_with_its_key() -> None:
    """If the keys are withdrawn, connections that presented it before have nothing either."""
    bench = Restricted()
    bench.give(of(LedgerRight.READ))
    bench.verifier.use([])
    assert "was withdrawn" in bench.reason(ReadLac(1, LEDGER, fence=False))


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_stream_ends_with_its_capability(is_renewed: bool) -> None:
    """At its next message, unless another one was presented meanwhile."""
    bench = Restricted()
    bench.give(of(LedgerRight.READ))
    bench.take(ReadEntries(1, LEDGER, 0, 99, 1, 1000, WINDOW))
    bench.now_s += 60 + SKEW_S + 1
    if is_renewed:
        bench.give(of(LedgerRight.READ))
    effects = bench.handle(Stepped(1, True, None))
    effects += bench.handle(Signal.BEGIN_STEPS)
    assert bool(only(effects, Step)) == is_renewed
    assert bool(only(effects, NoteDenial)) != is_renewed
    if not is_renewed:
        assert refusals(bench.handle(Signal.FLUSH)) == {1: DENIED}


def test_a_refused_capability_grants_nothing_and_the_error_says_why() -> None:
    """Its signer is unknown, or its lifetime is too long."""
    bench = Restricted()
    stranger = Signer(new_private_key()).sign([of(ALL_RIGHTS)], expires_s=int(bench.now_s))
    bench.take(Authorize(stranger))
    assert "the last capability was refused: it is signed by" in bench.reason(ReadHeld(1, LEDGER))
    bench.give(of(LedgerRight.READ), lifetime_s=LIFETIME_S_MAX + SKEW_S + 1)
    assert "at most 86400" in bench.reason(ReadHeld(2, LEDGER))


def test_a_client_that_presents_many_refused_ones_is_disconnected() -> None:
    """A few may be a mistake, of clocks or keys; each costs a verification."""
    bench = Restricted()
    stranger = Signer(new_private_key()).sign([of(ALL_RIGHTS)], expires_s=int(bench.now_s))
    good = bench.capability(of(LedgerRight.READ))
    for _ in range(7):
        bench.take(Authorize(stranger), Authorize(good))
    before = bench.session.refusal
    assert before is None
    bench.take(Authorize(stranger))
    assert bench.session.state is SessionState.REFUSED
    assert bench.session.refusal is not None
    assert bench.session.refusal[0] is Status.ACCESS_DENIED


def test_with_a_certificate_a_capability_is_not_looked_at() -> None:
    """Such a connection may do everything, whatever it presents."""
    bench = Bench()
    assert not sent(bench.take(Authorize(bytes(116))))
    assert is_done(bench.take(ReadLac(1, LEDGER, fence=False)))


def test_a_denial_is_logged_with_who_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a real connection: the client gets the error, and the bookie's log names its address."""
    verifier = Verifier(lambda: 0.0)
    verifier.use([SIGNER.public_key])

    async def scenario() -> None:
        async with (
            serve(tmp_path, new_access=lambda: Access(verifier)) as served,
            client_of(served.address) as client,
        ):
            with pytest.raises(DENIED, match="no right to READ in ledger 7"):
                await client.read_lac(BOOKIE, ledger_id=7, fence=False)

    run(scenario)
    denied = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(denied) == 1
    assert denied[0].startswith("request denied peer=('127.0.0.1', ")
    assert "no right to READ in ledger 7" in denied[0]


def test_a_large_payload_is_received_only_of_who_may_add(tmp_path: Path) -> None:
    """Else the connection ends at its head, with the reason; a right to read is none."""
    verifier = Verifier(lambda: 0.0)
    verifier.use([SIGNER.public_key])
    head, *payload = map(bytes, encode(adds(frame_of(LEDGER, 0, bytes(100_000)))))

    async def scenario() -> None:
        async with serve(tmp_path, new_access=lambda: Access(verifier)) as served:
            for rights in (LedgerRight(0), LedgerRight.READ, LedgerRight.ADD):
                async with raw_connection(served.address) as end:
                    if rights:
                        end.send(Authorize(SIGNER.sign([of(rights)], expires_s=60)))
                    end.send(head)
                    if rights is LedgerRight.ADD:
                        end.send(*payload)
                        assert await end.receive() == Durable((1,))
                    else:
                        assert kind_of(await end.receive()) == (0, DENIED)

    run(scenario)
