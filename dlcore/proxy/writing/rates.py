"""Rates of writing: token buckets of streams, logs, principals and the proxy.  No clock.

Theory of operation.  A batch takes tokens from each bucket that applies to it, even more than the
bucket has: the rest is a debt, which the rate pays off.  A batch waits until the debts that it
finds are paid, and adds its own.  Therefore writers that share a bucket are served in the order of
arrival, and a batch of any size passes.  A batch that would wait too long is refused and takes no
token; the error has the time of the next attempt.

Invariants: in any period that begins and ends without debts, at most the rate times the period, and
a burst, passes; no batch waits for more than `wait_max_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlcore.base.errors import OverCapacityError

BURST_S = 1.0
"""An idle bucket gathers the tokens of this time."""
KEPT_MAX = 1000
"""Above this number of logs and principals, full buckets are dropped."""


class TokenBucket:
    """A bucket that allows `rate` units a second, and a burst."""

    def __init__(self, rate: float) -> None:
        assert rate > 0
        self.rate = rate
        self._level = rate * BURST_S
        # The first look thus finds a full bucket, whatever the zero of the clock is.
        self._at_s = float("-inf")

    def delay_s(self, now_s: float) -> float:
        """Return the seconds until the present debt is paid."""
        if self._at_s < now_s:
            gained = (now_s - self._at_s) * self.rate
            self._level = min(self.rate * BURST_S, self._level + gained)
            self._at_s = now_s
        return max(0.0, -self._level / self.rate)

    def take(self, amount: float) -> None:
        """Take `amount` units, at the time of the last `delay_s`."""
        self._level -= amount

    @property
    def is_full(self) -> bool:
        """Whether the bucket is full, at the time of the last `delay_s`."""
        return self._level >= self.rate * BURST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Records and bytes a second; 0: no limit."""

    records_per_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return bool(self.records_per_s or self.bytes_per_s)


class _Scope:
    """The buckets of one stream, log or principal, or of the proxy."""

    def __init__(self, what: str, rate: Rate) -> None:
        self.what = what
        self._records = TokenBucket(rate.records_per_s) if rate.records_per_s else None
        self._bytes = TokenBucket(rate.bytes_per_s) if rate.bytes_per_s else None

    def delay_s(self, now_s: float) -> float:
        buckets = (self._records, self._bytes)
        return max(each.delay_s(now_s) for each in buckets if each is not None)

    def take(self, records: int, size_bytes: int) -> None:
        if self._records is not None:
            self._records.take(records)
        if self._bytes is not None:
            self._bytes.take(size_bytes)

    def is_idle(self, now_s: float) -> bool:
        self.delay_s(now_s)
        return all(each is None or each.is_full for each in (self._records, self._bytes))


class Rates:
    """The rates of one proxy's streams; a batch waits for `wait_max_s` at most."""

    def __init__(
        self,
        *,
        stream: Rate | None = None,
        log: Rate | None = None,
        principal: Rate | None = None,
        proxy: Rate | None = None,
        wait_max_s: float,
    ) -> None:
        self.changes = 0
        """How often the rates changed."""
        self._shared: dict[str, _Scope] = {}
        self._prunes_at = KEPT_MAX
        self.configure(
            stream=stream, log=log, principal=principal, proxy=proxy, wait_max_s=wait_max_s
        )

    def configure(
        self,
        *,
        stream: Rate | None = None,
        log: Rate | None = None,
        principal: Rate | None = None,
        proxy: Rate | None = None,
        wait_max_s: float,
    ) -> None:
        """Set other rates, also for the streams that there are; all begin with a burst."""
        self._stream = stream or Rate()
        self._log = log or Rate()
        self._principal = principal or Rate()
        self._proxy = proxy or Rate()
        self._wait_max_s = wait_max_s
        self._shared.clear()
        self.changes += 1

    def __len__(self) -> int:
        return len(self._shared)

    def join(self, log: str, principal: str | None) -> StreamRates:
        """Return the rates of a stream to a log; `principal` names the client, if it is known."""
        return StreamRates(self, log, principal, _Own())

    def _own_scopes(self, own: _Own) -> list[_Scope]:
        """Return the bucket of a stream, made anew if the rates have changed."""
        if own.changes != self.changes:
            own.changes = self.changes
            own.scopes = [_Scope("this stream", self._stream)] if self._stream.is_limited else []
        return own.scopes

    def _limits_of(self, log: str, principal: str | None) -> list[tuple[str, Rate]]:
        """Return the limited rates that a stream shares with others, each with what it is of."""
        shared = [(f"log {log!r}", self._log), ("this proxy", self._proxy)]
        if principal is not None:
            shared.append((principal, self._principal))
        return [(what, rate) for what, rate in shared if rate.is_limited]

    def _take(
        self,
        own: list[_Scope],
        shared: list[tuple[str, Rate]],
        records: int,
        size_bytes: int,
        now_s: float,
    ) -> float:
        scopes = [*own, *(self._scope(what, rate, now_s) for what, rate in shared)]
        found = [(each.delay_s(now_s), each.what) for each in scopes]
        # The debts of all buckets are paid off at the same time, so the longest one decides.
        delay_s, slowest = max(found, default=(0.0, ""))
        if delay_s > self._wait_max_s:
            raise OverCapacityError(
                f"the rate of {slowest} is used up for {delay_s:.3f} s, and a batch may wait for "
                f"{self._wait_max_s:g} s at most: write it again after that",
                retry_after_s=delay_s,
            )
        for each in scopes:
            each.take(records, size_bytes)
        return delay_s

    def _scope(self, what: str, rate: Rate, now_s: float) -> _Scope:
        scope = self._shared.get(what)
        if scope is None:
            if len(self._shared) >= self._prunes_at:
                # A full bucket is equal to a new one.
                idle = [key for key, each in self._shared.items() if each.is_idle(now_s)]
                for key in idle:
                    del self._shared[key]
                # Doubled, so that looks at all buckets stay rare when most of them are in use.
                self._prunes_at = max(KEPT_MAX, 2 * len(self._shared))
            scope = self._shared[what] = _Scope(what, rate)
        return scope


class _Own:
    """The bucket of one stream, for all logs that it writes to."""

    def __init__(self) -> None:
        self.changes = 0
        self.scopes: list[_Scope] = []


class StreamRates:
    """The rates that apply to one stream.  Use `Rates.join`."""

    def __init__(self, rates: Rates, log: str, principal: str | None, own: _Own) -> None:
        self._rates = rates
        self._log = log
        self._principal = principal
        self._own = own
        self._changes = 0
        self._scopes: list[_Scope] = []
        self._shared: list[tuple[str, Rate]] = []

    def _look(self) -> None:
        """Take the rates over if they have changed."""
        if self._changes != self._rates.changes:
            self._changes = self._rates.changes
            self._scopes = self._rates._own_scopes(self._own)
            self._shared = self._rates._limits_of(self._log, self._principal)

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        self._look()
        return bool(self._scopes or self._shared)

    def to(self, log: str) -> StreamRates:
        """Return the rates of the same stream if it writes to another log."""
        return StreamRates(self._rates, log, self._principal, self._own)

    def take(self, records: int, size_bytes: int, *, now_s: float) -> float:
        """Take tokens for a batch; return the seconds for which the batch must wait.

        Raises:
            OverCapacityError: the wait would be too long; no token was taken.
        """
        self._look()
        return self._rates._take(self._scopes, self._shared, records, size_bytes, now_s)
