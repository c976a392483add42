"""Configuration of a proxy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlcore.base.access.rights import Principal
from dlcore.base.config import MIB, checked, require, require_not_negative, require_positive
from dlcore.base.http_options import Address, address_in, address_of, require_http
from dlcore.base.settings import Option, log_levels_of, options_of, values_of

_EVERYWHERE = ("0.0.0.0", "::", "[::]")

_COUNTS = tuple(
    f"{scope}{what}_max"
    for scope in ("log_", "principal_")
    for what in ("streams", "pending_bytes")
)
_CHOICES = {
    "tls_client_auth": ("required", "none"),
    "certificate_principal": ("common_name", "dns", "uri"),
    "anonymous": ("allowed", "refused"),
    "kafka_typed": ("json", "arrow"),
}
_RATES = tuple(
    f"{scope}{unit}_per_s"
    for scope in ("stream_", "log_", "principal_", "")
    for unit in ("records", "bytes")
)
_BUDGETS = (
    "ring_bytes_max",
    "sending_bytes_max",
    "catching_up_max",
    "window_records",
    "window_bytes",
    "pending_bytes_max",
    "received_bytes_max",
    "staging_max",
)
LIVE_SETTINGS = (*_RATES, "throttle_max_s", *_COUNTS, *_BUDGETS)
"""The settings that a running proxy takes over from those of its cluster."""


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
    certificate_principal: str = "common_name"
    """The part of a client's certificate that is its principal: common_name, or the first dns or
    uri of its subjectAltName.  A client whose certificate has no such part is anonymous."""
    anonymous: str = "allowed"
    """Whether clients without a token and without a certificate's name are served: allowed or
    refused."""
    token_issuer: str = ""
    """Issuer of the tokens of users, as in their claim `iss`; empty: calls with a token are
    refused."""
    token_audience: str = ""
    """Name of this service in the claim `aud` of tokens; it is needed with an issuer."""
    token_keys: str = ""
    """Public keys of the issuer: a file, as JWK set or PEM, or an https:// URL of a JWK set; empty:
    they are found by OpenID discovery, for an issuer that is an https:// URL."""
    token_principal: str = "sub"
    """The claim of a token that is its user's name."""
    token_skew_s: float = 10.0
    """By so much the clocks of the issuer and of the proxy may differ."""
    super_users: str = ""
    """Principals that may do everything whatever the rules of access say, joined by commas, like
    certificate:ops.example."""
    audit_file: str = ""
    """File of the audit log: a line for each denial, and each call that manages or truncates.
    Empty: only the program's log tells them."""
    session_timeout_s: float = 4.0
    """Without contact for this time, the proxy loses its logs to other proxies."""
    message_bytes_max: int = 4 * MIB
    """Largest message that the proxy accepts; clients split larger ones."""
    ring_bytes_max: int = 64 * MIB
    """Memory for the latest entries of all followed logs, from which readers are served, and for
    older messages that a reader was sent within the last minute."""
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
    principal is the user of the client's token, or `certificate_principal`; all anonymous clients
    of a host are one."""
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
    http_address: str = ""
    """Address of metrics and health over HTTP, like 127.0.0.1:9191; empty: none."""
    http_tls: str = "none"
    """TLS of that port, with `tls_cert`: none, server, or required: callers need a certificate that
    `tls_ca` has signed."""
    http_logs_max: int = 10
    """Most logs that metrics name: those with the highest rates."""
    kafka_address: str = ""
    """Address for clients of Kafka's protocol, like 127.0.0.1:9092; empty: none.  With `tls_cert`
    they need TLS (docs/kafka-protocol.md)."""
    kafka_advertised_port: int = 0
    """Port at which these clients reach the proxy, at `advertised_host`; 0: that of
    `kafka_address`."""
    kafka_connections_max: int = 1000
    """Most connections of these clients at once; further ones are closed."""
    kafka_typed: str = "json"
    """The form of a typed log's row as the value of a record of Kafka: json or arrow."""
    kafka_headers: bool = False
    """Whether records of Kafka have the headers dlsn and txid."""
    log_level: str = "info"
    """Lowest level of logged messages: debug, info, warning or error; levels of modules may follow,
    as in info,dlcore.proxy=debug."""

    def __post_init__(self) -> None:
        for key in ("port", "advertised_port", "kafka_advertised_port"):
            value = getattr(self, key)
            require(condition=0 <= value <= 65535, key=key, value=value, rule="expected 0 … 65535")
        require(condition=bool(self.host), key="host", value=self.host, rule="expected an address")
        require(
            condition=self.host not in _EVERYWHERE or bool(self.advertised_host),
            key="host",
            value=self.host,
            rule="clients cannot connect to this address: give an advertised_host",
        )
        at = self.kafka_listens_at
        require(
            condition=at is None or at.host not in _EVERYWHERE or bool(self.advertised_host),
            key="kafka_address",
            value=self.kafka_address,
            rule="clients cannot connect to this address: give an advertised_host",
        )
        require_positive(
            self,
            "message_bytes_max",
            *_BUDGETS,
            "calls_max",
            "logs_max",
            "idle_release_s",
            "session_timeout_s",
            "rebalance_pause_s",
            "kafka_connections_max",
        )
        self._require_access()
        require_http(self, has_certificate=bool(self.tls_cert))
        require_not_negative(
            self,
            "token_skew_s",
            "lock_timeout_s",
            "throttle_max_s",
            "http_logs_max",
            "rebalance_after_s",
            "rebalance_tolerance",
            *_RATES,
            *_COUNTS,
        )
        log_levels_of(self.log_level)

    def _require_access(self) -> None:
        for key, choices in _CHOICES.items():
            value, rule = getattr(self, key), f"expected {' or '.join(choices)}"
            require(condition=value in choices, key=key, value=value, rule=rule)
        require(
            condition=bool(self.token_issuer) == bool(self.token_audience),
            key="token_audience",
            value=self.token_audience,
            rule=f"expected one with a token_issuer, and none without: {self.token_issuer!r}",
        )
        require(
            condition=bool(self.token_issuer) or not self.token_keys,
            key="token_keys",
            value=self.token_keys,
            rule="expected a token_issuer, too",
        )
        require(
            condition=bool(self.token_principal),
            key="token_principal",
            value=self.token_principal,
            rule="expected the name of a claim",
        )
        # Parsed here only for its error: a wrong name must not be found at the first call.
        _ = self.super_user_names

    @property
    def super_user_names(self) -> frozenset[str]:
        """The texts of the super users.  Raises: ConfigurationError: one is no principal."""
        found = (each.strip() for each in self.super_users.split(","))
        return frozenset(str(Principal.parse(each)) for each in found if each)

    def changed_to(self, new: ProxyConfig) -> tuple[ProxyConfig, dict[str, object]]:
        """Return the configuration after a change at run time, and those that need a restart.

        The latter are settings of `new`, by key: all but the level of the log.
        """
        changed, wanted = replace(self, log_level=new.log_level), values_of(new)
        kept = values_of(changed)
        return changed, {key: value for key, value in wanted.items() if value != kept[key]}

    @property
    def asks_clients(self) -> bool:
        """Whether clients need a certificate, with TLS."""
        return self.tls_client_auth == "required"

    @property
    def address(self) -> str:
        """The address that the proxy listens on."""
        return address_of(self.host, self.port)

    @property
    def kafka_listens_at(self) -> Address | None:
        """Where the proxy listens for Kafka's clients.  Raises: ConfigurationError."""
        return address_in("kafka_address", self.kafka_address)

    @property
    def name(self) -> str:
        """The proxy's name in its log: the address that clients connect to, if it is configured."""
        return address_of(self.advertised_host or self.host, self.advertised_port or self.port)

    def location(self, port: int) -> str:
        """Return the location that clients connect to if the proxy listens on `port`."""
        host, scheme = self.advertised_host or self.host, "grpc+tls" if self.tls_cert else "grpc"
        return f"{scheme}://{address_of(host, self.advertised_port or port)}"


def proxy_options() -> dict[str, Option]:
    """Return the settings of a proxy by key, with their meaning."""
    found = options_of(ProxyConfig)
    live = {key: replace(found[key], live=True) for key in LIVE_SETTINGS}
    return found | live | {"log_level": replace(found["log_level"], changes=True)}
