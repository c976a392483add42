"""The master keys of encryption at rest, as a file or the command of a key service gives them.

Text, one key a line: its name, a space, and 32 bytes in base64.  The first key encrypts, all
decrypt.  Empty lines, and those that begin with ``#``, are ignored::

    # dlog's master keys
    2026-11 MTIzNDU2Nzg5MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTI=
    2025-11 c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0MTI=

The name is stored with each entry, in the clear.  No error and no representation has a key.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

MASTER_KEY_BYTES = 32
_NAME = re.compile(r"[0-9A-Za-z._-]{1,64}")


class MasterKey(NamedTuple):
    """A named key."""

    name: str
    secret: bytes

    def __repr__(self) -> str:
        return f"<MasterKey {self.name}>"


class MasterKeys:
    """Keys by name; there is at least one."""

    def __init__(self, keys: Iterable[MasterKey]) -> None:
        self._keys = {key.name: key for key in keys}
        assert self._keys

    def __repr__(self) -> str:
        return f"<MasterKeys {self.names}>"

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> MasterKey:
        return self._keys[name]

    @property
    def names(self) -> str:
        """The names of all, the one that encrypts first."""
        return ", ".join(self._keys)

    @property
    def first(self) -> MasterKey:
        """The key that encrypts."""
        return next(iter(self._keys.values()))

    @classmethod
    def parse(cls, data: bytes, where: str) -> MasterKeys:
        """Read keys from text.

        Raises:
            ConfigurationError: it has none, or a line is no key; the error has the line's number.
        """
        keys: dict[str, MasterKey] = {}
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            key = _key_of(words)
            if key is None or key.name in keys:
                raise ConfigurationError(
                    f"encryption keys in {where}, line {number}: expected a name that no other "
                    f"line has (letters, digits, '.', '_', '-'), a space, and "
                    f"{MASTER_KEY_BYTES} bytes in base64"
                )
            keys[key.name] = key
        if not keys:
            raise ConfigurationError(
                f"encryption keys in {where}: expected at least one line: a name, a space, and "
                f"{MASTER_KEY_BYTES} bytes in base64"
            )
        return cls(keys.values())


def _key_of(words: list[str]) -> MasterKey | None:
    if len(words) != 2 or _NAME.fullmatch(words[0]) is None:
        return None
    try:
        secret = base64.b64decode(words[1], validate=True)
    except binascii.Error:
        return None
    return MasterKey(words[0], secret) if len(secret) == MASTER_KEY_BYTES else None
