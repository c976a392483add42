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
    """Return ``host:port``, with the brackets that an IPv6 address has there."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """Where a proxy serves, and what bounds it."""

    host: str = "127.0.0.1"
    """The address of this machine to listen on."""
    port: int = 0
    """The port to listen on; 0: a free one."""
    advertised_host: str = ""
    """Where clients and other proxies reach it, if that is not the host."""
    advertised_port: int = 0
    """The port there; 0: the port it listens on."""
    tls_cert: str = ""
    """PEM file of the proxy's certificate, which names `advertised_host`; empty: no TLS."""
    tls_key: str = ""
    """PEM file of its private key, without a passphrase."""
    tls_ca: str = ""
    """PEM file of the certificates that may sign those of clients."""
    tls_client_auth: str = "required"
    """Whether clients need a certificate: required or none."""
    session_timeout_s: float = 4.0
    """After this long without contact the metadata store gives its logs to other proxies."""
    message_bytes_max: int = 4 * MIB
    """The largest message that it takes; clients split what is larger."""
    ring_bytes_max: int = 64 * MIB
    """What it keeps of the ends of the logs that it follows, of all together."""
    sending_bytes_max: int = 64 * MIB
    """What it is sending to readers, with gRPC's copies; above it who takes nothing is ended."""
    catching_up_max: int = 8
    """How many readers of older records it serves at once; each reads some MiB ahead."""
    window_records: int = 65_536
    """Records of one stream that may be accepted and not durable; it then takes no more."""
    window_bytes: int = 8 * MIB
    """Likewise their bytes."""
    stream_records_per_s: float = 0.0
    """Records that one stream may write in a second; 0: as many as come.  Above it they wait.
    A client with more streams may write more: `principal_records_per_s` bounds clients."""
    stream_bytes_per_s: float = 0.0
    """Likewise bytes."""
    log_records_per_s: float = 0.0
    """Likewise records of all streams to one log."""
    log_bytes_per_s: float = 0.0
    """Likewise their bytes."""
    principal_records_per_s: float = 0.0
    """Likewise records of all streams of one principal: of clients whose certificates have one
    common name, or, of those without a certificate, of all on one host."""
    principal_bytes_per_s: float = 0.0
    """Likewise their bytes."""
    records_per_s: float = 0.0
    """Likewise records of all streams."""
    bytes_per_s: float = 0.0
    """Likewise their bytes."""
    log_streams_max: int = 0
    """Streams that may write to one log at once; others are refused.  0: as many as come."""
    principal_streams_max: int = 0
    """Likewise those of one principal, to all logs, and those that stage."""
    log_pending_bytes_max: int = 0
    """Of `pending_bytes_max` at most so much for one log; 0: no limit but a quarter of the rest."""
    principal_pending_bytes_max: int = 0
    """Likewise for one principal, and as much of `received_bytes_max`; 0: no limit of his own."""
    throttle_max_s: float = 10.0
    """A batch that would wait longer for these rates is refused, and told when to come again."""
    pending_bytes_max: int = 256 * MIB
    """Bytes of all streams that are accepted and not durable; those without room wait in turn."""
    received_bytes_max: int = 128 * MIB
    """Bytes of messages that wait for a rate, or for their log; a stream above it is ended."""
    staging_max: int = 8
    """Streams that stage at once, as of Spark's tasks; each takes 32 MiB at most, others wait."""
    calls_max: int = 10_000
    """Calls at once, open streams among them; those above are refused."""
    logs_max: int = 10_000
    """Logs that it owns at once; others are refused."""
    lock_timeout_s: float = 5.0
    """How long it waits for a log that is held by a direct writer, or by a proxy that is gone."""
    idle_release_s: float = 600.0
    """A log to which no stream was open for so long is let go of."""
    rebalance: bool = True
    """Whether it hands over logs to proxies that have fewer, and takes part of what others have."""
    rebalance_after_s: float = 60.0
    """It does so once the live proxies have been the same for so long."""
    rebalance_pause_s: float = 5.0
    """The pause after each step, in which one of 100 logs goes, and one that is written at most."""
    rebalance_tolerance: float = 0.2
    """What is above the mean of all proxies by less than this share of it stays."""
    log_level: str = "info"
    """What its log tells at least: debug, info, warning or error."""

    def __post_init__(self) -> None:
        for key in ("port", "advertised_port"):
            value = getattr(self, key)
            require(condition=0 <= value <= 65535, key=key, value=value, rule="expected 0 … 65535")
        require(condition=bool(self.host), key="host", value=self.host, rule="expected an address")
        require(
            condition=self.host not in _EVERYWHERE or bool(self.advertised_host),
            key="host",
            value=self.host,
            rule="clients cannot be sent there: give an advertised_host",
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
        """What it listens on."""
        return address_of(self.host, self.port)

    def location(self, port: int) -> str:
        """Return where clients connect to, while it listens on this port."""
        host, scheme = self.advertised_host or self.host, "grpc+tls" if self.tls_cert else "grpc"
        return f"{scheme}://{address_of(host, self.advertised_port or port)}"


def proxy_options() -> dict[str, Option]:
    """Return the settings of a proxy by key, with what they mean."""
    return options_of(ProxyConfig)
