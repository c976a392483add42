"""Invariants of subscriptions over proxies, judged by what consumers got and what was stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.simulation.life_checkers import require
from tests.simulation.stored_log import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlcore.base.ids import DLSN
    from dlcore.base.records import LogRecordWithDLSN
    from tests.simulation.log_checkers import LogCheckers, Reading

CONSUMED = "P6 ConsumersShareALog"


@dataclass(slots=True)
class Consuming:
    """One holder of a subscription: its records, and the answers to it, since it has it."""

    logs: LogCheckers
    log_id: str
    subscriber: str
    token: str
    reading: Reading
    got: list[DLSN] = field(default_factory=list)
    """Positions of the records that it read."""
    asked: dict[DLSN, int] = field(default_factory=dict)
    """For each position that it wanted to store, the number of records read by then."""

    def on_records(self, records: Sequence[LogRecordWithDLSN]) -> None:
        """P6: it got the next records."""
        self.reading.on_records(records)
        self.got += [each.dlsn for each in records]

    def on_ask(self, position: DLSN) -> None:
        """It is going to store a position, or the same one again."""
        self.asked.setdefault(position, len(self.got))

    def on_stored(self, position: DLSN) -> None:
        """P6: it learned that its position is stored."""
        lives = self.logs.life.lives(self.log_id, self.subscriber)
        require(
            CONSUMED,
            holds=any(Position(position, self.token) in moves for moves in lives),
            message=f"a consumer of log id {self.log_id} learned that {position} is stored, and "
            "it is not",
        )

    def on_moved(self) -> None:
        """P6: it learned that the subscription is another consumer's, or gone."""
        moves = self.logs.life.moves(self.log_id, self.subscriber)
        require(
            CONSUMED,
            holds=not moves or moves[-1].token != self.token,
            message=f"a consumer of log id {self.log_id} learned that another one has its "
            "subscription, and none has",
        )


class SubscriptionCheckers:
    """Records the answers that consumers get, and judges them when the run is over."""

    def __init__(self, logs: LogCheckers) -> None:
        self._logs = logs
        self._holders: dict[str, Consuming] = {}  # by token

    def new_holder(
        self, log_id: str, subscriber: str, token: str, position: DLSN, start: DLSN
    ) -> Consuming:
        """Begin to judge a consumer that got a subscription, and reads from a position on."""
        reading = self._logs.new_reading(log_id, "", start, promise=CONSUMED)
        holder = Consuming(self._logs, log_id, subscriber, token, reading)
        holder.on_stored(position)
        self._holders[token] = holder
        return holder

    def check_whole(self) -> None:
        """Judge all, once everything that there is was read."""
        for log_id, subscriber in sorted(
            {(each.log_id, each.subscriber) for each in self._holders.values()}
        ):
            for moves in self._logs.life.lives(log_id, subscriber):
                for before, after in pairwise(moves):
                    if before.dlsn != after.dlsn:
                        self._check_move(log_id, before, after)

    def _check_move(self, log_id: str, before: Position, after: Position) -> None:
        """P6: it goes forward, and over what its holder got, all of it."""
        name = f"the subscription of log id {log_id}"
        require(
            CONSUMED,
            holds=before.dlsn < after.dlsn,
            message=f"{name} went back from {before.dlsn} to {after.dlsn}",
        )
        holder = self._holders.get(after.token)
        got = set() if holder is None else {*holder.got[: holder.asked.get(after.dlsn, 0)]}
        truncated = self._logs.truncated(log_id)
        missed = [
            dlsn
            for dlsn in self._logs.places(log_id)
            if max(before.dlsn, truncated) <= dlsn < after.dlsn and dlsn not in got
        ]
        require(
            CONSUMED,
            holds=not missed,
            message=f"{name} went from {before.dlsn} to {after.dlsn} by one who did not get "
            f"{missed[:3]}",
        )
