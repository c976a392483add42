"""Java's client, franz-go, kcat and Spark's connector read a log of many segments through proxies.

Goal: as librdkafka, each reads every record once and in its order, byte for byte, through rolls of
segments, a truncation, a move of the log and the death of the proxy that it reads from.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.kafka_proxies import (
    filled,
    go_on_through_faults,
    kafka_address,
    kafka_addresses,
)
from tests.fixtures.lengths import amount
from tests.fixtures.proxies import log_name_for, payloads_in
from tests.kafka_clients.programs import (
    LANGUAGES,
    KcatReader,
    Reader,
    command_of,
    kcat_command,
    spark_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.integration, pytest.mark.prove, pytest.mark.timeout(1800)]

RECORDS = amount(1_000_000, sampled=40_000)
FILLED = RECORDS * 3 // 4
"""Number of records before a client reads; the others come while the log moves."""


@pytest.fixture(params=[*LANGUAGES, "kcat", "Spark"])
def reading(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str, int], Reader]:
    """A client; a machine without what it needs leaves the test out."""
    kind = request.param
    if kind == "kcat":
        kcat = kcat_command()
        return lambda *arguments: KcatReader(kcat, *arguments, folder=tmp_path)
    command = spark_command() if kind == "Spark" else command_of(kind, tmp_path)
    return lambda *arguments: Reader(command, "read", *arguments, folder=tmp_path)


def test_a_log_of_many_segments(
    sandbox: Sandbox,
    kafka_proxies: list[ProxyProcess],
    reading: Callable[[str, str, int], Reader],
) -> None:
    """It asks for truncated records, learns the earliest one, and reads on from there.

    It also reads on when the log moves, and when the proxy is killed from which it reads.
    """
    uri, addresses = sandbox.uri, kafka_addresses(kafka_proxies, sandbox.uri)
    name = filled(uri, FILLED, log_name_for(kafka_proxies[0], uri))
    first = FILLED - len(payloads_in(uri, name))
    assert first > 1
    with reading(addresses, name.replace("/", "."), 1) as reader:
        go_on_through_faults(
            uri,
            kafka_proxies,
            name,
            range(FILLED, RECORDS),
            lambda number: reader.wait_for(number - first),
        )
    assert [each.offset for each in reader.records] == list(range(first, RECORDS))
    assert [each.value for each in reader.records] == payloads_in(uri, name)


def test_a_batch_of_spark(
    sandbox: Sandbox, kafka_proxies: list[ProxyProcess], tmp_path: Path
) -> None:
    """Its tasks divide the range of offsets; what is truncated is left out, also from the count."""
    command = spark_command()
    name = filled(sandbox.uri, RECORDS)
    expected = payloads_in(sandbox.uri, name)
    arguments = (kafka_address(kafka_proxies[0], sandbox.uri), name.replace("/", "."), 1)
    with Reader(command, "batch", *arguments, folder=tmp_path) as reader:
        reader.succeed(within_s=900)  # all of it comes at once
    first = RECORDS - len(expected)
    assert [each.offset for each in reader.records] == list(range(first, RECORDS))
    assert [each.value for each in reader.records] == expected


def test_kcat_lists_logs(sandbox: Sandbox, kafka_proxies: list[ProxyProcess]) -> None:
    """As topics."""
    address = kafka_address(kafka_proxies[0], sandbox.uri)
    name = filled(sandbox.uri, 40_000)
    command = [*kcat_command(), "-b", address, "-L", "-J"]
    listed = subprocess.run(command, capture_output=True, check=True)
    topics = [each["topic"] for each in json.loads(listed.stdout)["topics"]]
    assert name.replace("/", ".") in topics
