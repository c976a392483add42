"""The names of machines that a server lets in, by their certificates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATTERN = re.compile(r"(\*\.)?[^\s*,]+")


@dataclass(frozen=True, slots=True)
class ClientNames:
    """The names in `subjectAltName` that are let in; with none, every certificate is.

    A pattern is a whole name, or ``*.suffix`` for all names that end in ``.suffix``.  Upper and
    lower case are the same.  The common name does not count: authorities seldom check it.
    """

    patterns: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> ClientNames:
        """Read patterns between commas.  Raises: ConfigurationError: one is none."""
        patterns = tuple(each.strip().lower() for each in text.split(",")) if text else ()
        for pattern in patterns:
            if _PATTERN.fullmatch(pattern) is None:
                raise ConfigurationError(
                    f"tls_client_names={text!r}: {pattern!r} is no name: expected names in "
                    "subjectAltName between commas, whole or as *.suffix"
                )
        return cls(patterns)

    def refusal(self, names: Sequence[str]) -> str | None:
        """Return why a client with these names is not let in; None: it is."""
        if not self.patterns or any(self._has(name.lower()) for name in names):
            return None
        return (
            f"a client whose certificate has the names {', '.join(names) or 'none'} in "
            f"subjectAltName is not let in: expected one of tls_client_names="
            f"{','.join(self.patterns)!r}"
        )

    def _has(self, name: str) -> bool:
        return any(
            name.endswith(each[1:]) if each.startswith("*.") else name == each
            for each in self.patterns
        )


EVERY_CLIENT = ClientNames()


def names_in(certificate: Any) -> list[str]:
    """Return the names in `subjectAltName` of a certificate in the form of `ssl`."""
    return [str(name) for _, name in (certificate or {}).get("subjectAltName", ())]
