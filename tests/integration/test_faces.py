"""The contract of the public API: what each back end and the blocking API give for each call.

Goal: a call means the same over bookies, over proxies and in memory, async and blocking.  Method:
the same calls on logs that hold the same records; values and errors are compared with those of the
async API over bookies.  Differences that are promised are in `OWN_OUTCOMES`.
"""

from __future__ import annotations

import inspect
import re
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pytest

import dlcore
import dlcore.sync
from dlcore.base.errors import DLError
from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.log.reading.reader import DirectReader
from dlcore.sync.portal import shared_portal
from dlcore.testing.sync import MemoryCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.sync import Namespace
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

KINDS = ["empty", "bytes", "truncated", "truncated to its end", "sealed", "typed"]
OF_ONE_LOG = ("log", "timestamp")
"""Columns that differ between logs which hold the same."""
COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *((f"get_{what}_{which}", (), {}) for what in ("first", "last") for which in ("dlsn", "txid")),
    *((f"get_{what}_record", (), {}) for what in ("first", "last")),
    ("get_log_record_count", (), {}),
    ("get_log_record_count", (DLSN(1, 2, 0), DLSN(2, 0, 0)), {}),
    ("get_dlsn_not_less_than_txid", (13,), {}),
    ("get_dlsn_not_less_than_timestamp", (0,), {}),
    ("is_end_of_stream_marked", (), {}),
    ("get_settings", (), {}),
    ("update_settings", (), {"unknown": 1}),
    ("update_settings", (), {"entry_bytes": 4096}),
    ("get_schema", (), {}),
    ("update_schema", (COLUMNS.append(pa.field("km", pa.int64())),), {"merge": True}),
    ("update_schema", (pa.schema({"id": pa.string()}),), {"merge": True}),
    ("get_snapshot", (), {}),
    ("move_subscription", ("s",), {"txid": 12}),
    ("move_subscription", ("s",), {"txid": 12, "timestamp_ms": 1}),
    ("get_subscriptions", (), {}),
    ("delete_subscription", ("s",), {}),
    ("delete_subscription", ("s",), {}),
    ("read", (), {}),
    ("read", (DLSN(1, 0, 0),), {}),
    ("read", (DLSN(1, 1, 0), DLSN(2, 2, 0)), {}),
    ("read", (13, 18), {}),
    ("read", (datetime(2024, 1, 1),), {}),  # noqa: DTZ001  # refused
    ("read", (), {"columns": ["nothing"]}),
    ("open_reader", (), {}),
    ("open_reader", (), {"dlsn": DLSN(1, 1, 0)}),
    ("open_reader", (), {"txid": 17}),
    ("open_reader", (), {"dlsn": DLSN(1, 1, 0), "txid": 17}),
    ("open_reader", (), {"dlsn": "1:1:0"}),
    ("open_reader", (), {"subscriber": "s"}),
    ("open_stream_reader", (), {}),
    ("open_stream_reader", (10**6,), {}),
    ("open_stream_writer", (), {}),
    ("open_writer", (), {}),
    ("truncate", (), {}),
    ("truncate", (DLSN(9, 0, 0),), {}),
    ("truncate", (), {"txid": 16}),
    ("truncate", (), {"txid": 16}),
    ("purge_logs_older_than", (18,), {}),
    ("mark_end_of_stream", (), {}),
    ("mark_end_of_stream", (), {}),
    ("open_writer", (), {}),
    ("rename", ("not//a name",), {}),
    ("delete", (), {}),
    ("get_last_txid", (), {}),
]


_SHOWN_BY = re.compile(r"(its record at|byte \d+ follows byte) .*")


class Face:
    """One face: performs calls, and says what came of them in words that both share."""

    def __init__(self, namespace: Any) -> None:
        self.namespace = namespace

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what a call gives."""
        return call()

    def close(self, opened: Any) -> None:
        """Close what was opened."""
        self.run(opened.close)

    def read(self, reader: Any) -> list[Any]:
        """Return what a reader can read."""
        if getattr(reader, "log_name", None) is None:
            return [self.run(reader.read)]
        return list(self.run(partial(reader.read_bulk, 100)))

    def outcome(self, log: Any, name: str, *given: Any, **named: Any) -> object:
        """Perform a call of a log; return what it gave, or its error."""
        try:
            return self._shown(name, self.run(partial(getattr(log, name), *given, **named)))
        except DLError as error:
            text = str(error).replace(log.name, "LOG").replace(log.log_id, "ID")
            # Which record shows first that a log is no byte stream depends on what comes at once.
            return type(error).__name__, _SHOWN_BY.sub("its record at PLACE", text)

    def _shown(self, name: str, found: Any) -> object:
        if name == "read":
            table = self.run(found.to_arrow)
            return table.select([n for n in table.column_names if n not in OF_ONE_LOG]).to_pylist()
        if not name.startswith("open_"):
            plain = found is None or isinstance(found, (int, str, dict, DLSN, pa.Schema))
            record = getattr(found, "payload", None)
            return found if plain else type(found).__name__ if record is None else record
        try:
            if name.endswith("_writer"):
                return "a writer"
            return [getattr(each, "payload", each) for each in self.read(found)]
        finally:
            self.close(found)


class AsyncFace(Face):
    """The async one, on the event loop of the other."""

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what a call gives, once it does."""

        async def awaited() -> Any:
            found = call()
            return await found if inspect.isawaitable(found) else found

        return shared_portal().call(awaited())

    def close(self, opened: Any) -> None:
        """Close what was opened."""
        self.run(opened.aclose)

    def read(self, reader: Any) -> list[Any]:
        """Return what a reader can read."""
        if getattr(reader, "log_name", None) is None:
            return [self.run(reader.read)]
        return list(self.run(partial(reader.read_bulk, 100, until_caught_up=True)))


OWN_OUTCOMES = {("proxies", "get_last_txid"): "is gone, or has another name"}
"""The error of a back end for a call that it does not offer as the others do."""


@pytest.fixture
def opened(namespace_uri: str, proxy: ProxyProcess) -> Iterator[dict[str, tuple[Face, Any]]]:
    """By back end and API: its face, and a blocking namespace that makes logs for it."""
    portal = shared_portal()
    with (
        dlcore.sync.open_namespace(namespace_uri) as direct,
        dlcore.sync.open_namespace(proxy.location) as proxies,
        MemoryCluster() as memory,
    ):
        in_memory = memory.open_namespace()
        async_direct = portal.call(dlcore.open_namespace(namespace_uri))
        async_proxies = portal.call(dlcore.open_namespace(proxy.location))
        try:
            yield {
                "bookies, async": (AsyncFace(async_direct), direct),
                "bookies, blocking": (Face(direct), direct),
                "proxies, async": (AsyncFace(async_proxies), direct),
                "proxies, blocking": (Face(proxies), direct),
                "memory, async": (AsyncFace(in_memory._namespace), in_memory),
                "memory, blocking": (Face(in_memory), in_memory),
            }
        finally:
            portal.call(async_direct.aclose())
            portal.call(async_proxies.aclose())


def make(namespace: Namespace, name: str, kind: str) -> None:
    """Make a log that holds what its kind says, two segments of five records each."""
    namespace.create_log(name, schema=COLUMNS if kind == "typed" else None)
    with namespace.open_log(name) as log:
        for first in () if kind == "empty" else (10, 15):
            with log.open_writer() as writer:
                for txid in range(first, first + 5):
                    if kind == "typed":
                        rows = {"id": [txid], "name": ["n"], "_txid": [txid]}
                        writer.write_batch(pa.record_batch(rows))
                    else:
                        writer.write(LogRecord(txid, b"%d" % txid))
                    writer.flush()
        if kind == "truncated":
            log.truncate(DLSN(1, 3, 0))
        if kind == "truncated to its end":
            log.truncate(DLSN(2, 5, 0))
        if kind == "sealed":
            log.mark_end_of_stream()


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_gives_the_same(opened: dict[str, tuple[Face, Any]], kind: str) -> None:
    """Or the same error, in the same words."""
    outcomes: dict[str, list[tuple[Any, object]]] = {}
    for way, (face, making) in opened.items():
        name = f"faces/{uuid4().hex}"
        make(making, name, kind)
        log = face.run(partial(face.namespace.open_log, name))
        outcomes[way] = [(call, face.outcome(log, call[0], *call[1], **call[2])) for call in CALLS]
        face.close(log)
    expected = outcomes["bookies, async"]
    different = [
        (way, *other, one[1])
        for way, found in outcomes.items()
        for one, other in zip(expected, found, strict=True)
        if one != other and not _is_own(way, other)
    ]
    assert different == [], "\n".join(map(str, different))


def _is_own(way: str, found: tuple[Any, object]) -> bool:
    (call, *_), outcome = found
    own = OWN_OUTCOMES.get((way.partition(",")[0], call))
    return own is not None and own in str(outcome)


def test_a_range_is_waited_for(namespace_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not see yet what was readable when the range was made sees it soon."""
    name = f"faces/{uuid4().hex}"
    with dlcore.sync.open_namespace(namespace_uri) as namespace:
        make(namespace, name, "bytes")
    expected = [b"%d" % txid for txid in range(10, 20)]
    is_behind = True
    adding = DirectReader._add

    async def add(self: DirectReader, *, non_blocking: bool, until_caught_up: bool) -> Any:
        """Give nothing until a caller waits for it."""
        nonlocal is_behind
        if is_behind and (non_blocking or until_caught_up):
            return None
        is_behind = False
        return await adding(self, non_blocking=non_blocking, until_caught_up=until_caught_up)

    monkeypatch.setattr(DirectReader, "_add", add)
    uses: list[Callable[[Any], list[bytes]]] = [
        lambda found: found.to_arrow()["value"].to_pylist(),
        lambda found: list(found.to_pandas()["value"]),
        lambda found: found.to_polars()["value"].to_list(),
        lambda found: pa.RecordBatchReader.from_stream(found).read_all()["value"].to_pylist(),
        lambda found: [each for batch in found for each in batch["value"].to_pylist()],
    ]
    with dlcore.sync.open_namespace(namespace_uri) as namespace, namespace.open_log(name) as log:
        for use in uses:
            is_behind = True
            assert use(log.read()) == expected
