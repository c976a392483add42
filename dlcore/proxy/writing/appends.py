"""Atomic appends that a proxy performs for clients without access to the metadata store.

Any proxy can perform an append, as a `StagedAppend` of `dlcore`.  The client chooses the append's
token and keeps it for all attempts.  By the token any proxy recognizes an append whose answer was
lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import ConfigurationError
from dlcore.flight.answers import CommittedAppend, NoAnswer

if TYPE_CHECKING:
    from dlcore.backends.direct.namespace import DirectNamespace
    from dlcore.flight.appends import AppendRequest
    from dlcore.log.staging.append import DirectStagedAppend


class Appends:
    """Performs appends for the clients of one proxy."""

    def __init__(self, namespace: DirectNamespace) -> None:
        self._namespace = namespace

    async def commit(self, request: AppendRequest) -> CommittedAppend:
        """Append staged extents to their logs: all or nothing, once.

        Raises: as `DirectStagedAppend.commit`.
        """
        async with await self._begin(request) as append:
            result = await append.commit(request.all_extents(), replaces=request.replaces)
        return CommittedAppend(result.already_committed)

    async def abort(self, request: AppendRequest) -> NoAnswer:
        """Drop staged extents, unless they are committed.  Raises: MetadataError."""
        async with await self._begin(request) as append:
            await append.abort(request.all_extents())
        return NoAnswer()

    async def _begin(self, request: AppendRequest) -> DirectStagedAppend:
        if not request.token:
            raise ConfigurationError("token='': expected a string that is unique to the append")
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
