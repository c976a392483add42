"""The rules of access, in the metadata store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from dlcore.api.access import AccessRules
from dlcore.backends.direct.opened_namespace import DirectOpenedNamespace
from dlcore.base.access.rights import Rule, require_present, texts_of
from dlcore.log.metadata.store import persistently

if TYPE_CHECKING:
    from collections.abc import Sequence


class DirectAccessRules(DirectOpenedNamespace, AccessRules):
    """The rules of one namespace."""

    @override
    async def get_access_rules(self) -> list[str]:
        self._require_open()
        return list(map(str, await persistently(self.access_rules.read)))

    @override
    async def change_access_rules(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        added, removed = texts_of(add), texts_of(remove)
        require_present(await self.get_access_rules(), removed)
        rules = await self.access_rules.change(
            add=map(Rule.parse, added), remove=map(Rule.parse, removed)
        )
        return list(map(str, rules))
