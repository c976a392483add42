"""TLS between clients and bookies: which are trusted, and what is left of others."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from dlcore.base.access import tls_in_use
from dlcore.base.access.client_names import ClientNames
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.tls_in_use import TlsInUse
from dlcore.base.config import LedgerClientConfig
from dlcore.base.errors import BookieUnavailableError, ConfigurationError
from dlcore.base.proto import bookie_pb2 as pb
from dlcore.base.proto.bookie_pb2_grpc import BookieControlStub
from dlcore.wire.client import WireBookieClient
from tests.fixtures.certificates import Authority, lock, make_tls
from tests.fixtures.raw_wire import raw_connection
from tests.fixtures.served_bookie import BOOKIE, CLUSTER_ID, frame_of, run, serve

if TYPE_CHECKING:
    from tests.fixtures.served_bookie import ServedBookie

PATIENT = LedgerClientConfig(add_timeout_s=60.0, read_timeout_s=60.0)


def client_of(served: ServedBookie, tls: TlsFiles | None) -> WireBookieClient:
    """Return a client."""
    return WireBookieClient(
        served.resolve,
        cluster_id=CLUSTER_ID,
        config=PATIENT,
        resolve_control=served.resolve_control,
        tls=TlsInUse.of(tls),
    )


def test_the_bookie_knows_the_name_in_the_clients_certificate(tmp_path: Path) -> None:
    """Both sides have certificates: large entries pass, and the handler sees the name."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls", client_name="writer-7")
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            client = client_of(served, tls.client)
            frame = frame_of(1, 0, b"x" * 3_000_000)
            await client.add_entry(BOOKIE, frame)
            assert [each.socket.peer for each in served.service.connections] == ["writer-7"]
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=0)
            assert [bytes(each) for each in await anext(chunks)] == [frame]
            await chunks.aclose()
            (listed,) = await client.list_entries(BOOKIE, ledger_id=1)
            assert (listed.first_entry_id, listed.last_entry_id) == (0, 0)
            await client.aclose()

    run(scenario)


@pytest.mark.parametrize("who", ["no certificate", "without TLS", "a stranger"])
def test_an_untrusted_client_gets_no_answer(
    tmp_path: Path, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No certificate, no TLS, a stranger's certificate: unavailable, and nothing is stored."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls")
        stranger = replace(make_tls(tmp_path / "other").client, ca=tls.client.ca)
        uncertified = TlsFiles(ca=tls.client.ca)
        files, reason = {
            "no certificate": (uncertified, "asks for a certificate closes so"),
            "without TLS": (None, "if a port is of TLS, it closes so: then expected tls_ca"),
            "a stranger": (stranger, "does not accept cert="),
        }[who]
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            await gives_nothing(served, files, match=reason)
            good = client_of(served, tls.client)
            await good.add_entry(BOOKIE, frame_of(1, 0))
            await good.aclose()

    run(scenario)
    reason = {"no certificate": "without a certificate", "without TLS": "without TLS"}.get(
        who, "a client's"
    )
    assert reason in caplog.text


def test_the_control_service_and_its_client_use_files_that_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next call, without a restart of either."""
    monkeypatch.setattr(tls_in_use, "LOOK_S", 0.0)

    async def scenario() -> None:
        tls, other = make_tls(tmp_path / "tls"), make_tls(tmp_path / "other")
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            client = client_of(served, tls.client)
            await client.add_entry(BOOKIE, frame_of(1, 0))
            assert len(await client.list_entries(BOOKIE, ledger_id=1)) == 1
            control = client._control
            assert control is not None
            before = dict(control._channels)
            for old, new in ((tls.bookie, other.bookie), (tls.client, other.client)):
                for name in ("key", "cert", "ca"):
                    shutil.copyfile(getattr(new, name), getattr(old, name))
            assert len(await client.list_entries(BOOKIE, ledger_id=1)) == 1
            assert control._channels.keys() == before.keys()
            assert control._channels != before
            await client.aclose()
            newcomer = client_of(served, other.client)
            assert len(await newcomer.list_entries(BOOKIE, ledger_id=1)) == 1
            credentials = (in_use := TlsInUse(other.client)).channel_credentials()
            async with grpc.aio.secure_channel(served.control_address, credentials) as channel:
                info: pb.InfoResponse = await BookieControlStub(channel).GetInfo(pb.InfoRequest())
            assert info.expires_at_ms == in_use.expires_at_ms
            await newcomer.aclose()

    run(scenario)


def test_a_certificate_without_a_name_that_is_let_in_is_refused_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the HELLO and in each call of the control service; both ends tell why."""

    async def scenario() -> None:
        authority = Authority(tmp_path / "tls")
        names = ClientNames.parse("*.inside.example")
        bookie = authority.issue("bookie")
        inside = authority.issue("inside", host="DNS:a.inside.example")
        outside = authority.issue("outside", host="DNS:a.outside.example")
        async with serve(tmp_path / "data", tls=bookie, client_names=names) as served:
            reason = r"names a.outside.example in .* not let in: expected one of .*'\*.inside.ex"
            client = client_of(served, outside)
            with pytest.raises(BookieUnavailableError, match=reason):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            with pytest.raises(BookieUnavailableError, match=reason):
                await client.read_lac(BOOKIE, ledger_id=1, fence=True)
            with pytest.raises(BookieUnavailableError, match=reason):
                await client.list_entries(BOOKIE, ledger_id=1)
            await client.aclose()
            assert served.storage.core.live_ledgers() == []
            good = client_of(served, inside)
            await good.add_entry(BOOKIE, frame_of(1, 0))
            assert len(await good.list_entries(BOOKIE, ledger_id=1)) == 1
            await good.aclose()

    run(scenario)
    assert "connection refused peer=outside: a client whose certificate" in caplog.text
    assert "call refused" in caplog.text


def test_a_client_that_is_silent_to_a_bookie_with_tls_is_cut_off(tmp_path: Path) -> None:
    """As one that says no HELLO is: else each would hold a descriptor for a minute."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls").bookie
        async with (
            serve(tmp_path / "data", tls=tls, handshake_s=0.2) as served,
            raw_connection(served.address, hello=False) as end,
            asyncio.timeout(20),
        ):
            assert await end.receive() is None

    run(scenario)


async def gives_nothing(served: ServedBookie, files: TlsFiles | None, *, match: str) -> None:
    """See that a client with these files sends the bookie nothing, on both ports, and fails soon.

    It would wait three times as long for a connection.
    """
    client = client_of(served, files)
    async with asyncio.timeout(PATIENT.add_timeout_s / 3):
        with pytest.raises(BookieUnavailableError, match=match):
            await client.add_entry(BOOKIE, frame_of(1, 0))
        with pytest.raises(BookieUnavailableError, match=match):
            await client.list_entries(BOOKIE, ledger_id=1)
    await client.aclose()
    assert served.storage.core.live_ledgers() == []


def test_a_bookie_that_is_not_trusted_gets_nothing(tmp_path: Path) -> None:
    """The client knows another certificate, or the bookie speaks no TLS."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls")
        other = make_tls(tmp_path / "other")
        for at_bookie, reason in (
            (other.bookie, "certificate is not accepted"),
            (None, "it does not speak TLS: expected tls_cert and tls_key there"),
        ):
            async with serve(tmp_path / "data", tls=at_bookie) as served:
                await gives_nothing(served, tls.client, match=reason)

    run(scenario)


@pytest.mark.parametrize("why", ["expired", "another name"])
def test_a_certificate_that_does_not_hold_is_not_taken(tmp_path: Path, why: str) -> None:
    """The right authority is not enough: the time and the name count, on both ports."""

    async def scenario() -> None:
        authority = Authority(tmp_path / "tls")
        bad = {
            "expired": authority.issue("bookie-1", days=-1),
            "another name": authority.issue("bookie-1", host="DNS:elsewhere"),
        }[why]
        async with serve(tmp_path / "data", tls=bad) as served:
            await gives_nothing(served, authority.issue("client-1"), match="certificate")

    run(scenario)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"cert": "c.pem", "key": "c.key"}, "no ca"),
        ({"ca": "ca.pem", "cert": "c.pem"}, "expected both files or none"),
        ({"ca": "ca.pem", "key": "c.key"}, "expected both files or none"),
    ],
)
def test_files_that_need_each_other_are_given_together(given: dict[str, str], reason: str) -> None:
    """Half of what TLS needs is refused, not taken for none."""
    with pytest.raises(ConfigurationError, match=reason):
        TlsFiles.of(**{"ca": "", "cert": "", "key": "", **given})


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """The error names the file to mend, and no passphrase is asked for."""
    tls = make_tls(tmp_path / "tls").client
    assert TlsFiles.of(ca="", cert="", key="") is None
    (tmp_path / "empty.pem").touch()
    for wrong in ("/nowhere.pem", str(tmp_path / "empty.pem")):
        with pytest.raises(ConfigurationError, match=f"ca='{wrong}'"):
            replace(tls, ca=wrong).client_context()
        with pytest.raises(ConfigurationError, match=f"key='{wrong}'"):
            replace(tls, key=wrong).client_context()
    locked = tmp_path / "locked.key"
    lock(Path(tls.key), locked, passphrase="secret")
    with pytest.raises(ConfigurationError, match="without a passphrase"):
        replace(tls, key=str(locked)).client_context()
    with pytest.raises(ConfigurationError, match="needs a certificate"):
        TlsFiles(ca=tls.ca).server_context(asks_clients=False)
