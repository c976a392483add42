"""The features that the cluster may use now (`dlcore/base/features.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import UnsupportedError
from dlcore.metadata.binding import read_binding

if TYPE_CHECKING:
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


class ClusterFeatures:
    """The finalized features of one namespace.

    A feature remains finalized, and is not asked about again.  One that is not costs a request at
    each call: ask where something is opened or begun, not with each record.
    """

    def __init__(self, store: MetadataStore, paths: NamespacePaths) -> None:
        self._store = store
        self._paths = paths
        self._finalized: frozenset[str] = frozenset()

    async def has(self, name: str) -> bool:
        """Return whether a feature may be used: it was finalized, so no member lacks it.

        Raises: MetadataError: that is not known now.
        """
        if name not in self._finalized:
            binding = await read_binding(self._store, self._paths, fresh=True)
            self._finalized = frozenset(binding.features)
        return name in self._finalized

    async def require(self, name: str) -> None:
        """Return if a feature may be used.

        Raises:
            UnsupportedError: it was not finalized; the message says how that is done.
            MetadataError: that is not known now.
        """
        if not await self.has(name):
            raise UnsupportedError(
                f"the feature {name!r} is not finalized for the cluster: once all members run a "
                "release that has it, dlog upgrade finalize (docs/upgrading.md)"
            )
