"""The way in which ZooKeeper knows a process: TLS, and the user whose nodes no other user reads.

Only paths are passed on, as those of `TlsFiles`: every host has its own files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlcore.base.access.tls import TlsFiles
from dlcore.base.errors import ConfigurationError
from dlcore.base.html_tables import ShownFields

if TYPE_CHECKING:
    from collections.abc import Mapping

ZK_KEYS = ("zk_tls_ca", "zk_tls_cert", "zk_tls_key", "zk_auth_file")
"""The settings of every process that connects to ZooKeeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperAccess(ShownFields):
    """Files for connections to ZooKeeper; without any, everybody reads and changes all nodes."""

    tls: TlsFiles | None = None
    """The authorities to trust, and our certificate where servers ask for one; None: no TLS."""
    auth_file: str = ""
    """File with a line ``user:password``.  Nodes that are made are for this user alone."""

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> ZooKeeperAccess:
        """Return the access that the `ZK_KEYS` in settings describe.

        Raises:
            ConfigurationError: a file of TLS is given without others that it needs.
        """
        ca, cert, key, auth_file = (str(settings.get(each) or "") for each in ZK_KEYS)
        try:
            return cls(tls=TlsFiles.of(ca=ca, cert=cert, key=key), auth_file=auth_file)
        except ConfigurationError as error:
            raise ConfigurationError(f"zk_tls_ca, zk_tls_cert, zk_tls_key: {error}") from error

    def credentials(self) -> Credentials | None:
        """Return what the file says now, None without a file.

        Raises:
            ConfigurationError: it cannot be read, or has no user or password.
        """
        if not self.auth_file:
            return None
        try:
            text = Path(self.auth_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"zk_auth_file={self.auth_file!r}: expected a readable file: {error}"
            ) from error
        user, _, password = text.partition(":")
        if not user or not password or len(text.splitlines()) > 1:
            raise ConfigurationError(
                f"zk_auth_file={self.auth_file!r}: expected one line user:password in it"
            )
        return Credentials(user=user, secret=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """A user of ZooKeeper; its representation has no password."""

    user: str
    secret: str = field(repr=False)
    """``user:password``."""


EVERYBODY = ZooKeeperAccess()
"""As one of everybody, over connections without TLS."""
