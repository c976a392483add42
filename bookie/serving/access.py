"""The rights of a client: those of its certificate, or what its capabilities let it do.

A session of a client without a certificate asks for each request.  The answer to one without a
right says which is missing, and why the capability that was presented does not give it.

Invariants:

* A request is let through only if one capability, valid now, has all of its entries and rights.
* No large payload is received from a client that may add nothing.
* Capabilities that do not verify leave nothing behind except the reason of the last one.  After
  `_REFUSED_MAX` of them the connection ends: a stranger pays a handshake for a few tries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.access.capability import EVERYTHING, Kept, LedgerRight
from dlcore.base.access.client_names import names_in
from dlcore.base.errors import AccessDeniedError, BookieAccessDeniedError
from dlcore.wire.capabilities import reach_of, reach_of_add, reach_of_adds

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlcore.base.access.capability import Capability, Reach, Verifier
    from dlcore.base.access.client_names import ClientNames
    from dlcore.wire.messages import Add, Request


_REFUSED_MAX = 8
"""Most refused capabilities of a connection; verifying one takes about 0.1 ms."""


class Access:
    """The rights of one connection, whose client has no certificate."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._kept = Kept()
        self._everything: Capability | None = None
        self._may_add = False
        self._refused = 0
        self._reason = "the connection has no certificate, and presented no capability for it"

    def present(self, token: bytes) -> None:
        """Take a capability.

        Raises:
            BookieAccessDeniedError: it is refused, and so were too many others.
        """
        try:
            # One presented again is not verified again; its time is checked at each request.
            capability = self._kept.get(token) or self._verifier.verify(token)
        except AccessDeniedError as error:
            self._reason = f"the last capability was refused: {error}"
            self._refused += 1
            if self._refused >= _REFUSED_MAX:
                raise BookieAccessDeniedError(
                    f"{self._refused} capabilities of the connection were refused: {error}"
                ) from error
        else:
            # Only now: what does not verify must not take memory.
            self._kept.keep(token, capability)
            self._may_add |= any(grant.rights & LedgerRight.ADD for grant in capability.grants)
            if capability.grants == (EVERYTHING,):
                self._everything = capability

    def has_all(self) -> bool:
        """Return whether a capability for everything is valid: no request has to be looked at.

        Clients that sign for themselves add with one, and here each step of Python counts.
        """
        return self._everything is not None and self._verifier.is_valid(self._everything)

    def require_right_to_add(self) -> None:
        """Raise BookieAccessDeniedError if no capability had a right to add anything.

        It is asked before a large payload takes memory, of which all connections share one bound.
        """
        if not self._may_add:
            raise BookieAccessDeniedError(f"no right to ADD: {self._reason}")

    def judge(self, request: Request) -> BookieAccessDeniedError | None:
        """Return why a request has no right; None if it has."""
        return self._judge(reach_of(request))

    def may_add_all(self, add: Add) -> bool:
        """Return whether all adds of a message have the right, as nearly all messages have.

        It takes no step for each of them; False also for adds of several ledgers.
        """
        whole = (
            reach_of_adds(add.frames, is_recovery=add.is_recovery)
            if len(add.frames) > 1
            else reach_of_add(add.frames[0], is_recovery=add.is_recovery)
        )
        return whole is not None and self._judge(whole) is None

    def judge_adds(self, add: Add) -> dict[int, BookieAccessDeniedError]:
        """Return why adds have no right, by their number in the message; each is looked at."""
        found = (
            (number, self._judge(reach_of_add(frame, is_recovery=add.is_recovery)))
            for number, frame in enumerate(add.frames)
        )
        return {number: error for number, error in found if error is not None}

    def _judge(self, reach: Reach) -> BookieAccessDeniedError | None:
        reason = self._reason
        for _, capability in self._kept:
            grant = capability.grant_for(reach)
            if grant is None:
                continue
            if grant.rights & reach.rights != reach.rights:
                reason = f"the capability gives {_names(grant.rights)}"
                continue
            try:
                self._verifier.require_valid(capability)
            except AccessDeniedError as error:
                reason = f"of the capability: {error}"
                continue
            return None
        entries = "" if reach.last_entry_id < 0 else f" from entry {reach.first_entry_id} on"
        return BookieAccessDeniedError(
            f"no right to {_names(reach.rights)} in ledger {reach.ledger_id}{entries}: {reason}"
        )


def _names(rights: int) -> str:
    return " and ".join(str(each.name) for each in LedgerRight if each & rights)


class Admitted(NamedTuple):
    """The judgement of a client."""

    access: Access | None
    """The rights of its connection; None: it may do everything."""
    refusal: str | None
    """Why it is not let in; None: it is."""


class Admission:
    """Judges each client by its certificate, when its connection is made.

    A client without a certificate has the rights of the capabilities that it presents, if the
    bookie takes capabilities.  Any other client is let in by the names in its certificate.

    Args:
        client_names: the names of clients that are let in.
        new_access: returns the rights of a connection without a certificate; None: it may do
            everything, if its name is let in.
    """

    def __init__(
        self, client_names: ClientNames, new_access: Callable[[], Access] | None = None
    ) -> None:
        self._client_names = client_names
        self._new_access = new_access

    def admit(self, certificate: Any) -> Admitted:
        """Judge a client by its certificate in the form of `ssl`; None: it has none."""
        if self._new_access is not None and not certificate:
            return Admitted(self._new_access(), None)
        return Admitted(None, self._client_names.refusal(names_in(certificate)))
