"""The records of one log on their way to one connection: a feed of the proxy's own deliveries.

A feed asks `Deliveries` for all records from an offset on, as a follower of Flight does, and shares
their rings, their bound on readers of older records, and their memory.  It holds one message until
the client has fetched and received all of it; only then the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dlcore.base.background import fulfil
from dlcore.base.clock import steady_s
from dlcore.base.errors import DLError, ReaderStalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.background import BackgroundTasks
    from dlcore.proxy.kafka.batches import Batch, Batches
    from dlcore.proxy.reading.delivery import Deliveries, Reading

logger = logging.getLogger(__name__)


class _Slot:
    """The one message that a feed has, until all of it is taken and the client has it."""

    def __init__(self) -> None:
        self.left: Sequence[Batch] = ()
        """The part of it that was not taken."""
        self._received: asyncio.Future[None] | None = None

    @property
    def is_outstanding(self) -> bool:
        """Whether a message came, and all of it was taken."""
        return self._received is not None and not self.left

    def put(self, message: Sequence[Batch]) -> asyncio.Future[None]:
        """Take in the next message; return the future of its receipt."""
        self._received = asyncio.get_running_loop().create_future()
        self.left = message
        return self._received

    def take(self, count: int) -> Sequence[Batch]:
        """Take so many batches."""
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def received(self) -> None:
        """The client has all that was taken."""
        if self._received is not None and not self.left:
            fulfil(self._received, None)


class Feed:
    """Record batches of a log from an offset on.

    Args:
        reading: the request for its records; it follows.
        offset: the offset of the first one.
        first: the offset of the log's first record.
        end: the offset behind the last one that was readable.
        on_news: called when there is more to take, or an error.
        on_stall: called when the client has received nothing for long, and others need the memory.
    """

    def __init__(
        self,
        reading: Reading,
        *,
        offset: int,
        first: int,
        end: int,
        on_news: Callable[[], None],
        on_stall: Callable[[], None],
    ) -> None:
        self._reading = reading
        self.offset = offset
        """The offset of the next record that is taken."""
        self.first = first
        self._end = end
        self._on_news = on_news
        self._on_stall = on_stall
        self.error: DLError | None = None
        """The reason why no more will come."""
        self.used_s = steady_s()
        """When it was last asked for records."""
        self._slot = _Slot()
        self._task: asyncio.Task[None] | None = None

    @property
    def log_id(self) -> str:
        """The identity of the log."""
        return self._reading.log.log_id

    @property
    def end(self) -> int:
        """The offset behind the last record that is known."""
        return max(self._end, self.offset)

    def start(self, deliveries: Deliveries, tasks: BackgroundTasks) -> None:
        """Begin to ask for records."""
        name = f"feeding log {self._reading.log.name!r}"
        self._task = tasks.start(self._run(deliveries), name=name)

    async def _run(self, deliveries: Deliveries) -> None:
        try:
            await deliveries.deliver(self._reading, self._send)
        except ReaderStalledError as error:
            self.error = error
            if self._slot.is_outstanding:
                self._on_stall()  # the connection has the message, and does not take it
        except DLError as error:
            logger.info("feeding log=%s ended: %s", self._reading.log.name, error)
            self.error = error
        finally:
            self.received()
            self._on_news()

    async def _send(self, message: Batches) -> None:
        received = self._slot.put(message.each)
        self._on_news()
        try:
            await received
        finally:
            self._slot.left = ()

    def take(self, bytes_max: int, *, is_first: bool) -> Sequence[Batch]:
        """Take the next batches, as many as fit; one, if it is the first of an answer.

        `received` must be called once the client has them.
        """
        count = size_bytes = 0
        for each in self._slot.left:
            size_bytes += each.size_bytes
            if size_bytes > bytes_max and (count or not is_first):
                break
            count += 1
            self.offset = each.end
        return self._slot.take(count)

    def received(self) -> None:
        """Let the next message come, if all of this one was taken."""
        self._slot.received()

    def close(self) -> None:
        """Ask for no more records."""
        self._slot.left = ()
        self.received()
        if self._task is not None:
            self._task.cancel()
