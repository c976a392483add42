"""Keys that change while a process uses them: in a file, or given by a server or a command.

Promises: a change of a file is seen when its keys are asked for.  A teller is asked every few
minutes, and sooner for a key that is not known, but not more often than every few seconds, however
many callers name such keys.  While new keys cannot be read, the present ones stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dlcore.base.access.files_in_use import FilesInUse
from dlcore.base.background import BackgroundTasks
from dlcore.base.clock import steady_s
from dlcore.base.config import MIB
from dlcore.base.errors import ConfigurationError, LogNotReadyError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

REFRESH_S = 300.0
"""A teller is asked for its keys after this time."""
AGAIN_S = 10.0
"""A teller is not asked more often than this."""
SIZE_BYTES_MAX = MIB
"""The largest size of keys, in a file or given otherwise."""


class NamedKeys(Protocol):
    """Keys that have names."""

    def __contains__(self, name: str, /) -> bool: ...

    def __len__(self) -> int: ...


KeysT = TypeVar("KeysT", bound=NamedKeys)
KeysT_co = TypeVar("KeysT_co", bound=NamedKeys, covariant=True)


class KeySource(Protocol[KeysT_co]):
    """Where keys come from."""

    async def keys_for(self, name: str | None) -> KeysT_co:
        """Return the keys, with that of a name if it exists.  Raises: LogNotReadyError."""
        ...

    async def aclose(self) -> None:
        """Stop looking for changes."""
        ...


class KeyFile(Generic[KeysT]):
    """Keys in a file, which others of this host must not be able to read if they are `secret`.

    Raises: ConfigurationError: it has none.
    """

    def __init__(
        self, path: str, parse: Callable[[bytes, str], KeysT], *, secret: bool = False
    ) -> None:
        self._path = Path(path)
        self._secret = secret
        self._in_use = FilesInUse(
            self._read, lambda content: parse(content, path), what="keys", where=path
        )

    async def keys_for(self, name: str | None) -> KeysT:
        """Return the keys; if the file has changed to what is no key file, the earlier ones."""
        self._in_use.look()
        return self._in_use.made

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                if self._secret and os.fstat(file.fileno()).st_mode & stat.S_IRWXO:
                    raise ConfigurationError(
                        f"keys in {self._path}: expected a file that only its owner and group may "
                        "read (chmod o= FILE)"
                    )
                content = file.read(SIZE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigurationError(
                f"keys in {self._path}: expected a readable file: {error}"
            ) from error
        if len(content) > SIZE_BYTES_MAX:
            raise ConfigurationError(
                f"keys in {self._path}: expected {SIZE_BYTES_MAX} bytes at most, the file has more"
            )
        return content

    async def aclose(self) -> None:
        """Do nothing: the file is not open."""


class KeyTeller(Generic[KeysT]):
    """Keys that a server or a command tells; `fetch` asks it, in a thread."""

    def __init__(
        self, where: str, fetch: Callable[[], bytes], parse: Callable[[bytes, str], KeysT]
    ) -> None:
        self._where = where
        self._fetch = fetch
        self._parse = parse
        self._keys: KeysT | None = None
        self._problem = "it has not answered yet"
        self._asked_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._tasks.start(self._refresh(), name=f"refreshing the keys of {where}")

    async def keys_for(self, name: str | None) -> KeysT:
        """Return the keys; for a name that is not among them, the teller is asked again.

        Raises: LogNotReadyError: it has given none yet.
        """
        if self._keys is None or (name is not None and name not in self._keys):
            await self._ask()
        if self._keys is None:
            raise LogNotReadyError(
                f"the keys are not known yet: {self._where} has not given them: {self._problem}",
                retry_after_s=1.0,
            )
        return self._keys

    async def _refresh(self) -> None:
        while True:
            await self._ask()
            await asyncio.sleep(REFRESH_S if self._keys is not None else AGAIN_S)

    async def _ask(self) -> None:
        """Ask the teller, or wait while it is being asked; do neither if it just was."""
        if self._asking is None:
            if self._asked_s and steady_s() - self._asked_s < AGAIN_S:
                return
            self._asked_s = steady_s()
            self._asking = self._tasks.start(self._update(), name=f"asking {self._where}")
        # A caller that is cancelled must not cancel what others wait for.
        await asyncio.wait([self._asking])

    async def _update(self) -> None:
        try:
            keys = self._parse(await asyncio.to_thread(self._fetch), self._where)
        except (OSError, ValueError, HTTPException, ConfigurationError) as error:
            self._problem = str(error)
            logger.warning(
                "%s tells no keys: %s; to do: correct where keys are asked for; newer ones are not "
                "known until then",
                self._where,
                error,
            )
        else:
            if self._keys is None:
                logger.info("%s tells %d keys", self._where, len(keys))
            self._keys = keys
        finally:
            self._asking = None

    async def aclose(self) -> None:
        """Ask no more."""
        await self._tasks.aclose()
