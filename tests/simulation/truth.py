"""The promises of each bookie, kept outside of it; its later answers are judged by them.

A `BookieRecord` belongs to one identity (name and incarnation): a wiped bookie is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlcore.base.errors import DLError, NoSuchEntryError, NoSuchLedgerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlcore.base.ids import BookieId

Entry = tuple[int, int]
"""Ledger and entry."""


class InvariantViolatedError(AssertionError):
    """A promise was broken: which one, and for which ledger and entry."""

    def __init__(
        self,
        invariant: str,
        message: str,
        *,
        ledger_id: int | None = None,
        entry_id: int | None = None,
    ) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
        self.ledger_id = ledger_id
        self.entry_id = entry_id


class BookieRecord:
    """One identity's promises.

    `is_exempt` tells which ledgers it may forget (deleted ones, and closed ones that do not name
    it), `on_fenced` is called for every ledger that it fences.
    """

    def __init__(
        self,
        bookie: BookieId,
        *,
        is_exempt: Callable[[int], bool],
        on_fenced: Callable[[int], None],
        on_violation: Callable[[InvariantViolatedError], None],
    ) -> None:
        self.bookie = bookie
        self.is_lost = False
        """Its disk is gone for good."""
        self.acknowledged: set[Entry] = set()
        """The entries that it ever called durable or showed: it shows no others."""
        self.fenced: set[int] = set()
        """Ledgers for which it ever answered a fencing request."""
        self.denied: set[Entry] = set()
        """The entries that it called absent in an answer to a fencing request."""
        self.lacs: dict[int, int] = {}
        """The highest explicit LAC of each ledger that it ever called durable."""
        self.is_exempt = is_exempt
        self._on_fenced = on_fenced
        self._on_violation = on_violation

    def _violate(self, invariant: str, entry: Entry, message: str) -> None:
        ledger_id, entry_id = entry
        self._on_violation(
            InvariantViolatedError(
                invariant,
                f"{self.bookie.name} {message} {ledger_id}:{entry_id}",
                ledger_id=ledger_id,
                entry_id=entry_id,
            )
        )

    def on_added(self, entry: Entry, *, is_recovery: bool, was_fenced: bool) -> None:
        """It called an add durable; `was_fenced` is from when the add arrived."""
        self.acknowledged.add(entry)
        if is_recovery or self.is_exempt(entry[0]):
            return
        if was_fenced:
            self._violate("I5 NoAckAfterFence", entry, "fenced the ledger and then accepted")
        if entry in self.denied:
            self._violate("I5 NoAckAfterFence", entry, "denied for good and then accepted")

    def on_shown(self, ledger_id: int, entry_ids: Iterable[int]) -> None:
        """It sent these entries, or listed them."""
        self.acknowledged.update((ledger_id, entry_id) for entry_id in entry_ids)

    def on_fence_answered(self, ledger_id: int) -> None:
        """It answered a fencing request, with whatever but "unknown"."""
        if ledger_id not in self.fenced:
            self.fenced.add(ledger_id)
            self._on_fenced(ledger_id)

    def on_lac_written(self, ledger_id: int, last_add_confirmed: int) -> None:
        """It called an explicit LAC durable."""
        self.lacs[ledger_id] = max(self.lacs.get(ledger_id, -1), last_add_confirmed)

    def on_lac(self, ledger_id: int, last_add_confirmed: int, known: int) -> None:
        """It returned its LAC; `known` is what it had called durable when the request came."""
        if last_add_confirmed < known and not self.is_exempt(ledger_id):
            self._violate("I7 NoFalseNo", (ledger_id, known), "forgot the LAC")

    def on_collected(self, ledger_ids: Iterable[int]) -> None:
        """It gave up ledgers as garbage: it holds nothing of them any more."""
        for ledger_id in ledger_ids:
            if not self.is_exempt(ledger_id) and self.held(ledger_id):
                self._violate("I7 NoFalseNo", (ledger_id, 0), "collected what is its own,")
            self.acknowledged = {each for each in self.acknowledged if each[0] != ledger_id}
            self.lacs.pop(ledger_id, None)

    def held(self, ledger_id: int) -> frozenset[int]:
        """Return the entries of a ledger that it has acknowledged by now."""
        return frozenset(entry for ledger, entry in self.acknowledged if ledger == ledger_id)

    def on_denied(self, ledger_id: int, entry_id: int, held: bool, *, fence: bool) -> None:
        """It answered "no"; `held` is from before the request came."""
        if fence:
            self.denied.add((ledger_id, entry_id))
        if held and not self.is_exempt(ledger_id):
            self._violate("I7 NoFalseNo", (ledger_id, entry_id), "denied what it had acknowledged,")

    def on_ledger_denied(self, ledger_id: int, held: Iterable[int]) -> None:
        """It called the ledger unknown."""
        for entry_id in held:
            self.on_denied(ledger_id, entry_id, held=True, fence=False)

    def on_listed(self, ledger_id: int, held: Iterable[int], listed: Iterable[range]) -> None:
        """It listed what it holds of a ledger, or delivered all that it holds of a range."""
        ranges = list(listed)
        for entry_id in held:
            if self.is_exempt(ledger_id) or any(entry_id in each for each in ranges):
                continue
            self._violate(
                "I7 NoFalseNo", (ledger_id, entry_id), "left out what it had acknowledged,"
            )


def is_no(result: object) -> bool:
    """Return whether an answer is a proven no."""
    return isinstance(result, NoSuchEntryError | NoSuchLedgerError)


def is_known(result: object) -> bool:
    """Return whether an answer is yes or a proven no."""
    return is_no(result) or not isinstance(result, DLError)
