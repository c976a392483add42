"""The ports for operators of real processes: a bookie, a proxy and auto-recovery."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bookie.serving import metrics as bookie_metrics
from dlcore.backends.direct import metrics as client_metrics
from dlcore.base.access.tls import TlsFiles
from dlcore.base.listening import operator_port
from dlcore.base.metrics import Kind
from dlcore.base.records import LogRecord
from dlcore.metadata import operated as metadata
from dlcore.ops.autorecovery import metrics as recovery_metrics
from dlcore.ops.sandbox import Sandbox
from dlcore.proxy import metrics as proxy_metrics
from dlcore.sync import open_namespace
from tests.fixtures.operators import LASTING, PORT, WAIT_S, asked, asked_json, scraped, url_of
from tests.fixtures.shell import Shell
from tests.fixtures.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlcore.base.metrics import Metric
    from dlcore.sync import Namespace

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A cluster whose processes have ports for operators."""
    with Sandbox(
        3,
        data_dir=tmp_path_factory.mktemp("watched"),
        bookie_options=(*PORT, LASTING),
        proxies=1,
        proxy_options=(*PORT, LASTING),
        autorecovery_options=PORT,
    ) as sandbox:
        yield sandbox


def fill(namespace: Namespace, name: str, count: int) -> None:
    """Write records of 1,000 bytes to a log."""
    with namespace.open_log(name, create_if_missing=True).open_writer() as writer:
        for number in range(count):
            writer.write(LogRecord(number, b"x" * 1000))


def names_of(metrics: tuple[Metric, ...]) -> set[str]:
    """Return the names of samples of metrics without labels."""
    return {
        f"{each.name}_count" if each.kind is Kind.HISTOGRAM else each.name
        for each in metrics
        if not each.labels
    }


def test_each_process_is_live_ready_and_works(watched: Sandbox) -> None:
    """The trial of a bookie is on its disk, that of the others a record in a log of their own."""
    for name in ("bookie-1", "proxy-1", "autorecovery"):
        url = url_of(watched.data_dir / f"{name}.log")
        assert asked_json(f"{url}/health/live") == (200, {"live": True})
        status, ready = asked_json(f"{url}/health/ready")
        assert (status, ready["ready"]) == (200, True), ready
        status, works = asked_json(f"{url}/health/works")
        assert (status, works["works"]) == (200, True), works
    with open_namespace(watched.uri) as namespace:
        logs = namespace.get_logs("dlog-trial/")
        assert len(logs) == 2
        assert all(namespace.open_log(log).get_log_record_count() == 1 for log in logs)


def test_each_process_has_its_metrics(watched: Sandbox) -> None:
    """All that the page of metrics names is there, and counts what was done."""
    with open_namespace(watched.proxies[0].location) as namespace:
        fill(namespace, "counted", 50)
    always = names_of((*operator_port.METRICS, *metadata.METRICS)) - {
        operator_port.CERTIFICATE.name
    }
    client = names_of(client_metrics.METRICS)
    bookie = url_of(watched.bookies[0].log_path)
    added = "dlog_bookie_added_bytes_total"
    # Two of the three bookies acknowledge; the last one may come later.
    wait_until(lambda: scraped(bookie)[added][()] > 50_000, timeout_s=WAIT_S)
    found = scraped(bookie)
    assert found.keys() >= always | names_of(bookie_metrics.METRICS)
    assert found["dlog_bookie_sync_seconds_count"][()] > 0
    assert found["dlog_bookie_add_seconds_sum"][()] > 0
    found = scraped(url_of(watched.data_dir / "proxy-1.log"))
    assert found.keys() >= (always | client | names_of(proxy_metrics.METRICS)) - {
        proxy_metrics.AUDIT.name
    }
    assert found["dlog_metadata_request_seconds_count"][()] > 0
    assert found["dlog_proxy_append_records_total"][()] >= 50
    assert found["dlog_proxy_append_bytes_total"][()] > 50_000
    assert found["dlog_proxy_acquired_logs_total"][()] > 0
    assert found["dlog_proxy_append_seconds_count"][()] > 0
    assert found["dlog_client_append_seconds_sum"][()] > 0
    recovery = url_of(watched.data_dir / "autorecovery.log")
    unset = {recovery_metrics.EXPORT_AGE.name, recovery_metrics.EXPORT_EVERY.name}
    names = (always | client | names_of(recovery_metrics.METRICS)) - unset
    wait_until(lambda: scraped(recovery).keys() >= names, timeout_s=WAIT_S)  # after an audit
    assert scraped(recovery)["dlog_autorecovery_is_auditor"][()] == 1


def test_a_proxy_names_only_the_busiest_logs(watched: Sandbox) -> None:
    """Their number is bounded, however many logs there are."""
    url = url_of(watched.data_dir / "proxy-1.log")
    scraped(url)
    with open_namespace(watched.proxies[0].location) as namespace:
        for number in range(12):
            fill(namespace, f"busy-{number}", 1 + 5 * number)
    rates = scraped(url)["dlog_proxy_log_bytes_per_second"]
    assert len(rates) == 10
    assert max(rates, key=lambda labels: rates[labels]) == ("busy-11",)


def test_a_drained_proxy_is_live_and_not_ready(
    watched: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    """The action `health`, gRPC's health and the port tell the same."""
    url = url_of(watched.data_dir / "proxy-1.log")
    shell, proxy = Shell(watched.uri, capsys), ("--endpoint", watched.proxies[0].location)
    shell.text(*proxy, "proxy", "drain")
    try:
        status, ready = asked_json(f"{url}/health/ready")
        assert status == 503
        assert not ready["checks"]["takes_logs"]["ok"]
        assert asked(f"{url}/health/live")[0] == 200
    finally:
        shell.text(*proxy, "proxy", "undrain")
    assert asked_json(f"{url}/health/ready")[0] == 200


def test_a_client_has_a_collector_for_a_registry(watched: Sandbox) -> None:
    """The registry asks it at each scrape, also after the namespace was closed."""
    registry = CollectorRegistry()
    with open_namespace(watched.uri) as namespace:
        registry.register(namespace.get_collector())
        with namespace.open_log("collected", create_if_missing=True).open_writer() as writer:
            writer.write(LogRecord(1, b"x"))
            writer.flush()
            text = generate_latest(registry).decode()
            assert 'dlog_client_open_objects{class="AsyncLogWriter"} 1.0' in text
            assert "dlog_client_entries_written_total 1.0" in text
    assert "dlog_client_entries_written_total 1.0" not in generate_latest(registry).decode()


def test_on_a_secured_cluster_only_who_has_a_certificate_is_answered(tmp_path: Path) -> None:
    """Each process serves with its own certificate, if that is set."""
    options = (*PORT, "--http-tls=required")
    with Sandbox(
        1,
        secure=True,
        data_dir=tmp_path,
        bookie_options=(*options, LASTING),
        proxies=1,
        proxy_options=(*options, LASTING),
        autorecovery_options=options,
    ) as sandbox:
        assert sandbox.tls is not None
        client, bare = sandbox.tls, TlsFiles(ca=sandbox.tls.ca)
        for name in ("bookie-1", "proxy-1", "autorecovery"):
            url = f"{url_of(sandbox.data_dir / f'{name}.log')}/health/ready"
            with urllib.request.urlopen(url, context=client.client_context()) as answer:
                assert answer.status == 200
            with pytest.raises(OSError, match=r"closed|certificate|reset|Broken pipe"):
                urllib.request.urlopen(url, context=bare.client_context())
