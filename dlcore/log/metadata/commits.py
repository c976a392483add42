"""The decision to commit, skip or refuse an append, from the record of its identity.

An identity's versions go up.  Within one version an appender may append several times, one after
the other: the n-th append of a run has the ordinal n.  Who repeats a version, after a crash, does
so in another run, from ordinal 1 on, in the same order; what is at or below the number of ordinals
committed is skipped, the rest appended.  So each append of a version is committed once, wherever
the runs before it ended.

That holds while the appends of a run have an order, and one run at a time appends.  Both are
watched: two appends of a run that overlap, or that threads made which have no order, make the
version `CONFLICTING` for good, because a repetition could take one for the other; and a run that
another one has followed is `SUPERSEDED`.

Skipping loses records in silence where the appender is not who it was: one that goes on from an old
or copied state gives numbers that are taken to other records.  An appender that repeats nothing but
its latest version, to the logs that it wrote to before, says to which logs it appends.  Then an
older version is `OLDER`, and the latest one to none of the version's logs is `ELSEWHERE`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlcore.errors import ConfigurationError
from dlcore.html_tables import ShownFields
from dlcore.log.metadata.values import CommitRecord

if TYPE_CHECKING:
    from collections.abc import Collection

RUNS_REMEMBERED_MAX = 16
"""Runs of one version that a record remembers as followed by another; older ones are long dead."""
LOGS_REMEMBERED_MAX = 2_000
"""Logs of one version that a record remembers; of one with more it cannot be told what is new."""
_DIGEST_BYTES = 4
"""Of a log's id.  Two that are equal by chance let one append in 2**32 be skipped after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRun(ShownFields):
    """One life of an appender, and when in it an append began.

    `token` is unique to the life. `begun_ns` is what the monotonic clock of the machine that
    commits showed before anything of the append was done: an append that begins before the one
    before it commits overlaps it.  `thread` names what made the append, in an order of its own:
    appends of different threads come now in one order, now in another, also where none overlap.
    Where another machine commits for the appender, `commits_ns` is what the appender's clock showed
    when it asked for that.
    """

    token: str
    begun_ns: int
    thread: str = ""
    commits_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStatus(ShownFields):
    """The last commit of an appender: its identity, the version, how many appends of it, when."""

    identity: str
    version: int
    appends: int
    committed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStaging(ShownFields):
    """Where appends of several identities find what was staged for all of them, in shared ledgers.

    `identity` is that of the staging writers.  `round` tells which appends may run side by side:
    all of one round are decided or given up when the next one begins.  So what a dead process
    staged is kept from the round that finds it so until the next one.
    """

    identity: str
    round: str

    def __post_init__(self) -> None:
        if not self.round:
            raise ConfigurationError("round='': expected a text that tells rounds apart")


class Verdict(enum.Enum):
    """What becomes of an append."""

    APPEND = "append"
    SKIP = "skip"
    KNOWN = "known"
    """The record was written by this very append: what it tried last is done."""
    CONFLICTING = "conflicting"
    SUPERSEDED = "superseded"
    OLDER = "older"
    ELSEWHERE = "elsewhere"
    AHEAD = "ahead"
    """It follows another version than the last one committed."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and the record to write with it; None leaves the record as it is."""

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
        record: what is stored for its identity.
        version: which version it belongs to.
        token: unique to the append, over all its attempts.
        run: the run it belongs to; None for an appender that appends a version once.
        now_ns: the clock of `AppendRun.begun_ns`.
        logs: the ids of those it appends to, if the appender repeats its latest version only,
            and to the same logs; None for one of which that is not known.
        after: the version that must be the last one committed, -1 for none, if that matters.
    """
    if record is None or version > record.version:
        is_next = after in (None, -1 if record is None else record.version)
        begun = _begun(version, token, run, now_ns, logs)
        return Decision(Verdict.APPEND, begun) if is_next else Decision(Verdict.AHEAD)
    if version < record.version:
        return Decision(Verdict.SKIP if logs is None else Verdict.OLDER)
    if record.conflicting:
        return Decision(Verdict.CONFLICTING)
    if record.token == token:
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
        taken = replace(taken, seen=record.seen + 1)
    else:
        followed = (*record.superseded, record.run) if record.run else record.superseded
        taken = replace(
            taken,
            run=run.token,
            thread=run.thread,
            seen=1,
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
    """Whether an append has logs, and none of them is among those of the version."""
    if joined is None or not logs:
        return False
    return _split(joined).isdisjoint(_digests(logs))
