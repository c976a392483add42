"""Judgement of a simulated bookie's ledger ids: it may refuse none whose ledger was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bookie.membership.given_ids import GivenIds
from dlcore.errors import BadRequestError
from dlcore.ledger.metadata.store import LedgerStore

if TYPE_CHECKING:
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

    async def check(self, ledger_id: int) -> None:
        """Check, and judge a refusal."""
        was_made = self._tree._find(self._paths.ledger(ledger_id)) is not None
        try:
            await super().check(ledger_id)
        except BadRequestError as error:
            if was_made:
                self._on_false_no(f"refused a new ledger: {error}")
            raise
