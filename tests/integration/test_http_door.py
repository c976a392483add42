"""`curl` writes and reads a log of real bookies through the console and proxies.

Goal: an append that is sent until it is answered is in the log once, whatever happened to answers
and to the owner of the log, and each answer names the position where it is read; a stream goes on
where it broke, through the change of a segment, and ends with the console.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from dlcore.sync import open_namespace
from tests.fixtures.browser import console_process
from tests.fixtures.lengths import amount
from tests.fixtures.lost_answers import LossyRelay
from tests.fixtures.proxies import log_name_for, proxy_process, wait_for_no_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

APPENDS = amount(200, sampled=24)
TRIES_MAX = 100
LIMIT_S = "60"


class Curl:
    """Calls of `curl` to one log, at a console or a relay before it."""

    def __init__(self, address: str, log: str, *, relay: LossyRelay | None = None) -> None:
        parts = urlsplit(address)
        self.url = f"http://{parts.netloc}/v1/logs/{log}/records"
        secret = parts.fragment.removeprefix("secret=")
        self.command = ["curl", "--silent", "--max-time", LIMIT_S]
        self.command += ["--header", f"Authorization: Bearer {secret}"]
        if relay is not None:
            self.command += ["--connect-to", f"{parts.netloc}:127.0.0.1:{relay.port}"]

    def ask(self, *options: str, query: str = "") -> tuple[int, str]:
        """Return the status, 0 if no answer came, and the body."""
        command = [*self.command, *options, "--write-out", "\n%{http_code}", self.url + query]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        body, _, status = done.stdout.rpartition("\n")
        return (0 if done.returncode else int(status)), body

    def append(self, key: str, lines: Sequence[str]) -> tuple[int, str]:
        """Append lines of JSON under a key."""
        body = "\n".join(lines)
        return self.ask("--json", body, "--header", f"Idempotency-Key: {key}")

    def append_surely(self, key: str, lines: Sequence[str]) -> dict[str, Any]:
        """Append until there is an answer; return it."""
        for _ in range(TRIES_MAX):
            status, body = self.append(key, lines)
            if status == 200:
                return dict(json.loads(body))
            assert status in (0, 429, 503), body
        raise AssertionError(f"no answer to {key}")

    def read(self) -> list[dict[str, Any]]:
        """Return all records, page by page."""
        found: list[dict[str, Any]] = []
        query = "?limit=40"
        while True:
            status, body = self.ask(query=query)
            assert status == 200, body
            page = [json.loads(line) for line in body.splitlines()]
            if not page:
                return found
            found += page
            query = f"?limit=40&after={page[-1]['dlsn']}"

    def follow(self, last: str = "") -> subprocess.Popen[str]:
        """Open a stream of events."""
        headers = ["--header", "Accept: text/event-stream", "--no-buffer"]
        if last:
            headers += ["--header", f"Last-Event-ID: {last}"]
        command = [*self.command, *headers, self.url]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def next_events(stream: subprocess.Popen[str], count: int) -> list[tuple[str, str]]:
    """Return the ids and values of the next events."""
    assert stream.stdout is not None
    found: list[tuple[str, str]] = []
    last = ""
    while len(found) < count:
        line = stream.stdout.readline()
        assert line, "the stream has ended"
        name, _, value = line.rstrip("\n").partition(": ")
        if name == "id":
            last = value
        elif name == "data":
            found.append((last, json.loads(value)["value"]))
    return found


@pytest.fixture
def proxies(sandbox: Sandbox) -> Iterator[list[ProxyProcess]]:
    """Two, of which the first may be killed."""
    wait_for_no_proxy(sandbox.uri)
    with ExitStack() as steps:
        yield [
            steps.enter_context(proxy_process(sandbox.uri, is_killed=is_killed))
            for is_killed in (True, False)
        ]


def endpoint_of(proxies: Sequence[ProxyProcess]) -> str:
    """Return the endpoint of all of them."""
    return "--endpoint=grpc://" + ",".join(each.location.partition("://")[2] for each in proxies)


def test_each_append_is_in_the_log_once(sandbox: Sandbox, proxies: list[ProxyProcess]) -> None:
    """Over lost answers, and the death of the owner; and sent again to another console later."""
    with open_namespace(sandbox.uri) as namespace, ExitStack() as steps:
        log = log_name_for(proxies[0], sandbox.uri)
        namespace.create_log(log)
        address = steps.enter_context(console_process(endpoint_of(proxies), appends=True))
        port = urlsplit(address).port
        assert port is not None
        relay = steps.enter_context(LossyRelay(port, every=3, sent_min=1))
        curl = Curl(address, log, relay=relay)
        relay.is_losing = True
        sent = {f"key-{n}": [f"[{n},{part}]" for part in range(3)] for n in range(APPENDS)}
        answers = {}
        for n, (key, lines) in enumerate(sent.items()):
            if n == APPENDS // 2:
                proxies[0].kill()
            answers[key] = curl.append_surely(key, lines)
        assert relay.lost >= APPENDS // 4
        relay.is_losing = False
        found = curl.read()
        assert [each["value"] for each in found] == [
            line for each in sent.values() for line in each
        ]
        by_value = {each["value"]: each["dlsn"] for each in found}
        for key, lines in sent.items():
            assert answers[key] == {"records": 3, "last": by_value[lines[-1]]}
        # Another console, which knows nothing, and the log's next owner give the same answers.
        other = Curl(
            steps.enter_context(console_process(endpoint_of(proxies[1:]), appends=True)), log
        )
        for key, lines in sent.items():
            assert other.append(key, lines) == (200, json.dumps(answers[key]))
        status, body = other.append("key-0", ["0"])
        assert (status, json.loads(body)["kind"]) == (409, "ProducerFencedError")
        assert len(other.read()) == len(found)


def test_a_stream_goes_on_where_it_broke(sandbox: Sandbox, proxies: list[ProxyProcess]) -> None:
    """By the id of its last event, and through new segments; it ends with the console."""
    with open_namespace(sandbox.uri) as namespace, ExitStack() as steps:
        log = log_name_for(proxies[0], sandbox.uri)
        namespace.create_log(log)
        begun = ExitStack()
        address = begun.enter_context(console_process(endpoint_of(proxies), appends=True))
        with begun:
            curl = Curl(address, log)
            with curl.follow() as first:
                curl.append_surely("0", ["0", "1"])
                (_, zero), (last, one) = next_events(first, 2)
                assert (zero, one) == ("0", "1")
                proxies[0].act("release", log=log)  # the next append begins another segment
                answer = curl.append_surely("1", ["2"])
                assert next_events(first, 1) == [(answer["last"], "2")]
                assert answer["last"].split(":")[0] > last.split(":")[0]
                first.kill()
            curl.append_surely("2", ["3"])
            again = steps.enter_context(curl.follow(last))
            assert [value for _, value in next_events(again, 2)] == ["2", "3"]
            proxies[0].act("release", log=log)
            curl.append_surely("3", ["4"])
            assert [value for _, value in next_events(again, 1)] == ["4"]
            # A stream at the end waits, and costs nothing else but its connection.
            waiting = steps.enter_context(curl.follow(curl.read()[-1]["dlsn"]))
            curl.append_surely("4", ["5"])
            assert [value for _, value in next_events(waiting, 1)] == ["5"]
        # `console_process` has seen it end in order; so do the streams.
        for each in (again, waiting):
            each.wait(float(LIMIT_S))


def test_answers_to_curl(sandbox: Sandbox, proxies: list[ProxyProcess]) -> None:
    """Each error in one form."""
    with open_namespace(sandbox.uri) as namespace:
        log = log_name_for(proxies[1], sandbox.uri)
        namespace.create_log(log)
        with console_process(endpoint_of(proxies)) as address:
            curl = Curl(address, log)
            for status, kind, (found, body) in (
                (403, "AccessDeniedError", curl.append("0", ["0"])),
                (400, "ConfigurationError", curl.ask(query="?from=yesterday")),
                (404, "LogNotFoundError", Curl(address, f"{log}-gone").ask()),
                (401, "UnauthenticatedError", Curl(address + "x", log).ask()),
            ):
                reply = json.loads(body)
                assert (found, reply["kind"]) == (status, kind), body
                assert set(reply) == {"error", "kind"}
