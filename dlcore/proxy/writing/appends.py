"""Atomic appends that a proxy performs for who has no way to the metadata.

An append is performed as the core's `StagedAppend`, at whichever proxy is asked.  Its token is the
client's, over all its attempts: one whose answer was lost is known by it at any other proxy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from dlcore.api.namespace import Namespace
    from dlcore.flight.appends import AppendRequest
    from dlcore.log.staging.append import StagedAppend


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
