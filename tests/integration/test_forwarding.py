"""Arrow's own Flight client, unmodified, which knows one proxy's address only: not the owner's.

Goal: it writes as at the owner, and each record once, whatever becomes of the owner.  Method: two
proxies as processes, the owner among them is killed or drained while records are on their way.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from tests.fixtures.proxies import act, log_name_for, payloads_in, two_proxies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration

SCHEMA = pa.schema([("value", pa.binary())])
FORWARD = flight.FlightCallOptions(headers=[(b"dlog-forward", b"true")])
BATCHES, ROWS = 60, 10
WAIT_S = 60


@pytest.fixture
def proxies(sandbox: Sandbox) -> Iterator[tuple[ProxyProcess, ProxyProcess]]:
    """One that is asked and one that owns, the only ones, each of which knows the other."""
    with two_proxies(sandbox.uri, is_killed=True) as (owner, asked):
        yield asked, owner


def put(
    client: flight.FlightClient,
    log: str,
    payloads: list[bytes],
    acked_to: Callable[[int], None],
) -> None:
    """Write as a producer what is not in the log yet; tell of each acknowledgement.

    Raises: FlightUnavailableError: the owner is gone, or releases the log.
    """
    command = json.dumps({"log": log, "producer": "test"}).encode()
    descriptor = flight.FlightDescriptor.for_command(command)
    writer, answers = client.do_put(descriptor, SCHEMA, FORWARD)
    with writer:
        begin = sent = acked = 0
        while acked < len(payloads):
            answer = answers.read()
            if answer is None:
                return  # closing the writer raises why
            reply: dict[str, Any] = json.loads(answer.to_pybytes())
            if "ready" in reply:
                begin = sent = acked = reply["ready"]["sequence"] + 1
            elif "acked" in reply:
                acked = begin + reply["acked"]
                acked_to(acked)
            elif "draining" in reply:
                writer.done_writing()
                continue
            while sent < min(len(payloads), acked + 5 * ROWS):
                rows = payloads[sent : sent + ROWS]
                writer.write_batch(pa.record_batch([pa.array(rows, pa.binary())], schema=SCHEMA))
                sent += len(rows)


@pytest.mark.parametrize("change", ["kill", "drain"])
def test_each_record_is_written_once_whatever_becomes_of_the_owner(
    sandbox: Sandbox, proxies: tuple[ProxyProcess, ProxyProcess], change: str
) -> None:
    """Records acknowledged when it went are durable, and the client goes on where it was."""
    asked, owner = proxies
    log = log_name_for(owner, sandbox.uri)
    payloads = [b"%d" % number for number in range(BATCHES * ROWS)]
    seen = [0]
    errors: list[str] = []
    gone_at: list[int] = []

    def acked_to(records: int) -> None:
        seen.append(records)
        if not gone_at and records >= len(payloads) // 3:
            assert owner.act("logs")["logs"] == [log]
            gone_at.append(records)
            if change == "kill":
                owner.kill()
            else:
                owner.act("drain")

    with asked.client() as client:
        act(client, "create", log=log)
        while seen[-1] < len(payloads):
            try:
                put(client, log, payloads, acked_to)
            except flight.FlightUnavailableError as error:
                errors.append(str(error))
        assert act(client, "logs")["logs"] == [log], "it took over"
    assert payloads_in(sandbox.uri, log) == payloads
    if change == "kill":
        assert "to which it was forwarded, broke" in errors[0]
        assert "records, which are durable" in errors[0]


def test_a_table_is_written_by_stock_calls(
    sandbox: Sandbox, proxies: tuple[ProxyProcess, ProxyProcess]
) -> None:
    """Which read no answer; what cannot be written is an error at the end."""
    asked, owner = proxies
    log = log_name_for(owner, sandbox.uri)
    table = pa.table({"value": [b"%d" % number for number in range(50_000)]})
    descriptor = flight.FlightDescriptor.for_path(log)
    with asked.client() as client:
        act(client, "create", log=log)
        writer, _ = client.do_put(descriptor, table.schema, FORWARD)
        writer.write_table(table, max_chunksize=500)
        writer.close()
        assert owner.act("logs")["logs"] == [log]
        writer, _ = client.do_put(descriptor, pa.schema([("other", pa.int8())]), FORWARD)
        with pytest.raises(pa.ArrowInvalid, match="value"):
            writer.close()
    assert payloads_in(sandbox.uri, log) == table["value"].to_pylist()
