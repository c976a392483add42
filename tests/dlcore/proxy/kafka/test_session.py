"""One connection's machine: nothing is performed for a client that is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kio.serial import entity_reader

from dlcore.base.errors import ConfigurationError
from dlcore.proxy.kafka import messages
from dlcore.proxy.kafka.messages import Response
from dlcore.proxy.kafka.session import (
    REQUEST_BYTES_MAX,
    UNKNOWN_BYTES_MAX,
    Close,
    Effect,
    Event,
    KafkaSession,
    Perform,
    Performed,
    Prove,
    Proven,
    Received,
    Refused,
    Send,
    SendLater,
    SessionState,
    Taken,
    token_of,
)
from tests.dlcore.proxy.kafka.test_messages import filled, frame_of, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = b"\0any name\0a.b.c"


def handshake(mechanism: str, version: int = 1) -> Received:
    """Return the choice of a mechanism."""
    return Received(frame_of(sample(messages.SASL_HANDSHAKE, version)(mechanism=mechanism)))


def proof(sent: bytes, version: int = 2) -> Received:
    """Return the token."""
    return Received(frame_of(sample(messages.SASL_AUTHENTICATE, version)(auth_bytes=sent)))


def asked(call: int = messages.METADATA, version: int = 12) -> Received:
    """Return a request."""
    return Received(frame_of(filled(sample(call, version))))


def body_of(effect: Effect, call: int, version: int) -> Any:
    """Read an answer back."""
    assert isinstance(effect, Send)
    module = Response(call, version)._kinds
    kind = vars(module)[messages._payload_name(module, "Response")]
    data = b"".join(effect.parts)
    assert int.from_bytes(data[:4]) == len(data) - 4
    header, at = entity_reader(kind.__header_schema__)(data, 4)
    assert header.correlation_id == 7
    body, _ = entity_reader(kind)(data, 4 + at)
    return body


class Checked(KafkaSession):
    """A session that is validated after each event."""

    def handle(self, event: Event) -> Sequence[Effect]:
        """Take an event."""
        effects = super().handle(event)
        self.validate()
        return effects


def known() -> KafkaSession:
    """Return the session of a client that needs no proof."""
    return Checked(is_known=True, checks_tokens=True, produce_bytes_max=2**20)


def unknown(*, checks_tokens: bool = True) -> KafkaSession:
    """Return the session of a client that does."""
    return Checked(is_known=False, checks_tokens=checks_tokens, produce_bytes_max=2**20)


def chosen(mechanism: str = "PLAIN") -> KafkaSession:
    """Return one that waits for a token."""
    session = unknown()
    (answer,) = session.handle(handshake(mechanism))
    body = body_of(answer, messages.SASL_HANDSHAKE, 1)
    assert (body.error_code, body.mechanisms) == (0, ("PLAIN", "OAUTHBEARER"))
    return session


def test_a_known_client_is_answered_one_request_after_the_other() -> None:
    """Each with what the driver made of it."""
    session = known()
    for _ in range(2):
        (effect,) = session.handle(asked())
        assert isinstance(effect, Perform)
        assert effect.request.call == messages.METADATA
        assert session.state is SessionState.BUSY
        with pytest.raises(AssertionError):
            session.handle(asked())
        assert session.handle(Performed([b"x"])) == [Send([b"x"])]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_client_proves_who_it_is(version: int) -> None:
    """Then it may ask; until then it gets little room."""
    session = chosen()
    assert session.bytes_max_of(messages.PRODUCE) == UNKNOWN_BYTES_MAX
    assert session.handle(proof(PLAIN, version)) == [Prove("a.b.c")]
    assert not session.is_known
    (answer,) = session.handle(Proven(5000))
    body = body_of(answer, messages.SASL_AUTHENTICATE, version)
    assert (body.error_code, body.error_message) == (0, None)
    if version:
        assert body.session_lifetime.total_seconds() == 5
    (effect,) = session.handle(asked())
    assert isinstance(effect, Perform)


def test_a_token_without_an_end() -> None:
    """Kafka's clients take 0 for that."""
    session = chosen("OAUTHBEARER")
    assert session.handle(proof(b"n,,\x01auth=Bearer t \x01\x01")) == [Prove("t")]
    (answer,) = session.handle(Proven(None))
    assert not body_of(answer, messages.SASL_AUTHENTICATE, 2).session_lifetime


def test_a_refused_token_ends_the_connection_after_the_answer() -> None:
    """And so does what has no token."""
    session = chosen()
    session.handle(proof(PLAIN))
    answer, end = session.handle(Refused("expired"))
    body = body_of(answer, messages.SASL_AUTHENTICATE, 2)
    assert (body.error_code, body.error_message) == (58, "expired")
    assert end == Close("expired")
    answer, end = chosen().handle(proof(b"\0name\0"))
    assert body_of(answer, messages.SASL_AUTHENTICATE, 2).error_code == 58
    assert isinstance(end, Close)


def test_a_known_client_may_prove_itself_again() -> None:
    """As those do whose token ends soon; meanwhile nothing is performed."""
    session = known()
    session.handle(handshake("PLAIN"))
    (end,) = session.handle(asked())
    assert isinstance(end, Close)
    session = known()
    session.handle(handshake("PLAIN"))
    session.handle(proof(PLAIN))
    session.handle(Proven(None))
    assert session.is_known


@pytest.mark.parametrize("call", [messages.METADATA, messages.FETCH, messages.PRODUCE])
def test_nothing_is_performed_for_an_unknown_client(call: int) -> None:
    """The connection is closed."""
    (end,) = unknown().handle(asked(call, CALLS_MAX[call]))
    assert end == Close(f"call {call} before a proof of who calls: expected SASL")


CALLS_MAX = {call: high for call, (_, high) in messages.CALLS.items()}


@pytest.mark.parametrize("version", range(5))
def test_every_client_may_ask_for_versions(version: int) -> None:
    """Also while a token is awaited."""
    for session in (unknown(), known(), chosen()):
        before = session.state
        (answer,) = session.handle(asked(messages.API_VERSIONS, version))
        assert len(body_of(answer, messages.API_VERSIONS, version).api_keys) == len(messages.CALLS)
        assert session.state is before
    later = (18).to_bytes(2) + (99).to_bytes(2) + (7).to_bytes(4)
    (answer,) = unknown().handle(Received(later))
    assert body_of(answer, messages.API_VERSIONS, 0).error_code == 35


def test_mechanisms_that_are_not_served() -> None:
    """The client learns which there are, and may choose again."""
    session = unknown()
    (answer,) = session.handle(handshake("SCRAM-SHA-256"))
    assert body_of(answer, messages.SASL_HANDSHAKE, 1).error_code == 33
    (answer,) = session.handle(handshake("PLAIN", 0))
    assert body_of(answer, messages.SASL_HANDSHAKE, 0).error_code == 35
    (answer,) = unknown(checks_tokens=False).handle(handshake("PLAIN"))
    assert body_of(answer, messages.SASL_HANDSHAKE, 1).mechanisms == ()
    assert session.state is SessionState.UNKNOWN


@pytest.mark.parametrize("event", [proof(PLAIN), Received(b"GET / HTTP/1.1")])
def test_a_request_out_of_place_ends_the_connection(event: Received) -> None:
    """A token without a mechanism, and what is no request."""
    for session in (unknown(), known()):
        (end,) = session.handle(event)
        assert isinstance(end, Close)
        assert session.state is SessionState.CLOSED


def test_a_mechanism_is_chosen_once() -> None:
    """A second choice before the token ends the connection."""
    (end,) = chosen().handle(handshake("PLAIN"))
    assert isinstance(end, Close)


@pytest.mark.parametrize("version", range(3, 10))
def test_records_are_answered_later(version: int) -> None:
    """The next request is taken meanwhile.  A producer that wants no answer is sent away."""
    session = known()
    for later in ("first", "second"):
        (effect,) = session.handle(asked(messages.PRODUCE, version))
        assert isinstance(effect, Perform)
        assert session.handle(Taken(later)) == [SendLater(later)]
    kind = sample(messages.PRODUCE, version)
    request = kind(transactional_id=None, acks=0, timeout=filled(kind).timeout, topic_data=())
    (end,) = session.handle(Received(frame_of(request)))
    assert end == Close(
        "records with acks=0: expected -1, since a refusal needs an answer",
        loses_records=True,
    )


def test_requests_with_records_are_larger() -> None:
    """Those of a client that is known, as large as the proxy's configuration allows."""
    session = known()
    assert session.bytes_max_of(messages.PRODUCE) == 2**20
    assert session.bytes_max_of(messages.FETCH) == REQUEST_BYTES_MAX
    session = unknown()
    assert session.bytes_max_of(messages.PRODUCE) == UNKNOWN_BYTES_MAX


@pytest.mark.parametrize(
    ("mechanism", "sent"),
    [("PLAIN", b"name"), ("PLAIN", b"\xff"), ("OAUTHBEARER", b"n,,\x01auth=Basic x\x01\x01")],
)
def test_calls_without_a_token(mechanism: str, sent: bytes) -> None:
    """The reason says what was expected, and not what was sent."""
    with pytest.raises(ConfigurationError) as caught:
        token_of(mechanism, sent)
    assert mechanism in str(caught.value)
