"""The positions that a log stores for its subscribers."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.opened_log import OpenedLog

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN


class Subscriptions(OpenedLog):
    """The subscribers of one log; a reader that has the name of one stores its position."""

    @abstractmethod
    async def get_subscriptions(self) -> dict[str, DLSN]:
        """Return the stored positions of subscribers: the next record that each one reads.

        Raises: LogNotFoundError, MetadataError.
        """

    @abstractmethod
    async def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        """Store the position of a subscriber without a reader, forward or back, and return it.

        Through proxies the next `commit` of a reader of the subscriber fails.

        Raises:
            OwnershipAcquireFailedError: the subscriber has a direct reader, which can `seek` and
                `commit`.
            OverCapacityError: the log keeps as many positions as it may.
        """

    @abstractmethod
    async def delete_subscription(self, subscriber: str) -> bool:
        """Forget a subscriber that has no reader; return whether there was one.

        Raises:
            OwnershipAcquireFailedError: it has a direct reader.
            SubscriptionMovedError: a client of proxies moved the subscription meanwhile.
        """
