"""Logs as tables: DuckDB over logs of real bookies, and ADBC's driver of Flight SQL at `dlog sql`.

Goal: a query reads what it needs of the logs that its caller may read, and reaches nothing else;
one that takes too much ends alone.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

import pyarrow as pa
import pytest
from adbc_driver_flightsql import dbapi

from benchmarks.peers.kafka import class_path
from dlcore.base.errors import (
    ConfigurationError,
    DLError,
    InvalidLogNameError,
    LogNotFoundError,
    UnsupportedError,
)
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ops.sql import engine
from dlcore.ops.sql.engine import Query
from dlcore.sync import DistributedLogManager, open_namespace
from tests.fixtures.bookie_process import REPOSITORY
from tests.fixtures.forked_commands import environment_at
from tests.fixtures.pages import PROXY, blocks_of
from tests.fixtures.proxies import proxy_process, wait_for_no_proxy
from tests.fixtures.tokens import AUDIENCE, ISSUER, Issuer
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import Namespace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TRIPS = pa.schema([("city", pa.string()), ("fare", pa.float64())])
ROWS, PER_BATCH = 20_000, 1_000
MEMORY_BYTES = 256 * 1024 * 1024
_SERVING = re.compile(r"SQL serving on (\S+)")
_END_S = 60.0


@pytest.fixture(scope="module")
def trips(sandbox: Sandbox) -> str:
    """The name of a typed log with some rows."""
    name = f"sql/{uuid4().hex[:8]}"
    with open_namespace(sandbox.uri) as namespace:
        namespace.create_log(name, schema=TRIPS)
        with namespace.open_log(name) as log, log.open_writer() as writer:
            for first in range(0, ROWS, PER_BATCH):
                numbers = range(first, first + PER_BATCH)
                columns = [[f"city {n % 7}" for n in numbers], [float(n) for n in numbers]]
                writer.write_batch(pa.record_batch(columns, schema=TRIPS))
                writer.flush()
            writer.commit()
    return name


@pytest.fixture(scope="module")
def namespace(sandbox: Sandbox) -> Iterator[Namespace]:
    """The sandbox's namespace."""
    with open_namespace(sandbox.uri) as opened:
        yield opened


def write(namespace: Namespace, log: str, *payloads: bytes) -> None:
    """Write records to a log."""
    with namespace.open_log(log) as manager, manager.open_writer() as writer:
        writer.write_bulk([LogRecord(1, each) for each in payloads])
        writer.commit()


def table(sql: str, namespace: Namespace) -> pa.Table:
    """Return the rows of a query that runs here."""
    rows = Query(sql, namespace, memory_bytes=MEMORY_BYTES)
    return pa.Table.from_batches(list(rows), rows.schema)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Any, list[str]]]]:
    """Note which parts of logs are read: start, end, columns."""
    noted: list[tuple[Any, Any, list[str]]] = []
    read = DistributedLogManager.read

    def note(self: DistributedLogManager, start: Any, end: Any, *, columns: list[str]) -> Any:
        noted.append((start, end, columns))
        return read(self, start, end, columns=columns)

    with monkeypatch.context() as patched:
        patched.setattr(DistributedLogManager, "read", note)
        yield noted


def test_only_what_a_query_needs_is_read(
    trips: str, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns, and the part of the log that its conditions on position and time leave."""
    with reads(monkeypatch) as noted:
        found = table(
            f'SELECT sum(fare) AS fares FROM "{trips}" '
            "WHERE _sequence_id >= 12000 AND _sequence_id < 12100 AND city = 'city 3'",
            namespace,
        )
        expected = sum(float(n) for n in range(12_000, 12_100) if n % 7 == 3)
        assert found.to_pylist() == [{"fares": expected}]
        ((start, end, columns),) = noted
        assert set(columns) == {"fare", "city", "_sequence_id"}
        assert DLSN(1, 10, 0) <= start <= DLSN(1, 12, 0)
        assert DLSN(1, 12, 100) <= end <= DLSN(1, 14, 0)
    with reads(monkeypatch) as noted:
        found = table(
            f"SELECT city FROM \"{trips}\" WHERE _timestamp > TIMESTAMPTZ '2200-01-01'", namespace
        )
        assert found.num_rows == 0
        ((start, end, columns),) = noted
        assert (start, end) >= (DLSN(1, 18, 0), DLSN(1, 19, 0))
    with reads(monkeypatch) as noted:
        found = table(f'SELECT count(*) AS n FROM "{trips}"', namespace)
        assert found.to_pylist() == [{"n": ROWS}]
        assert len(noted[0][2]) == 1


def test_a_limit_ends_the_reading(
    trips: str, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records behind the last row of a query are not read."""
    taken: list[int] = []
    noted = engine.LogTable._noted

    def note(self: engine.LogTable, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in noted(self, rows):
            taken.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(engine.LogTable, "_noted", note)
    assert table(f'SELECT city FROM "{trips}" LIMIT 10', namespace).num_rows == 10
    assert 10 <= sum(taken) <= ROWS // 2


def test_queries_over_logs(trips: str, namespace: Namespace) -> None:
    """Joins, nested positions, names within the statement, logs of bytes, and empty ones."""
    other = f"sql-{uuid4().hex[:8]}"
    namespace.create_log(other)
    assert table(f'SELECT count(*) AS n FROM "{other}"', namespace).to_pylist() == [{"n": 0}]
    write(namespace, other, b"city 1", b"city 2")
    found = table(
        f'WITH chosen AS (SELECT value::VARCHAR AS city FROM "{other}") '
        f'SELECT city, count(*) AS n, min(_dlsn.slot) AS slot FROM "{trips}" '
        "JOIN chosen USING (city) WHERE _dlsn.lssn = 1 GROUP BY city ORDER BY city",
        namespace,
    )
    counts = [len(range(n, ROWS, 7)) for n in (1, 2)]
    assert [(each["city"], each["n"]) for each in found.to_pylist()] == [
        ("city 1", counts[0]),
        ("city 2", counts[1]),
    ]


@pytest.mark.parametrize(
    ("sql", "kind", "reason"),
    [
        ("DROP TABLE x", UnsupportedError, "expected one SELECT"),
        ("INSERT INTO x VALUES (1)", UnsupportedError, "expected one SELECT"),
        ("COPY (SELECT 1) TO '/tmp/x'", UnsupportedError, "expected one SELECT"),
        ("SET memory_limit = '9GB'", UnsupportedError, "expected one SELECT"),
        ("ATTACH '/tmp/x'", UnsupportedError, "expected one SELECT"),
        ("SELECT 1; SELECT 2", UnsupportedError, "2 statements"),
        ("", UnsupportedError, "0 statements"),
        ("SELEC", ConfigurationError, "does not parse"),
        ("SELECT * FROM nothing", LogNotFoundError, "log 'nothing' does not exist"),
        ("SELECT * FROM read_csv('/etc/passwd')", ConfigurationError, "PermissionException"),
        ("SELECT * FROM read_text('/etc/passwd')", ConfigurationError, "PermissionException"),
        ("SELECT * FROM '/etc/passwd'", LogNotFoundError, "log '/etc/passwd' does not exist"),
        ("SELECT * FROM glob('/*')", ConfigurationError, "PermissionException"),
        ("SELECT * FROM sandbox", LogNotFoundError, "log 'sandbox' does not exist"),
        ("SELECT * FROM arrow_scan(1, 2, 3)", ConfigurationError, "Exception"),
        (
            f"SELECT {', '.join(f'(SELECT 1 FROM t{n})' for n in range(21))}",
            ConfigurationError,
            "21 tables: expected at most 20",
        ),
    ],
)
def test_nothing_else_is_reached(
    namespace: Namespace, sql: str, kind: type[DLError], reason: str
) -> None:
    """No file, no object of Python, no setting; nothing is changed."""
    sandbox = pa.table({"a": [1]})  # DuckDB's own API would find it by its name
    assert sandbox.num_rows == 1
    with pytest.raises(kind, match=reason):
        table(sql, namespace)


def test_the_folder_for_temporary_files_is_not_reached(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB allows it, unless there is none, although access to files is off."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "secret.csv").write_text("a\n1\n")
    for source in (f"read_csv('{tmp_path}/.tmp/secret.csv')", f"glob('{tmp_path}/.tmp/*')"):
        with pytest.raises(ConfigurationError, match="PermissionException"):
            table(f"SELECT * FROM {source}", namespace)


def test_logs_whose_names_differ_in_case_only_are_not_mixed_up(namespace: Namespace) -> None:
    """DuckDB would read one of them in place of both."""
    name = f"sql-{uuid4().hex[:8]}"
    other = name.replace("sql", "SQL")
    for log in (name, other):
        namespace.create_log(log)
    write(namespace, other, b"1")
    for log, count in ((name, 0), (other, 1)):
        found = table(f'SELECT count(*) AS n FROM "{log}"', namespace)
        assert found.to_pylist() == [{"n": count}]
    with pytest.raises(UnsupportedError, match="differ in case only"):
        table(f'SELECT * FROM "{name}", "{other}"', namespace)


def test_columns_whose_names_differ_in_case_only_are_refused(namespace: Namespace) -> None:
    """DuckDB would read the first of them in place of each."""
    name = f"sql-{uuid4().hex[:8]}"
    namespace.create_log(name, schema=pa.schema([("id", pa.int64()), ("ID", pa.string())]))
    with pytest.raises(UnsupportedError, match=f"log '{name}' has columns 'id' and 'ID': DuckDB"):
        table(f'SELECT "ID" FROM "{name}"', namespace)


def test_a_name_within_a_statement_need_not_be_that_of_a_log(namespace: Namespace) -> None:
    """It may have letters that names of logs have not."""
    found = table('WITH "a b" AS (SELECT 1 AS x) SELECT * FROM "a b"', namespace)
    assert found.to_pylist() == [{"x": 1}]
    with pytest.raises(InvalidLogNameError, match="invalid log name 'a b'"):
        table('SELECT * FROM "a b"', namespace)


def test_an_unknown_log_is_named(namespace: Namespace) -> None:
    """DuckDB alone would recommend a table of its own, such as `pg_enum`."""
    with pytest.raises(LogNotFoundError, match=r"^log 'nope' does not exist"):
        table("WITH here AS (SELECT 1) SELECT * FROM here, nope", namespace)


def test_a_lack_of_memory_between_rows_of_a_log_is_reported_as_one(
    trips: str, namespace: Namespace
) -> None:
    """DuckDB's own text recommends settings that no user can change here.

    Method: the first rows are small, since a lack among them is reported in another way.
    """
    sizes = f"CASE WHEN fare < {ROWS // 2} THEN 1 ELSE 1000000 END"
    with pytest.raises(MemoryError):
        table(f'SELECT repeat(city, {sizes}) FROM "{trips}"', namespace)


def test_an_error_of_a_log_is_passed_on_unchanged(
    trips: str, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as one of DuckDB."""

    def refuse(*_: object) -> Any:
        raise UnsupportedError("refused")

    monkeypatch.setattr(engine, "narrowed", refuse)
    with pytest.raises(UnsupportedError, match=r"^refused$"):
        table(f'SELECT * FROM "{trips}" WHERE _sequence_id > 3', namespace)


# The server


@contextmanager
def sql_process(*options: str, **settings: int) -> Iterator[str]:
    """Start `dlog sql`; yield where it serves, as ADBC names it."""
    command = [sys.executable, "-m", "dlcore.ops.cli", *options, "sql", "--address=127.0.0.1:0"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            match = _SERVING.match(process.stdout.readline())
            assert match is not None, "it did not start"
            yield match[1].replace("grpc://", "grpc+tcp://")
            process.terminate()
            assert process.wait(_END_S) == 0
        finally:
            process.kill()


@contextmanager
def connected(location: str, token: str = "") -> Iterator[dbapi.Connection]:
    """Connect ADBC's driver."""
    settings = {"adbc.flight.sql.authorization_header": f"Bearer {token}"} if token else {}
    with dbapi.connect(location, db_kwargs=settings, autocommit=True) as connection:
        yield connection


def fetched(connection: dbapi.Connection, sql: str) -> pa.Table:
    """Return the rows of a query."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetch_arrow_table()


def test_adbc_reads_logs_with_the_rights_of_its_token(
    sandbox: Sandbox, trips: str, namespace: Namespace, tmp_path: Path
) -> None:
    """Its user lists and reads the logs that the rules let it read, and no others."""
    issuer = Issuer()
    (tmp_path / "keys.json").write_bytes(issuer.key_set())
    secret = f"secret-{uuid4().hex[:8]}"
    namespace.create_log(secret)
    write(namespace, secret, b"secret")
    wait_for_no_proxy(sandbox.uri)
    rule = f"allow user:reader read log {trips}"
    namespace.change_access_rules(add=[rule, f"allow user:reader append log {secret}"])
    try:
        with (
            proxy_process(
                sandbox.uri,
                f"--token-issuer={ISSUER}",
                f"--token-audience={AUDIENCE}",
                f"--token-keys={tmp_path / 'keys.json'}",
            ) as proxy,
            sql_process(f"--endpoint={proxy.location}") as location,
        ):
            with connected(location, issuer.token("reader")) as connection:
                found = fetched(
                    connection,
                    f'SELECT city, count(*) AS n FROM "{trips}" WHERE _sequence_id < 700 '
                    "GROUP BY city ORDER BY city",
                )
                assert found.to_pylist() == [{"city": f"city {n}", "n": 100} for n in range(7)]
                assert fetched(connection, f'SELECT * FROM "{trips}"').num_rows == ROWS
                schema = connection.adbc_get_table_schema(trips)
                assert schema.names[:2] == TRIPS.names
                (catalog,) = connection.adbc_get_objects(depth="tables").read_all().to_pylist()
                (tables,) = catalog["catalog_db_schemas"]
                names = {each["table_name"] for each in tables["db_schema_tables"]}
                assert {trips, secret} <= names
                assert connection.adbc_get_info()["vendor_name"] == "dlog"
                for sql, reason in (
                    (f'SELECT * FROM "{secret}"', "AccessDeniedError"),
                    ("DROP TABLE x", "UnsupportedError"),
                ):
                    with pytest.raises(dbapi.Error, match=reason) as raised:
                        fetched(connection, sql)
                    assert "Traceback" not in str(raised.value), "it tells paths of the server"
                    assert ".py" not in str(raised.value)
            with (
                connected(location, issuer.token("unknown")) as connection,
                pytest.raises(dbapi.Error, match="AccessDeniedError"),
            ):
                fetched(connection, f'SELECT * FROM "{trips}"')
            for token, reason in (("x.y.z", "UnauthenticatedError"), ("", "anonymous may not")):
                with (
                    connected(location, token) as connection,
                    pytest.raises(dbapi.Error, match=reason),
                ):
                    fetched(connection, f'SELECT * FROM "{trips}"')
    finally:
        namespace.change_access_rules(remove=[rule, f"allow user:reader append log {secret}"])


def test_the_page_works_as_it_stands(sandbox: Sandbox, dlog_program: Path, tmp_path: Path) -> None:
    """Its blocks make a log with columns, serve it, and ask it."""
    environment_at(tmp_path, dlog_program)
    make, serve, ask, _jdbc = blocks_of("docs/flight-sql.md")
    assert serve.text == f".venv/bin/dlog sql --endpoint grpc://{PROXY}    # until Ctrl-C\n"
    wait_for_no_proxy(sandbox.uri)
    with proxy_process(sandbox.uri) as proxy:
        made = make.at(zookeeper="", proxy=urlsplit(proxy.location).netloc)
        for _ in range(2):
            subprocess.run(["bash", "-euc", made.text], cwd=tmp_path, check=True)
        with sql_process(f"--endpoint={proxy.location}") as location:
            asked = ask.text.replace("grpc+tcp://127.0.0.1:4185", location)
            done = subprocess.run(
                [sys.executable, "-c", asked], check=True, capture_output=True, text=True
            )
    found = re.findall(r"(\w+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert sorted(found) == [("Paris", "12.5"), ("Rome", "8.0")]


def refusal(*options: str) -> str:
    """Return how `dlog sql` refuses to start."""
    command = [sys.executable, "-m", "dlcore.ops.cli", "--endpoint=grpc://127.0.0.1:1", "sql"]
    done = subprocess.run(
        [*command, *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=_END_S,
    )
    assert done.returncode == 2
    return done.stderr


def test_a_taken_port_is_named() -> None:
    """Arrow's server says nothing but that it did not start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"error: cannot listen on address='{address}': " in refusal(f"--address={address}")


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    """And one that is missing."""
    wrong, missing = tmp_path / "wrong.pem", tmp_path / "missing.pem"
    wrong.write_text("no certificate")
    for cert in (wrong, missing):
        found = refusal(
            "--address=127.0.0.1:0", f"--serve-tls-cert={cert}", f"--serve-tls-key={wrong}"
        )
        assert (
            f"error: --serve-tls-cert='{cert}' --serve-tls-key='{wrong}': expected readable"
            in found
        )


def test_a_prepared_statement(sandbox: Sandbox, trips: str) -> None:
    """Its columns are sent before its rows, often; it has no parameters, and holds no place."""
    wait_for_no_proxy(sandbox.uri)
    with (
        proxy_process(sandbox.uri) as proxy,
        sql_process(f"--endpoint={proxy.location}", queries_max=1) as location,
        connected(location) as connection,
    ):
        sql = f'SELECT fare, city FROM "{trips}" WHERE _sequence_id < 3'
        with connection.cursor() as cursor:
            cursor.adbc_prepare(sql)
            for _ in range(2):
                cursor.execute(sql)
                assert cursor.fetch_arrow_table().column_names == ["fare", "city"]
        for refused, reason in (
            (f'SELECT city FROM "{trips}" WHERE fare = ?', "parameter"),
            ("SELEC", "does not parse"),
        ):
            with connection.cursor() as cursor, pytest.raises(dbapi.Error, match=reason):
                cursor.adbc_prepare(refused)
        with connection.cursor() as cursor, pytest.raises(dbapi.Error, match="no parameters"):
            cursor.execute("SELECT 1", parameters=[1])


@pytest.mark.prove
def test_java_reads_logs_by_jdbc(sandbox: Sandbox, trips: str) -> None:
    """Arrow's driver prepares each statement; it finds tables, columns and rows."""
    if shutil.which("mvn") is None or shutil.which("java") is None:
        pytest.skip("Maven brings the driver, and Java runs it: apt-get install maven")
    jar = class_path("org.apache.arrow:flight-sql-jdbc-driver:18.3.0")
    opened = "--add-opens=java.base/java.nio=org.apache.arrow.memory.core,ALL-UNNAMED"
    program = ["java", opened, "-cp", jar, str(REPOSITORY / "tests/integration/SqlClient.java")]
    wait_for_no_proxy(sandbox.uri)
    with (
        proxy_process(sandbox.uri) as proxy,
        sql_process(f"--endpoint={proxy.location}") as location,
    ):
        url = location.replace("grpc+tcp", "jdbc:arrow-flight-sql") + "/?useEncryption=false"
        rows = f'SELECT city, fare, _sequence_id FROM "{trips}" WHERE _sequence_id < 2 ORDER BY 3'
        done = subprocess.run(
            [*program, url, trips, rows, "SELECT 1 FROM nothing", rows],
            capture_output=True,
            text=True,
            check=True,
            timeout=_END_S * 2,
        )
    output = done.stdout.splitlines()
    found = ["row\tcity 0\t0.0\t0", "row\tcity 1\t1.0\t1"]
    assert output[0] == f"table {trips}"
    assert output[1:3] == ["column city VARCHAR", "column fare DOUBLE"]
    assert [line for line in output if line.startswith("row")] == found * 2
    assert "log 'nothing' does not exist" in done.stdout


def test_a_query_that_takes_too_much_ends_alone(sandbox: Sandbox, trips: str) -> None:
    """In memory or in time; the others go on, and one more than the most is refused."""
    wait_for_no_proxy(sandbox.uri)
    with (
        proxy_process(sandbox.uri) as proxy,
        sql_process(
            f"--endpoint={proxy.location}", memory_mib=128, query_s=60, queries_max=2
        ) as location,
        connected(location) as connection,
        connection.cursor() as slow,
    ):
        slow.execute("SELECT range FROM range(100000000)")
        rows = slow.fetch_record_batch()
        assert rows.read_next_batch().num_rows > 0
        for much in (
            "length(repeat('x', 2000000000))",
            "count(*) FROM (SELECT range FROM range(100000000) ORDER BY random())",
        ):
            with pytest.raises(dbapi.Error, match=r"134,217,728 bytes of memory: .*--memory-mib"):
                fetched(connection, f"SELECT {much}")
        with connection.cursor() as second:
            second.execute("SELECT range FROM range(100000000)")
            waiting = second.fetch_record_batch()
            assert waiting.read_next_batch().num_rows > 0
            with pytest.raises(dbapi.Error, match="2 queries run, which is the most"):
                fetched(connection, "SELECT 1")
            waiting.close()
        wait_until(lambda: is_answered(connection), timeout_s=_END_S)  # the client has left it
        assert rows.read_next_batch().num_rows > 0


def is_answered(connection: dbapi.Connection) -> bool:
    """Return whether a query is, and not refused."""
    try:
        return int(fetched(connection, "SELECT 1").num_rows) == 1
    except dbapi.Error:
        return False


def test_a_query_that_lasts_too_long_is_ended(sandbox: Sandbox) -> None:
    """Its client gets an error."""
    with (
        sql_process("--endpoint=grpc://127.0.0.1:1", query_s=3) as location,
        connected(location) as connection,
        pytest.raises(dbapi.Error, match="the query took more than 3 s"),
    ):
        fetched(
            connection, "SELECT sum(a.range * b.range) FROM range(10000000) a, range(1000000) b"
        )
