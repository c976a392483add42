"""The state of one ledger beside its entries: fence, LAC, files."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from dlcore.base.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from bookie.files.index import LedgerSummary

_ID_MAX = 2**63 - 1
_SPAN_FIELDS = 4
"""Values per file: its number, the ledger's first and last entry in it, and the bytes of its
entries."""


class LedgerState:
    """Fence, last add confirmed and files of one ledger.

    `fenced` is set when the fence is accepted, so that no later add is accepted.
    `is_fence_durable` is set once the fence's record is on disk; only then may the fence be
    reported to a client.
    """

    __slots__ = (
        "_spans",
        "fenced",
        "is_deleted",
        "is_fence_durable",
        "last_add_confirmed",
        "last_entry_id",
    )

    def __init__(self) -> None:
        self.fenced = False
        self.is_fence_durable = False
        self.is_deleted = False
        """The ledger's metadata is proven to be gone.  Its files are dropped when no other ledger
        needs them."""
        self.last_add_confirmed = -1
        self.last_entry_id = -1
        """Highest entry accepted; an add of a higher entry cannot be a repetition."""
        self._spans: array[int] = array("q")

    def note_sealed(self, number: int, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in sealed file `number`."""
        self._spans.extend(
            (number, summary.first_entry_id, summary.last_entry_id, summary.entry_bytes)
        )
        self.note_summary(summary)

    def note_summary(self, summary: LedgerSummary) -> None:
        """Add the summary of the ledger in a replayed file."""
        self.note_entry(summary.last_entry_id, summary.last_add_confirmed)
        if summary.fenced:
            self.fenced = True
            self.is_fence_durable = True

    def note_entry(self, entry_id: int, last_add_confirmed: int) -> bool:
        """Note an accepted entry and the LAC it carries; return whether the LAC moved."""
        self.last_entry_id = max(self.last_entry_id, entry_id)
        return self.note_lac(last_add_confirmed)

    def note_lac(self, last_add_confirmed: int) -> bool:
        """Raise the last add confirmed; return whether it moved."""
        if last_add_confirmed <= self.last_add_confirmed:
            return False
        self.last_add_confirmed = last_add_confirmed
        return True

    def accepts(self, *, is_recovery: bool) -> bool:
        """Return whether an add is still allowed."""
        return is_recovery or not self.fenced

    def forget_files(self, numbers: Container[int]) -> None:
        """Forget deleted files."""
        kept: array[int] = array("q")
        for span in self._iterate():
            if span[0] not in numbers:
                kept.extend(span)
        self._spans = kept

    @property
    def has_files(self) -> bool:
        """Whether any sealed file has records of the ledger."""
        return len(self._spans) > 0

    def files(self) -> Iterator[int]:
        """Return the sealed files that have records of the ledger."""
        return iter(self._spans[::_SPAN_FIELDS])

    def file_bytes(self) -> Iterator[tuple[int, int]]:
        """Return (file, bytes of the ledger's entry records in it) of its sealed files."""
        return zip(self._spans[::_SPAN_FIELDS], self._spans[3::_SPAN_FIELDS], strict=True)

    def files_between(self, first_entry_id: int, last_entry_id: int) -> list[tuple[int, int]]:
        """Return (lowest entry id, file) of sealed files that may hold entries of the range."""
        return [
            (first, number)
            for number, first, last, _ in self._iterate()
            if first <= last_entry_id and last >= first_entry_id
        ]

    def _iterate(self) -> Iterator[tuple[int, int, int, int]]:
        spans = self._spans
        return zip(
            spans[::_SPAN_FIELDS],
            spans[1::_SPAN_FIELDS],
            spans[2::_SPAN_FIELDS],
            spans[3::_SPAN_FIELDS],
            strict=True,
        )


def note_sealed(
    ledgers: dict[int, LedgerState], number: int, summaries: Iterable[LedgerSummary]
) -> None:
    """Add the summaries of the ledgers in sealed file `number`."""
    for summary in summaries:
        state = ledgers.get(summary.ledger_id)
        if state is None:
            state = ledgers[summary.ledger_id] = LedgerState()
        state.note_sealed(number, summary)


def check_id(kind: str, value: int) -> None:
    """Raise `BadRequestError` for a ledger or entry id out of range; `kind` names it."""
    if not 0 <= value <= _ID_MAX:
        raise BadRequestError(f"{kind} id {value}: expected 0 … {_ID_MAX}")
