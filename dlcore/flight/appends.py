"""The message of an atomic append that a proxy performs."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError
from dlcore.flight.requests import MALFORMED
from dlcore.log.metadata.commits import AppendRun, SharedStaging
from dlcore.log.reading.scan import StagedExtent

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNPACKED_MAX = 1000
"""Above this number extents are sent packed."""
UNPACKED_BYTES_MAX = 64 * MIB
"""Most bytes of unpacked extents: more than any transaction of the metadata store holds."""


class AppendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An append, with the arguments of `Namespace.begin_append`, and its staged extents."""

    identity: str
    version: int
    token: str
    extents: list[StagedExtent] = []
    packed: bytes = b""
    """Further extents, as a list in JSON compressed by zlib, if they exceed a message."""
    shared: SharedStaging | None = None
    run: AppendRun | None = None
    lock_timeout_s: float | None = None
    strict: bool = False
    after: int | None = None
    replaces: list[str] = []

    def with_extents(self, extents: Sequence[StagedExtent]) -> AppendRequest:
        """Return the request with these extents, of any number."""
        if len(extents) <= _UNPACKED_MAX:
            return msgspec.structs.replace(self, extents=list(extents))
        return msgspec.structs.replace(self, packed=zlib.compress(msgspec.json.encode(extents)))

    def all_extents(self) -> list[StagedExtent]:
        """Return all extents.  Raises: ConfigurationError: `packed` is invalid."""
        if not self.packed:
            return self.extents
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(self.packed, UNPACKED_BYTES_MAX)
            if not unpacking.eof:
                raise ConfigurationError(
                    f"packed: expected complete zlib data of at most {UNPACKED_BYTES_MAX} bytes"
                )
            return self.extents + msgspec.json.decode(text, type=list[StagedExtent])
        except (zlib.error, *MALFORMED) as error:
            raise ConfigurationError(
                f"packed: expected a list of extents, as JSON by zlib in base64: {error}"
            ) from error
