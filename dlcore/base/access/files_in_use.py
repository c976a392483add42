"""Files whose content a running process uses, as it changes: certificates and keys.

Promises: other content is seen at each look, also where size and time of a file are as before.  It
is used whole or not at all.  While it cannot be read, does not fit together, or is being written,
what was made of the content before stays in use, and the log says each reason once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, TypeVar

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ContentT = TypeVar("ContentT")
MadeT = TypeVar("MadeT")


class FilesInUse(Generic[ContentT, MadeT]):
    """The content of files, and `made`, which was made of it; not for several threads at once.

    Args:
        read: returns what the files hold now.
        make: makes of it what the process uses.
        what: names the content in the log, and `where` the files.

    Raises:
        ConfigurationError: by `read` or `make`, for the first content.
    """

    def __init__(
        self,
        read: Callable[[], ContentT],
        make: Callable[[ContentT], MadeT],
        *,
        what: str,
        where: object,
    ) -> None:
        self._read = read
        self._make = make
        self._what = what
        self._where = where
        self._logged = ""
        self.content = read()
        self.made = make(self.content)

    def look(self) -> bool:
        """Use what the files hold now; return whether that is other content than before."""
        try:
            content = self._read()
            if content == self.content:
                self._logged = ""
                return False
            made = self._make(content)
            if self._read() != content:
                return False  # they are being written, and the next look will see it
        except ConfigurationError as error:
            if str(error) != self._logged:
                logger.warning(
                    "the %s stay as they were: %s; to do: correct the files; until then the "
                    "earlier ones are in use, and newer ones are not known",
                    self._what,
                    error,
                )
            self._logged = str(error)
            return False
        self.content, self.made, self._logged = content, made, ""
        logger.info("the %s were read again: %s", self._what, self._where)
        return True
