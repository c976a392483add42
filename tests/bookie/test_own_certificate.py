"""A bookie judges its own certificate at its start, as its clients and other bookies will."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from bookie import server
from bookie.server import BookieServer
from bookie.server_config import BookieConfig
from dlcore.base.access import tls_in_use
from dlcore.base.clock import SystemClock
from dlcore.ops.secure.certificates import SERVER
from tests.fixtures.aio import until
from tests.fixtures.certificates import Authority
from tests.fixtures.served_bookie import run
from tests.fixtures.simulated_store import SimulatedTree

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from dlcore.base.access.tls import TlsFiles

URI = "distributedlog://memory:2181/dlog"


def config_of(files: TlsFiles, folder: Path, **given: str) -> BookieConfig:
    """Return the configuration of a bookie with these files."""
    return BookieConfig(
        name="b",
        metadata_uri=URI,
        data_dir=folder / "data",
        tls_ca=files.ca,
        tls_cert=files.cert,
        tls_key=files.key,
        **given,  # type: ignore[arg-type]
    )


def test_a_bookie_tells_at_its_start_what_others_will_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its clients, and the bookies of which it is a client itself; none if all is in order."""
    authority, tree = Authority(tmp_path / "tls"), SimulatedTree()

    async def start(files: TlsFiles, **given: str) -> str:
        caplog.clear()
        config = config_of(files, tmp_path, **given)
        store = tree.connect()
        async with await BookieServer.start(config, store=store, clock=SystemClock()):
            pass
        await store.aclose()
        return "\n".join(
            each.getMessage() for each in caplog.records if each.levelno == logging.WARNING
        )

    async def scenario() -> None:
        assert not await start(authority.issue("good"))
        named = await start(authority.issue("good"), advertised_host="bookie.example")
        assert re.fullmatch(r"our .*'bookie.example'\): expected one with the host .*", named)
        for_servers = authority.issue("server", purposes=[SERVER])
        as_client = await start(for_servers)
        assert re.fullmatch(r"our .* expected one with clientAuth in .* bookie=b.*", as_client)
        assert not await start(for_servers, tls_client_auth="none")

    run(scenario)


def test_a_new_certificate_is_judged_when_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients would refuse it from now on, and the log tells why."""
    monkeypatch.setattr(tls_in_use, "LOOK_S", 0.01)
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    authority = Authority(tmp_path / "tls")
    files = authority.issue("good")
    config = config_of(files, tmp_path)

    async def scenario() -> None:
        store = SimulatedTree().connect()
        async with await BookieServer.start(config, store=store, clock=SystemClock()):
            authority.issue("good", host="DNS:elsewhere")
            await until(lambda: "is not accepted by others" in caplog.text)
        await store.aclose()

    run(scenario)
