"""Rights: the names of callers, the rules of a namespace, and what these say of a caller's demand.

Rules, quotas and the audit log know a caller by its principal.  A rule gives rights to a principal,
or denies them, on the namespace, on the logs whose names begin with a prefix, or on one log.
Promises:

* While a namespace has no rule, every caller may do everything.
* Once it has one, a demand that no rule allows is refused.
* A rule that denies is stronger than any number of rules that allow.
* A rule on the namespace holds for all its logs as well.
* Each of the rights to read, append, truncate and manage includes the right to describe.  No other
  right includes one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from dlcore.base.errors import ConfigurationError
from dlcore.base.ids import name_prefix, validate_log_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


RULES_MAX = 1000
"""Most rules of a namespace: they are one value of the metadata store, and stay below its size."""
EVERYBODY = "*"


class Right(Enum):
    """The kinds of rights."""

    DESCRIBE = "describe"
    """See that a log exists, its settings, schema and positions."""
    READ = "read"
    """Read records, and move the positions of subscriptions."""
    APPEND = "append"
    """Append records."""
    TRUNCATE = "truncate"
    """Drop the oldest records."""
    MANAGE = "manage"
    """Create, change, seal, rename and delete logs; on the namespace: its proxies and rules."""


class Scope(Enum):
    """The extent of a rule."""

    NAMESPACE = "namespace"
    PREFIX = "prefix"
    LOG = "log"


FORM = (
    "allow or deny, a principal (user:NAME, certificate:NAME, anonymous or *), rights joined by "
    "commas (describe, read, append, truncate, manage), and namespace, prefix START or log NAME"
)
_RULE = re.compile(
    r"(?P<verb>allow|deny) (?P<principal>.+?) (?P<rights>\S+)"
    r" (?:(?P<scope>prefix|log) (?P<name>\S+)|namespace)"
)


class Demand(NamedTuple):
    """A right that a call needs, on a log or, if that is None, on the namespace."""

    right: Right
    log: str | None = None

    def __str__(self) -> str:
        return f"{self.right.value} {'the namespace' if self.log is None else f'log {self.log!r}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.  Its text is the form in which it is stored, shown and given.

        allow user:alice read,append prefix pay/
        deny * read log pay/secret
        allow certificate:Night Shift manage namespace

    Raises:
        ConfigurationError: the principal is none, there is no right, or the name does not fit.
    """

    principal: str
    """Text of a `Principal`; ``*`` for everybody; ``user:*`` and ``certificate:*`` for all of a
    proof."""
    rights: tuple[Right, ...]
    scope: Scope
    name: str = ""
    """The log's name or the prefix; empty for the namespace."""
    deny: bool = False

    def __post_init__(self) -> None:
        if self.principal != EVERYBODY:
            Principal.parse(self.principal)
        if not self.rights or len(set(self.rights)) < len(self.rights):
            shown = ",".join(right.value for right in self.rights)
            raise ConfigurationError(f"rights={shown!r}: expected one or more different rights")
        if self.scope is Scope.NAMESPACE:
            is_right = not self.name
        elif self.scope is Scope.LOG:
            is_right = validate_log_name(self.name) == self.name
        else:
            is_right = bool(self.name) and name_prefix(self.name) == self.name
        if not is_right:
            raise ConfigurationError(
                f"name={self.name!r} of a rule on a {self.scope.value}: expected the name of a log "
                "or the start of names, without a leading slash, and none for the namespace"
            )

    def __str__(self) -> str:
        verb = "deny" if self.deny else "allow"
        rights = ",".join(right.value for right in self.rights)
        return f"{verb} {self.principal} {rights} {self.scope.value} {self.name}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read the text of a rule.  Raises: ConfigurationError."""
        match = _RULE.fullmatch(str(text))
        if match is None:
            raise ConfigurationError(f"rule {text!r}: expected {FORM}")
        try:
            return cls(
                principal=match["principal"],
                rights=tuple(Right(each) for each in match["rights"].split(",")),
                scope=Scope(match["scope"] or "namespace"),
                name=match["name"] or "",
                deny=match["verb"] == "deny",
            )
        except ValueError as error:
            raise ConfigurationError(f"rule {text!r}: {error}: expected {FORM}") from error

    def covers(self, log: str | None) -> bool:
        """Return whether the rule is about a log, or with None about the namespace itself."""
        if self.scope is Scope.NAMESPACE:
            return True
        if self.scope is Scope.LOG:
            return log == self.name
        return log is not None and log.startswith(self.name)


class Verdict(Enum):
    """The answer to a demand."""

    ALLOWED = "allowed"
    DENIED = "a rule denies it"
    NOT_ALLOWED = "no rule allows it"


class Rules:
    """The rules of a namespace.

    Raises:
        ConfigurationError: there are too many.
    """

    def __init__(
        self, rules: Iterable[Rule] = (), *, super_users: frozenset[str] = frozenset()
    ) -> None:
        self.all = tuple(rules)
        """The rules, in the order in which they were added."""
        if len(self.all) > RULES_MAX:
            raise ConfigurationError(
                f"{len(self.all)} rules: expected at most {RULES_MAX}; use prefixes, or one name "
                "for callers with the same rights"
            )
        self._super_users = super_users
        self._by_principal: dict[str, list[Rule]] = {}
        for rule in self.all:
            self._by_principal.setdefault(rule.principal, []).append(rule)

    def judge(self, principal: Principal, demand: Demand) -> Verdict:
        """Return whether a caller may do something, and why not."""
        if not self.all or str(principal) in self._super_users:
            return Verdict.ALLOWED
        found = [rule for rule in self._rules_of(principal) if rule.covers(demand.log)]
        if any(rule.deny and demand.right in rule.rights for rule in found):
            return Verdict.DENIED
        # With any right on a log its name is known already.
        includes = demand.right is Right.DESCRIBE
        if any(not rule.deny and (includes or demand.right in rule.rights) for rule in found):
            return Verdict.ALLOWED
        return Verdict.NOT_ALLOWED

    def _rules_of(self, principal: Principal) -> Iterable[Rule]:
        names = {EVERYBODY, str(principal)}
        if principal.proof is not Proof.NONE:
            names.add(f"{principal.proof.value}:{EVERYBODY}")
        for name in names:
            yield from self._by_principal.get(name, ())


def changed(rules: Iterable[Rule], *, add: Iterable[Rule], remove: Iterable[Rule]) -> list[Rule]:
    """Return the rules without those of `remove`, and then with those of `add`, each once."""
    removed = set(remove)
    return list(dict.fromkeys((*(rule for rule in rules if rule not in removed), *add)))


def texts_of(rules: Sequence[str]) -> list[str]:
    """Return the texts of rules as they are stored.

    Raises: ConfigurationError: one is no rule, or `rules` is one text, whose letters are no rules.
    """
    if isinstance(rules, str):
        raise ConfigurationError(f"rules={rules!r}: expected a list of rules")
    return [str(Rule.parse(rule)) for rule in rules]


def require_present(rules: Iterable[str], removed: Iterable[str]) -> None:
    """Refuse to remove a rule that is not there: its author believes that it is.

    Raises: ConfigurationError.
    """
    known = set(rules)
    for text in removed:
        if text not in known:
            raise ConfigurationError(f"rule {text!r} is not there: list the rules")
