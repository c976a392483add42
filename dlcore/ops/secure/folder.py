"""Makes the files of a secured cluster that are missing in its folder, and changes none."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError
from dlcore.base.whole_files import whole_file
from dlcore.ops.secure.certificates import (
    CLIENT,
    SERVER,
    Authority,
    authority_certificate,
    new_key,
    new_user,
    public_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.secure.plan import ClusterPlan, Member

_AUTHORITY_NAME = "dlog authority"
_SECRET = ("zookeeper.auth", "zookeeper.store.pem")
"""Files of members, besides keys, that no other user may read."""


def make_missing(folder: Path, plan: ClusterPlan, *, now_ms: int, days: int) -> list[str]:
    """Make what is missing, and return the paths below the folder of what was made.

    Without its certificate a key keeps its bytes and gets a new certificate.

    Raises:
        ConfigurationError: a certificate is there without its key, a key cannot be read, the
            authority's key is not that of its certificate, or the folder cannot be written.
    """
    try:
        return _Folder(folder, plan, now_ms=now_ms, days=days).make()
    except OSError as error:
        raise ConfigurationError(
            f"folder {str(folder)!r}: cannot make its files: {error}"
        ) from error


class _Folder:
    def __init__(self, folder: Path, plan: ClusterPlan, *, now_ms: int, days: int) -> None:
        self._folder = folder
        self._plan = plan
        self._now = datetime.fromtimestamp(now_ms / 1000, UTC)
        self._days = days
        self._made: list[str] = []

    def make(self) -> list[str]:
        key = self._key("ca")
        if not self._has("ca.pem"):
            self._write("ca.pem", authority_certificate(_AUTHORITY_NAME, key, now=self._now))
        authority = Authority(key, (self._folder / "ca.pem").read_bytes())
        issuer = self._key("tokens")
        if not self._has("tokens.pem"):
            self._write("tokens.pem", public_key(issuer))
        if not self._has("zookeeper.auth"):
            self._write("zookeeper.auth", new_user(), mode=0o600)
        for member in self._plan.members:
            self._make(member, authority)
        return self._made

    def _make(self, member: Member, authority: Authority) -> None:
        stem = f"{member.folder}/{member.stem}"
        key = self._key(stem)
        if not self._has(f"{stem}.pem"):
            certificate = authority.issue(
                member.name,
                key,
                places=[member.place, member.name],
                purposes=[SERVER, CLIENT] if member.serves else [CLIENT],
                now=self._now,
                days=self._days,
            )
            self._write(f"{stem}.pem", certificate)
        contents = {
            name: (self._folder / name).read_bytes() for name in self._plan.given_to(member)
        }
        if member.store is not None:
            contents[member.store] = key + (self._folder / f"{stem}.pem").read_bytes()
        contents[member.configuration] = self._plan.settings_of(member).encode()
        for name, content in contents.items():
            if not self._has(f"{member.folder}/{name}"):
                mode = 0o600 if name in _SECRET else 0o644
                self._write(f"{member.folder}/{name}", content, mode=mode)

    def _key(self, stem: str) -> bytes:
        """Return the private key of that name; make it if its certificate is missing, too."""
        path = self._folder / f"{stem}.key"
        if path.exists():
            return path.read_bytes()
        if self._has(f"{stem}.pem"):
            raise ConfigurationError(
                f"{path} is missing, and its certificate {stem}.pem is there: remove the "
                "certificate to make both anew"
            )
        key = new_key()
        self._write(f"{stem}.key", key, mode=0o600)
        return key

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _write(self, name: str, content: bytes, *, mode: int = 0o644) -> None:
        path = self._folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(path, mode=mode) as file:
            file.write(content)
        self._made.append(name)
