"""The master keys of encryption at rest that a process uses, as they change.

Promises: a key that an entry names, and that is not known, is looked for once more.  Beside that
the file is looked at every few seconds, and a command is run again every few minutes: so a new
first key encrypts from then on.  While new keys cannot be read, the present ones stay.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from functools import partial
from typing import TYPE_CHECKING

from dlcore.base.access.key_sources import SIZE_BYTES_MAX, KeyFile, KeySource, KeyTeller
from dlcore.base.access.master_keys import MasterKeys
from dlcore.base.background import BackgroundTasks
from dlcore.base.errors import ConfigurationError, LogNotReadyError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND_PREFIX = "command:"
LOOK_S = 2.0
"""Time between two looks at a file."""
_COMMAND_S = 30.0
SALT_BYTES = 16


def _random_salt() -> bytes:
    return os.urandom(SALT_BYTES)


class EncryptionKeys:
    """The keys of an open namespace; used on one event loop.

    Args:
        known: the present keys.
        source: tells others when they change; None: they stay.
        new_salt: returns `SALT_BYTES` bytes that no other call returns, in any process.
    """

    def __init__(
        self,
        known: MasterKeys,
        source: KeySource[MasterKeys] | None = None,
        *,
        new_salt: Callable[[], bytes] = _random_salt,
    ) -> None:
        self.known = known
        self.new_salt = new_salt
        self._source = source
        self._tasks = BackgroundTasks()
        if source is not None:
            self._tasks.start(self._watch(source), name="watching the encryption keys")

    @classmethod
    async def open(cls, where: str) -> EncryptionKeys:
        """Read the keys in a file, or those that ``command:…`` prints.

        Raises:
            ConfigurationError: there are none, or others of this host can read the file.
        """
        source = _source_of(where)
        try:
            return cls(await source.keys_for(None), source)
        except LogNotReadyError as error:
            await source.aclose()
            raise ConfigurationError(f"encryption_keys={where!r}: {error}") from error
        except BaseException:
            await source.aclose()
            raise

    async def learn(self, name: str) -> None:
        """Look for a key of this name, unless it is known."""
        if name not in self.known and self._source is not None:
            self.known = await self._source.keys_for(name)

    async def _watch(self, source: KeySource[MasterKeys]) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.known = await source.keys_for(None)

    async def aclose(self) -> None:
        """Look for changes no more."""
        await self._tasks.aclose()
        if self._source is not None:
            await self._source.aclose()


def _source_of(where: str) -> KeySource[MasterKeys]:
    if where.startswith(COMMAND_PREFIX):
        command = shlex.split(where.removeprefix(COMMAND_PREFIX))
        return KeyTeller(where, partial(_output_of, command), MasterKeys.parse)
    return KeyFile(where, MasterKeys.parse, secret=True)


def _output_of(command: list[str]) -> bytes:
    """Return what a command prints.  Raises: OSError: it fails, is late, or prints too much."""
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"no answer within {_COMMAND_S:g} s") from error
    if ran.returncode:
        reason = ran.stderr.decode(errors="replace").strip()[-500:]
        raise OSError(f"exit code {ran.returncode}: {reason}")
    if len(ran.stdout) > SIZE_BYTES_MAX:
        raise OSError(f"it prints more than {SIZE_BYTES_MAX} bytes")
    return ran.stdout
