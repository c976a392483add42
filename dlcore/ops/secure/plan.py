"""The folder of a secured cluster: the members, with certificates and configurations.

ca.pem, ca.key                      the authority: the key stays here
hosts/HOST/ca.pem                   the folder of each host, which goes there as a whole
hosts/HOST/bookie.{pem,key,toml}    and the same of proxy and autorecovery
hosts/HOST/zookeeper.{pem,key,store.pem}, zoo.cfg
clients/NAME/{ca.pem,client.pem,client.key,dlog.toml}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from typing import TYPE_CHECKING

from dlcore.base.access.rights import Proof
from dlcore.base.config import checked, require_positive
from dlcore.base.errors import ConfigurationError, InvalidNamespaceUriError
from dlcore.base.http_options import address_of
from dlcore.metadata.paths import parse_uri

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ISSUER = AUDIENCE = "dlog"
"""The issuer that users' tokens name, and for whom they are."""
_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_NAME_LENGTH_MAX = 50  # a common name has 64 characters at most, and the role stands before it
_EVERYWHERE = "0.0.0.0"
_ZOO_CFG = "# For zoo.cfg of this server, in place of its clientPort."


class Role(Enum):
    """The purpose of a certificate."""

    BOOKIE = "bookie"
    PROXY = "proxy"
    AUTORECOVERY = "autorecovery"
    ZOOKEEPER = "zookeeper"
    CLIENT = "client"
    REMOTE = "remote"
    """A client of proxies only."""


_DIRECT = (Role.BOOKIE, Role.PROXY, Role.AUTORECOVERY, Role.CLIENT)
"""Those whom bookies let in."""


@dataclass(frozen=True, slots=True)
class Member:
    """An owner of a certificate: a role on a host, or a client."""

    role: Role
    place: str
    """The host, or the name of the client."""

    @property
    def name(self) -> str:
        """The name in its certificate, by which rules and quotas know it."""
        return f"{self.place.replace(':', '-')}.{self.role.value}"

    @property
    def is_client(self) -> bool:
        """Whether it is no machine of the cluster."""
        return self.role in (Role.CLIENT, Role.REMOTE)

    @property
    def stem(self) -> str:
        """The name of its certificate's file, and of its key's, before the dot."""
        return "client" if self.is_client else self.role.value

    @property
    def folder(self) -> str:
        """Its folder, below that of the cluster."""
        return f"{'clients' if self.is_client else 'hosts'}/{self.place}"

    @property
    def serves(self) -> bool:
        """Whether others connect to it: at least monitors do to each process of a host."""
        return not self.is_client

    @property
    def configuration(self) -> str:
        """The name of the file with its settings."""
        if self.role is Role.ZOOKEEPER:
            return "zoo.cfg"
        return "dlog.toml" if self.is_client else f"{self.role.value}.toml"

    @property
    def store(self) -> str | None:
        """The name of a file with its key and certificate together, as ZooKeeper takes them."""
        return f"{self.stem}.store.pem" if self.role is Role.ZOOKEEPER else None


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The folders of a cluster: of its files, and of each host's data."""

    folder: str
    """The folder of the cluster."""
    installed: str = ""
    """The folder in which each host will have its files; empty: they stay where they are made."""
    data_dir: str = "/var/lib/dlog"
    """The folder of a host's data: of its bookie, and of its proxy's audit log."""

    @property
    def wrong(self) -> Iterator[str]:
        """A sentence about each path that cannot be one."""
        paths = {"folder": self.folder, "install_dir": self.installed, "data_dir": self.data_dir}
        for key, path in paths.items():
            is_path = path.isprintable() and path.startswith("/")
            if not (is_path or (key, path) == ("install_dir", "")):
                yield f"{key}={path!r}: expected an absolute path of printable characters"

    def of(self, member: Member) -> str:
        """Return the folder in which a member finds its files."""
        stays = not self.installed or member.is_client
        return f"{self.folder}/{member.folder}" if stays else self.installed


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of the processes of each host."""

    bookie_port: int = 3181
    control_port: int = 3182
    proxy_port: int = 4190

    def __post_init__(self) -> None:
        require_positive(self, "bookie_port", "control_port", "proxy_port")


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The hosts and clients of a cluster, and what their settings have in common."""

    uri: str
    """The namespace: distributedlog://zk1:2181,zk2:2181/path."""
    hosts: tuple[str, ...] = ()
    """Names or addresses at which hosts reach each other."""
    clients: tuple[str, ...] = ()
    """Names of clients that reach bookies and proxies."""
    remote_clients: tuple[str, ...] = ()
    """Names of clients that reach proxies only."""
    places: Places
    zookeeper_user: bool = True
    """Whether all nodes in ZooKeeper are for one user, whom zookeeper.auth names."""
    zookeeper_tls: bool = False
    """Whether the servers of the URI have certificates, and listen there for TLS."""
    ports: Ports = Ports()

    def __post_init__(self) -> None:
        # All at once: who gave two wrong values would else correct the first one in vain.
        wrong = [*self._wrong_names, *self.places.wrong]
        try:
            parse_uri(self.uri)
        except InvalidNamespaceUriError as error:
            if not wrong:
                raise
            wrong.append(str(error))
        if wrong:
            raise ConfigurationError("; ".join(wrong))

    @property
    def _wrong_names(self) -> Iterator[str]:
        clients = {"client": self.clients, "remote_client": self.remote_clients}
        for key, names in {"host": self.hosts, **clients}.items():
            for name in names:
                is_name = _NAME.fullmatch(name) and len(name) <= _NAME_LENGTH_MAX
                if not (is_name or (key == "host" and _is_address(name))):
                    yield (
                        f"{key}={name!r}: expected a name of at most {_NAME_LENGTH_MAX} letters, "
                        "digits, dots and dashes, or of a host its address"
                    )
        if self.remote_clients and not self.hosts:
            yield (
                f"remote_client={','.join(self.remote_clients)!r}: expected the hosts of the "
                "proxies as well, those from before among them"
            )

    @property
    def members(self) -> Iterator[Member]:
        """All members that get a certificate."""
        for host in self.hosts:
            for role in (Role.BOOKIE, Role.PROXY, Role.AUTORECOVERY):
                yield Member(role, host)
        if self.zookeeper_tls:
            for host in self._zookeepers:
                yield Member(Role.ZOOKEEPER, host)
        for role, names in ((Role.CLIENT, self.clients), (Role.REMOTE, self.remote_clients)):
            for name in names:
                yield Member(role, name)

    @property
    def _zookeepers(self) -> dict[str, int]:
        """The port of each server, by its host."""
        servers = parse_uri(self.uri).servers.split(",")
        found = (each.rpartition(":") for each in servers)
        return {host.strip("[]"): int(port) for host, _, port in found}

    def given_to(self, member: Member) -> Iterator[str]:
        """Yield the names of the files of the cluster that a member gets copies of."""
        yield "ca.pem"
        if member.role is Role.ZOOKEEPER:
            return
        if not member.is_client:
            yield "tokens.pem"
        if self.zookeeper_user and member.role is not Role.REMOTE:
            yield "zookeeper.auth"

    def settings_of(self, member: Member) -> str:
        """Return the text of a member's configuration."""
        place = self.places.of(member)
        files = {
            "tls_ca": f"{place}/ca.pem",
            "tls_cert": f"{place}/{member.stem}.pem",
            "tls_key": f"{place}/{member.stem}.key",
        }
        if member.role is Role.ZOOKEEPER:
            return self._zookeeper_settings(member, place)
        user = {"zk_auth_file": f"{place}/zookeeper.auth"} if self.zookeeper_user else {}
        if self.zookeeper_tls:
            user |= {f"zk_{key}": path for key, path in files.items()}
        if member.role is Role.BOOKIE:
            own = {
                "name": member.place,
                "metadata_uri": self.uri,
                "data_dir": f"{self.places.data_dir}/bookie",
            }
            ports = {"port": self.ports.bookie_port, "control_port": self.ports.control_port}
            names = {"tls_client_names": ", ".join(f"*.{each.value}" for each in _DIRECT)}
            return _table("bookie", own | _address(member.place) | ports | files | names | user)
        if member.role is Role.REMOTE:
            proxies = ",".join(address_of(each, self.ports.proxy_port) for each in self.hosts)
            return _table("dlog", {"endpoint": f"grpc+tls://{proxies}"} | files)
        text = _table("dlog", {"uri": self.uri} | files | user)
        if member.role is Role.PROXY:
            text += "\n" + _table("proxy", self._proxy_settings(member, place) | files)
        return text

    def _zookeeper_settings(self, member: Member, place: str) -> str:
        """Return the lines of TLS for a server's own configuration."""
        stores = {
            "keyStore.location": f"{place}/{member.store}",
            "keyStore.type": "PEM",
            "trustStore.location": f"{place}/ca.pem",
            "trustStore.type": "PEM",
        }
        values = {
            "secureClientPort": str(self._zookeepers[member.place]),
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.clientAuth": "need",
            **{f"ssl.{key}": value for key, value in stores.items()},
            "sslQuorum": "true",
            **{f"ssl.quorum.{key}": value for key, value in stores.items()},
        }
        # Java's properties have the escapes of JSON.
        lines = (f"{key}={json.dumps(value)[1:-1]}" for key, value in values.items())
        return "\n".join((_ZOO_CFG, *lines, ""))

    def _proxy_settings(self, member: Member, place: str) -> dict[str, object]:
        """Return what a proxy has beside its certificate: who its callers are, and may do."""
        clients = (Member(Role.CLIENT, each).name for each in self.clients)
        return {
            **_address(member.place),
            "port": self.ports.proxy_port,
            "token_issuer": ISSUER,
            "token_audience": AUDIENCE,
            "token_keys": f"{place}/tokens.pem",
            # They reach bookies and ZooKeeper, where no rule binds them.
            "super_users": ",".join(f"{Proof.CERTIFICATE.value}:{each}" for each in clients),
            "audit_file": f"{self.places.data_dir}/audit.jsonl",
        }


def _address(host: str) -> dict[str, object]:
    """Return the settings by which a server listens, and is found: at an address, or by a name."""
    if _is_address(host):
        return {"host": host}
    return {"host": _EVERYWHERE, "advertised_host": host}


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _table(name: str, values: Mapping[str, object]) -> str:
    # Printable text has the same form in JSON and TOML.
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    return "\n".join((f"[{name}]", *lines, ""))
