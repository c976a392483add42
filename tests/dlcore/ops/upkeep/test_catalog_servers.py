"""Catalogs of Iceberg behind a network: answers are lost, connections cut, calls not answered."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlcore.base.errors import ConfigurationError, ObjectStoreError
from dlcore.log.cold.iceberg_catalog import namespace_of, open_catalog
from dlcore.log.cold.iceberg_format import fields_of
from dlcore.log.cold.iceberg_tables import IcebergTables
from dlcore.log.cold.parquet import POSITIONS, columns_of_object
from dlcore.log.cold.stores import StoredObjects
from dlcore.log.cold.table_format import AddedFile
from tests.dlcore.ops.upkeep.test_table_keeper import RIDES, TableScene, on_table
from tests.fixtures.http_relay import http_relay
from tests.fixtures.iceberg_catalogs import CutRelay, catalogs_of
from tests.fixtures.table_readers import delete_table, own_catalog
from tests.fixtures.table_worker import CATALOG_URI

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = "PYICEBERG_CATALOG__DLOG__REST__CLIENT__TIMEOUT_MS"
NAMESPACE = "PYICEBERG_CATALOG__DLOG__NAMESPACE"


@pytest.mark.prove
@pytest.mark.parametrize("what", ["/register", "/tables/rides"])
def test_a_rest_catalog_that_loses_answers(
    tmp_path: Path, request: pytest.FixtureRequest, what: str
) -> None:
    """It has registered a table, or made a commit, and no answer came; nothing is added twice."""
    met: list[str] = []
    fates: list[str] = []

    def before(method: str, path: str) -> str:
        if method != "POST" or not path.endswith(what) or not fates:
            return "pass"
        met.append(path)
        return fates.pop(0)

    async def body(scene: TableScene) -> None:
        for fate in ("lose answer", "503", "lose", "lose answer"):
            await scene.write()
            fates[:] = [fate]
            await scene.follow()
            await scene.check()
            if what == "/register":
                delete_table(scene.kind, scene.url, "rides")
                scene.start_worker()
        assert len(met) == 4
        await scene.write()
        fates[:] = ["lose answer", "lose", "503"] if what != "/register" else []
        with contextlib.suppress(ObjectStoreError):
            await scene.follow()
        await scene.follow()
        await scene.check()

    with catalogs_of("rest", request) as catalogs:
        catalogs.make(tmp_path / "catalog")
        with http_relay(f"127.0.0.1:{catalogs.port}") as relay:
            relay.before = before
            catalogs.name_at(int(relay.address.rpartition(":")[2]))
            on_table(tmp_path / "tier", body, kind="iceberg")


@pytest.mark.prove
def test_a_connection_to_postgres_that_is_cut_in_a_commit(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Before the server has it and after, while a table is made and while it follows."""

    async def body(scene: TableScene) -> None:
        # The namespace, then the table's registration, its first commit, and the next ones.
        for fates in (["lose answer"], ["lose"], ["lose answer"], ["pass", "lose answer"]):
            await scene.write()
            relay.fates[:] = list(fates)
            await scene.follow()
            await scene.check()
            assert not relay.fates
            delete_table(scene.kind, scene.url, "rides")
            scene.start_worker()
        await scene.follow()
        for fates in (["lose answer"], ["lose"], ["lose", "lose answer"]):
            await scene.write()
            relay.fates[:] = list(fates)
            await scene.follow()
            await scene.check()
            assert not relay.fates
        await scene.log.update_schema(RIDES.append(RIDES.field("fare").with_name("tip")))
        relay.fates[:] = ["lose answer"]
        await scene.follow()
        assert "tip" in scene.view().rows().column_names
        assert relay.met.count("lose answer") == 6

    with catalogs_of("postgres", request) as catalogs:
        catalogs.make(tmp_path / "catalog")
        with CutRelay(catalogs.port) as relay:
            catalogs.name_at(relay.port)
            own_catalog()  # which makes its tables, by commits of its own
            on_table(tmp_path / "tier", body, kind="iceberg")


def test_a_rest_catalog_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends, and tells why; the library alone would wait for ever."""
    url = f"file://{tmp_path}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(CATALOG_URI, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv(TIMEOUT, "50")
        with pytest.raises(ObjectStoreError, match=r"catalog dlog: opening it for .*: ReadTimeout"):
            open_catalog(url)
        for wrong in ("0", "1 s"):
            monkeypatch.setenv(TIMEOUT, wrong)
            with pytest.raises(ConfigurationError, match=f"is '{wrong}', expected milliseconds"):
                open_catalog(url)
    monkeypatch.setenv(CATALOG_URI, f"sqlite:///{tmp_path}/catalog.db")


def test_a_rest_catalog_that_wants_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is among properties within properties, which only the file of the library has."""
    wanted = f"Basic {base64.b64encode(b'me:secret').decode()}"

    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name is the library's
            is_known = self.headers["authorization"] == wanted
            answer = json.dumps({"defaults": {"namespace": "ours"}, "overrides": {}}).encode()
            self.send_response(200 if is_known else 401)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    url = f"file://{tmp_path}"
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        file = tmp_path / ".pyiceberg.yaml"
        file.write_text(f"""\
catalog:
  dlog:
    uri: http://127.0.0.1:{server.server_address[1]}
    namespace: mine
    auth:
      type: basic
      basic:
        username: me
        password: secret
""")
        monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
        monkeypatch.delenv(CATALOG_URI, raising=False)
        try:
            catalog = open_catalog(url)
            assert open_catalog(url) is catalog
            assert namespace_of(url) == "mine"
            file.write_text(file.read_text().replace("auth:", "auth: {"))
            with pytest.raises(ConfigurationError, match=r"\.pyiceberg\.yaml.*line 5") as caught:
                open_catalog(url)
            assert "secret" not in str(caught.value)
        finally:
            server.shutdown()
            thread.join()
    monkeypatch.setenv(CATALOG_URI, f"sqlite:///{tmp_path}/catalog.db")


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["postgres", "rest"])
def test_a_namespace_of_parts(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Dots separate them, as in the names that the library takes."""
    monkeypatch.setenv(NAMESPACE, "lake.logs")

    async def body(scene: TableScene) -> None:
        for _ in range(2):
            await scene.write()
            await scene.follow()
        found = own_catalog().load_table(("lake", "logs", "rides"))
        assert found.scan().to_arrow().num_rows == 120
        await scene.namespace.delete_log("rides")
        await scene.worker.sweep()

    with catalogs_of(kind, request) as catalogs:
        catalogs.make(tmp_path / "catalog")
        on_table(tmp_path / "tier", body, kind="iceberg")


@pytest.mark.prove
def test_names_of_logs_that_a_server_refuses_in_paths(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The table has another letter in their place."""
    columns = columns_of_object(None, 0)
    schema = pa.schema([*POSITIONS, *columns])
    sink = pa.BufferOutputStream()
    rows = [pa.array([0]).cast(each.type) for each in POSITIONS]
    pq.write_table(pa.Table.from_arrays([*rows, pa.array([b"x"])], schema=schema), sink)
    footer = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    added = AddedFile("1/7-t-0-1.parquet", 1, 0, footer, 1)
    with catalogs_of("rest", request) as catalogs:
        catalogs.make(tmp_path / "catalog")
        for number, name in enumerate(("team/rides", "50%;a\\b", "größe.v1+2 &=?#")):
            table = IcebergTables(f"file://{tmp_path}/{number}", "c/l", StoredObjects())
            asyncio.run(table.create(name, fields_of(columns), [added], (1, 1)))
            seen = asyncio.run(table.look())
            assert seen is not None
            assert len(seen.files) == 1
