"""The rules of access that a namespace stores, and that proxies follow."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.api.opened_namespace import OpenedNamespace

if TYPE_CHECKING:
    from collections.abc import Sequence


class AccessRules(OpenedNamespace):
    """The rules that say what callers of proxies may do."""

    @abstractmethod
    async def get_access_rules(self) -> list[str]:
        """Return the rules of access, as texts, in the order in which they were added.

        A rule says what callers of proxies may do: docs/access.md.  Without any they may do
        everything.  Clients that reach the metadata store and the bookies are bound by none.

        Raises: MetadataError; AccessDeniedError: over proxies it needs to manage the namespace.
        """

    @abstractmethod
    async def change_access_rules(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> list[str]:
        """Remove rules, then add others, in one step; return all rules.

        Proxies follow within seconds, and end streams that lost their right.

        Args:
            add: texts of rules, as ``allow user:alice read,append prefix pay/``.
            remove: texts of rules that are there.

        Raises:
            ConfigurationError: a text is no rule, one to remove is not there, or there are too
                many.
            MetadataError; AccessDeniedError: as for `get_access_rules`.
        """
