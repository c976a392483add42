"""The decision to commit, skip or refuse an append, from the record of its identity.

An identity's versions go up.  Within one version an appender may append several times, one after
the other: the n-th append of a run has the ordinal n.  An appender that repeats a version after a
crash does so in another run, from ordinal 1 on, in the same order.  Its appends up to the number of
committed ordinals are skipped, and the rest is appended.  Therefore each append of a version is
committed once, wherever the earlier runs ended.

That holds while the appends of a run have an order, and one run at a time appends.  Both are
checked.  If two appends of a run overlap, or come from threads without an order, the version is
`CONFLICTING` for good, because a repetition could take one for the other.  A run that another one
has followed is `SUPERSEDED`.

An append whose answer was lost is tried again, possibly by another process, and the first try may
come last, when the run has gone on.  The record has the tokens of the run's appends, so that such a
late one is `KNOWN`: it is no overlap.

Skipping would lose records silently if the appender were another one: one that continues from an
old or copied state uses numbers that were taken by other records.  An appender that only repeats
its latest version, to the same logs, says to which logs it appends.  Then an older version is
`OLDER`, and the latest one to none of the version's logs is `ELSEWHERE`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.base.errors import ConfigurationError
from dlcore.base.html_tables import ShownFields
from dlcore.log.metadata.values import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Collection

RUNS_REMEMBERED_MAX = 16
"""Superseded runs of one version that a record remembers; older runs are long dead."""
TOKENS_REMEMBERED_MAX = 16
"""Earlier appends of one run that a record remembers; still earlier ones come no more."""
LOGS_REMEMBERED_MAX = 2_000
"""Logs of one version that a record remembers; with more of them new logs cannot be recognized."""
_DIGEST_BYTES = 4
"""Bytes of the digest of a log's id.  By equal digests one append in 2**32 is wrongly skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRun(ShownFields):
    """One life of an appender, and when one of its appends began.

    `token` is unique to the life.  `begun_ns` is the monotonic clock of the committing machine
    before any work of the append.  An append that begins before the previous one commits overlaps
    it.  `thread` names the thread that made the append: its appends have an order, but appends of
    different threads have none that a repetition keeps, even if none overlap.  If another machine
    commits for the appender, `commits_ns` is the appender's clock at the time of that request.
    """

    token: str
    begun_ns: int
    thread: str = ""
    commits_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStatus(ShownFields):
    """The last commit of an appender: its identity, version, number of appends, and time."""

    identity: str
    version: int
    appends: int
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStaging(ShownFields):
    """The shared ledgers in which records are staged for appends of several identities.

    `identity` is the identity of the staging writers.  `round` groups the appends that may run side
    by side: all of one round are decided or given up when the next one begins.  Therefore the
    staged records of a dead process are kept from the round that finds it dead until the next one.
    """

    identity: str
    round: str

    def __post_init__(self) -> None:
        if not self.round:
            raise ConfigurationError("round='': expected a name that differs from other rounds")


class Verdict(enum.Enum):
    """The outcome of an append."""

    APPEND = "append"
    SKIP = "skip"
    KNOWN = "known"
    """The record was written by this very append, or by another try of it: it is done."""
    CONFLICTING = "conflicting"
    SUPERSEDED = "superseded"
    OLDER = "older"
    ELSEWHERE = "elsewhere"
    AHEAD = "ahead"
    """It follows another version than the last committed one."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and the record to write with it; None: the record does not change."""

    verdict: Verdict
    record: CommitRecord | None = None


def decide(
    record: CommitRecord | None,
    *,
    version: int,
    token: str,
    run: AppendRun | None,
    now_ns: int,
    logs: Collection[str] | None = None,
    after: int | None = None,
) -> Decision:
    """Decide about an append.

    Args:
        record: the stored record of its identity.
        version: the version that it belongs to.
        token: unique to the append, the same in all its attempts.
        run: the run that it belongs to; None for an appender that appends a version once.
        now_ns: the clock of `AppendRun.begun_ns`.
        logs: the ids of the logs that it appends to, if the appender repeats only its latest
            version, and to the same logs; None if that is not known.
        after: the version that must be the last committed one, -1 for none; None: any.
    """
    if record is None or version > record.version:
        is_next = after in (None, -1 if record is None else record.version)
        begun = _begun(version, token, run, now_ns, logs)
        return Decision(Verdict.APPEND, begun) if is_next else Decision(Verdict.AHEAD)
    if version < record.version:
        return Decision(Verdict.SKIP if logs is None else Verdict.OLDER)
    if record.conflicting:
        return Decision(Verdict.CONFLICTING)
    if token in (record.token, *record.earlier):
        return Decision(Verdict.KNOWN)
    skip = Verdict.ELSEWHERE if _are_others(record.logs, logs) else Verdict.SKIP
    if run is None:
        return Decision(skip)
    if run.token in record.superseded:
        return Decision(Verdict.SUPERSEDED)
    taken = replace(record, token=token, last_ns=now_ns)
    if run.token == record.run:
        if run.thread != record.thread or run.begun_ns < record.last_ns:
            return Decision(Verdict.CONFLICTING, replace(taken, conflicting=True))
        earlier = (*record.earlier, record.token)[-TOKENS_REMEMBERED_MAX:]
        taken = replace(taken, seen=record.seen + 1, earlier=earlier)
    else:
        followed = (*record.superseded, record.run) if record.run else record.superseded
        taken = replace(
            taken,
            run=run.token,
            thread=run.thread,
            seen=1,
            earlier=(),
            superseded=followed[-RUNS_REMEMBERED_MAX:],
        )
    if taken.seen <= record.committed:
        return Decision(skip, taken if skip is Verdict.SKIP else None)
    logs_of_all = _join(record.logs, logs)
    return Decision(Verdict.APPEND, replace(taken, committed=taken.seen, logs=logs_of_all))


def _begun(
    version: int, token: str, run: AppendRun | None, now_ns: int, logs: Collection[str] | None
) -> CommitRecord:
    """Return the record of the first append of a version."""
    return CommitRecord(
        version=version,
        token=token,
        committed=1,
        run="" if run is None else run.token,
        thread="" if run is None else run.thread,
        seen=1,
        last_ns=now_ns,
        logs=_join(b"", logs),
    )


def _digests(logs: Collection[str]) -> set[bytes]:
    return {hashlib.blake2b(log.encode(), digest_size=_DIGEST_BYTES).digest() for log in logs}


def _split(joined: bytes) -> set[bytes]:
    return {joined[i : i + _DIGEST_BYTES] for i in range(0, len(joined), _DIGEST_BYTES)}


def _join(joined: bytes | None, logs: Collection[str] | None) -> bytes | None:
    """Return the digests of a version's logs with those of one more append; None: not known."""
    if joined is None or logs is None:
        return None
    digests = _split(joined) | _digests(logs)
    return b"".join(sorted(digests)) if len(digests) <= LOGS_REMEMBERED_MAX else None


def _are_others(joined: bytes | None, logs: Collection[str] | None) -> bool:
    """Return whether an append has logs, and none of them is among those of the version."""
    if joined is None or not logs:
        return False
    return _split(joined).isdisjoint(_digests(logs))
