"""TLS between clients and bookies: who is trusted, and what is left of who is not."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from dlcore.config import LedgerClientConfig
from dlcore.errors import BookieUnavailableError
from dlcore.transport.client import WireBookieClient
from tests.fixtures.certificates import make_tls
from tests.fixtures.served_bookie import BOOKIE, CLUSTER_ID, frame_of, run, serve

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.served_bookie import ServedBookie

PATIENT = LedgerClientConfig(add_timeout_s=2.0, read_timeout_s=2.0)


def client_of(served: ServedBookie, tls: ssl.SSLContext | None) -> WireBookieClient:
    """Return a client."""
    return WireBookieClient(served.resolve, cluster_id=CLUSTER_ID, config=PATIENT, tls=tls)


def test_the_bookie_knows_the_name_in_the_clients_certificate(tmp_path: Path) -> None:
    """Both sides have certificates: large entries pass, and the handler sees the name."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls", client_name="writer-7")
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            client = client_of(served, tls.client)
            frame = frame_of(1, 0, b"x" * 3_000_000)
            await client.add_entry(BOOKIE, frame)
            assert [each.peer_name for each in served.service.connections] == ["writer-7"]
            chunks = client.read_entries(BOOKIE, ledger_id=1, first_entry_id=0, last_entry_id=0)
            assert [bytes(each) for each in await anext(chunks)] == [frame]
            await chunks.aclose()
            await client.aclose()

    run(scenario)


@pytest.mark.parametrize("who", ["nobody", "without TLS", "a stranger"])
def test_who_is_not_trusted_gets_no_answer(tmp_path: Path, who: str) -> None:
    """No certificate, no TLS, somebody else's certificate: unavailable, and nothing is stored."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls")
        stranger = make_tls(tmp_path / "other").client
        stranger.load_verify_locations(tmp_path / "tls" / "bookie.pem")
        nobody = ssl.create_default_context(cafile=tmp_path / "tls" / "bookie.pem")
        context = {"nobody": nobody, "without TLS": None, "a stranger": stranger}[who]
        async with serve(tmp_path / "data", tls=tls.bookie) as served:
            client = client_of(served, context)
            with pytest.raises(BookieUnavailableError):
                await client.add_entry(BOOKIE, frame_of(1, 0))
            await client.aclose()
            assert served.storage.ledgers() == []
            good = client_of(served, tls.client)
            await good.add_entry(BOOKIE, frame_of(1, 0))
            await good.aclose()

    run(scenario)


def test_a_bookie_that_is_not_trusted_gets_nothing(tmp_path: Path) -> None:
    """The client knows another certificate, or the bookie speaks no TLS."""

    async def scenario() -> None:
        tls = make_tls(tmp_path / "tls")
        other = make_tls(tmp_path / "other")
        for at_bookie in (other.bookie, None):
            async with serve(tmp_path / "data", tls=at_bookie) as served:
                client = client_of(served, tls.client)
                with pytest.raises(BookieUnavailableError):
                    await client.add_entry(BOOKIE, frame_of(1, 0))
                await client.aclose()
                assert served.storage.ledgers() == []

    run(scenario)
