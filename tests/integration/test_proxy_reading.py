"""Reading through a proxy, by Arrow's own Flight client, over real bookies."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from dlcore.base.config import LogConfig
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.proxy.config import ProxyConfig
from dlcore.proxy.reading import following
from dlcore.sync import LogSnapshot, open_namespace
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import ProxyThread, proxy_process, proxy_thread
from tests.fixtures.resident import resident_kb
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ops.sandbox.cluster import Sandbox
    from dlcore.sync import DistributedLogManager, LogWriter, Namespace

pytestmark = pytest.mark.integration

WAIT_S = 60
STANDING = amount(1000, sampled=60)
FOLLOWED = amount(1000, sampled=500)
ROLLING = LogConfig(segment_bytes_max=4096)


@pytest.fixture(scope="module")
def proxy(sandbox: Sandbox) -> Iterator[ProxyThread]:
    """A proxy that the tests of this module share."""
    with proxy_thread(sandbox.uri) as server:
        yield server


@pytest.fixture(scope="module")
def client(proxy: ProxyThread) -> Iterator[flight.FlightClient]:
    """A client of the proxy."""
    with proxy.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def namespace(sandbox: Sandbox) -> Iterator[Namespace]:
    """The same logs, without a proxy."""
    with open_namespace(sandbox.uri, config=ROLLING) as opened:
        yield opened


@pytest.fixture
def log(namespace: Namespace) -> DistributedLogManager:
    """An empty log."""
    return namespace.open_log(f"read/{uuid4().hex}", create_if_missing=True)


def ticket(log: str, **fields: Any) -> flight.Ticket:
    """Return a ticket, written by hand."""
    return flight.Ticket(json.dumps({"log": log, **fields}).encode())


def written(log: DistributedLogManager, first: int, count: int, *, size: int = 100) -> None:
    """Write records whose transaction ids are ten times their numbers."""
    with log.open_writer() as writer:
        write(writer, first, count, size=size)


def write(writer: LogWriter, first: int, count: int, *, size: int = 100) -> None:
    """Write records, a few in each entry."""
    for number in range(first, first + count):
        writer.write(LogRecord(number * 10, f"{number}".encode().ljust(size)))
        if number % 3 == 2:
            writer.flush()
    writer.commit()


def numbers(table: pa.Table) -> list[int]:
    """Return the numbers of the records in a table."""
    return [int(value) for value in table.column("value").to_pylist()]


def expected(log: DistributedLogManager) -> list[dict[str, Any]]:
    """Return the rows of a log, read without a proxy."""
    return log.read().to_arrow().to_pylist()  # type: ignore[no-any-return]


class Follower:
    """A client that follows a log in a thread of its own."""

    def __init__(self, client: flight.FlightClient, log: str, **fields: Any) -> None:
        self.reader = client.do_get(ticket(log, follow=True, **fields))
        self.numbers: list[int] = []
        self.positions: list[str] = []
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def _follow(self) -> None:
        try:
            for chunk in self.reader:
                self.numbers += numbers(pa.Table.from_batches([chunk.data]))
                self.positions.append(json.loads(chunk.app_metadata.to_pybytes())["next"])
        except pa.ArrowException as error:
            self.error = error

    def wait_for(self, count: int) -> list[int]:
        """Wait for so many records; return all that came."""
        wait_until(lambda: len(self.numbers) >= count or self.error is not None, timeout_s=WAIT_S)
        return self.numbers

    def stop(self) -> None:
        """Cancel, and wait until the thread is gone."""
        self.reader.cancel()
        self.thread.join(WAIT_S)


def test_the_whole_log(client: flight.FlightClient, log: DistributedLogManager) -> None:
    """Rows as Spark's source has them, over segments; nothing of a log that is empty."""
    assert client.do_get(ticket(log.name)).read_all().num_rows == 0
    written(log, 0, 200)
    assert len(log.get_log_segments()) > 2
    table = client.do_get(ticket(log.name)).read_all()
    assert table.to_pylist() == expected(log)


def test_a_typed_log(client: flight.FlightClient, namespace: Namespace) -> None:
    """It has its own columns, and what is known of each record if that is asked for."""
    name = f"read/{uuid4().hex}"
    namespace.create_log(name, schema=pa.schema([("id", pa.int64()), ("city", pa.string())]))
    log = namespace.open_log(name)
    with log.open_writer() as writer:
        for first in (0, 10):
            rows = [{"id": number, "city": f"c{number}"} for number in range(first, first + 10)]
            writer.write_table(pa.Table.from_pylist(rows))
            writer.commit()
    whole = client.do_get(ticket(name)).read_all()
    assert whole.equals(log.read().to_arrow())
    columns = ["city", "_dlsn", "_log"]
    some = client.do_get(ticket(name, columns=columns, start={"sequence_id": 7})).read_all()
    assert some.to_pylist() == log.read(columns=columns).to_arrow().to_pylist()[7:]
    descriptor = flight.FlightDescriptor.for_path(name)
    assert client.get_schema(descriptor).schema == whole.schema


def test_positions(client: flight.FlightClient, log: DistributedLogManager) -> None:
    """A range begins and ends at a position, a transaction id, a time or a number."""
    written(log, 0, 60)
    middle = datetime.now(UTC).isoformat()
    wait_until(lambda: datetime.now(UTC).isoformat() > middle, timeout_s=WAIT_S)
    written(log, 60, 60)
    rows = expected(log)
    dlsn = "{lssn}:{entry}:{slot}".format(**rows[31]["dlsn"])
    last = "{lssn}:{entry}:{slot}".format(**rows[119]["dlsn"])

    def read(**fields: Any) -> list[int]:
        return numbers(client.do_get(ticket(log.name, **fields)).read_all())

    assert read(start={"dlsn": dlsn}) == list(range(31, 120))
    assert read(start={"dlsn": dlsn}, end={"dlsn": last}) == list(range(31, 119))
    assert read(start={"txid": 305}, end={"txid": 400}) == list(range(31, 40))
    assert read(start={"sequence_id": 5}, end={"sequence_id": 8}) == [5, 6, 7]
    assert read(start={"time": middle}) == list(range(60, 120))
    assert read(end={"time": middle}) == list(range(60))
    assert read(start={"latest": True}) == read(start={"dlsn": "99:0:0"}) == []
    assert read(end={"latest": True}) == read(end={"dlsn": "99:0:0"}) == list(range(120))
    assert read(start={"txid": 400}, end={"txid": 305}) == []
    table = client.do_get(ticket(log.name, columns=["txid", "log"])).read_all()
    assert table.column_names == ["txid", "log"]
    assert table.column("txid").to_pylist() == list(range(0, 1200, 10))


def test_the_parts_of_a_range(
    proxy: ProxyThread, client: flight.FlightClient, log: DistributedLogManager
) -> None:
    """A FlightInfo's endpoints give, one after the other, all there is; it tells what that is."""
    written(log, 0, 300)
    info = client.get_flight_info(flight.FlightDescriptor.for_path(log.name))
    parts = [client.do_get(endpoint.ticket).read_all() for endpoint in info.endpoints]
    assert len(parts) == len(log.get_log_segments()) > 2
    assert pa.concat_tables(parts).to_pylist() == expected(log)
    known = json.loads(info.app_metadata)
    assert info.total_records == known["records"] == 300
    assert info.total_bytes == known["size_bytes"] > 0
    assert (known["first"], known["last"]) == ("1:0:0", str(log.get_last_dlsn()))
    assert known["log_id"] == log.log_id
    assert info.schema == parts[0].schema
    locations = [{each.uri.decode() for each in endpoint.locations} for endpoint in info.endpoints]
    assert all(proxy.server.location in each for each in locations[:-1])
    assert locations[-1] == {known["owner"]}
    later = json.dumps({"log": log.name, "start": {"sequence_id": 299}, "follow": True}).encode()
    tail = client.get_flight_info(flight.FlightDescriptor.for_command(later))
    assert tail.total_records == 1
    assert json.loads(tail.endpoints[-1].ticket.ticket)["follow"]
    nothing = json.dumps({"log": log.name, "start": {"txid": 99999}, "follow": True}).encode()
    empty = client.get_flight_info(flight.FlightDescriptor.for_command(nothing))
    assert empty.total_records == 0
    (endpoint,) = empty.endpoints
    assert json.loads(endpoint.ticket.ticket)["start"] == {"txid": 99999}


def test_logs_are_listed(client: flight.FlightClient, log: DistributedLogManager) -> None:
    """By the beginning of their names, with their columns."""
    (found,) = client.list_flights(log.name.encode())
    assert found.descriptor.path == [log.name.encode()]
    assert found.schema.names == ["log", "dlsn", "txid", "sequence_id", "timestamp", "value"]
    assert found.total_records == -1
    assert len(list(client.list_flights(b"read/"))) >= 1
    with pytest.raises(pa.ArrowInvalid, match="UTF-8"):
        list(client.list_flights(b"\xff"))


def test_followers_get_every_record_once(
    proxy: ProxyThread, client: flight.FlightClient, log: DistributedLogManager
) -> None:
    """From wherever they begin, over segments; a sealed log ends them, nothing of them stays."""
    followed = proxy.server.reads.followed
    written(log, 0, 100)
    followers = [Follower(client, log.name, start={"sequence_id": n}) for n in (0, 50, 99)]
    late = [Follower(client, log.name, start={"latest": True}) for _ in range(3)]
    coming = [
        Follower(client, log.name, start={"txid": 1205}),
        Follower(client, log.name, start={"dlsn": "1:0:1"}, end={"dlsn": "9:0:0"}),
    ]
    wait_until(lambda: sum(each.users for each in followed) == 8, timeout_s=WAIT_S)
    assert len(followed) == 1
    with log.open_writer() as writer:
        write(writer, 100, 200)
        assert followers[0].wait_for(300) == list(range(300))
        writer.mark_end_of_stream()
    for each in (*followers, *late, *coming):
        each.thread.join(WAIT_S)
        assert each.error is None
    assert [each.numbers for each in followers] == [list(range(n, 300)) for n in (0, 50, 99)]
    assert [each.numbers for each in late] == [list(range(100, 300))] * 3
    assert coming[0].numbers == list(range(121, 300))
    ended = len(coming[1].numbers)
    assert coming[1].numbers == list(range(1, ended + 1))
    assert DLSN.parse(coming[1].positions[-1]) <= DLSN(9, 0, 0)
    wait_until(lambda: not len(followed), timeout_s=WAIT_S)
    assert followed.budget.size_bytes == 0
    again = Follower(client, log.name, start={"txid": 10**9})
    again.thread.join(WAIT_S)
    assert (again.error, again.numbers) == (None, [])


def test_a_client_that_stands_still_slows_no_other(sandbox: Sandbox, namespace: Namespace) -> None:
    """The ring goes on without it; when it reads again it gets everything, from the bookies."""
    log = namespace.open_log(f"read/{uuid4().hex}", config=LogConfig(), create_if_missing=True)
    config = ProxyConfig(ring_bytes_max=50_000, catching_up_max=1)
    with proxy_thread(sandbox.uri, config) as proxy, ExitStack() as stack:
        connected = stack.enter_context(proxy.client())
        slow = connected.do_get(ticket(log.name, follow=True))
        fast = [Follower(connected, log.name) for _ in range(3)]
        with log.open_writer() as writer:
            for first in range(0, FOLLOWED, 100):
                write(writer, first, 100, size=30_000)
        for each in fast:
            assert each.wait_for(FOLLOWED) == list(range(FOLLOWED))
        stuck = connected.do_get(ticket(log.name))
        assert stuck.read_chunk().data.num_rows
        whole = connected.do_get(ticket(log.name)).read_all()
        assert numbers(whole) == list(range(FOLLOWED)), "a stuck reader gives up its turn"
        budget = proxy.server.reads.followed.budget
        assert budget.size_bytes <= budget.bytes_max
        got: list[int] = []
        while len(got) < FOLLOWED:
            got += numbers(pa.Table.from_batches([slow.read_chunk().data]))
        assert got == list(range(FOLLOWED))
        for each in (slow, stuck):
            each.cancel()
        for each in fast:
            each.stop()


def test_many_who_wait_or_stand_still(sandbox: Sandbox, log: DistributedLogManager) -> None:
    """They cost a proxy little memory, however many they are, and others are served beside them."""
    mib = 1 << 20
    options = ("--sending-bytes-max", str(8 * mib), "--ring-bytes-max", str(8 * mib))
    # Windows that do not grow: else this process would hold what the proxy should not.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with (
        proxy_process(sandbox.uri, *options) as proxy,
        proxy.client() as connected,
        ExitStack() as stack,
    ):
        clients = [flight.connect(proxy.location, generic_options=narrow) for _ in range(20)]
        still = itertools.cycle([stack.enter_context(each) for each in clients])
        assert connected.do_get(ticket(log.name)).read_all().num_rows == 0
        before_kb = resident_kb(proxy.process.pid)
        waiting = [next(still).do_get(ticket(log.name, follow=True)) for _ in range(STANDING)]
        waiting_kb = resident_kb(proxy.process.pid)
        assert waiting_kb - before_kb < 20_000 + 100 * STANDING, "of those who wait"
        with log.open_writer() as writer:
            for number in range(40):
                writer.write(LogRecord(number, bytes(1_000_000)))
            writer.commit()
        behind = []
        for _ in range(STANDING // 2):
            with suppress(pa.ArrowException):  # its connection may be ended by others' silence
                behind.append(next(still).do_get(ticket(log.name)))
        for columns in (["txid"], None):
            whole = connected.do_get(ticket(log.name, columns=columns)).read_all()
            assert whole.num_rows == 40
        grown_kb = resident_kb(proxy.process.pid) - waiting_kb
        # Messages twice, as gRPC copies them; the ring; memory that the allocator keeps; calls.
        assert grown_kb < 110_000 + 100 * STANDING, "of those who stand still"
        for each in (*waiting, *behind):
            each.cancel()


def test_a_killed_bookie(fresh_sandbox: Callable[..., Sandbox]) -> None:
    """A follower gets every record, once, and a later follower does, too."""
    cluster = fresh_sandbox(4)
    with (
        open_namespace(cluster.uri, config=ROLLING) as namespace,
        proxy_thread(cluster.uri) as proxy,
        proxy.client() as connected,
    ):
        log = namespace.open_log("killed", create_if_missing=True)
        follower = Follower(connected, log.name)
        with log.open_writer() as writer:
            write(writer, 0, 100)
            assert follower.wait_for(100) == list(range(100))
            cluster.bookies[0].kill()
            write(writer, 100, 100)
        assert follower.wait_for(200) == list(range(200))
        assert numbers(connected.do_get(ticket(log.name)).read_all()) == list(range(200))
        follower.stop()


def test_truncation_under_a_reader(client: flight.FlightClient, log: DistributedLogManager) -> None:
    """A reader of cut records gets an error; one at the end goes on; the first one left is
    first."""
    follower = Follower(client, log.name)
    written(log, 0, 100)
    assert follower.wait_for(100) == list(range(100))
    log.truncate(txid=555)
    with pytest.raises(pa.ArrowException, match=r"AlreadyTruncatedError.*1:0:1 was truncated"):
        client.do_get(ticket(log.name, start={"dlsn": "1:0:1"})).read_all()
    assert numbers(client.do_get(ticket(log.name)).read_all()) == list(range(56, 100))
    written(log, 100, 50)
    assert follower.wait_for(150) == list(range(150))
    follower.stop()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"log": "read/none"}, "LogNotFoundError"),
        ({"log_id": "0"}, "LogNotFoundError.*it is another one"),
        ({"columns": ["speed"]}, "'speed' is not one of its columns"),
        ({"columns": ["txid", "txid"]}, "or named twice"),
        ({"format": 7}, "format=7: expected 1"),
        ({"start": {"dlsn": "x"}}, "expected a DLSN"),
        ({"follow": True, "end": {"txid": 5}}, "with follow, expected no end"),
    ],
)
def test_a_wrong_ticket(
    client: flight.FlightClient,
    log: DistributedLogManager,
    fields: dict[str, Any],
    problem: str,
) -> None:
    """It is refused with what is wrong, and the service goes on."""
    wrong = ticket(fields.pop("log", log.name), **fields)
    with pytest.raises((pa.ArrowException, KeyError), match=problem):
        client.do_get(wrong).read_all()


def test_bytes_that_are_no_ticket_or_descriptor(client: flight.FlightClient) -> None:
    """Random bytes are refused."""
    with pytest.raises(pa.ArrowInvalid, match="not a ticket"):
        client.do_get(flight.Ticket(b"\x00\xff")).read_all()
    with pytest.raises(pa.ArrowInvalid, match="not a ticket"):
        client.get_flight_info(flight.FlightDescriptor.for_command(b"{"))


def test_columns_that_are_asked_for_later(
    proxy: ProxyThread, client: flight.FlightClient, log: DistributedLogManager
) -> None:
    """They come from a ring of their own, and nothing before it is missing."""
    first = Follower(client, log.name)
    written(log, 0, 100)
    first.wait_for(100)
    later = Follower(client, log.name, columns=["value"], start={"sequence_id": 40})
    assert later.wait_for(60) == list(range(40, 100))
    written(log, 100, 50)
    assert later.wait_for(110) == list(range(40, 150))
    assert first.wait_for(150) == list(range(150))
    # A log that an earlier test followed is left a moment after its last reader went.
    wait_until(lambda: len(proxy.server.reads.followed) == 1, timeout_s=WAIT_S)
    for each in (first, later):
        each.stop()


def test_a_follower_that_breaks_is_no_secret(
    client: flight.FlightClient, log: DistributedLogManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its readers get an error, and the next one is served."""
    followers = [Follower(client, log.name) for _ in range(2)]
    written(log, 0, 5)
    for each in followers:
        each.wait_for(5)  # what was written before they follow would come from the bookies

    def breaks(*_: object, **__: object) -> None:
        raise ValueError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(following, "fetched", breaks)
        written(log, 5, 5)
        for each in followers:
            each.wait_for(10)  # these may go to what was called before it was patched
        written(log, 10, 5)
        for each in followers:
            each.thread.join(WAIT_S)
            assert "broke: ValueError('a defect')" in str(each.error)
    again = Follower(client, log.name)
    assert again.wait_for(15) == list(range(15))
    again.stop()


def test_followers_share_what_is_known_of_a_log(
    client: flight.FlightClient, log: DistributedLogManager
) -> None:
    """Its segments may be very many."""
    written(log, 0, 100)

    def are_few() -> bool:
        gc.collect()
        known = [each for each in gc.get_objects() if isinstance(each, LogSnapshot)]
        return sum(each.log == log.name for each in known) <= 3

    followers = [Follower(client, log.name) for _ in range(20)]
    for each in followers:
        each.wait_for(100)
    wait_until(are_few, timeout_s=WAIT_S)
    for each in followers:
        each.stop()


def test_a_deleted_log_ends_its_followers(
    client: flight.FlightClient, namespace: Namespace, log: DistributedLogManager
) -> None:
    """They learn why."""
    written(log, 0, 10)
    follower = Follower(client, log.name)
    follower.wait_for(10)
    namespace.delete_log(log.name)
    follower.thread.join(WAIT_S)
    assert "LogNotFoundError" in str(follower.error)
