"""The positions of a log's subscribers, in the metadata store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.subscriptions import Subscriptions
from dlcore.backends.direct.opened_log import DirectOpenedLog
from dlcore.log.reading.rows_reader import ReadStart
from dlcore.log.reading.subscriptions import (
    delete_subscription,
    list_subscriptions,
    move_subscription,
)

if TYPE_CHECKING:
    from dlcore.base.ids import DLSN


class DirectSubscriptions(DirectOpenedLog, Subscriptions):
    """The subscribers of one log."""

    @override
    async def get_subscriptions(self) -> dict[str, DLSN]:
        self._require_open()
        found = await list_subscriptions(self._context, self._log)
        return {subscriber: seen.position for subscriber, seen in found.items()}

    @override
    async def move_subscription(
        self,
        subscriber: str,
        *,
        dlsn: DLSN | None = None,
        txid: int | None = None,
        timestamp_ms: int | None = None,
    ) -> DLSN:
        self._require_open()
        start = ReadStart(dlsn=dlsn, txid=txid, timestamp_ms=timestamp_ms)
        position = await self.readers.position_of(start)
        await move_subscription(self._context, self._log, subscriber, position)
        return position

    @override
    async def delete_subscription(self, subscriber: str) -> bool:
        self._require_open()
        return await delete_subscription(self._context, self._log, subscriber)
