"""The rights that a call needs, found in its request.

A request names a log, and may have the id that it expects of it.  An id is enough to reach a log,
whatever the name is that the request has.  Therefore the server looks up the present name of a log
with an id, and the caller needs the right on both names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlcore.base.access.rights import Caller, Right


class Need(NamedTuple):
    """A right on a log, or, if that is None, on the namespace."""

    right: Right
    log: str | None = None
    log_id: str | None = None


class Pass(Protocol):
    """A call behind the gate of a server."""

    @property
    def caller(self) -> Caller:
        """The caller."""
        ...

    async def require(self, needs: Sequence[Need], *, entrance: str | None = None) -> None:
        """Require what a request of the call needs; `entrance` names a part of the method.

        Raises: AccessDeniedError; InvalidLogNameError; LogNotReadyError: the rules are not known
            yet, or the audit log cannot be written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of one kind of requests."""

    text: str
    """The needs in words, for the documentation."""
    of: Callable[[Any], Sequence[Need]]
    """Returns the needs of a request."""


NOTHING = Needs("none", lambda _: ())
"""Every caller may do it."""


def on_log(right: Right) -> Needs:
    """Return the needs of requests about one log."""
    return Needs(
        f"{right.value} on the log",
        lambda request: (Need(right, request.log, getattr(request, "log_id", None)),),
    )


def on_logs(right: Right) -> Needs:
    """Return the needs of requests about several logs by name."""
    return Needs(
        f"{right.value} on each log",
        lambda request: [Need(right, name) for name in request.logs],
    )


def on_namespace(right: Right) -> Needs:
    """Return the needs of requests that are about no single log."""
    return Needs(f"{right.value} on the namespace", lambda _: (Need(right),))
