"""deploy/grafana: a dashboard for each role, made of lists of panels.

``python -m tests.dashboards_document`` writes them; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


class Panel(NamedTuple):
    """One picture over time."""

    title: str
    expression: str
    unit: str = "short"
    legend: str = "{{instance}}"


def _slowest(name: str) -> str:
    return f"histogram_quantile(0.99, sum by (le, instance) (rate({name}_bucket[5m])))"


def _of_every(role: str) -> list[Panel]:
    """Return the panels that the servers of a role share with the others."""
    own = f'{{job="dlog-{role}"}}'
    times = f"rate(dlog_metadata_request_seconds_bucket{own}[5m])"
    requests = f"histogram_quantile(0.99, sum by (le, instance) ({times}))"
    ends = f"dlog_certificate_expires_timestamp_seconds{own} - time()"
    return [
        Panel("Ready", f"dlog_ready{own}"),
        Panel("Checks that fail", f"dlog_check_ok{own} == 0", legend="{{instance}} {{check}}"),
        Panel("Metadata store answers", f"dlog_metadata_connected{own}"),
        Panel("Requests to it, p99", requests, "s"),
        Panel("Certificate ends in", ends, "s"),
        Panel("Resident memory", f"process_resident_memory_bytes{own}", "bytes"),
        Panel("CPU", f"rate(process_cpu_seconds_total{own}[5m])", "percentunit"),
    ]


DASHBOARDS: dict[str, list[Panel]] = {
    "bookie": [
        Panel("Writable", "dlog_bookie_writable"),
        Panel("Bytes added", "rate(dlog_bookie_added_bytes_total[5m])", "Bps"),
        Panel("Bytes read", "rate(dlog_bookie_read_bytes_total[5m])", "Bps"),
        Panel("Adds until durable, p99", _slowest("dlog_bookie_add_seconds"), "s"),
        Panel("Syncs, p99", _slowest("dlog_bookie_sync_seconds"), "s"),
        Panel("Bytes not durable", "dlog_bookie_pending_add_bytes", "bytes"),
        Panel("Adds refused: overload", "rate(dlog_bookie_overloaded_total[5m])"),
        Panel("Adds refused: disk full", "rate(dlog_bookie_disk_full_total[5m])"),
        Panel(
            "Disk free",
            "dlog_bookie_disk_free_bytes / dlog_bookie_disk_size_bytes",
            "percentunit",
        ),
        Panel("Stored", "dlog_bookie_stored_bytes", "bytes"),
        Panel("Freed", "rate(dlog_bookie_freed_bytes_total[1h])", "Bps"),
        Panel("Damaged entries", "dlog_bookie_damaged_entries"),
        Panel("Since the last scrub", "dlog_bookie_scrub_age_seconds", "s"),
        Panel("Connections", "dlog_bookie_connections"),
        Panel("Followers", "dlog_bookie_followers"),
    ],
    "proxy": [
        Panel("Owned logs", "dlog_proxy_owned_logs"),
        Panel("Logs acquired", "rate(dlog_proxy_acquired_logs_total[5m])"),
        Panel("Streams that write", "dlog_proxy_streams"),
        Panel("Records", "rate(dlog_proxy_append_records_total[5m])"),
        Panel("Bytes", "rate(dlog_proxy_append_bytes_total[5m])", "Bps"),
        Panel("Appends, p99", _slowest("dlog_proxy_append_seconds"), "s"),
        Panel("Failed batches", "rate(dlog_proxy_failed_batches_total[5m])"),
        Panel("Delayed by rates", "rate(dlog_proxy_throttled_seconds_total[5m])", "percentunit"),
        Panel("Delivery, p99", _slowest("dlog_proxy_delivery_seconds"), "s"),
        Panel("Bytes to readers", "rate(dlog_proxy_delivery_bytes_total[5m])", "Bps"),
        Panel("Readers of older records", "dlog_proxy_catching_up_readers"),
        Panel("Kept for readers", "dlog_proxy_ring_bytes + dlog_proxy_kept_bytes", "bytes"),
        Panel("Busiest logs", "dlog_proxy_log_bytes_per_second", "Bps", "{{log}}"),
    ],
    "autorecovery": [
        Panel("Ledgers that lack replicas", "max(dlog_autorecovery_underreplicated_ledgers)"),
        Panel("Lost bookies", "dlog_autorecovery_lost_bookies"),
        Panel("Auditor", "dlog_autorecovery_is_auditor"),
        Panel("Since the last audit", "dlog_autorecovery_audit_age_seconds", "s"),
        Panel("Ledgers left out", "dlog_autorecovery_unreadable_ledgers"),
        Panel("Repairs", "rate(dlog_autorecovery_repairs_total[5m])"),
        Panel("Failed repairs", "rate(dlog_autorecovery_failed_repairs_total[5m])"),
        Panel("Repair, p99", _slowest("dlog_autorecovery_repair_seconds"), "s"),
        Panel("Cold bytes scrubbed", "rate(dlog_autorecovery_scrubbed_bytes_total[5m])", "Bps"),
        Panel("Cold ledgers with holes", "dlog_autorecovery_cold_holes"),
        Panel("Logs that fail to reach their tier", "dlog_autorecovery_tier_failing_logs"),
        Panel("Round of tiering", "dlog_autorecovery_tier_round_seconds", "s"),
        Panel("Tables that fail", "dlog_autorecovery_table_failing_logs"),
        Panel(
            "Tier and table, errors",
            "rate(dlog_autorecovery_tier_errors_total[5m]) "
            "or rate(dlog_autorecovery_table_errors_total[5m])",
            legend="{{instance}} {{kind}}",
        ),
        Panel("Since the last export", "min(dlog_autorecovery_export_age_seconds)", "s"),
    ],
    "spark": [
        Panel("Records behind", "dlog_stream_records_behind", legend="{{query}}"),
        Panel("Seconds behind", "dlog_stream_seconds_behind", "s", "{{query}}"),
        Panel("Rows processed", "dlog_stream_processed_rows_per_s", legend="{{query}}"),
        Panel("Micro-batch", "dlog_stream_batch_ms", "ms", "{{query}}"),
        Panel("Logs furthest behind", "dlog_stream_log_records_behind", legend="{{log}}"),
        Panel("Records skipped", "dlog_stream_records_skipped", legend="{{query}}"),
    ],
}


def panels_of(role: str) -> list[Panel]:
    """Return the panels of a role's dashboard."""
    return DASHBOARDS[role] + ([] if role == "spark" else _of_every(role))


def dashboard(role: str) -> str:
    """Return the dashboard of a role, as Grafana imports it."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    whole = {
        "uid": f"dlog-{role}",
        "title": f"dlog {role}",
        "tags": ["dlog"],
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source]},
        "panels": [_panel(number, each) for number, each in enumerate(panels_of(role))],
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, object]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [{"refId": "A", "expr": panel.expression, "legendFormat": panel.legend}],
    }


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(dashboard(each), encoding="utf-8")
