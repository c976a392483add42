"""Capabilities: signed tokens that let a client without a certificate reach some ledgers.

A capability names ranges of entries, rights to them, and when it expires.  It is bound to no
client: every holder has its rights until then.  Therefore it goes only over encrypted connections,
is short lived, and is no text of errors or logs.  Bookies verify it by the public keys of their
cluster.

Layout, big-endian; the signature (Ed25519) is over a fixed prefix and all bytes before it:

    version u8 | key id 8 bytes | expires u64 (seconds since the epoch) | grants u16
    each grant: first ledger i64 | first entry i64 | last ledger i64 | last entry i64 | rights u8
    signature 64 bytes

Both ends of a connection keep the last ones that it presented, by the same rule (`Kept`).
Therefore a client knows which of them a bookie still keeps, and presents another one, or one again,
without being asked for it.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from dataclasses import dataclass
from enum import IntFlag
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dlcore.base.errors import AccessDeniedError, ConfigurationError
from dlcore.base.extras import missing_packages_explained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


ID_MAX = 2**63 - 1
"""Highest id of a ledger, and of an entry."""
GRANTS_MAX = 1024
"""Most grants of one capability; a job that reads more has several."""
LIFETIME_S_MAX = 24 * 3600
"""A capability that expires later than this from now is refused."""
SKEW_S = 60
"""How far the clocks of signers and bookies may be apart."""
KEY_BYTES = 32
"""Bytes of a public key, and of a private key."""

_VERSION = 1
_HEAD = struct.Struct(">B8sQH")
_GRANT = struct.Struct(">qqqqB")
_SIGNATURE_BYTES = 64
_CONTEXT = b"dlog capability\0"
"""Before the signed bytes, so that no signature of another use fits."""
CAPABILITY_BYTES_MIN = _HEAD.size + _GRANT.size + _SIGNATURE_BYTES
CAPABILITY_BYTES_MAX = _HEAD.size + _GRANT.size * GRANTS_MAX + _SIGNATURE_BYTES


class LedgerRight(IntFlag):
    """Rights to a ledger at a bookie."""

    READ = 1
    """Read and follow entries, and its last add confirmed."""
    ADD = 2
    """Add entries, and write its last add confirmed."""
    FENCE = 4
    """Fence it, which stops its writer."""
    RECOVER = 8
    """Add entries to it after it was fenced."""


ALL_RIGHTS = LedgerRight.READ | LedgerRight.ADD | LedgerRight.FENCE | LedgerRight.RECOVER


class Reach(NamedTuple):
    """The entries of a ledger that a request touches, and the rights that it needs.

    A request that touches the ledger and no entry has those from `ID_MAX` to -1.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    rights: int


class Grant(NamedTuple):
    """Rights to entries of a ledger, or of each ledger of a range; all ends are included."""

    first_ledger_id: int
    first_entry_id: int
    last_ledger_id: int
    last_entry_id: int
    rights: int

    @classmethod
    def of(
        cls,
        ledger_id: int,
        rights: LedgerRight,
        *,
        first_entry_id: int = 0,
        last_entry_id: int = ID_MAX,
    ) -> Grant:
        """Return the grant of one ledger."""
        return cls(ledger_id, first_entry_id, ledger_id, last_entry_id, int(rights))


EVERYTHING = Grant(0, 0, ID_MAX, ID_MAX, int(ALL_RIGHTS))
"""All rights to all ledgers, for a process that reads the private key anyway."""


@dataclass(frozen=True, slots=True)
class Capability:
    """The signed values.  Grants ascend and do not overlap; those of one ledger have equal rights.

    Raises:
        ConfigurationError: the values are not such.
    """

    key_id: bytes
    expires_s: int
    grants: tuple[Grant, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.grants) <= GRANTS_MAX:
            raise ConfigurationError(
                f"a capability with {len(self.grants)} grants: expected 1 … {GRANTS_MAX}"
            )
        if not 0 <= self.expires_s <= ID_MAX:
            raise ConfigurationError(f"expires_s={self.expires_s}: expected a time of the epoch")
        for grant in self.grants:
            if not (
                0 <= grant.first_ledger_id <= grant.last_ledger_id <= ID_MAX
                and 0 <= grant.first_entry_id <= grant.last_entry_id <= ID_MAX
                and 0 < grant.rights <= ALL_RIGHTS
            ):
                raise ConfigurationError(f"{grant}: expected ids that ascend, and known rights")
        for before, grant in pairwise(self.grants):
            if not _follows(before, grant):
                raise ConfigurationError(f"{grant} behind {before}: expected them in order, apart")

    def grant_for(self, reach: Reach) -> Grant | None:
        """Return the grant that has the ledger and entries of `reach`, whatever its rights."""
        # Grants ascend and do not overlap: only the last one that begins at or before the first
        # entry can have it.
        at = bisect_right(self.grants, (reach.ledger_id, reach.first_entry_id, ID_MAX + 1)) - 1
        if at < 0:
            return None
        grant = self.grants[at]
        has_all = reach.ledger_id <= grant.last_ledger_id
        return grant if has_all and reach.last_entry_id <= grant.last_entry_id else None


def _follows(before: Grant, grant: Grant) -> bool:
    if before.last_ledger_id < grant.first_ledger_id:
        return True
    ledgers = (before.first_ledger_id, before.last_ledger_id)
    is_one = len({*ledgers, grant.first_ledger_id, grant.last_ledger_id}) == 1
    is_apart = before.last_entry_id < grant.first_entry_id
    return is_one and is_apart and before.rights == grant.rights


def joined(grants: Iterable[Grant]) -> list[Grant]:
    """Return the grants in order; of one ledger, those that touch or overlap become one."""
    found: list[Grant] = []
    for grant in sorted(grants):
        before = found[-1] if found else None
        if (
            before is not None
            and before.first_ledger_id == grant.first_ledger_id
            and before.last_ledger_id == grant.last_ledger_id
            and before.rights == grant.rights
            and grant.first_entry_id <= before.last_entry_id + 1
        ):
            last = max(before.last_entry_id, grant.last_entry_id)
            found[-1] = before._replace(last_entry_id=last)
        else:
            found.append(grant)
    return found


def parse(token: bytes) -> Capability:
    """Return what a token says; its signature is not verified.  Raises: AccessDeniedError."""
    head = _head_of(token)
    grants = _GRANT.iter_unpack(token[_HEAD.size : -_SIGNATURE_BYTES])
    try:
        return Capability(*head, tuple(map(Grant._make, grants)))
    except ConfigurationError as error:
        raise AccessDeniedError(f"a capability that contradicts itself: {error}") from error


def _head_of(token: bytes) -> tuple[bytes, int]:
    """Return the id of the key, and when it expires."""
    count, rest = divmod(len(token) - _HEAD.size - _SIGNATURE_BYTES, _GRANT.size)
    if not 1 <= count <= GRANTS_MAX or rest:
        raise AccessDeniedError(f"a capability of {len(token)} bytes: none has this size")
    version, key_id, expires_s, named = _HEAD.unpack_from(token)
    if version != _VERSION:
        raise AccessDeniedError(f"a capability of version {version}: expected {_VERSION}")
    if named != count:
        raise AccessDeniedError(f"a capability of {count} grants, {named} by its head")
    return key_id, expires_s


def key_id_of(public_key: bytes) -> bytes:
    """Return the id by which capabilities name a key."""
    return hashlib.sha256(public_key).digest()[:8]


def new_private_key() -> bytes:
    """Return a new private key."""
    with missing_packages_explained():
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


class Signer:
    """Signs with one private key, of 32 bytes."""

    def __init__(self, private_key: bytes) -> None:
        with missing_packages_explained():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key = self._key.public_key().public_bytes_raw()
        """The key that verifies its capabilities."""
        self.key_id = key_id_of(self.public_key)

    def sign(self, grants: Sequence[Grant], *, expires_s: int) -> bytes:
        """Return a capability.  Raises: ConfigurationError: the grants make none."""
        capability = Capability(self.key_id, expires_s, tuple(grants))
        signed = _HEAD.pack(_VERSION, self.key_id, expires_s, len(grants))
        signed += b"".join(_GRANT.pack(*grant) for grant in capability.grants)
        return signed + self._key.sign(_CONTEXT + signed)

    def sign_all(self, grants: Iterable[Grant], *, expires_s: int) -> tuple[bytes, ...]:
        """Return as few capabilities as give all of `grants`, in any order."""
        ordered = joined(grants)
        return tuple(
            self.sign(ordered[at : at + GRANTS_MAX], expires_s=expires_s)
            for at in range(0, len(ordered), GRANTS_MAX)
        )


class Verifier:
    """Verifies capabilities by the public keys that are valid now.

    Args:
        now_s: the time, in seconds since the epoch.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self._keys: dict[bytes, Callable[[bytes, bytes], None]] = {}

    def use(self, public_keys: Iterable[bytes]) -> None:
        """Verify by these keys from now on, and by no others."""
        with missing_packages_explained():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        self._keys = {
            key_id_of(each): Ed25519PublicKey.from_public_bytes(each).verify for each in public_keys
        }

    def verify(self, token: bytes) -> Capability:
        """Return what a token gives.  Raises: AccessDeniedError: nothing; it says why."""
        key_id, expires_s = _head_of(token)
        verify = self._keys.get(key_id)
        if verify is None:
            raise AccessDeniedError(f"it is signed by the key {key_id.hex()}, not known")
        left_s = expires_s - self.now_s()
        if left_s < -SKEW_S:
            raise AccessDeniedError(f"it expired {-left_s:.0f} s ago")
        if left_s > LIFETIME_S_MAX + SKEW_S:
            raise AccessDeniedError(f"it expires in {left_s:.0f} s, at most {LIFETIME_S_MAX} are")
        _require_signature(verify, token)
        return parse(token)  # of many grants it takes longer than the signature

    def is_valid(self, capability: Capability) -> bool:
        """Return whether a verified capability is valid still."""
        return self.now_s() - capability.expires_s <= SKEW_S and capability.key_id in self._keys

    def require_valid(self, capability: Capability) -> None:
        """Raise AccessDeniedError if a verified capability is not valid any more."""
        late_s = self.now_s() - capability.expires_s
        if late_s > SKEW_S:
            raise AccessDeniedError(f"it expired {late_s:.0f} s ago")
        if capability.key_id not in self._keys:
            raise AccessDeniedError(f"its key {capability.key_id.hex()} was withdrawn")


def _require_signature(verify: Callable[[bytes, bytes], None], token: bytes) -> None:
    from cryptography.exceptions import InvalidSignature

    try:
        verify(token[-_SIGNATURE_BYTES:], _CONTEXT + token[:-_SIGNATURE_BYTES])
    except InvalidSignature as error:
        key_id, _ = _head_of(token)
        raise AccessDeniedError(
            f"its signature is wrong: expected that of the key {key_id.hex()}"
        ) from error


KEPT_MAX = 64
KEPT_BYTES_MAX = 256 * 1024
"""The capabilities of a connection that are kept: most of them, and most bytes of them."""


class Kept:
    """The last capabilities of a connection, within bounds; iterates from the latest on."""

    def __init__(self) -> None:
        self._capabilities: dict[bytes, Capability] = {}
        self._bytes = 0

    def get(self, token: bytes) -> Capability | None:
        """Return the capability of a token that is kept."""
        return self._capabilities.get(token)

    def __iter__(self) -> Iterator[tuple[bytes, Capability]]:
        return reversed(self._capabilities.items())

    def keep(self, token: bytes, capability: Capability) -> None:
        """Keep a capability as the latest; drop the oldest ones that are too many."""
        if self._capabilities.pop(token, None) is None:
            self._bytes += len(token)
        self._capabilities[token] = capability
        while len(self._capabilities) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
            oldest = next(iter(self._capabilities))
            del self._capabilities[oldest]
            self._bytes -= len(oldest)


class Purse(Protocol):
    """The capabilities that a client of bookies may present."""

    def token_for_all(self) -> bytes | None:
        """Return the token to present for every request; None if it depends on the request."""
        ...

    def token_for(self, reach: Reach) -> bytes | None:
        """Return the token to present for a request; None if there is none."""
        ...


class OwnPurse:
    """Presents one capability for everything, made anew once half of its time is over.

    Args:
        make: returns a capability that expires at a time.
        now_s: the time, in seconds since the epoch.
        lifetime_s: for how long each capability is valid.
    """

    def __init__(
        self, make: Callable[[int], bytes], now_s: Callable[[], float], *, lifetime_s: int
    ) -> None:
        self._make = make
        self._now_s = now_s
        self._lifetime_s = lifetime_s
        self._token = b""
        self._renewed_s = 0.0

    def token_for(self, _reach: Reach) -> bytes:
        """Return the present token."""
        return self.token_for_all()

    def token_for_all(self) -> bytes:
        """Return the present token."""
        now_s = self._now_s()
        if now_s >= self._renewed_s:
            self._token = self._make(int(now_s) + self._lifetime_s)
            self._renewed_s = now_s + self._lifetime_s / 2
        return self._token

    def renew(self) -> None:
        """Make another one for the next request: the keys have changed."""
        self._renewed_s = 0.0


class CarriedPurse:
    """Presents capabilities that came with the work of this process; the last ones are kept."""

    def __init__(self) -> None:
        self._kept = Kept()

    def learn(self, tokens: Iterable[bytes]) -> None:
        """Take capabilities.  Raises: AccessDeniedError: one is none."""
        for token in tokens:
            self._kept.keep(token, parse(token))

    def token_for_all(self) -> None:
        """Return nothing: each has entries of its own."""

    def token_for(self, reach: Reach) -> bytes | None:
        """Return the latest one that has the ledger and entries of a request."""
        fitting = (token for token, capability in self._kept if capability.grant_for(reach))
        return next(fitting, None)
