"""Judgement of a simulated bookie's ledger ids: it may refuse none whose ledger was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.membership.given_ids import GivenIds, Need
from dlcore.base.errors import BadRequestError, LedgerFencedError
from dlcore.ledger.metadata.store import LedgerStore
from tests.simulation.stored_ledger import read_ledger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore
    from tests.fixtures.simulated_store import SimulatedTree


class JudgedIds(GivenIds):
    """Asks by a bookie's own session; `tree` is what is true at any time."""

    def __init__(
        self,
        session: MetadataStore,
        paths: NamespacePaths,
        tree: SimulatedTree,
        on_false_no: Callable[[str], None],
    ) -> None:
        super().__init__(LedgerStore(session, paths))
        self._paths = paths
        self._tree = tree
        self._on_false_no = on_false_no

    def ask(self, ledger_id: int, need: Need) -> asyncio.Future[None]:
        """Ask, and judge a refusal."""
        was_made, was_fit = self._is_made(ledger_id), self._is_fit(ledger_id, need)

        def judge(answer: asyncio.Future[None]) -> None:
            error = None if answer.cancelled() else answer.exception()
            if was_made and isinstance(error, BadRequestError):
                self._on_false_no(f"refused a new ledger: {error}")
            is_fit = was_fit and self._is_fit(ledger_id, need)
            if is_fit and isinstance(error, LedgerFencedError):
                self._on_false_no(f"refused a ledger that is not over: {error}")

        answer = super().ask(ledger_id, need)
        answer.add_done_callback(judge)
        return answer

    def _is_made(self, ledger_id: int) -> bool:
        return self._tree._find(self._paths.ledger(ledger_id)) is not None

    def _is_fit(self, ledger_id: int, need: Need) -> bool:
        node = self._tree._find(self._paths.ledger(ledger_id))
        return node is not None and (need is not Need.OPEN or read_ledger(node.value).is_open)
