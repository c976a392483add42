"""A bookie judges its own certificate at its start, as its clients and other bookies will."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from bookie.server import BookieServer
from bookie.server_config import BookieConfig
from dlcore.base.clock import SystemClock
from dlcore.metadata.memory import MemoryTree
from tests.fixtures.certificates import SERVER, Authority
from tests.fixtures.served_bookie import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from dlcore.base.tls import TlsFiles

URI = "distributedlog://memory:2181/dlog"


def test_a_bookie_tells_at_its_start_what_others_will_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its clients, and the bookies of which it is a client itself; none if all is in order."""
    authority, tree = Authority(tmp_path / "tls"), MemoryTree()

    async def start(files: TlsFiles, **given: str) -> str:
        caplog.clear()
        config = BookieConfig(
            name="b",
            metadata_uri=URI,
            data_dir=tmp_path / "data",
            tls_ca=files.ca,
            tls_cert=files.cert,
            tls_key=files.key,
            **given,  # type: ignore[arg-type]
        )
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
        server = authority.issue("server", purposes=[SERVER])
        as_client = await start(server)
        assert re.fullmatch(r"our .* expected one with clientAuth in .* bookie=b.*", as_client)
        assert not await start(server, tls_client_auth="none")

    run(scenario)
