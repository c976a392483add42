"""The callers of a proxy, by a token, a certificate or a forwarding proxy, or not known at all.

Promises: a caller has a name only by what it proved.  A token that is refused is never passed over
for another proof.  A stream lasts as long as the proof of its caller, and accepts nothing after.

A stream goes on if its caller makes another call on the same connection with a token that lasts
longer.  A token extends only streams of its own user.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from dlcore.base.access.rights import ANONYMOUS, Caller, Principal, Proof
from dlcore.base.access.tls import name_in_certificate
from dlcore.base.clock import wall_s
from dlcore.base.errors import LogNotReadyError, MetadataError, UnauthenticatedError
from dlcore.base.extras import missing_packages_explained
from dlcore.flight.calls import host_of
from dlcore.flight.forwards import wish_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from dlcore.base.access.key_sources import KeySource
    from dlcore.base.access.tokens import Keys
    from dlcore.base.errors import DLError
    from dlcore.flight.calls import Context
    from dlcore.flight.forwards import Forwarder
    from dlcore.proxy.config import ProxyConfig
    from dlcore.proxy.membership import Membership

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
_OLD_KEY = "auth-token-bin"
"""The key of tokens of a server's own, which this one does not make."""
_PROPERTIES = {"common_name": "x509_common_name", "dns": "peer_dns", "uri": "peer_uri"}
"""gRPC's names of the parts of a certificate, by the value of `certificate_principal`."""


class Callers:
    """Finds out who makes a call to one proxy."""

    def __init__(self, membership: Membership, config: ProxyConfig) -> None:
        self._membership = membership
        self._part = config.certificate_principal
        self._property = _PROPERTIES[self._part]
        self._lets_anonymous_in = config.anonymous == "allowed"
        self._tokens = Tokens(config) if config.token_issuer else None
        self._stays: dict[Stay, None] = {}  # an ordered set

    async def of(self, context: Context) -> Caller:
        """Return the caller of a call; for a call of a live proxy, the caller that it names.

        Raises:
            UnauthenticatedError: a token is refused, or a proof is missing.
            LogNotReadyError: the keys that check tokens are not known now.
            ConfigurationError: the metadata or the name in the certificate is invalid.
        """
        forwarder = wish_of(context.invocation_metadata() or ()).forwarder
        if forwarder is not None and await self._is_proven(forwarder):
            return forwarder.caller
        header = self._header_of(context)
        if header is not None:
            return await self._bearer(_after("bearer", header), context)
        principal = self._principal_of(context)
        if principal == ANONYMOUS and not self._lets_anonymous_in:
            if forwarder is not None:  # its client is not to blame, and may try again
                raise LogNotReadyError(f"it is not known now whether {forwarder.location} is live")
            raise UnauthenticatedError(f"a call without a proof of who calls: {_EXPECTED}")
        unproven = None if forwarder is None else forwarder.location
        return Caller(principal, host_of(context), forwarder=unproven)

    async def handshake(self, context: Context) -> str:
        """Return the bearer token of a user who sends it as the password of a basic handshake.

        Raises: as `of`.
        """
        header = self._header_of(context)
        if header is not None:
            with contextlib.suppress(binascii.Error, UnicodeDecodeError):
                pair = base64.b64decode(_after("basic", header), validate=True).decode()
                token = pair.partition(":")[2]
                await self._bearer(token, context)
                return token
        raise UnauthenticatedError(
            "a handshake without a name and a password: expected a token as the password, as of "
            "authenticate_basic_token(name, token)"
        )

    @property
    def checks_tokens(self) -> bool:
        """Whether tokens are checked here."""
        return self._tokens is not None

    def of_connection(self, certificate: Any, host: str) -> Caller | None:
        """Return the caller of a connection by its certificate; None: a token must tell it.

        Args:
            certificate: that of the client, as `ssl` has it; None for none.
            host: its address.
        """
        principal = ANONYMOUS
        for name in _names_in(certificate or {}, self._part)[:1]:
            principal = Principal(Proof.CERTIFICATE, name)
        if principal == ANONYMOUS and not self._lets_anonymous_in:
            return None
        return Caller(principal, host)

    async def user_of(self, token: str, host: str) -> Caller:
        """Return the holder of a token.  Raises: UnauthenticatedError, LogNotReadyError."""
        assert self._tokens is not None
        return await self._tokens.caller_of(token, host)

    def _header_of(self, context: Context) -> str | None:
        """Return the header of a call that proves who calls; None without one."""
        metadata = context.invocation_metadata() or ()
        given = [(key, value) for key, value in metadata if key in (AUTHORIZATION, _OLD_KEY)]
        if not given:
            return None
        key, value = given[0]
        if self._tokens is None:
            raise UnauthenticatedError(
                f"metadata {key!r} has a token, and this proxy checks none: send none, or give the "
                "proxy a token_issuer.  It serves every client that can connect; with TLS, every "
                "client with a certificate that its tls_ca signed (docs/security.md)"
            )
        # With two tokens it would be unclear which of them names the caller.
        if key == _OLD_KEY or len(given) > 1 or isinstance(value, bytes):
            raise UnauthenticatedError(f"metadata {key!r}: {_EXPECTED}")
        return value

    async def _bearer(self, token: str, context: Context) -> Caller:
        """Return the holder of a token, whose streams on the connection last as long as it."""
        assert self._tokens is not None
        caller = await self._tokens.caller_of(token, host_of(context))
        for stay in self._stays:
            stay.renew(caller, context.peer())
        return caller

    def _principal_of(self, context: Context) -> Principal:
        for name in context.auth_context().get(self._property, ()):
            return Principal(Proof.CERTIFICATE, name.decode("utf-8", "replace"))
        return ANONYMOUS

    async def _is_proven(self, forwarder: Forwarder) -> bool:
        """Return whether a call is of a live proxy, by its secret, which clients do not know.

        A proxy that is not live, because it drains, counts as a client.
        """
        location = forwarder.location
        try:
            is_proven = await self._membership.proves(location, forwarder.secret)
        except (MetadataError, LogNotReadyError) as error:
            logger.info("whether %s is live is not known: %s", location, error)
            return False
        if not is_proven:
            logger.warning(
                "a call says that %s forwards it, and does not prove it; to do: if it is a proxy "
                "of yours, give it a certificate that names its host; else find out who calls",
                location,
            )
        return is_proven

    @contextlib.contextmanager
    def stay(self, caller: Caller, peer: str) -> Iterator[Stay]:
        """Yield the time for which a stream of a caller may last, during the block."""
        stay = Stay(caller, peer)
        self._stays[stay] = None
        try:
            yield stay
        finally:
            del self._stays[stay]
            stay.close()

    async def aclose(self) -> None:
        """Stop looking for new keys."""
        if self._tokens is not None:
            await self._tokens.aclose()


def _names_in(certificate: dict[str, Any], part: str) -> list[str]:
    """Return the names in a part of a certificate in the form of `ssl`."""
    if part == "common_name":
        name = name_in_certificate(certificate)
        return [] if name is None else [name]
    kind = {"dns": "DNS", "uri": "URI"}[part]
    return [str(name) for each, name in certificate.get("subjectAltName", ()) if each == kind]


_EXPECTED = (
    "expected a token as in `authorization: Bearer …`, or as the password of a basic handshake "
    "(docs/access.md)"
)


def _after(scheme: str, value: str) -> str:
    """Return what follows the scheme in a value of `AUTHORIZATION`."""
    found, _, rest = value.partition(" ")
    if found.lower() != scheme:
        raise UnauthenticatedError(f"metadata {AUTHORIZATION!r} of another scheme: {_EXPECTED}")
    return rest.strip()


class Tokens:
    """Checks the tokens of one issuer."""

    def __init__(self, config: ProxyConfig) -> None:
        with missing_packages_explained():
            from dlcore.base.access.token_keys import open_keys  # loads joserfc
            from dlcore.base.access.tokens import Token, TokenRules

        self._parse = Token.parse
        self._keys: KeySource[Keys] = open_keys(config.token_keys, config.token_issuer)
        self._rules = TokenRules(
            issuer=config.token_issuer,
            audience=config.token_audience,
            claim=config.token_principal,
            skew_s=config.token_skew_s,
        )

    async def caller_of(self, text: str, address: str) -> Caller:
        """Return the user of a token.  Raises: UnauthenticatedError, LogNotReadyError."""
        token = self._parse(text)
        keys = await self._keys.keys_for(token.kid)
        found = token.check(keys, self._rules, now_s=wall_s())
        return Caller(found.principal, address, found.expires_at)

    async def aclose(self) -> None:
        """Stop looking for new keys."""
        await self._keys.aclose()


class Stay:
    """The time for which a stream may last: until its caller's proof ends, or `end` is called."""

    def __init__(self, caller: Caller, peer: str) -> None:
        self.caller = caller
        self._peer = peer
        self._expires_at = caller.expires_at
        self.ending: DLError | None = None
        """The reason why the stream may last no longer."""
        self._on_end: Callable[[DLError], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_sending = False
        self._stuck: asyncio.TimerHandle | None = None
        self._look()

    def when_ended(self, on_end: Callable[[DLError], object]) -> None:
        """Call a function with the reason at the end, or now if it has ended."""
        self._on_end = on_end
        if self.ending is not None:
            on_end(self.ending)

    @contextlib.contextmanager
    def ending_block(self) -> Iterator[None]:
        """Raise the reason of the end within the block, wherever its task waits.

        Messages are sent by `send`.
        """
        task = asyncio.current_task()
        assert task is not None
        self.when_ended(lambda _: self._interrupt(task))
        try:
            yield
        except asyncio.CancelledError:
            if self.ending is None or task.uncancel() > 0:  # or gRPC cancelled it, too
                raise
            raise self.ending from None
        finally:
            self._on_end = None

    def _interrupt(self, task: asyncio.Task[object]) -> None:
        if self._is_sending:
            self._stuck = asyncio.get_running_loop().call_later(_SENDING_S, task.cancel)
        else:
            task.cancel()

    async def send(self, send: Callable[[object], Awaitable[None]], message: object) -> None:
        """Send a message within an `ending_block`, and then raise the reason of the end, if any.

        gRPC cannot send a status while a message is on its way: the end waits for it, for a while.
        """
        self._is_sending = True
        try:
            await send(message)
        finally:
            self._is_sending = False
            if self._stuck is not None:
                self._stuck.cancel()
        if self.ending is not None:
            raise self.ending

    def renew(self, caller: Caller, peer: str) -> None:
        """Last as long as a later token of the same user on the same connection."""
        before, after = self._expires_at, caller.expires_at
        if (caller.principal, peer) != (self.caller.principal, self._peer):
            return
        if self.ending is None and before is not None and after is not None and after > before:
            self._expires_at = after

    def end(self, reason: DLError) -> None:
        """End the stream for a reason, unless it has ended."""
        if self.ending is None:
            self.ending = reason
            if self._on_end is not None:
                self._on_end(reason)

    def _look(self) -> None:
        """End the stream if the proof has ended, else look again then; a timer calls this."""
        if self._expires_at is None:
            return
        left_s = self._expires_at - wall_s()
        if left_s <= 0:
            self.end(
                UnauthenticatedError(
                    f"the token of {self.caller.principal} has expired during the stream: get a "
                    "new one, and open the stream again with it"
                )
            )
        else:
            self._timer = asyncio.get_running_loop().call_later(min(left_s, _LOOK_S), self._look)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()


_SENDING_S = 1.0
"""A message that takes longer is given up at the end of its stream, with the connection."""
_LOOK_S = 60.0
"""The wall clock is looked at after this time at the latest, because it may be set."""
