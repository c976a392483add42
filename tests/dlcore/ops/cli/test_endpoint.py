"""`dlog --endpoint`: proxies answer as a client with a way to bookies would."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

import pyarrow as pa
import pytest

from dlcore.base.ids import DLSN
from dlcore.base.records import LogRecord
from dlcore.ops.cli.app import run
from dlcore.ops.diagnosis import asking
from dlcore.sync import open_namespace, open_namespace as open_remote
from tests.fixtures.certificates import Authority
from tests.fixtures.proxies import log_name_for, proxy_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox
    from tests.fixtures.proxies import ProxyProcess

pytestmark = pytest.mark.integration


@pytest.fixture
def log(namespace_uri: str) -> str:
    """Thirty records in two segments, of which two are truncated."""
    name = f"remote/{uuid4().hex}"
    with open_namespace(namespace_uri) as namespace:
        namespace.create_log(name)
        manager = namespace.open_log(name)
        for segment in range(2):
            with manager.open_writer() as writer:
                for entry in range(3):
                    txids = [100 * segment + 10 * entry + each for each in range(5)]
                    payloads = [f"{txid}".encode() for txid in txids]
                    writer.write_batch(pa.record_batch({"txid": txids, "value": payloads}))
                    writer.flush()
        manager.truncate(DLSN(1, 0, 2))
    return name


class Dlog(Protocol):
    """Runs a command with these variables; returns its status and all that it printed."""

    def __call__(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run it in this process."""


@pytest.fixture
def dlog(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dlog:
    """The command, which no other variable tells a namespace or an endpoint."""

    def run_it(*arguments: str, **variables: str) -> tuple[int, str]:
        with monkeypatch.context() as environment:
            for name in [name for name in os.environ if name.startswith("DLOG_")]:
                environment.delenv(name)
            for name, value in variables.items():
                environment.setenv(name, value)
            capsys.readouterr()
            code = run(arguments)
        return code, "".join(capsys.readouterr())

    return run_it


@pytest.mark.parametrize(
    "command",
    [
        "list remote/",
        "count {log}",
        "count {log} 1:1:3 2:0:4",
        "position {log} --txid 103",
        "position {log} --timestamp 0",
        "position {log} --txid 5000 --json",
        "tail {log} -n 4",
        "tail {log} --from-txid 14 -n 3",
        "tail {log} --from-dlsn 1:2:0 --raw",
        "tail {log} --from-timestamp 0 --format {{txid}}",
        "dump {log} --json",
        "dump {log} --from-dlsn 1:1:0 --to-dlsn 2:0:2",
        "lag {log} 2:3:0",
        "settings {log}",
        "retention {log}",
    ],
)
def test_proxies_answer_as_bookies_do(
    command: str, log: str, dlog: Dlog, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """To the letter."""
    arguments = ["log", *command.format(log=log).split()]
    there = dlog(*arguments, DLOG_URI=namespace_uri)
    assert there[0] == 0
    assert dlog(*arguments, "--endpoint", proxy.location) == there
    assert there[1]


def test_columns_that_are_shown_and_hidden(
    log: str, dlog: Dlog, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """Proxies answer about a log; other commands say what they need, and which do not."""
    endpoint = {"DLOG_ENDPOINT": proxy.location, "DLOG_URI": namespace_uri}
    code, shown = dlog("log", "show", log, **endpoint)
    assert code == 0
    assert "1:0:2" in shown
    assert "28" in shown
    for command in ("log space", f"log inspect {log}", "bookie list", f"log dump {log} --entries"):
        code, reply = dlog(*command.split(), **endpoint)
        assert code != 0
        assert "give --uri and no --endpoint" in reply
    code, reply = dlog("log", "count", "no/such/log", **endpoint)
    assert (code, "'no/such/log' does not exist" in reply) == (1, True)
    code, reply = dlog("log", "list", "--patience", "5", DLOG_ENDPOINT="grpc://127.0.0.1:1")
    assert (code, "127.0.0.1:1" in reply, "refused" in reply) == (1, True, True), reply


@pytest.mark.parametrize("options", ["", "--txid line-number", "--framed", "--whole"])
def test_records_are_written_through_proxies(
    options: str, dlog: Dlog, namespace_uri: str, proxy: ProxyProcess, tmp_path: Path
) -> None:
    """They are there as a writer with a way to bookies would have written them."""
    there, here = (f"remote/{uuid4().hex}" for _ in range(2))
    lines = b"one\ntwo\nthree\n"
    given = tmp_path / "given"
    given.write_bytes(len(lines).to_bytes(4, "big") + lines if "framed" in options else lines)
    with open_namespace(namespace_uri) as namespace:
        for name, environment in (
            (there, {"DLOG_URI": namespace_uri}),
            (here, {"DLOG_ENDPOINT": proxy.location}),
        ):
            namespace.create_log(name)
            command = ("log", "write", name, "--file", str(given), *options.split())
            code, reply = dlog(*command, **environment)
            assert code == 0, reply
            count = "1 record" if "whole" in options or "framed" in options else "3 records"
            assert f"wrote {count} to log {name}, the last one at " in reply
        tables = [namespace.open_log(name).read().to_arrow() for name in (there, here)]
    assert tables[0]["value"] == tables[1]["value"]
    assert len(tables[0])
    if "line-number" in options:
        assert tables[0]["txid"] == tables[1]["txid"]


def test_proxies_that_speak_tls(log: str, dlog: Dlog, namespace_uri: str, tmp_path: Path) -> None:
    """Files on the command line or in variables; without the right ones it says what they are."""
    authority = Authority(tmp_path / "ours")
    files, client = authority.issue("proxy"), authority.issue("client", host="DNS:client")
    stranger = Authority(tmp_path / "theirs").ca
    serving = [f"--serve-tls-{name}={getattr(files, name)}" for name in ("ca", "cert", "key")]
    with proxy_process(namespace_uri, *serving) as proxy:
        right = {
            f"DLOG_TLS_{name.upper()}": getattr(client, name) for name in ("ca", "cert", "key")
        }
        endpoint = ("--endpoint", proxy.location)
        assert dlog(*endpoint, "log", "count", log, **right) == (0, "28\n")
        lines = tmp_path / "lines"
        lines.write_bytes(b"one\n")
        # The other proxy that is live speaks no TLS.
        written = log_name_for(proxy, namespace_uri)
        with open_namespace(namespace_uri) as namespace:
            namespace.create_log(written)
        writing = ("write", written, "--file", str(lines))
        code, reply = dlog(*endpoint, "log", *writing, **right)
        assert (code, "the last one at " in reply) == (0, True), reply
        code, reply = dlog(*endpoint, "log", "tail", written, "-n", "1", "--raw", **right)
        assert (code, reply.strip()) == (0, "one")
        plain = proxy.location.replace("grpc+tls", "grpc")
        wrong = [
            ((*endpoint, f"--tls-ca={client.ca}"), "lets no client in without a certificate"),
            ((*endpoint, f"--tls-ca={stranger}"), "its certificate is not accepted"),
            (("--endpoint", plain), f"it speaks TLS: expected {proxy.location}"),
        ]
        for command, expected in wrong:
            began = time.monotonic()
            for done in (("count", log), writing):
                code, reply = dlog("log", *done, *command)
                assert (code, expected in reply) == (2, True), reply
                assert f"the proxy at {command[1]}: " in reply
            assert time.monotonic() - began < 30


def test_subscriptions_and_settings_through_proxies(
    log: str, dlog: Dlog, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """Shown, with how far they are behind, and forgotten; settings are changed."""
    endpoint = {"DLOG_ENDPOINT": proxy.location}
    with open_namespace(namespace_uri) as namespace:
        namespace.open_log(log).move_subscription("ann", dlsn=DLSN(2, 0, 0))
    shown = dlog("log", "subscriptions", log, "--json", **endpoint)
    assert shown == (0, json.dumps([{"subscriber": "ann", "dlsn": "2:0:0"}]) + "\n")
    code, reply = dlog("log", "lag", log, "--json", **endpoint)
    assert (code, [(row["subscriber"], row["records_behind"]) for row in json.loads(reply)]) == (
        0, [("ann", 15)],
    )  # fmt: skip
    code, reply = dlog("log", "subscriptions", log, "--delete", "ann", "--yes", **endpoint)
    assert (code, f"log {log} has forgotten ann" in reply) == (0, True)
    assert dlog("log", "subscriptions", log, "--json", **endpoint) == (0, "[]\n")
    code, reply = dlog("log", "retention", log, "1s", "--yes", **endpoint)
    assert (code, "Drop records of log" in reply) == (0, True), reply
    command = ("log", "settings", log, "--set", "entry_bytes=4096", "--json")
    code, reply = dlog(*command, **endpoint)
    assert (code, json.loads(reply)["entry_bytes"], json.loads(reply)["retention_s"]) == (
        0,
        4096,
        1,
    )


def test_logs_are_made_and_ended_through_proxies(
    dlog: Dlog, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """Created, of bytes or typed, cut off, sealed while a proxy writes them, renamed, deleted."""
    endpoint = {"DLOG_ENDPOINT": proxy.location}
    log = log_name_for(proxy, namespace_uri)
    code, reply = dlog("log", "create", log, "--ensemble", "1", **endpoint)
    assert (code, "proxies do not offer `create_log(config=…)`" in reply) == (2, True)
    assert dlog("log", "create", log, "--json", **endpoint) == (0, json.dumps({"log": log}) + "\n")
    assert dlog("log", "schema", log, **endpoint) == (0, f"log {log} is one of bytes\n")
    assert dlog("log", "create", f"{log}/t", "--schema", "city string", **endpoint)[0] == 0
    assert "city" in dlog("log", "schema", f"{log}/t", **endpoint)[1]
    code, reply = dlog("log", "schema", f"{log}/none", **endpoint)
    assert (code, f"'{log}/none' does not exist" in reply) == (1, True)
    with open_remote(proxy.location) as namespace, namespace.open_log(log) as opened:
        with opened.open_writer() as writer:
            writer.write_table(pa.table({"value": ["a", "b", "c"]}))
        code, reply = dlog("log", "truncate", log, str(opened.get_last_dlsn()), "--yes", **endpoint)
        assert (code, "Drop the 2 records" in reply) == (0, True)
        assert opened.get_log_record_count() == 1
        assert dlog("log", "seal", log, "--yes", **endpoint)[0] == 0
        assert opened.is_end_of_stream_marked()
    code, reply = dlog("log", "rename", log, f"{log}/new", **endpoint)
    assert (code, reply) == (0, f"renamed log {log} to {log}/new\n")
    code, reply = dlog("log", "delete", f"{log}/new", "--yes", **endpoint)
    assert (code, f"Delete log {log}/new with 1 records" in reply) == (0, True)
    code, reply = dlog("log", "delete", f"{log}/t", "--yes", "--damaged", **endpoint)
    assert (code, "give --uri and no --endpoint" in reply) == (2, True)
    assert dlog("log", "list", log, **endpoint) == (0, f"log\n{log}/t\n")


def test_a_log_is_released_by_the_proxy_that_owns_it(
    dlog: Dlog, namespace_uri: str, proxy: ProxyProcess
) -> None:
    """Then a program that reaches bookies writes it at once, and not after ten minutes."""
    endpoint = {"DLOG_ENDPOINT": proxy.location}
    log = log_name_for(proxy, namespace_uri)
    code, reply = dlog("proxy", "release", log, **endpoint)
    assert (code, f"'{log}' does not exist" in reply) == (1, True)
    with open_remote(proxy.location) as remote:
        remote.create_log(log)
        with remote.open_log(log).open_writer() as writer:
            writer.write_table(pa.table({"value": ["a"]}))
    assert log in proxy.act("logs")["logs"]
    done = {"log": log, "released": True}
    assert dlog("proxy", "release", log, "--json", **endpoint) == (0, json.dumps(done) + "\n")
    assert log not in proxy.act("logs")["logs"]
    with open_namespace(namespace_uri) as direct, direct.open_log(log).open_writer() as own:
        own.write_batch(pa.record_batch({"txid": [10**15], "value": [b"b"]}))
    code, reply = dlog("proxy", "release", log, **endpoint)
    assert (code, reply) == (0, f"log {log} is owned by no proxy\n")
    code, reply = dlog("proxy", "release", log)
    assert (code, "give --endpoint grpc://host:port" in reply) == (2, True)


def test_proxies_are_listed(
    dlog: Dlog, fresh_sandbox: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with what it owns, over bookies and over proxies; one that hangs is reported."""
    monkeypatch.setattr(asking, "PATIENCE_S", 1.0)
    cluster = fresh_sandbox(3, proxies=2)
    with open_namespace(cluster.uri) as namespace:
        for number in range(4):
            namespace.create_log(f"listed-{number}")
    first, second = (each.location for each in cluster.proxies)
    with open_remote(first) as namespace:
        for number in range(4):
            with namespace.open_log(f"listed-{number}") as log, log.open_writer() as writer:
                writer.write(LogRecord(txid=1, payload=b"x"))
                writer.commit()

    def listed(*options: str) -> dict[str, dict[str, object]]:
        code, shown = dlog("proxy", "list", "--json", *options)
        assert code == 0
        return {each["location"]: each for each in json.loads(shown)}

    found = listed("--uri", cluster.uri)
    assert sorted(found) == sorted([first, second])
    assert [each["state"] for each in found.values()] == ["serves", "serves"]
    assert sum(int(str(each["logs"])) for each in found.values()) == 4
    assert all(abs(float(str(each["ahead_ms"]))) < 1000 for each in found.values())
    assert sorted(listed("--endpoint", second)) == sorted(found)
    assert dlog("proxy", "list", "-q", "--uri", cluster.uri) == (0, "\n".join([*sorted(found), ""]))

    cluster.proxies[0].pause()
    hanging = listed("--uri", cluster.uri)[first]
    assert (hanging["state"], hanging["logs"]) == ("no answer", None)
    assert hanging["problem"]
    cluster.proxies[0].resume()
    cluster.proxies[0].terminate()
    assert list(listed("--uri", cluster.uri)) == [second]
