"""The certificates of a cluster on this machine, and the options that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.access.rights import Proof
from dlcore.base.access.tls import TlsFiles
from dlcore.base.clock import SystemClock
from dlcore.base.extras import missing_packages_explained
from dlcore.ops.sandbox.process import HOST
from dlcore.ops.secure.plan import AUDIENCE, ISSUER, ClusterPlan, Member, Places, Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CLIENT = "sandbox"
_DAYS = 365


class Certificates:
    """The files of hosts, each of which its processes share, and of a client, in a folder."""

    def __init__(self, folder: Path, hosts: Sequence[str] = (HOST,)) -> None:
        self.folder = folder
        self._hosts = tuple(hosts)

    def make(self, uri: str) -> None:
        """Make what is missing in the folder; of an earlier start only the URI is another one."""
        with missing_packages_explained():
            from dlcore.ops.secure.folder import make_missing
        for settings in self.folder.rglob("*.toml"):
            settings.unlink()
        plan = ClusterPlan(
            uri=uri,
            hosts=self._hosts,
            clients=(_CLIENT,),
            places=Places(folder=str(self.folder)),
            zookeeper_user=False,  # the embedded one is reached from this machine only
        )
        make_missing(self.folder, plan, now_ms=SystemClock().now_ms(), days=_DAYS)

    @property
    def configuration(self) -> Path:
        """The client's file for `dlog --config`."""
        return self.folder / "clients" / _CLIENT / "dlog.toml"

    @property
    def client(self) -> TlsFiles:
        """The files of the client."""
        stem = self.configuration.with_name("client")
        return TlsFiles(ca=f"{stem.parent}/ca.pem", cert=f"{stem}.pem", key=f"{stem}.key")

    def options(self, role: str, *, prefix: str = "tls", host: str = HOST) -> list[str]:
        """Return the options that name the files of a process."""
        folder = self.folder / "hosts" / host
        names = {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}.key"}
        return [f"--{prefix}-{key}={folder / name}" for key, name in names.items()]

    def proxy_options(self, *, host: str = HOST) -> list[str]:
        """Return the options of a proxy: its files, who signs tokens, and whom no rule binds."""
        return [
            *self.options("proxy", prefix="serve-tls", host=host),
            *self.options("proxy", host=host),
            f"--token-issuer={ISSUER}",
            f"--token-audience={AUDIENCE}",
            f"--token-keys={self.folder / 'tokens.pem'}",
            f"--super-users={Proof.CERTIFICATE.value}:{Member(Role.CLIENT, _CLIENT).name}",
        ]
