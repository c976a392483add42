"""One connection of a Kafka client: who it is, and which of its requests are performed.

Theory of operation.  A client sends requests, and the server answers them in their order, one at a
time.  Only the records of producers are answered later, in their turn, when they are durable:
meanwhile the next request is taken.  ApiVersions is answered at once, in any version.  A client
that is not known yet must prove who it is before anything else: it chooses a mechanism of SASL, and
sends a token by it.  Clients whose certificate names them, or that need no name, are known from the
start, and may still prove who they are.  A client whose token ends soon proves itself again
on the same connection.

Promises:

* Nothing is performed for a client that is not known, and between a choice of a mechanism and its
  proof.
* Each request gets one answer, with its number, or the connection is closed.
* A refused proof closes the connection, after its answer.
* A producer that wants no acknowledgement is sent away: it would never know what was refused.

The driver performs the effects; while the machine is PROVING or BUSY it reads no further request.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, assert_never

from kio.schema.errors import ErrorCode

from dlcore.base.errors import ConfigurationError
from dlcore.base.machines import Machine, State, Transitions
from dlcore.proxy.kafka.messages import (
    API_VERSIONS,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Request,
    Response,
    UnknownVersion,
    request_of,
    versions_response,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MECHANISMS = ("PLAIN", "OAUTHBEARER")
"""Both carry a bearer token; PLAIN has it as the password, with any name."""
_NO_ANSWER = "records with acks=0: expected -1, since a refusal needs an answer"
# A token has a few KB; a client that has proved nothing may take no more memory than it needs.
UNKNOWN_BYTES_MAX = 64 * 1024
REQUEST_BYTES_MAX = 256 * 1024
"""Most bytes of a request without records; one that names 4,000 logs has about as many."""


class SessionState(State):
    """The state of the machine; CLOSED is final."""

    UNKNOWN = "the client must prove who it is"
    CHOSEN = "a mechanism is chosen, and its token awaited"
    PROVING = "the token is being checked"
    READY = "the client is known, and may ask"
    BUSY = "a request is being performed"
    CLOSED = "the connection ends"


_S = SessionState
_END = {_S.CLOSED: "not a request, or one that is not served now"}
_CHOICE = {_S.CHOSEN: "a mechanism is chosen"}
TRANSITIONS = Transitions(
    _S.UNKNOWN,
    {
        _S.UNKNOWN: {**_CHOICE, **_END},
        _S.CHOSEN: {_S.PROVING: "a token came", **_END},
        _S.PROVING: {_S.READY: "the token is good", _S.CLOSED: "the token is refused"},
        _S.READY: {_S.BUSY: "a request came", **_CHOICE, **_END},
        _S.BUSY: {_S.READY: "it is answered, or will be"},
        _S.CLOSED: {},
    },
)


@dataclass(frozen=True, slots=True)
class Received:
    """Event: a request, without its size."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Proven:
    """Event: the token is good, for so long; None: without an end."""

    lifetime_ms: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    """Event: the token is refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Performed:
    """Event: the request is performed, and this is the answer, in parts with their size."""

    answer: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Taken:
    """Event: the request is taken, and will be answered by this in its turn."""

    answer: Any


Event: TypeAlias = Received | Proven | Refused | Performed | Taken


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send these parts."""

    parts: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class SendLater:
    """Effect: send what this answers, behind what was to be sent before, and go on."""

    answer: Any


@dataclass(frozen=True, slots=True)
class Prove:
    """Effect: check a token, and tell by `Proven` or `Refused`."""

    token: str


@dataclass(frozen=True, slots=True)
class Perform:
    """Effect: perform a request, and tell by `Performed` or `Taken`."""

    request: Request


@dataclass(frozen=True, slots=True)
class Close:
    """Effect: close the connection, for a reason; the client may take lost records for written."""

    reason: str
    loses_records: bool = False


Effect: TypeAlias = Send | SendLater | Prove | Perform | Close


class KafkaSession(Machine[SessionState]):
    """The machine of one connection.

    Args:
        is_known: whether the client needs no proof.
        checks_tokens: whether the proxy checks tokens.
        produce_bytes_max: most bytes of a request with records.
    """

    transitions = TRANSITIONS

    def __init__(self, *, is_known: bool, checks_tokens: bool, produce_bytes_max: int) -> None:
        self.state = _S.READY if is_known else _S.UNKNOWN
        self._mechanisms = MECHANISMS if checks_tokens else ()
        self._mechanism = ""
        self._produce_bytes_max = max(produce_bytes_max, REQUEST_BYTES_MAX)
        self._proof = Request(SASL_AUTHENTICATE, 0, 0, None, None)

    @property
    def is_known(self) -> bool:
        """Whether the client is known, so that it may take its time."""
        return self.state in (_S.READY, _S.BUSY)

    def bytes_max_of(self, call: int) -> int:
        """Return the most bytes of the next request, if it is of this call."""
        if not self.is_known:
            return UNKNOWN_BYTES_MAX
        return self._produce_bytes_max if call == PRODUCE else REQUEST_BYTES_MAX

    def handle(self, event: Event) -> Sequence[Effect]:
        """Take an event, and return what is to be done, in this order."""
        match event:
            case Received(frame):
                return self._received(frame)
            case Proven(lifetime_ms):
                self._become(_S.READY)
                return [self._proof_answer(ErrorCode.none, None, lifetime_ms)]
            case Refused(reason):
                return self._refuse(reason)
            case Performed(answer):
                self._become(_S.READY)
                return [Send(answer)]
            case Taken(later):
                self._become(_S.READY)
                return [SendLater(later)]
            case _:
                assert_never(event)

    def _received(self, frame: bytes) -> Sequence[Effect]:
        assert self.state not in (_S.PROVING, _S.BUSY), self.state
        try:
            request = request_of(frame)
        except ConfigurationError as error:
            return self._close(str(error))
        if isinstance(request, UnknownVersion):
            # By this answer the client finds a version that both know (KIP-511).
            return [Send(versions_response(request.number, 0, is_known=False))]
        if request.call == API_VERSIONS:
            return [Send(versions_response(request.number, request.version))]
        if request.call == SASL_HANDSHAKE:
            return self._choose(request)
        if request.call == SASL_AUTHENTICATE:
            return self._authenticate(request)
        if self.state is not _S.READY:
            return self._close(f"call {request.call} before a proof of who calls: expected SASL")
        if request.call == PRODUCE and not request.body.acks:
            return self._close(_NO_ANSWER, loses_records=True)
        self._become(_S.BUSY)
        return [Perform(request)]

    def _choose(self, request: Request) -> Sequence[Effect]:
        code = ErrorCode.none
        if request.version == 0:  # tokens would come without a header
            code = ErrorCode.unsupported_version
        elif request.body.mechanism not in self._mechanisms:
            code = ErrorCode.unsupported_sasl_mechanism
        elif self.state is _S.CHOSEN:
            return self._close("two mechanisms of SASL: expected a token")
        else:
            self._mechanism = request.body.mechanism
            self._become(_S.CHOSEN)
        make = Response(request.call, request.version)
        body = make.of("SaslHandshakeResponse", error_code=code, mechanisms=self._mechanisms)
        return [Send(make.framed(request.number, body))]

    def _authenticate(self, request: Request) -> Sequence[Effect]:
        if self.state is not _S.CHOSEN:
            return self._close("a token before a mechanism of SASL: expected SaslHandshake")
        self._proof = request
        self._become(_S.PROVING)
        try:
            return [Prove(token_of(self._mechanism, request.body.auth_bytes))]
        except ConfigurationError as error:
            return self._refuse(str(error))

    def _refuse(self, reason: str) -> Sequence[Effect]:
        answer = self._proof_answer(ErrorCode.sasl_authentication_failed, reason, None)
        return [answer, *self._close(reason)]

    def _proof_answer(self, code: ErrorCode, message: str | None, lifetime_ms: int | None) -> Send:
        make = Response(self._proof.call, self._proof.version)
        body = make.of(
            "SaslAuthenticateResponse",
            error_code=code,
            error_message=message,
            auth_bytes=b"",
            session_lifetime=timedelta(milliseconds=lifetime_ms or 0),
        )
        return Send(make.framed(self._proof.number, body))

    def _close(self, reason: str, *, loses_records: bool = False) -> Sequence[Effect]:
        self._become(_S.CLOSED)
        return [Close(reason, loses_records)]

    def validate(self) -> None:
        """Assert all that holds between two events; tests call it after each."""
        assert self._mechanism in ("", *self._mechanisms)
        assert self.state not in (_S.CHOSEN, _S.PROVING) or self._mechanism
        assert self._proof.call == SASL_AUTHENTICATE


def token_of(mechanism: str, sent: bytes) -> str:
    """Return the bearer token in what a client sends by a mechanism of `MECHANISMS`.

    Raises:
        ConfigurationError: there is none.
    """
    try:
        text = sent.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"what {mechanism} sends is not UTF-8") from error
    if mechanism == "PLAIN":
        parts = text.split("\0")
        if len(parts) == 3 and parts[2]:
            return parts[2]
        raise ConfigurationError("PLAIN without a password: expected a bearer token as password")
    for part in text.split("\x01"):
        if part.lower().startswith("auth=bearer "):
            return part[len("auth=bearer ") :].strip()
    raise ConfigurationError("OAUTHBEARER without a token: expected auth=Bearer and a token")
