"""The logs that writers name, with their heads and schemas, in as few round trips as possible."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dlcore.base.errors import LogNotFoundError
from dlcore.base.ids import validate_log_names
from dlcore.log.metadata.nodes import head_of, schema_of
from dlcore.log.metadata.values import LogMetadata, VersionedHead
from dlcore.metadata.stored import decode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import TypeAlias

    from dlcore.log.typed.schema import LogSchema
    from dlcore.metadata.paths import NamespacePaths
    from dlcore.metadata.port import Versioned

    Target: TypeAlias = tuple[VersionedHead, LogSchema | None]
    Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Sequence[Versioned | None]]]

_KNOWN_MAX = 1000
"""Most logs whose metadata are kept as a guess to which log a name leads."""


def existing(paths: Sequence[str], nodes: Sequence[Versioned | None]) -> list[LogMetadata]:
    """Return the logs whose names have these paths, from the first of the nodes."""
    return [
        decode(LogMetadata, node.value, source=path)
        for path, node in zip(paths, nodes, strict=False)
        if node is not None
    ]


class TargetLookup:
    """Finds the heads and schemas of logs by their names, and remembers which log a name led to.

    `read` returns fresh nodes of paths in one round trip, None for those that are not there.
    """

    def __init__(self, paths: NamespacePaths, read: Read) -> None:
        self._paths = paths
        self._read = read
        self._known: dict[str, LogMetadata] = {}
        """The log to which each of the last names led, the latest last."""

    async def find(self, names: Sequence[str]) -> dict[str, Target]:
        """Return head and schema of those of the logs that exist.

        Names lead to logs, and logs to heads: two round trips.  Heads of the logs that the names
        led to before come with the names, in one: they are as fresh, and count if the names still
        lead there.
        """
        paths = [self._paths.log(name) for name in validate_log_names(names)]
        guesses = {name: self._known[name] for name in names if name in self._known}
        nodes = await self._read([*paths, *self._paths_of(guesses)])
        logs = {log.name: log for log in existing(paths, nodes)}
        found = {
            name: target
            for name, target in self._among(guesses, nodes[len(paths) :]).items()
            if guesses[name] == logs.get(name)
        }
        others = {name: log for name, log in logs.items() if log != guesses.get(name)}
        if others:
            found |= self._among(others, await self._read(self._paths_of(others)))
        self._remember(names, logs)
        return {name: found[name] for name in logs if name in found}

    def _paths_of(self, logs: Mapping[str, LogMetadata]) -> list[str]:
        heads = [self._paths.log_of(log.log_id).head for log in logs.values()]
        typed = [log for log in logs.values() if log.typed]
        return [*heads, *(self._paths.log_of(log.log_id).schema for log in typed)]

    def _among(
        self, logs: Mapping[str, LogMetadata], nodes: Sequence[Versioned | None]
    ) -> dict[str, Target]:
        """Return what is in the nodes of `_paths_of`, without logs that were deleted."""
        of_typed = iter(nodes[len(logs) :])
        found = {}
        for (name, log), node in zip(logs.items(), nodes, strict=False):
            schema = next(of_typed) if log.typed else None
            with contextlib.suppress(LogNotFoundError):
                at = head_of(self._paths, log, node)
                found[name] = at, schema_of(self._paths, log, schema) if log.typed else None
        return found

    def _remember(self, names: Sequence[str], logs: Mapping[str, LogMetadata]) -> None:
        for name in names:
            self._known.pop(name, None)
        self._known.update(logs)
        for name in [*self._known][:-_KNOWN_MAX]:
            del self._known[name]
