"""Configuration of auto-recovery."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.base.config import MIB, checked, require_not_negative, require_positive


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRecoveryConfig:
    """Delays of auto-recovery, its intervals, and the amount of work at a time."""

    lost_bookie_delay_s: float = 60.0
    """A bookie that is not registered gets this long to come back; 0 replaces it at once."""
    open_ledger_grace_s: float = 60.0
    """A ledger whose writer keeps a lost bookie in its last ensemble is recovered after this time.
    """
    audit_interval_s: float = 600.0
    """How often all ledgers are compared with the registered bookies, beside at every change."""
    check_interval_s: float = 7 * 24 * 3600.0
    """Time from the end of one full replica check to the start of the next."""
    check_ledgers_per_s: float = 50.0
    """Pace of the full replica check."""
    copy_bytes_per_s: float = 64.0 * MIB
    """Pace of copying, for all ledgers that one worker repairs."""
    copy_bytes_in_flight: int = 4 * MIB
    """Most bytes of entries sent to a replacement and not acknowledged yet, per ledger."""
    ledgers_at_once: int = 4
    """Ledgers that one worker repairs at the same time."""
    poll_interval_s: float = 5.0
    """How often a worker reads the list of under-replicated ledgers."""
    retry_pause_s: float = 5.0
    """Pause before a ledger whose repair failed is tried again; it doubles up to the maximum."""
    retry_pause_s_max: float = 300.0
    """The longest of these pauses."""
    lag_interval_s: float = 60.0
    """How often the auditor looks how far subscribers are behind, of 1,000 logs at a time."""
    http_address: str = ""
    """Address of metrics and health over HTTP, like 127.0.0.1:9192; empty: none."""
    http_tls: str = "none"
    """TLS of that port, with `tls_cert` of the table [dlog], which must name this host: none,
    server, or required: callers need a certificate that `tls_ca` has signed."""

    def __post_init__(self) -> None:
        require_not_negative(self, "lost_bookie_delay_s", "open_ledger_grace_s")
        require_positive(
            self,
            "audit_interval_s",
            "check_interval_s",
            "check_ledgers_per_s",
            "copy_bytes_per_s",
            "copy_bytes_in_flight",
            "ledgers_at_once",
            "poll_interval_s",
            "retry_pause_s",
            "retry_pause_s_max",
            "lag_interval_s",
        )


def is_live(key: str) -> bool:
    """Return whether a setting of the service, or of upkeep, may be set for a whole cluster."""
    return not key.startswith("http_") and key != "log_level"
