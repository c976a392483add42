"""Judgement of a simulated bookie's ledger ids: it may refuse none whose ledger was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.membership.given_ids import GivenIds
from dlcore.base.errors import BadRequestError
from dlcore.ledger.metadata.store import LedgerStore

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from dlcore.metadata.memory import MemoryTree
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import MetadataStore


class JudgedIds(GivenIds):
    """Asks by a bookie's own session; `tree` is what is true at any time."""

    def __init__(
        self,
        session: MetadataStore,
        paths: NamespacePaths,
        tree: MemoryTree,
        on_false_no: Callable[[str], None],
    ) -> None:
        super().__init__(LedgerStore(session, paths).next_ledger_id)
        self._paths = paths
        self._tree = tree
        self._on_false_no = on_false_no

    def ask(self, ledger_id: int) -> asyncio.Future[None]:
        """Ask, and judge a refusal."""
        was_made = self._tree._find(self._paths.ledger(ledger_id)) is not None

        def judge(answer: asyncio.Future[None]) -> None:
            if not answer.cancelled() and isinstance(error := answer.exception(), BadRequestError):
                self._on_false_no(f"refused a new ledger: {error}")

        answer = super().ask(ledger_id)
        if was_made:
            answer.add_done_callback(judge)
        return answer
