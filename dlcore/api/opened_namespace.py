"""A namespace that was opened."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from dlcore.base.closing import AsyncClosing
from dlcore.base.errors import UnsupportedError

if TYPE_CHECKING:
    from typing import NoReturn


class OpenedNamespace(AsyncClosing):
    """The base of all that a namespace offers."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """The URI that it was opened with."""

    def _unsupported(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"{self.uri}: proxies do not offer `{operation}`; open the namespace directly, as "
            "distributedlog://…"
        )
