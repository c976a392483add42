"""Requests and responses of Kafka's protocol, by the schemas of the library `kio`.

A request begins with its call, its version, and a number that its response repeats.  A version
that a client may use is one of `CALLS`; ApiVersions is answered in any case, since a client asks
with it for the versions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from dlcore.base.errors import ConfigurationError
from dlcore.proxy.kafka.parsing import Unread, read
from dlcore.proxy.kafka.writing import Collected, write

if TYPE_CHECKING:
    from types import ModuleType

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
SASL_HANDSHAKE, API_VERSIONS, SASL_AUTHENTICATE = 17, 18, 36
INIT_PRODUCER_ID = 22
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR = 8, 9, 10
JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 11, 12, 13, 14
GROUP_CALLS = frozenset(range(OFFSET_COMMIT, SYNC_GROUP + 1))
"""The calls of consumers that form groups."""
CALLS = {
    PRODUCE: (3, 9),
    FETCH: (4, 12),
    LIST_OFFSETS: (1, 10),
    METADATA: (0, 12),
    OFFSET_COMMIT: (2, 6),
    OFFSET_FETCH: (1, 7),
    FIND_COORDINATOR: (0, 3),
    JOIN_GROUP: (0, 4),
    HEARTBEAT: (0, 2),
    LEAVE_GROUP: (0, 2),
    SYNC_GROUP: (0, 2),
    SASL_HANDSHAKE: (0, 1),
    API_VERSIONS: (0, 4),
    INIT_PRODUCER_ID: (0, 5),
    SASL_AUTHENTICATE: (0, 2),
}
"""The lowest and the highest version of each call that is served.

From version 13 on, Fetch names topics by ids, and so does Produce.  A log is found by its name, and
a client may come to a proxy that never sent it the id of a topic.  Versions of Produce above 9 are
those of transactions.  Later versions of the calls of groups have static members, or several
groups.
"""
_HEAD_BYTES = 8
_NEVER = timedelta(0)


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client; `body` is that of the library."""

    call: int
    version: int
    number: int
    client: str | None
    body: Any


@dataclass(frozen=True, slots=True)
class UnknownVersion:
    """ApiVersions in a version that is not known; its answer has version 0, and the range."""

    number: int


def request_of(frame: bytes) -> Request | UnknownVersion:
    """Parse a request without its size.

    Raises:
        ConfigurationError: it is none, or of a call or version that is not served.
    """
    if len(frame) < _HEAD_BYTES:
        raise ConfigurationError(f"a request of {len(frame)} bytes: expected at least 8")
    call, version = int.from_bytes(frame[:2]), int.from_bytes(frame[2:4])
    lowest, highest = CALLS.get(call, (0, -1))
    if not lowest <= version <= highest:
        if call == API_VERSIONS:
            return UnknownVersion(int.from_bytes(frame[4:8], signed=True))
        served = ", ".join(f"{each} ({low} to {high})" for each, (low, high) in CALLS.items())
        raise ConfigurationError(f"call {call} version {version}: expected one of {served}")
    payload = _payload(call, version)
    unread = Unread(frame)
    try:
        header, body = read(payload.__header_schema__, unread), read(payload, unread)
    except ConfigurationError as error:
        raise ConfigurationError(f"call {call} version {version}: {error}") from error
    # Bytes behind the request are ignored, as by Kafka: librdkafka ends some with zeros.
    return Request(call, version, header.correlation_id, header.client_id, body)


@cache
def _kinds(call: int, version: int, kind: Any) -> ModuleType:
    return load_payload_module(call, version, kind)


@cache
def _payload(call: int, version: int) -> Any:
    """Return the class of a request."""
    kinds = _kinds(call, version, EntityType.request)
    return vars(kinds)[_payload_name(kinds, "Request")]


def _payload_name(module: ModuleType, ending: str) -> str:
    (found,) = (
        name
        for name, each in vars(module).items()
        if getattr(each, "__module__", "") == module.__name__
        and each.__type__ in (EntityType.request, EntityType.response)
    )
    assert found.endswith(ending)
    return found


class Response:
    """Makes the parts of a response in one version of a call."""

    def __init__(self, call: int, version: int) -> None:
        self._kinds = _kinds(call, version, EntityType.response)

    def of(self, kind: str, **values: Any) -> Any:
        """Return a part; values that this version does not have are left out."""
        found = getattr(self._kinds, kind)
        return found(**{name: values[name] for name in _names_of(found) if name in values})

    def framed(self, number: int, body: Any) -> list[bytes | memoryview]:
        """Return a response, with its size, in parts."""
        header, collected = type(body).__header_schema__, Collected()
        write(collected, header(correlation_id=number))
        write(collected, body)
        return collected.framed()


@cache
def _names_of(kind: type[Any]) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind) if "tag" not in each.metadata)


def versions_response(
    number: int, version: int, *, is_known: bool = True
) -> list[bytes | memoryview]:
    """Return the answer to ApiVersions."""
    make = Response(API_VERSIONS, version)
    calls = tuple(
        make.of("ApiVersion", api_key=call, min_version=lowest, max_version=highest)
        for call, (lowest, highest) in CALLS.items()
    )
    code = ErrorCode.none if is_known else ErrorCode.unsupported_version
    body = make.of("ApiVersionsResponse", error_code=code, api_keys=calls, throttle_time=_NEVER)
    return make.framed(number, body)
