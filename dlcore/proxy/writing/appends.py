"""Atomic appends that a proxy performs for who has no way to the metadata.

An append is performed as the core's `StagedAppend`, at whichever proxy is asked.  Its token is the
client's, over all its attempts: one whose answer was lost is known by it at any other proxy.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from dlcore.config import MIB
from dlcore.errors import ConfigurationError
from dlcore.log.metadata.commits import AppendRun, SharedStaging
from dlcore.log.reading.scan import StagedExtent
from dlcore.proxy.flight.requests import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.log.staging.append import StagedAppend
    from dlcore.namespace import Namespace

_UNPACKED_MAX = 1000
"""More extents than these are sent packed."""
UNPACKED_BYTES_MAX = 64 * MIB
"""Of more extents than any transaction of the metadata store takes."""


class AppendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An append, as `Namespace.begin_append` takes it, and what was staged for it."""

    identity: str
    version: int
    token: str
    extents: list[StagedExtent] = []
    packed: bytes = b""
    """More of them than a message takes: their list as JSON, by zlib, after `extents`."""
    shared: SharedStaging | None = None
    run: AppendRun | None = None
    lock_timeout_s: float | None = None
    strict: bool = False
    after: int | None = None
    replaces: list[str] = []

    def with_extents(self, extents: Sequence[StagedExtent]) -> AppendRequest:
        """Return the same about these, however many they are."""
        if len(extents) <= _UNPACKED_MAX:
            return msgspec.structs.replace(self, extents=list(extents))
        return msgspec.structs.replace(self, packed=zlib.compress(msgspec.json.encode(extents)))

    def all_extents(self) -> list[StagedExtent]:
        """Return what it is about.  Raises: ConfigurationError: `packed` is no such list."""
        if not self.packed:
            return self.extents
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(self.packed, UNPACKED_BYTES_MAX)
            if not unpacking.eof:
                raise ConfigurationError(
                    f"packed: expected all of at most {UNPACKED_BYTES_MAX} bytes, by zlib"
                )
            return self.extents + msgspec.json.decode(text, type=list[StagedExtent])
        except (zlib.error, *MALFORMED) as error:
            raise ConfigurationError(
                f"packed: expected a list of extents as JSON, by zlib, in base64: {error}"
            ) from error


class Appends:
    """Performs appends, for one proxy."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    async def commit(self, request: AppendRequest) -> dict[str, object]:
        """Append what was staged to its logs: all or nothing, once.

        Raises: as `StagedAppend.commit`.
        """
        async with await self._begin(request) as append:
            result = await append.commit(request.all_extents(), replaces=request.replaces)
        return {"already_committed": result.already_committed}

    async def abort(self, request: AppendRequest) -> dict[str, object]:
        """Drop what was staged, unless it was committed.  Raises: MetadataError."""
        async with await self._begin(request) as append:
            await append.abort(request.all_extents())
        return {}

    async def _begin(self, request: AppendRequest) -> StagedAppend:
        if not request.token:
            raise ConfigurationError("token='': expected a text that is unique to the append")
        return await self._namespace.begin_append(
            request.identity,
            request.version,
            shared=request.shared,
            run=request.run,
            lock_timeout_s=request.lock_timeout_s,
            strict=request.strict,
            after=request.after,
            token=request.token,
        )
