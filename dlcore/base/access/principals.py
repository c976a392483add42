"""Principals: the names by which rules, quotas and the audit log know callers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dlcore.base.errors import ConfigurationError

NAME_LENGTH_MAX = 256


class Proof(Enum):
    """How a server knows a caller."""

    TOKEN = "user"
    """By a token that an issuer signed."""
    CERTIFICATE = "certificate"
    """By the client certificate of the connection."""
    NONE = "anonymous"
    """Not at all."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller: how it proved who it is, and its name by that proof.

    The text form is ``user:alice``, ``certificate:ingest.example`` or ``anonymous``.  Names of
    different proofs never match: the holder of a certificate of some name is not the user of that
    name.
    """

    proof: Proof
    name: str = ""

    def __post_init__(self) -> None:
        if bool(self.name) == (self.proof is Proof.NONE):
            raise ConfigurationError(
                f"principal {self.name!r} with the proof {self.proof.value}: expected a name, and "
                "none for anonymous"
            )
        if len(self.name) > NAME_LENGTH_MAX or not self.name.isprintable():
            raise ConfigurationError(
                f"principal {self.name[:NAME_LENGTH_MAX]!r}: expected at most {NAME_LENGTH_MAX} "
                "printable characters"
            )

    def __str__(self) -> str:
        return self.proof.value if self.proof is Proof.NONE else f"{self.proof.value}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Principal:
        """Read the text form.  Raises: ConfigurationError."""
        proof, _, name = text.partition(":")
        try:
            return cls(Proof(proof), name)
        except (ValueError, ConfigurationError) as error:
            raise ConfigurationError(
                f"principal {text!r}: expected user:NAME, certificate:NAME or anonymous"
            ) from error


ANONYMOUS = Principal(Proof.NONE)


@dataclass(frozen=True, slots=True)
class Caller:
    """The principal of a call, and where it comes from."""

    principal: Principal
    address: str
    """The host of its connection."""
    expires_at: float | None = None
    """The time in seconds since 1970 when its proof ends; None: not while its connection is open.
    """
    forwarder: str | None = None
    """The proxy that the call says it comes from, if that was not proven: then another may call."""

    @property
    def account(self) -> str:
        """The name by which its use is counted: all anonymous callers of a host are one."""
        if self.principal.proof is Proof.NONE:
            return f"host {self.address!r}"
        return str(self.principal)
