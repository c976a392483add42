"""Parts that take too long, or fail, and metrics of a server."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base.errors import MetadataConnectionError
from dlcore.ops.diagnosis import collecting
from dlcore.ops.diagnosis.archive import MANIFEST
from dlcore.ops.diagnosis.collecting import Collector
from dlcore.ops.diagnosis.servers import Server
from tests.fixtures.aio import run

if TYPE_CHECKING:
    import pytest

    from dlcore.backends.direct.namespace import DirectNamespace


class Metrics(BaseHTTPRequestHandler):
    """Answers with what was asked for."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"asked {self.path}\n".encode())

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def test_a_part_that_hangs_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest tells it; the parts of the machine are there, with metrics of a server."""

    def here(port: int) -> list[Server]:
        settings = {"http_address": f"127.0.0.1:{port}"}
        facts = {"role": "proxy", "name": "p", "settings": settings}
        return [Server(process.pid, Path("/dev/null"), facts)]

    async def hang() -> DirectNamespace:
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> DirectNamespace:
        raise MetadataConnectionError("no server listens")

    monkeypatch.setattr(collecting, "PART_S", 2.0)
    # Not this process: one of its tests may have begun to take the signal.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        with HTTPServer(("127.0.0.1", 0), Metrics) as server:
            monkeypatch.setattr(collecting, "find_servers", lambda: here(server.server_port))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                bundle = run(Collector(hang, settings={"uri": "u"}).collect())
            finally:
                server.shutdown()
                thread.join()
        later = run(Collector(fail, settings={}).collect())
    label = f"proxy-{process.pid}"
    assert bundle.values[MANIFEST]["parts"]["namespace"]["problem"] == "no answer within 2 s"
    assert bundle.texts[f"metrics/{label}.txt"] == "asked /metrics\n"
    assert bundle.texts[f"stacks/{label}.txt"].startswith("it does not take the signal")
    assert bundle.values["settings"] == {"uri": "u"}
    assert "ledgers" not in bundle.values

    parts = later.values[MANIFEST]["parts"]
    assert parts["namespace"]["problem"] == "MetadataConnectionError: no server listens"
    assert parts[f"metrics/{label}.txt"]["problem"].startswith("ConnectionRefusedError")
    assert parts["machine"]["problem"] is None
