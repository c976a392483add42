"""Configuration of a proxy."""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.base.config import MIB, checked, require, require_not_negative, require_positive
from dlcore.base.settings import Option, options_of, require_log_level

_EVERYWHERE = ("0.0.0.0", "::", "[::]")

_COUNTS = tuple(
    f"{scope}{what}_max"
    for scope in ("log_", "principal_")
    for what in ("streams", "pending_bytes")
)
_RATES = tuple(
    f"{scope}{unit}_per_s"
    for scope in ("stream_", "log_", "principal_", "")
    for unit in ("records", "bytes")
)


def address_of(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """The addresses and limits of a proxy."""

    host: str = "127.0.0.1"
    """The address of this machine to listen on."""
    port: int = 0
    """The port to listen on; 0: a free one."""
    advertised_host: str = ""
    """Host at which clients and other proxies reach the proxy; empty: `host`."""
    advertised_port: int = 0
    """Port at which they reach it; 0: the port to listen on."""
    tls_cert: str = ""
    """PEM file of the proxy's certificate, which names `advertised_host`; empty: no TLS."""
    tls_key: str = ""
    """PEM file of the proxy's private key, without a passphrase."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the certificates of clients."""
    tls_client_auth: str = "required"
    """Whether clients need a certificate: required or none."""
    session_timeout_s: float = 4.0
    """Without contact for this time, the proxy loses its logs to other proxies."""
    message_bytes_max: int = 4 * MIB
    """Largest message that the proxy accepts; clients split larger ones."""
    ring_bytes_max: int = 64 * MIB
    """Memory for the latest entries of all followed logs, from which readers are served."""
    sending_bytes_max: int = 64 * MIB
    """Most bytes in transit to readers, with gRPC's copies.  Above it, readers that do not receive
    are disconnected."""
    catching_up_max: int = 8
    """Most readers of older records at once; each reads some MiB ahead."""
    window_records: int = 65_536
    """Most records of one stream that are accepted and not durable; above it they wait."""
    window_bytes: int = 8 * MIB
    """Most bytes of one stream that are accepted and not durable; above it they wait."""
    stream_records_per_s: float = 0.0
    """Most records a second of one stream; above it they wait.  0: no limit.  A client can open
    more streams; `principal_records_per_s` limits a client."""
    stream_bytes_per_s: float = 0.0
    """Most bytes a second of one stream; above it they wait.  0: no limit."""
    log_records_per_s: float = 0.0
    """Most records a second of all streams to one log; above it they wait.  0: no limit."""
    log_bytes_per_s: float = 0.0
    """Most bytes a second of all streams to one log; above it they wait.  0: no limit."""
    principal_records_per_s: float = 0.0
    """Most records a second of all streams of one principal; above it they wait.  0: no limit.  The
    principal is the common name of the client's certificate, or without one the client's host."""
    principal_bytes_per_s: float = 0.0
    """Most bytes a second of all streams of one principal; above it they wait.  0: no limit."""
    records_per_s: float = 0.0
    """Most records a second of all streams; above it they wait.  0: no limit."""
    bytes_per_s: float = 0.0
    """Most bytes a second of all streams; above it they wait.  0: no limit."""
    log_streams_max: int = 0
    """Most streams that write to one log at once; others are refused.  0: no limit."""
    principal_streams_max: int = 0
    """Most streams of one principal that write or stage at once; others are refused.  0: no
    limit."""
    log_pending_bytes_max: int = 0
    """Most bytes of one log in `pending_bytes_max`.  0: only the limit that always holds, a quarter
    of the free bytes."""
    principal_pending_bytes_max: int = 0
    """Most bytes of one principal in `pending_bytes_max`, and in `received_bytes_max`; 0: no
    limit."""
    throttle_max_s: float = 10.0
    """A batch that would wait longer for its rates is refused, with the time when to retry."""
    pending_bytes_max: int = 256 * MIB
    """Most bytes of all streams that are accepted and not durable; above it streams wait in
    order."""
    received_bytes_max: int = 128 * MIB
    """Most bytes of messages that wait for a rate, or for their log; above it a stream is ended."""
    staging_max: int = 8
    """Most streams that stage at once, such as Spark's tasks; others wait.  Each takes at most
    32 MiB."""
    calls_max: int = 10_000
    """Most calls at once, with open streams; others are refused."""
    logs_max: int = 10_000
    """Most logs that the proxy owns at once; others are refused."""
    lock_timeout_s: float = 5.0
    """Longest wait for a log that a direct writer holds, or a proxy that is gone."""
    idle_release_s: float = 600.0
    """A log without an open stream is released after this time."""
    rebalance: bool = True
    """Whether the proxy hands over logs to proxies with fewer logs, and accepts logs of others."""
    rebalance_after_s: float = 60.0
    """Balancing starts when the set of live proxies has not changed for this time."""
    rebalance_pause_s: float = 5.0
    """Pause after each step; a step hands over one of 100 logs, and at most one that is written."""
    rebalance_tolerance: float = 0.2
    """A proxy hands over logs if it is above the mean of all proxies by more than this share."""
    log_level: str = "info"
    """Lowest level of logged messages: debug, info, warning or error."""

    def __post_init__(self) -> None:
        for key in ("port", "advertised_port"):
            value = getattr(self, key)
            require(condition=0 <= value <= 65535, key=key, value=value, rule="expected 0 … 65535")
        require(condition=bool(self.host), key="host", value=self.host, rule="expected an address")
        require(
            condition=self.host not in _EVERYWHERE or bool(self.advertised_host),
            key="host",
            value=self.host,
            rule="clients cannot connect to this address: give an advertised_host",
        )
        require_positive(
            self,
            "message_bytes_max",
            "ring_bytes_max",
            "sending_bytes_max",
            "catching_up_max",
            "window_records",
            "window_bytes",
            "pending_bytes_max",
            "received_bytes_max",
            "staging_max",
            "calls_max",
            "logs_max",
            "idle_release_s",
            "session_timeout_s",
            "rebalance_pause_s",
        )
        require(
            condition=self.tls_client_auth in ("required", "none"),
            key="tls_client_auth",
            value=self.tls_client_auth,
            rule="expected required or none",
        )
        require_not_negative(
            self,
            "lock_timeout_s",
            "throttle_max_s",
            "rebalance_after_s",
            "rebalance_tolerance",
            *_RATES,
            *_COUNTS,
        )
        require_log_level(self.log_level)

    @property
    def address(self) -> str:
        """The address that the proxy listens on."""
        return address_of(self.host, self.port)

    def location(self, port: int) -> str:
        """Return the location that clients connect to if the proxy listens on `port`."""
        host, scheme = self.advertised_host or self.host, "grpc+tls" if self.tls_cert else "grpc"
        return f"{scheme}://{address_of(host, self.advertised_port or port)}"


def proxy_options() -> dict[str, Option]:
    """Return the settings of a proxy by key, with their meaning."""
    return options_of(ProxyConfig)
