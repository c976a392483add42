"""Metadata of ledgers and bookies: immutable values and their changes."""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec.structs import replace

from dlcore.base.config import DEFAULT_RACK, QuorumConfig
from dlcore.base.errors import CorruptMetadataError
from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import BookieId
from dlcore.metadata.stored import LAYOUT, Count, Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Set as AbstractSet


COLD_LAYOUT = 3
"""The layout of a cold ledger: releases that know no such ledgers refuse it, and never misread it.
"""


class LedgerState(enum.Enum):
    """OPEN to its writer, IN_RECOVERY by any client, or CLOSED for good."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class Ensemble(msgspec.Struct, frozen=True, array_like=True):
    """The bookies of the entries from `first_entry_id` up to the next ensemble's first entry.

    Order matters: striping refers to positions in `bookies`.
    """

    first_entry_id: Count
    bookies: tuple[BookieId, ...]


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """An object with the entries of a cold ledger from `first_entry_id` up to the next object's.

    `records_before` is how many records the objects before it have.  `crc32c` is the sum of what
    its readers are given; None in ledgers that an earlier release wrote.
    """

    first_entry_id: Count
    records_before: Count
    name: str
    size_bytes: Count
    crc32c: Count | None = None


class LedgerMetadata(ShownFields, msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One ledger as the metadata store knows it.

    `last_entry_id` and `length_bytes` have a meaning once the ledger is CLOSED (-1 and 0 before).
    `token` is the creation token: a creator whose reply was lost sees by it whether the ledger is
    its own.  `wanted` is the quorum that was asked for, if the ledger had to begin with fewer
    bookies; None if it began with the wanted quorum.

    A cold ledger has no bookies: its entries are in `objects` below the URL `folder`.  It is CLOSED
    from the start, and empty until its objects are known to be whole.
    """

    LAYOUTS: ClassVar[tuple[int, ...]] = (LAYOUT, COLD_LAYOUT)

    layout: int = LAYOUT
    ledger_id: Count
    quorum: QuorumConfig
    state: LedgerState
    ensembles: tuple[Ensemble, ...]
    token: str
    created_ms: Count
    last_entry_id: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = -1
    length_bytes: Count = 0
    custom: dict[str, str] = msgspec.field(default_factory=dict)
    wanted: QuorumConfig | None = None
    folder: str = ""
    objects: tuple[StoredObject, ...] = ()

    def __post_init__(self) -> None:
        ended = (self.last_entry_id, self.length_bytes) != (-1, 0)
        if ended and self.state is not LedgerState.CLOSED:
            raise CorruptMetadataError(
                f"ledger {self.ledger_id}: last entry {self.last_entry_id} and length "
                f"{self.length_bytes} in state {self.state.name}, expected -1 and 0 before CLOSED"
            )
        if self.copies_lacking and self.quorum.ensemble_size != self.quorum.write_quorum_size:
            raise CorruptMetadataError(
                f"ledger {self.ledger_id}: {self.wanted} was wanted and {self.quorum} is smaller, "
                "expected one whose bookies store every entry (E = Qw)"
            )
        if self.is_cold or self.layout != LAYOUT or self.objects:
            self._check_cold()
            return
        firsts = [ensemble.first_entry_id for ensemble in self.ensembles]
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise CorruptMetadataError(
                f"ledger {self.ledger_id}: ensembles must start at entry 0 and ascend, not {firsts}"
            )
        for ensemble in self.ensembles:
            if len(ensemble.bookies) != self.quorum.ensemble_size:
                raise CorruptMetadataError(
                    f"ledger {self.ledger_id}: an ensemble of {len(ensemble.bookies)} bookies, "
                    f"expected {self.quorum.ensemble_size}"
                )
            if len(set(ensemble.bookies)) != len(ensemble.bookies):
                raise CorruptMetadataError(
                    f"ledger {self.ledger_id}: one bookie twice in the ensemble at entry "
                    f"{ensemble.first_entry_id}"
                )

    def _check_cold(self) -> None:
        firsts = [each.first_entry_id for each in self.objects]
        is_whole = not firsts if self.last_entry_id < 0 else firsts[:1] == [0]
        if (
            not self.is_cold
            or self.layout != COLD_LAYOUT
            or self.ensembles
            or self.state is not LedgerState.CLOSED
            or not is_whole
            or firsts != sorted(set(firsts))
        ):
            raise CorruptMetadataError(
                f"ledger {self.ledger_id}: layout {self.layout}, state {self.state.name}, "
                f"{len(self.ensembles)} ensembles and objects from entries {firsts} on in "
                f"{self.folder!r}: expected a closed ledger without bookies, in layout "
                f"{COLD_LAYOUT}, whose objects begin at entry 0 and ascend"
            )

    @property
    def is_cold(self) -> bool:
        """Whether objects have its entries, and no bookie."""
        return bool(self.folder)

    @property
    def home(self) -> list[str]:
        """Where its last entries are, as text for people: names of bookies, or its folder."""
        return [self.folder] if self.is_cold else [each.name for each in self.last_ensemble.bookies]

    @property
    def copies_lacking(self) -> int:
        """How many copies each entry has fewer than wanted; also of an open ledger."""
        if self.wanted is None:
            return 0
        return max(self.wanted.write_quorum_size - self.quorum.write_quorum_size, 0)

    def ensemble_of(self, entry_id: int) -> Ensemble:
        """Return the ensemble that stores `entry_id`."""
        assert entry_id >= 0
        firsts = [ensemble.first_entry_id for ensemble in self.ensembles]
        return self.ensembles[bisect.bisect_right(firsts, entry_id) - 1]

    @property
    def last_ensemble(self) -> Ensemble:
        """The ensemble that new entries go to."""
        return self.ensembles[-1]

    def with_last_ensemble(
        self, *, first_entry_id: int, bookies: tuple[BookieId, ...]
    ) -> LedgerMetadata:
        """Return a copy whose entries from `first_entry_id` on are stored by `bookies`.

        An ensemble that starts at that very entry is replaced in place.
        """
        assert first_entry_id >= self.last_ensemble.first_entry_id
        kept = tuple(e for e in self.ensembles if e.first_entry_id < first_entry_id)
        return replace(self, ensembles=(*kept, Ensemble(first_entry_id, bookies)))

    def with_replaced(self, *, first_entry_id: int, old: BookieId, new: BookieId) -> LedgerMetadata:
        """Return a copy in which `new` replaces `old` in the ensemble that starts at that entry.

        Only the writer or the recoverer may change the last ensemble of a ledger that is not
        CLOSED: a recoverer reads only from the ensemble that it found, and a writer takes a last
        ensemble that differs from its own for a change that it made itself.
        """
        assert (
            self.state is LedgerState.CLOSED or first_entry_id != self.last_ensemble.first_entry_id
        )
        changed = tuple(
            replace(each, bookies=tuple(new if b == old else b for b in each.bookies))
            if each.first_entry_id == first_entry_id
            else each
            for each in self.ensembles
        )
        return replace(self, ensembles=changed)

    def with_joined(self, joined: Mapping[int, BookieId]) -> LedgerMetadata:
        """Return a copy in which one more bookie stores every entry, in each ensemble.

        `joined` has the joining bookie of each ensemble, by the ensemble's first entry.  This is
        sound if each member of an ensemble stores all of its entries (E = Qw) and the ledger is
        CLOSED.  No client writes or recovers it then, and each write set of the new quorum is again
        the whole ensemble, of which each member holds the entry.  A reader with older metadata
        finds its bookies unchanged.
        """
        assert self.state is LedgerState.CLOSED
        return replace(
            self,
            quorum=self.quorum.enlarged(),
            ensembles=tuple(
                replace(each, bookies=(*each.bookies, joined[each.first_entry_id]))
                for each in self.ensembles
            ),
        )

    def closed(self, *, last_entry_id: int, length_bytes: int) -> LedgerMetadata:
        """Return a copy in state CLOSED, ending with `last_entry_id` (-1: empty)."""
        assert self.state is not LedgerState.CLOSED
        return replace(
            self, state=LedgerState.CLOSED, last_entry_id=last_entry_id, length_bytes=length_bytes
        )


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """A request to all bookies to remove every byte of ledgers that are gone, made at `asked_ms`.

    The caller deleted its `ledgers` before, so bookies need no other proof of that.  It is a node
    below ``bookies/erasures``, with one node below it for each bookie that has answered.  It stays
    until its maker has all answers, so a bookie that is down answers later.
    """

    layout: int = LAYOUT
    ledgers: tuple[Count, ...]
    asked_ms: Count


class Erased(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a bookie, which has this incarnation; `waits` says why bytes are left."""

    layout: int = LAYOUT
    incarnation: str
    waits: str = ""


def write_set(quorum: QuorumConfig, entry_id: int) -> tuple[int, ...]:
    """Return the ensemble positions that store `entry_id` (round-robin striping)."""
    assert entry_id >= 0
    # As BookKeeper's RoundRobinDistributionSchedule stripes entries.
    return tuple((entry_id + i) % quorum.ensemble_size for i in range(quorum.write_quorum_size))


def is_covered(quorum: QuorumConfig, known: AbstractSet[int]) -> bool:
    """Return whether no write set can still reach an ack quorum without a position in `known`.

    `known` holds the positions that answered (yes or proven no).  In every write set fewer than Qa
    positions may be unknown.  This is the exact form (bookkeeper.md section 1.2).
    """
    return all(
        sum(position not in known for position in write_set(quorum, first)) < quorum.ack_quorum_size
        for first in range(quorum.ensemble_size)
    )


def first_followed(ledger_id: int, ensemble_size: int) -> int:
    """Return the position of the bookie that followers ask first; it gets each LAC first."""
    return ledger_id % ensemble_size


class BookieRegistration(ShownFields, msgspec.Struct, frozen=True, kw_only=True):
    """A live bookie's identity and its addresses (``host:port``), as it registered them.

    Entries are at `address`, the control service at `control_address`.

    `free_bytes` and `total_bytes` are those of its disk a while ago; a total of 0 means unknown.
    `session` is a new one for each registration.  Updates of a registration keep it.
    """

    layout: int = LAYOUT
    name: Text
    incarnation: Text
    address: Annotated[str, msgspec.Meta(pattern=r"^.+:[0-9]+$")]
    read_only: bool = False
    rack: Text = DEFAULT_RACK
    free_bytes: Count = 0
    total_bytes: Count = 0
    session: str = ""
    control_address: Annotated[str, msgspec.Meta(pattern=r"^(.+:[0-9]+)?$")] = ""
    release: Release = UNKNOWN_RELEASE

    @property
    def bookie(self) -> BookieId:
        """The bookie that registered."""
        return BookieId(self.name, self.incarnation)


class BookieCookie(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a bookie's data; it must be the same in every data directory and here.

    `life` counts the starts on this data, and `start` names the last one.  A folder that was copied
    before the last start does not count as the bookie.  Both are written to the folder first.
    """

    layout: int = LAYOUT
    name: Text
    incarnation: Text
    cluster_id: Text
    created_ms: Count
    life: Count = 0
    start: str = ""

    @property
    def bookie(self) -> BookieId:
        """The bookie that the data belongs to."""
        return BookieId(self.name, self.incarnation)
