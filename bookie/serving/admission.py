"""The admission of clients: who is let in, and with which rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dlcore.base.access.client_names import names_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from bookie.serving.access import Access
    from dlcore.base.access.client_names import ClientNames


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
