"""Configuration of a proxy."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dlcore.config import MIB, require, require_not_negative, require_positive
from dlcore.settings import Option, field_texts, require_log_level

_EVERYWHERE = ("0.0.0.0", "::", "[::]")


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
    message_bytes_max: int = 4 * MIB
    """The largest message that it takes; clients split what is larger."""
    ring_bytes_max: int = 64 * MIB
    """What it keeps of the ends of the logs that it follows, of all together."""
    catching_up_max: int = 8
    """How many readers of older records it serves at once; each reads some MiB ahead."""
    window_records: int = 65_536
    """Records of one stream that may be accepted and not durable; it then takes no more."""
    window_bytes: int = 8 * MIB
    """Likewise their bytes."""
    pending_bytes_max: int = 256 * MIB
    """Likewise of all streams; those that find no room wait in turn."""
    calls_max: int = 10_000
    """Calls at once, open streams among them; those above are refused."""
    logs_max: int = 10_000
    """Logs that it owns at once; others are refused."""
    lock_timeout_s: float = 5.0
    """How long it waits for a log that is held by a direct writer, or by a proxy that is gone."""
    idle_release_s: float = 600.0
    """A log to which no stream was open for so long is let go of."""
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
            "catching_up_max",
            "window_records",
            "window_bytes",
            "pending_bytes_max",
            "calls_max",
            "logs_max",
            "idle_release_s",
        )
        require_not_negative(self, "lock_timeout_s")
        require_log_level(self.log_level)


def proxy_options() -> dict[str, Option]:
    """Return the settings of a proxy by key, with what they mean."""
    texts = field_texts(ProxyConfig)
    return {
        each.name: Option(type(each.default), each.default, texts[each.name])
        for each in fields(ProxyConfig)
    }
