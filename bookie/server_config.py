"""Configuration of a bookie process, as flat options.

Options of the process and of the storage have their own names.  Options of a part of the storage
begin with the name of that part (`garbage_age_ms`).  The command line and the table [bookie] of the
TOML file use the same keys; environment variables are called DLOG_BOOKIE_<KEY>.  Options of the
client that the bookie uses for repair begin with ``ledger_client_``, and have a table of their own.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path  # noqa: TC003  get_type_hints looks it up
from typing import TYPE_CHECKING

from bookie.config import StorageConfig
from dlcore.base.access.client_names import ClientNames
from dlcore.base.access.tls import TlsFiles
from dlcore.base.access.zookeeper import ZK_KEYS, ZooKeeperAccess
from dlcore.base.config import (
    DEFAULT_RACK,
    ENTRY_SIZE_BYTES_MAX,
    MIB,
    LedgerClientConfig,
    checked,
    require,
    require_positive,
)
from dlcore.base.errors import ConfigurationError
from dlcore.base.http_options import require_http
from dlcore.base.settings import (
    Option,
    config_of,
    log_levels_of,
    options_of,
    parse_value,
    require_log_format,
    values_of,
)
from dlcore.metadata.paths import parse_uri
from dlcore.wire.messages import ADD_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

LEDGER_CLIENT = "ledger_client_"
"""Prefix of the keys of the ledger client's options."""
_STORAGE = "storage_"
_NAME_LENGTH_MAX = 128
_RACK = re.compile(r"/?[^/\s]+(/[^/\s]+)*")
_CHANGING = re.compile("(garbage|compact|scrub)_.*|drain_timeout_s|log_level")
"""Options that a running bookie applies: those of background work and of logging."""
_ANY_HOST = ("", "0.0.0.0", "::", "[::]")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class BookieConfig:
    """One bookie process."""

    name: str
    """The bookie's name in the cluster; its data folder belongs to this name permanently."""
    metadata_uri: str
    """The namespace: distributedlog://zk1:2181,zk2:2181/path."""
    data_dir: Path
    """Made if missing; one process at a time."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    advertised_host: str = ""
    """Host that clients connect to; empty: `host`."""
    advertised_port: int = 0
    """Port that clients connect to, if a proxy or NAT forwards it to this bookie; 0: the port that
    the bookie listens on."""
    control_port: int = 0
    """Port of the control service (gRPC); 0 takes a free one."""
    advertised_control_port: int = 0
    """Port of the control service that clients connect to; 0: the port that it listens on."""
    rack: str = DEFAULT_RACK
    """The bookie's failure domain: a name, or a path like /region/rack.  Clients compare the whole
    text."""
    tls_cert: str = ""
    """PEM file of the bookie's certificate, which names `advertised_host`; empty: no TLS."""
    tls_key: str = ""
    """PEM file of the bookie's private key, without a passphrase."""
    tls_ca: str = ""
    """PEM file of the authorities that sign the certificates of clients and other bookies."""
    tls_client_auth: str = "required"
    """Whether clients need a certificate: required, none, or or_capability. With or_capability a
    client without a certificate reaches only the ledgers of its capabilities, and not the control
    service."""
    tls_client_names: str = ""
    """Names in `subjectAltName` of clients that are let in, between commas, whole or as *.suffix;
    those of the other bookies are among them.  Empty: every client with a certificate."""
    zk_tls_ca: str = ""
    """PEM file of the authorities that sign the certificates of ZooKeeper; empty: no TLS to it."""
    zk_tls_cert: str = ""
    """PEM file of the bookie's certificate for ZooKeeper, if that asks for one."""
    zk_tls_key: str = ""
    """PEM file of the private key of `zk_tls_cert`."""
    zk_auth_file: str = ""
    """File with ZooKeeper's user as a line user:password; only this user may use the nodes. Empty:
    everybody may."""
    session_timeout_s: float = 10.0
    """After this long without contact the metadata store removes the registration."""
    connection_bytes_max: int = 16 * MIB
    """Most bytes of one connection's adds that are not yet durable; beyond it the connection is not
    read.  Each request counts 2 KiB more than its payload.  The default is two batches.  All
    connections together may have four times as much."""
    read_bytes_max: int = 64 * MIB
    """Most bytes in transit to readers, over all connections; beyond it reads wait."""
    receive_bytes_max: int = 64 * MIB
    """Most bytes of partly received adds, over all connections; beyond it large adds wait."""
    garbage_interval_s: float = 300.0
    """How often the bookie looks for deleted ledgers."""
    compact_interval_s: float = 300.0
    """Pause between two passes of compaction."""
    scrub_interval_s: float = 24 * 3600.0
    """Pause between two passes of scrubbing."""
    drain_timeout_s: float = 10.0
    """How long a stopping bookie waits for requests in flight."""
    http_address: str = ""
    """Address of metrics and health over HTTP, like 127.0.0.1:9190; empty: none."""
    http_tls: str = "none"
    """TLS of that port, with `tls_cert`: none, server, or required: callers need a certificate that
    `tls_ca` has signed."""
    log_level: str = "info"
    """Lowest level that is logged: debug, info, warning or error; levels of modules may follow, as
    in info,bookie.serving=debug."""
    log_format: str = "plain"
    """How the log is written: plain, or json with one object on each line."""
    storage: StorageConfig = field(default_factory=StorageConfig)
    ledger_client: LedgerClientConfig = field(default_factory=LedgerClientConfig)
    """Options of the client that fetches intact copies of damaged entries from other bookies."""

    def __post_init__(self) -> None:
        parse_uri(self.metadata_uri)
        log_levels_of(self.log_level)
        require_log_format(self.log_format)
        require(
            condition=0 < len(self.name) <= _NAME_LENGTH_MAX and self.name.isprintable(),
            key="name",
            value=self.name,
            rule=f"expected 1 … {_NAME_LENGTH_MAX} printable characters",
        )
        require(
            condition=len(self.rack) <= _NAME_LENGTH_MAX
            and self.rack.isprintable()
            and _RACK.fullmatch(self.rack) is not None,
            key="rack",
            value=self.rack,
            rule=f"expected a name or a path like /region/rack, {_NAME_LENGTH_MAX} characters at "
            "most, without spaces or empty parts",
        )
        for key in ("port", "advertised_port", "control_port", "advertised_control_port"):
            value = getattr(self, key)
            require(condition=0 <= value < 2**16, key=key, value=value, rule="expected 0 … 65535")
        require(
            condition=bool(self.advertised_host) or self.host not in _ANY_HOST,
            key="advertised_host",
            value=self.advertised_host,
            rule=f"expected an address for clients, because host={self.host!r} is not one",
        )
        require(
            condition=self.storage.entry_size_bytes_max <= ENTRY_SIZE_BYTES_MAX,
            key="entry_size_bytes_max",
            value=self.storage.entry_size_bytes_max,
            rule=f"expected at most {ENTRY_SIZE_BYTES_MAX}, the limit of the protocol",
        )
        require(
            condition=self.read_bytes_max >= ADD_BYTES_MAX,
            key="read_bytes_max",
            value=self.read_bytes_max,
            rule=f"expected at least {ADD_BYTES_MAX}, the size of the largest entry",
        )
        self._require_tls()
        require_http(self, has_certificate=self.tls is not None)
        self.zookeeper.credentials()  # its error names the file
        require_positive(
            self,
            "session_timeout_s",
            "connection_bytes_max",
            "read_bytes_max",
            "receive_bytes_max",
            "garbage_interval_s",
            "compact_interval_s",
            "scrub_interval_s",
            "drain_timeout_s",
        )

    def _require_tls(self) -> None:
        require(
            condition=self.tls_client_auth in ("required", "or_capability", "none"),
            key="tls_client_auth",
            value=self.tls_client_auth,
            rule="expected required, or_capability or none",
        )
        require(
            condition=self.tls is not None or not self.takes_capabilities,
            key="tls_client_auth",
            value=self.tls_client_auth,
            rule="expected tls_ca, tls_cert and tls_key as well: others could copy a capability",
        )
        require(
            condition=not self.client_names.patterns
            or (self.tls is not None and self.asks_clients),
            key="tls_client_names",
            value=self.tls_client_names,
            rule="expected tls_ca, tls_cert and tls_key as well, and no tls_client_auth=none",
        )
        if self.tls is not None:
            # Its error names the wrong file.
            self.tls.server_context(asks_clients=self.asks_clients)

    @property
    def tls(self) -> TlsFiles | None:
        """Certificates of the connections; None: no encryption."""
        return TlsFiles.of(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)

    @property
    def asks_clients(self) -> bool:
        """Whether clients are asked for a certificate, with TLS."""
        return self.tls_client_auth != "none"

    @property
    def takes_capabilities(self) -> bool:
        """Whether clients without a certificate are let in, for what their capabilities give."""
        return self.tls_client_auth == "or_capability"

    @property
    def zookeeper(self) -> ZooKeeperAccess:
        """Certificates and user for the metadata store."""
        return ZooKeeperAccess.of({key: getattr(self, key) for key in ZK_KEYS})

    @property
    def client_names(self) -> ClientNames:
        """The names of clients that are let in."""
        return ClientNames.parse(self.tls_client_names)

    @property
    def options(self) -> dict[str, object]:
        """The value of every option, as `from_options` takes them."""
        return {key.removeprefix(_STORAGE): value for key, value in values_of(self).items()}

    def changed_to(self, new: BookieConfig) -> tuple[BookieConfig, dict[str, object]]:
        """Return the configuration after a change at run time, and the options that need a restart.

        The latter are options of `new`, by key.
        """
        options, known = self.options, _all_options()
        differing = {key: value for key, value in new.options.items() if value != options[key]}
        changes = {key: value for key, value in differing.items() if known[key].changes}
        left = {key: value for key, value in differing.items() if key not in changes}
        return BookieConfig.from_options(options | changes), left

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> BookieConfig:
        """Return the configuration that flat `options` describe; text is parsed.

        Raises:
            ConfigurationError: a key is unknown or missing, or a value is wrong; it names the key.
        """
        known = {key: option.kind for key, option in _all_options().items()}
        for key in options:
            if key not in known:
                raise ConfigurationError(
                    f"unknown option {key!r}: expected one of {', '.join(sorted(known))}"
                )
        values = {key: parse_value(value, known[key], key) for key, value in options.items()}
        missing = [key for key in ("name", "metadata_uri", "data_dir") if key not in values]
        if missing:
            spelled = [f"--{key.replace('_', '-')}" for key in missing]
            if "metadata_uri" in missing:
                spelled[missing.index("metadata_uri")] += " (or --uri, or $DLOG_URI)"
            raise ConfigurationError(
                f"missing: {', '.join(spelled)}; in a file, in its table [bookie], with underscores"
            )
        own = {
            each.name: values[each.name] for each in dataclasses.fields(cls) if each.name in values
        }
        return cls(
            **own,  # type: ignore[arg-type]
            storage=config_of(StorageConfig, values),
            ledger_client=config_of(LedgerClientConfig, values, LEDGER_CLIENT),
        )


def bookie_options() -> dict[str, Option]:
    """Return every option of a bookie by its key, with its meaning; without the ledger client's."""
    options = _all_options().items()
    return {key: option for key, option in options if not key.startswith(LEDGER_CLIENT)}


@cache
def _all_options() -> dict[str, Option]:
    found = options_of(BookieConfig)
    by_key = {key.removeprefix(_STORAGE): option for key, option in found.items()}
    return {
        key: dataclasses.replace(option, changes=_CHANGING.fullmatch(key) is not None)
        for key, option in by_key.items()
    }
