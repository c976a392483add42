"""docs/metrics.md, made of the declarations of the metrics.

``python -m tests.metrics_document`` writes it; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bookie.serving import metrics as bookie
from dlcore.backends.direct import metrics as client
from dlcore.base.listening import operator_port
from dlcore.base.metrics import BOUNDS_S, Kind, Metric
from dlcore.metadata import operated as metadata
from dlcore.ops.autorecovery import metrics as autorecovery
from dlcore.ops.metadata_server import server as metadata_server
from dlcore.proxy import metrics as proxy
from dlspark import progress

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
SPARK = (
    *(
        Metric(f"dlog_stream_{name}", Kind.GAUGE, text.rstrip("."), ("query",))
        for name, text in progress._EXPORTED.items()
    ),
    *(
        Metric(f"dlog_stream_log_{name}", Kind.GAUGE, text.rstrip("."), ("query", "log"))
        for name, (_, text) in progress._EXPORTED_BY_LOG.items()
    ),
)
TABLES: dict[str, tuple[Metric, ...]] = {
    "Every server": operator_port.METRICS,
    "A bookie, a proxy and auto-recovery": metadata.METRICS,
    "A bookie": bookie.METRICS,
    "A proxy": proxy.METRICS,
    "Auto-recovery": autorecovery.METRICS,
    "The metadata server of one host": metadata_server.METRICS,
    "A client, a proxy's and auto-recovery's too": client.METRICS,
    "A streaming query of Spark": SPARK,
}
_UNITS = {
    "timestamp_seconds": "seconds since 1970",
    "bytes_per_second": "bytes a second",
    "_per_s": "a second",
    "_ms": "milliseconds",
    "seconds": "seconds",
    "bytes": "bytes",
}
_PATHS = """| path | answer |
|---|---|
""" + "".join(
    f"| `{path}` | {answer} |\n"
    for path, answer in {
        "/metrics": "what the tables below name, in Prometheus' format, with `process_…`",
        "/health/live": "200: the process answers",
        "/health/ready": "200, or 503 if a check fails; JSON with each check: `metadata_store`; "
        "`certificates` with TLS; of a bookie `disk` and `space`; of a proxy `registered`, "
        "`takes_logs` and, with an audit log, `audit_log`; of a metadata server `serving` alone",
        "/health/works": "200, or 503 if a trial fails: a bookie writes a small file and reads "
        "it, a metadata server writes a row of its file as it is; the others append a record to a "
        "log of their own below `dlog-trial/`, read it, and truncate what was before. All who ask "
        "within 10 s get one result",
    }.items()
)
_BOUNDS = ", ".join(f"{each:g}" for each in BOUNDS_S)
_HEAD = f"""# Metrics and health

Generated from the code by `make pages`.

A bookie, a proxy and auto-recovery serve HTTP at `http_address`, and `dlog metadata serve` at
`--http-address` (by default there is none):

{_PATHS}
The port opens once the process serves, and stays while a proxy drains.

**Access.** With `http_tls=none` or `server` everybody who can connect can read the port: bind it to
localhost, or to a network of operators. With `http_tls=required` a client needs a certificate that
`tls_ca` signed. Auto-recovery serves with its certificate of the table `[dlog]`, which must be one
of a server, too; those of `dlog secure init` are.

The port shows figures. A proxy's port also shows
the names of the `http_logs_max` logs with the highest rates (0: none), and the auditor's those of
the ten subscribers that are furthest behind. No record can be read there, and nothing changed. The
port takes 32 connections at once, requests of some KiB, and 10 s for each.

**Cost.** Work counts in plain numbers; a scrape reads them, in some milliseconds of the process.
`python -m benchmarks.main --only core_write_scraped` measures it.

**Client library.** `namespace.get_collector()` is a collector for your own registry of
`prometheus_client` (extra `metrics`): `REGISTRY.register(namespace.get_collector())`.

**Spark.** The driver exports progress and lag ([`dlspark.ProgressListener`](spark-watch.md)).
Executors are not scraped: they come and go without a fixed address, and the progress of the query
has the rows that they read and wrote.

Rules are in `deploy/prometheus`, explained in [alerts.md](alerts.md), and dashboards, one for each
role, in `deploy/grafana`. Buckets of histograms end at {_BOUNDS} seconds.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *(_table(title, metrics) for title, metrics in TABLES.items())])


def unit_of(metric: Metric) -> str:
    """Return the unit that the end of its name tells."""
    name = metric.name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def _table(title: str, metrics: Iterable[Metric]) -> str:
    rows = [
        f"| `{each.name}` | {each.kind.value} | {', '.join(each.labels)} | {unit_of(each)} | "
        f"{each.text} |"
        for each in metrics
    ]
    head = ["| metric | type | labels | unit | meaning |", "|" + "---|" * 5]
    return "\n".join([f"## {title}", "", *head, *rows, ""])


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
