"""Invariants of logs, judged by what appenders said and what is stored.

Positions and contents are compared with the checkers' own list of what was appended; references to
ledgers are counted from the stored nodes, in every state that the metadata store goes through.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlcore.base.ids import DLSN
from dlcore.metadata.port import Delete
from tests.simulation.life_checkers import (
    DELAY_MS_MAX,
    LIFE_INVARIANTS,
    Known,
    LifeCheckers,
    depth,
    now_ms,
    require,
)
from tests.simulation.redaction_checkers import REDACTION_INVARIANTS, RedactionCheckers
from tests.simulation.stored_log import (
    ledgers_in,
    merges_of,
    nodes_of_log,
    open_extents_in,
    read_registration,
    redacted_ledgers_in,
)
from tests.simulation.tables import TABLE_INVARIANTS
from tests.simulation.tier_checkers import TIER_INVARIANTS, TierCheckers
from tests.simulation.type_checkers import TYPE_INVARIANTS, TypeCheckers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dlcore.base.records import LogRecordWithDLSN
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Op, Versioned
    from tests.fixtures.simulated_store import SimulatedTree

ONCE = "L1 EveryRecordOnceAtItsPlace"
WHOLE = "L2 AppendsAreReadableAndWhole"
COUNTED = "L3 ReferencesAreCounted"
KEPT = "L4 NeededLedgersStay"
TIDY = "L5 NothingIsLeftInTheEnd"
ONE_OPEN = "L6 OneOpenSegment"
LOG_INVARIANTS = (
    ONCE,
    WHOLE,
    COUNTED,
    KEPT,
    TIDY,
    ONE_OPEN,
    *LIFE_INVARIANTS,
    *TYPE_INVARIANTS,
    *TIER_INVARIANTS,
    *TABLE_INVARIANTS,
    *REDACTION_INVARIANTS,
)

_BESIDE = ("schema", "settings", "subscribers")
"""The other fields of a head beside its segments."""

AppendId = tuple[str, int]
"""Identity and version of an append."""
Rows = dict[str, list[bytes]]
"""Payloads by log."""


@dataclass(slots=True)
class _Append:
    rows: Rows
    log_ids: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """For each name, the logs for which it was staged: another one was created meanwhile."""
    ranges: dict[str, tuple[DLSN, DLSN]] = field(default_factory=dict)
    """The reported places of its rows, by the id of a log."""
    is_committed: bool = False
    began_ms: int = field(default_factory=now_ms)


@dataclass(slots=True)
class _Log:
    """One log, as its readers were shown it."""

    log_id: str
    name: str
    """The one under which it was found first."""
    places: dict[bytes, tuple[DLSN, int, int, int]] = field(default_factory=dict)
    """For each payload: position, sequence id, transaction id, timestamp."""
    payloads: dict[DLSN, bytes] = field(default_factory=dict)
    committed_end: DLSN = DLSN.INITIAL
    acknowledged: dict[bytes, DLSN] = field(default_factory=dict)
    """The results of writers."""
    written_ms: dict[bytes, int] = field(default_factory=dict)
    """When they began to write it."""
    truncated: DLSN = DLSN.INITIAL
    """The highest position that a client began to truncate at, or up to which records were old."""


class LogCheckers:
    """Records what happens to logs, and judges it as it goes."""

    def __init__(
        self,
        *,
        tree: SimulatedTree,
        paths: NamespacePaths,
        grace_s: float,
        tier_grace_s: float,
        epoch_ms: int,
    ) -> None:
        self._tree = tree
        self._paths = paths
        self._grace_ms = int(grace_s * 1000)
        self._tier_kept_ms = int((tier_grace_s - grace_s) * 1000)
        self._epoch_ms = epoch_ms
        self._appends: dict[AppendId, _Append] = {}
        self._owners: dict[bytes, set[str]] = {}  # of payloads: the ids of logs they may be in
        self._logs: dict[str, _Log] = {}
        self._references: dict[str, Counter[int]] = {}  # by path
        self._counts: Counter[int] = Counter()  # of all paths
        self._merges: dict[str, int] = {}  # by path of a head
        self._released_ms: dict[int, int] = {}  # when a merge last took extents of a ledger
        self.merges = 0
        self.commits = 0
        self.types = TypeCheckers(tree=tree, paths=paths)
        self.redactions = RedactionCheckers()
        self.tiers = TierCheckers(tree=tree, paths=paths, epoch_ms=epoch_ms)
        self.life = LifeCheckers(
            tree=tree,
            paths=paths,
            known=self._known,
            truncated=self.truncated,
            on_cut=lambda log_id, dlsn: self.on_truncate(log_id, "", dlsn),
            epoch_ms=epoch_ms,
        )

    # Appends

    def on_append(self, append: AppendId, rows: Rows) -> None:
        """A client is going to append these rows, or the same ones again."""
        if append not in self._appends:
            self._appends[append] = _Append(rows)
        assert self._appends[append].rows == rows

    def on_commit(self, append: AppendId, logs: Iterable[tuple[str, str]]) -> None:
        """It is about to commit what was staged for these logs, by name and id."""
        for log, log_id in logs:
            self._appends[append].log_ids[log].add(log_id)
            self._log(log_id, log)
            for payload in self._appends[append].rows[log]:
                self._owners.setdefault(payload, set()).add(log_id)

    def on_committed(
        self, append_id: AppendId, ranges: Mapping[str, tuple[str, DLSN, DLSN]]
    ) -> None:
        """It learned that its rows are in the logs, and perhaps where.

        `ranges` are by name of the log: its id, the first of the positions, and the end of them.
        """
        append = self._appends[append_id]
        append.is_committed = True
        self.commits += 1
        for name, (log_id, first, end) in ranges.items():
            append.ranges[log_id] = (first, end)
            log = self._log(log_id, name)
            log.committed_end = max(log.committed_end, end)

    def _log(self, log_id: str, name: str) -> _Log:
        return self._logs.setdefault(log_id, _Log(log_id, name))

    def _known(self, log_id: str) -> Iterator[Known]:
        """Yield what is known of a log's records: where they are, and from when they may be."""
        log = self._logs.get(log_id)
        if log is None:
            return
        for dlsn, _, _, timestamp_ms in log.places.values():
            yield Known(dlsn, timestamp_ms - self._epoch_ms)
        for payload, dlsn in log.acknowledged.items():
            yield Known(dlsn, log.written_ms[payload])
        for append in self._appends.values():
            if log_id in append.ranges:
                yield Known(append.ranges[log_id][0], append.began_ms)

    # Writes

    def new_writing(self, log_id: str, name: str) -> Writing:
        """Begin to judge the answers that one writer gets."""
        return Writing(self._log(log_id, name), self._owners)

    # Truncation

    def on_truncate(self, log_id: str, name: str, dlsn: DLSN) -> None:
        """A client is going to truncate a log below a position."""
        log = self._log(log_id, name)
        log.truncated = max(log.truncated, dlsn)

    def places(self, log_id: str) -> list[DLSN]:
        """Return the positions that a reader read, ascending."""
        return sorted(self._logs[log_id].payloads) if log_id in self._logs else []

    def known(self, log_id: str) -> Mapping[bytes, tuple[DLSN, int, int, int]]:
        """Return where the payloads are that a reader read, with all that was read of them."""
        return self._log(log_id, "").places

    def acknowledged(self, log_id: str) -> DLSN | None:
        """Return the highest position that was acknowledged to a writer."""
        return max(self._log(log_id, "").acknowledged.values(), default=None)

    def end(self, log_id: str) -> DLSN:
        """Return the end of what was committed, acknowledged or shown by now."""
        return self._log(log_id, "").committed_end

    def truncated(self, log_id: str) -> DLSN:
        """Return the highest position that a client began to truncate at."""
        return self._log(log_id, "").truncated

    # Reads

    def new_reading(
        self, log_id: str, name: str, start: DLSN = DLSN.INITIAL, *, promise: str = ONCE
    ) -> Reading:
        """Begin to judge what one reader gets from a position on, by a promise made to it."""
        return Reading(self, self._log(log_id, name), start, promise)

    def check_record(self, log: _Log, payload: bytes, place: tuple[DLSN, int, int, int]) -> None:
        """L1: it was appended to this log, and lies where it always lay."""
        payload = payload.rstrip(b" ")
        owners = self._owners.get(payload, ())
        require(
            ONCE,
            holds=log.log_id in owners,
            message=f"log {log.name} has {payload!r} at {place[0]}, which no writer appended to it",
        )
        known = log.places.setdefault(payload, place)
        require(
            ONCE,
            holds=known == place,
            message=f"log {log.name}: {payload!r} was at {known}, and now is at {place}",
        )
        require(
            ONCE,
            holds=log.acknowledged.get(payload, place[0]) == place[0],
            message=f"log {log.name}: {payload!r} is at {place[0]}, and was acknowledged at "
            f"{log.acknowledged.get(payload)}",
        )
        # A reader that was shown a record, and begins to read later, is shown it again.
        log.committed_end = max(log.committed_end, DLSN(place[0].lssn, place[0].entry_id + 1, 0))
        there = log.payloads.setdefault(place[0], payload)
        require(
            ONCE,
            holds=there == payload,
            message=f"log {log.name}: {place[0]} was {there!r}, and now is {payload!r}",
        )

    def check_whole(self, found: Mapping[str, Sequence[bytes]]) -> None:
        """L2: what was committed is readable, and of each append all or nothing.

        `found` are the records of every log, by id.
        """
        for log in self._logs.values():
            self.tiers.check_rows(log.places)
        there = {payload.rstrip(b" ") for payloads in found.values() for payload in payloads}
        for log_id in found:
            log = self._log(log_id, "")
            shown = {payload: place[0] for payload, place in log.places.items()}
            lost = [
                payload
                for payload, dlsn in (shown | log.acknowledged).items()
                if dlsn >= log.truncated and payload not in there
            ]
            require(
                WHOLE,
                holds=not lost,
                message=f"log {log.name}: {lost[:3]} were acknowledged or shown, and are not "
                "readable",
            )
        for append_id, append in self._appends.items():
            rows = [
                payload
                for name, payloads in append.rows.items()
                if len(append.log_ids[name]) == 1  # if it is there, it is in this log
                for log_id in append.log_ids[name] & found.keys()
                for payload in payloads
                if not self._may_be_cut(append, log_id, payload)
            ]
            missing = [each for each in rows if each not in there]
            require(
                WHOLE,
                holds=not missing or (len(missing) == len(rows) and not append.is_committed),
                message=f"of append {append_id} {missing[:3]} are not readable",
            )

    def _may_be_cut(self, append: _Append, log_id: str, payload: bytes) -> bool:
        """Return whether a record may lie where a client has truncated."""
        log = self._logs[log_id]
        place = log.places.get(payload)
        if place is not None:
            return place[0] < log.truncated
        first = append.ranges.get(log_id, (DLSN.INITIAL,))[0]
        return first < log.truncated

    # Stored state

    def on_metadata(self, ops: Iterable[Op]) -> None:
        """The store applied a transaction: every reference is counted, every ledger needed there.

        Raises:
            InvariantViolatedError: L3, L4, L13, one of the life of logs, or one of tiers.
        """
        ops = list(ops)
        self.life.on_metadata(ops)
        self.types.on_metadata(ops)
        self.tiers.on_metadata(ops)
        before, touched, has_merged = self._counts.copy(), set(), False
        for op in ops:
            if op.path.startswith(f"{self._paths.heads}/"):
                touched |= self._count(op.path)
                has_merged |= self._note_merge(op.path)
            elif op.path.startswith(f"{self._paths.ledgers}/"):
                parts = op.path.removeprefix(f"{self._paths.ledgers}/").split("/")
                if len(parts) >= 3:
                    ledger_id = self._paths.ledger_id_of(*parts[:3])
                    touched.add(ledger_id)
                    if isinstance(op, Delete) and len(parts) == 3:
                        self._check_grace(ledger_id)
        # A removal of a segment's first extents counts as a merge, and puts none in their place.
        has_merged = has_merged and any(self._counts[each] > before[each] for each in touched)
        kept_ms = self._tier_kept_ms if has_merged and self._check_swap(ops, before) else 0
        for ledger_id in touched:
            is_released = has_merged and self._counts[ledger_id] < before[ledger_id]
            self._check_ledger(ledger_id, is_released=is_released, kept_ms=kept_ms)

    def _check_swap(self, ops: Sequence[Op], before: Counter[int]) -> bool:
        """Return whether a cold extent takes the place of others, after a look at its objects."""
        for path in (op.path for op in ops if op.path in self._references):
            for ledger_id in self._references[path]:
                if not before[ledger_id] and self.tiers.is_cold(ledger_id):
                    node = self._tree._find(path)
                    assert node is not None
                    self.tiers.check_swap(ledger_id, path, node.value)
                    return True
        return False

    def _count(self, path: str) -> set[int]:
        before = self._references.pop(path, Counter())
        node = self._tree._find(path)
        after = Counter() if node is None else ledgers_in(path, node.value)
        if node is not None:
            self._check_open(path, node.value)
        if after:
            self._references[path] = after
        self._counts.subtract(before)
        self._counts.update(after)
        return {each for each in before | after if before[each] != after[each]}

    def _check_open(self, path: str, value: bytes) -> None:
        """L6: at most the last extent of the last segment is open; the head has it."""
        is_head = path.removeprefix(f"{self._paths.heads}/").count("/") == 1
        *others, last = [False, *open_extents_in(path, value)]
        require(
            ONE_OPEN,
            holds=not any(others) and (is_head or not last),
            message=f"{path} has open extents other than the last one of the head",
        )

    def _note_merge(self, path: str) -> bool:
        node = self._tree._find(path)
        if path.removeprefix(f"{self._paths.heads}/").count("/") != 1 or node is None:
            return False
        merges = merges_of(node.value)
        is_merge = merges > self._merges.get(path, 0)
        self._merges[path] = merges
        self.merges += is_merge
        return is_merge

    def _check_ledger(self, ledger_id: int, *, is_released: bool, kept_ms: int) -> None:
        count = self._counts[ledger_id]
        is_there = self._tree._find(self._paths.ledger(ledger_id)) is not None
        require(
            KEPT,
            holds=is_there or not count,
            message=f"ledger {ledger_id} is gone, and {count} extents refer to it",
            ledger_id=ledger_id,
        )
        node = self._tree._find(self._paths.staged_ledger(ledger_id))
        if node is None:
            require(
                COUNTED,
                holds=count <= 1,
                message=f"ledger {ledger_id} is not registered, and {count} extents refer to it",
                ledger_id=ledger_id,
            )
            return
        registration = read_registration(node.value)
        require(
            COUNTED,
            holds=registration.extents == count,
            message=f"ledger {ledger_id} has {count} extents, {registration.extents} are counted",
            ledger_id=ledger_id,
        )
        if is_released:
            released_ms = registration.released_ms - self._epoch_ms - kept_ms
            require(
                KEPT,
                holds=now_ms() - DELAY_MS_MAX <= released_ms <= now_ms(),
                message=f"ledger {ledger_id} was merged away, as of {released_ms} ms",
                ledger_id=ledger_id,
            )
            self._released_ms[ledger_id] = released_ms + kept_ms

    def _check_grace(self, ledger_id: int) -> None:
        """L4: a reader with the log's state before a merge is not disturbed for some time."""
        released_ms = self._released_ms.get(ledger_id)
        if released_ms is not None and ledger_id in redacted_ledgers_in(self._redactions()):
            return
        require(
            KEPT,
            holds=released_ms is None or now_ms() >= released_ms + self._grace_ms,
            message=f"ledger {ledger_id} was merged away at {released_ms} ms, and is deleted",
            ledger_id=ledger_id,
        )

    def _redactions(self) -> list[bytes]:
        nodes = self._tree.dump()
        return [nodes[each].value for each in nodes if depth(each, self._paths.redactions) == 1]

    def leftovers(self) -> list[str]:
        """Return what no one needs and what is still there."""
        nodes, paths = self._tree.dump(), self._paths
        heads = [each for each in nodes if depth(each, paths.heads) == 2]
        needed = {each for head in heads for each in nodes_of_log(head, nodes)}
        found = [f"node {each}" for each in nodes if depth(each, paths.heads) > 2]
        beside = tuple(f"{head}/{each}" for head in heads for each in _BESIDE)
        found = [each for each in found if not each.removeprefix("node ").startswith(beside)]
        found = [each for each in found if each.removeprefix("node ") not in needed]
        found += [f"missing {each}" for each in sorted(needed - nodes.keys())]
        found += [f"ledger {each}" for each in self.ledgers(nodes) if not self._counts[each]]
        found += [f"staged {each}" for each in nodes if depth(each, paths.staging) == 3]
        found += [f"deleted {each}" for each in nodes if depth(each, paths.deleted_logs) == 1]
        found += [f"redaction {each}" for each in nodes if depth(each, paths.redactions) == 1]
        found += [f"erasure {each}" for each in nodes if depth(each, paths.erasures) == 1]
        found += [f"asked {each}" for each in nodes if depth(each, paths.upkeep_requests) == 2]
        names = sum(depth(each, paths.logs) == 2 for each in nodes)
        if len(heads) != names:
            found.append(f"{len(heads)} heads of {names} logs")
        return [*found, *self.life.leftovers(), *self.tiers.leftovers()]

    def ledgers(self, nodes: Mapping[str, Versioned] | None = None) -> list[int]:
        """Return the ledgers that are stored."""
        root = self._paths.ledgers
        return [
            self._paths.ledger_id_of(*each.removeprefix(f"{root}/").split("/"))
            for each in nodes or self._tree.dump()
            if depth(each, root) == 3
        ]


class Reading:
    """The records that one reader got of a log."""

    def __init__(self, checkers: LogCheckers, log: _Log, start: DLSN, promise: str) -> None:
        self._checkers = checkers
        self._log = log
        self._promise = promise
        self.start = start
        self._last: tuple[DLSN, int] | None = None  # and its sequence id
        self._floors = (-1, 0)  # no lower transaction id and timestamp may follow
        self.payloads: list[bytes] = []

    @property
    def floor(self) -> DLSN:
        """The end of what was committed by now."""
        return self._log.committed_end

    @property
    def next_dlsn(self) -> DLSN:
        """Where to go on."""
        if self._last is None:
            return self.start
        last = self._last[0]
        return DLSN(last.lssn, last.entry_id, last.slot_id + 1)

    def on_records(self, records: Sequence[LogRecordWithDLSN]) -> None:
        """Take the next records that the reader got."""
        for each in records:
            self.on_record(each.payload, each.dlsn, each.sequence_id, each.txid, each.timestamp_ms)

    def on_record(
        self, payload: bytes, dlsn: DLSN, sequence_id: int, txid: int, timestamp_ms: int
    ) -> None:
        """L1: it follows the one before, nothing is left out, and it is where it always was."""
        if self._last is not None:
            require(
                self._promise,
                holds=dlsn > self._last[0]
                and (sequence_id == self._last[1] + 1 or self._may_pass_over_to(dlsn)),
                message=f"log {self._log.name}: {dlsn} with sequence id {sequence_id} was read "
                f"after {self._last}",
            )
        require(
            self._promise,
            holds=txid >= self._floors[0] and timestamp_ms >= self._floors[1],
            message=f"log {self._log.name}: {dlsn} has transaction id {txid} and timestamp "
            f"{timestamp_ms}, after {self._floors}",
        )
        self._floors = (txid, timestamp_ms)
        self._checkers.check_record(self._log, payload, (dlsn, sequence_id, txid, timestamp_ms))
        self._last = (dlsn, sequence_id)
        self.payloads.append(payload)

    def _may_pass_over_to(self, dlsn: DLSN) -> bool:
        """Return whether it began at the start, and may leave out what is truncated by now."""
        truncated = self._log.truncated
        return (
            self.start == DLSN.INITIAL
            and self.next_dlsn < truncated
            and not any(truncated <= each < dlsn for each in self._log.payloads)
        )

    def on_caught_up(self, floor: DLSN) -> None:
        """L2: it learned that there is no more; `floor` was the end when it asked."""
        last = self.next_dlsn
        has_all = last >= DLSN(floor.lssn, floor.entry_id - 1, 1) if floor.entry_id else True
        require(
            WHOLE,
            holds=has_all or self._log.truncated >= floor,
            message=f"log {self._log.name}: read up to {last}, and {floor} was committed",
        )

    def on_truncated(self) -> None:
        """L2: it learned that its position was truncated."""
        require(
            WHOLE,
            holds=self._log.truncated > self.next_dlsn,
            message=f"log {self._log.name}: {self.next_dlsn} is called truncated, and no one "
            f"truncated beyond {self._log.truncated}",
        )


class Writing:
    """The answers to one writer of a log about its records."""

    def __init__(self, log: _Log, owners: dict[bytes, set[str]]) -> None:
        self._log = log
        self._owners = owners
        self._last: DLSN | None = None

    def on_write(self, payloads: Sequence[bytes]) -> None:
        """It is going to write them."""
        self._owners |= {payload: {self._log.log_id} for payload in payloads}
        self._log.written_ms |= dict.fromkeys(payloads, now_ms())

    def on_acknowledged(self, payloads: Sequence[bytes], dlsn: DLSN) -> None:
        """L1: the last of them is durable at this position, which is above the one before."""
        require(
            ONCE,
            holds=self._last is None or dlsn > self._last,
            message=f"log {self._log.name}: {dlsn} was acknowledged after {self._last}",
        )
        self._last = dlsn
        known = self._log.places.get(payloads[-1], (dlsn,))[0]
        require(
            ONCE,
            holds=known == dlsn,
            message=f"log {self._log.name}: {payloads[-1]!r} was read at {known}, and is "
            f"acknowledged at {dlsn}",
        )
        self._log.acknowledged[payloads[-1]] = dlsn
        self.on_visible(dlsn)

    def on_never_sent(self, payloads: Sequence[bytes]) -> None:
        """L1: no one may read them."""
        for payload in payloads:
            require(
                ONCE,
                holds=payload not in self._log.places,
                message=f"log {self._log.name}: {payload!r} was never sent, and was read",
            )
            self._owners.pop(payload)

    def on_visible(self, last: DLSN | None) -> None:
        """L2: a reader that begins from now on gets all up to this position."""
        if last is not None:
            end = DLSN(last.lssn, last.entry_id + 1, 0)
            self._log.committed_end = max(self._log.committed_end, end)
