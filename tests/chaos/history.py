"""The history of a run, by the account of its writers and readers, and the judgement over it.

The checker knows nothing of the system's own state.  Writers note each append before they hand it
over and each acknowledgement after they have it; readers note what they were given; at the end
a reader reads every log from its beginning.  Times are seconds of the machine's monotonic clock,
which all processes share.

One line is one event, its fields separated by tabs:

    S <log> <identity> <group> <s>       about to be appended; group: "-", or an atomic append
    A <identity> <dlsn or -> <s>         acknowledged
    T <log> <life> <dlsn> <identity>     given to the tail reader `life`, in this order
    N <text>                             a note for readers of the file
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from dlcore import DLSN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NO_GROUP = "-"
UNKNOWN_DLSN = "-"
DAMAGED = "?"
"""Stands for the identity of a payload that no client can have written."""

_EXAMPLES_MAX = 5


@dataclass(slots=True)
class Append:
    """One append of one record; its identity is used once."""

    log: str
    identity: str
    group: str
    sent_s: float
    acked_s: float | None = None
    dlsn: DLSN | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A record as the last reader found it."""

    dlsn: DLSN
    sequence_id: int
    identity: str


@dataclass
class History:
    """Appends by identity, and what each tail reader was given, log by log."""

    appends: dict[str, Append] = field(default_factory=dict)
    tails: dict[tuple[str, str], list[tuple[DLSN, str]]] = field(default_factory=dict)
    """(log, life of the reader) → positions and identities in the order given."""

    def add_file(self, text: str) -> None:
        """Take the events of one process's file; its last line may be torn by a kill."""
        complete, _, _ = text.rpartition("\n")
        for line in complete.split("\n"):
            if line:
                self._add(line)

    def _add(self, line: str) -> None:
        kind, *fields = line.split("\t")
        match kind:
            case "S":
                log, identity, group, at_s = fields
                if identity in self.appends:
                    raise ValueError(f"the identity {identity} was used twice")
                self.appends[identity] = Append(log, identity, group, float(at_s))
            case "A":
                identity, dlsn, at_s = fields
                append = self.appends[identity]
                append.acked_s = float(at_s)
                append.dlsn = None if dlsn == UNKNOWN_DLSN else DLSN.parse(dlsn)
            case "T":
                log, life, dlsn, identity = fields
                self.tails.setdefault((log, life), []).append((DLSN.parse(dlsn), identity))
            case "N":
                pass
            case _:
                raise ValueError(f"unknown event: {line!r}")

    @property
    def ack_times_s(self) -> list[float]:
        """When acknowledgements came, sorted."""
        return sorted(a.acked_s for a in self.appends.values() if a.acked_s is not None)

    def count_acked_entries(self, finals: Mapping[str, Sequence[Found]]) -> int:
        """Return how many entries of the logs hold a record that was acknowledged."""
        acked = {a.identity for a in self.appends.values() if a.acked_s is not None}
        return len(
            {
                (log, record.dlsn.lssn, record.dlsn.entry_id)
                for log, records in finals.items()
                for record in records
                if record.identity in acked
            }
        )


@dataclass
class Verdict:
    """How often each promise was broken, with some examples."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    KINDS = (
        "lost",  # acknowledged, and not readable
        "doubled",  # readable twice
        "out of order",  # against the order in which it was written and acknowledged
        "moved",  # readable at another position than the one acknowledged
        "damaged",  # bytes that no client wrote
        "in the wrong log",
        "torn apart",  # an atomic append of which a part is readable
        "misnumbered",  # positions or sequence ids that do not rise as promised
        "diverged",  # a tail reader was given something else than the log holds
    )

    def blame(self, kind: str, example: str) -> None:
        """Count one break of a promise."""
        assert kind in self.KINDS
        self.counts[kind] += 1
        if self.counts[kind] <= _EXAMPLES_MAX:
            self.examples.append(f"{kind}: {example}")

    @property
    def is_clean(self) -> bool:
        """Whether nothing was broken."""
        return not self.counts.total()


def judge(history: History, finals: Mapping[str, Sequence[Found]]) -> Verdict:
    """Compare what every log holds in the end with what was promised on the way."""
    verdict = Verdict()
    seen: dict[str, tuple[str, DLSN]] = {}
    for log, records in finals.items():
        _check_numbers(log, records, verdict)
        _check_identities(log, records, history, seen, verdict)
        _check_order(log, records, history, verdict)
    for append in history.appends.values():
        if append.acked_s is not None and append.identity not in seen:
            verdict.blame("lost", f"{append.identity} of {append.log} at {append.dlsn}")
    _check_groups(history, seen, verdict)
    for (log, life), given in history.tails.items():
        _check_tail(f"{log}, reader {life}", given, finals[log], verdict)
    return verdict


def _check_numbers(log: str, records: Sequence[Found], verdict: Verdict) -> None:
    previous: Found | None = None
    for number, record in enumerate(records):
        if record.sequence_id != number:
            verdict.blame(
                "misnumbered", f"{log} {record.dlsn}: number {record.sequence_id}, not {number}"
            )
        if previous is not None and record.dlsn <= previous.dlsn:
            verdict.blame("misnumbered", f"{log}: {record.dlsn} was read after {previous.dlsn}")
        previous = record


def _check_identities(
    log: str,
    records: Iterable[Found],
    history: History,
    seen: dict[str, tuple[str, DLSN]],
    verdict: Verdict,
) -> None:
    """Check that each record was appended, once, here, and lies where its writer's answer said."""
    for record in records:
        append = history.appends.get(record.identity)
        if append is None:
            verdict.blame("damaged", f"{log} {record.dlsn}: no client appended {record.identity!r}")
            continue
        if record.identity in seen:
            other, dlsn = seen[record.identity]
            verdict.blame("doubled", f"{record.identity} at {other} {dlsn} and {log} {record.dlsn}")
            continue
        seen[record.identity] = (log, record.dlsn)
        if append.log != log:
            verdict.blame("in the wrong log", f"{record.identity} of {append.log} is in {log}")
        if append.dlsn is not None and append.dlsn != record.dlsn:
            verdict.blame(
                "moved", f"{record.identity}: acknowledged {append.dlsn}, read {record.dlsn}"
            )


def _check_order(log: str, records: Iterable[Found], history: History, verdict: Verdict) -> None:
    """Check the order in time over all writers.

    A record that was acknowledged before another append began comes before it.  The records of one
    writer come in the order it wrote them, acknowledged or not.
    """
    latest: Append | None = None
    last_of: dict[str, Append] = {}
    for record in records:
        append = history.appends.get(record.identity)
        if append is None:
            continue
        if latest is not None and append.acked_s is not None and latest.sent_s > append.acked_s:
            verdict.blame(
                "out of order",
                f"{log}: {append.identity} was acknowledged before {latest.identity} was written, "
                "and comes after it",
            )
        if latest is None or append.sent_s > latest.sent_s:
            latest = append
        writer, number = split_identity(append.identity)
        earlier = last_of.get(writer)
        if earlier is not None and split_identity(earlier.identity)[1] > number:
            verdict.blame("out of order", f"{log}: {append.identity} after {earlier.identity}")
        else:
            last_of[writer] = append


def split_identity(identity: str) -> tuple[str, int]:
    """Return the writer, which is one opening of a log by one process, and the record's number."""
    writer, _, number = identity.rpartition("#")
    return writer, int(number)


def _check_groups(history: History, seen: Mapping[str, tuple[str, DLSN]], verdict: Verdict) -> None:
    groups: dict[str, list[Append]] = {}
    for append in history.appends.values():
        if append.group != NO_GROUP:
            groups.setdefault(append.group, []).append(append)
    for name, members in groups.items():
        found = sum(append.identity in seen for append in members)
        if found not in (0, len(members)):
            verdict.blame("torn apart", f"{name}: {found} of {len(members)} records")


def _check_tail(
    name: str, given: Sequence[tuple[DLSN, str]], final: Sequence[Found], verdict: Verdict
) -> None:
    """Check that a reader which began at the beginning was given exactly the log's first part."""
    for number, (dlsn, identity) in enumerate(given):
        if number >= len(final):
            verdict.blame("diverged", f"{name} was given {identity} at {dlsn}, which is not there")
            return
        record = final[number]
        if (record.dlsn, record.identity) != (dlsn, identity):
            verdict.blame(
                "diverged",
                f"{name} was given {identity} at {dlsn}, and the log has {record.identity} at "
                f"{record.dlsn}",
            )
            return


def longest_gap_s(times_s: Sequence[float], *, first_s: float, last_s: float) -> float:
    """Return the longest time within [first, last] without any of the sorted `times_s`."""
    inside = [at_s for at_s in times_s if first_s <= at_s <= last_s]
    marks = [first_s, *inside, last_s]
    return max(after - before for before, after in pairwise(marks))
