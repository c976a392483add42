"""A back end says that it does not offer an operation, and docs/clients-dlcore.md has the table."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from dlcore import LedgerClientConfig, LogConfig, open_namespace
from dlcore.base.errors import InvalidNamespaceUriError, UnsupportedError
from dlcore.base.records import EntryPlace, LogRecordWithDLSN
from tests.backends_document import CONCEPTS, DOCUMENT, render
from tests.fixtures.made_parts import require_as_made
from tests.fixtures.served_proxies import Proxies, with_proxies


def test_the_document_is_as_the_classes() -> None:
    """`make pages` was run after the last change."""
    require_as_made(DOCUMENT, render(DOCUMENT.read_text(encoding="utf-8")))


async def outcome(call: Any) -> Any:
    """Return what a call gives, async or not."""
    found = call()
    return await found if inspect.isawaitable(found) else found


def test_proxies_refuse_by_one_error() -> None:
    """Each operation that the class of the back end does not have."""

    async def scenario(served: Proxies) -> None:
        await served.start()
        async with await open_namespace(served.servers[0].location) as namespace:
            log = await namespace.open_log("clicks")
            writer = await log.open_writer()
            objects = {"namespace": namespace, "log": log, "writer": writer}
            for concept in CONCEPTS:
                # Most are declared in the parts that a class is made of.
                for name, method in inspect.getmembers(concept.face, inspect.isfunction):
                    if name.startswith("_"):
                        continue
                    if getattr(concept.flight, name) is method and "_unsupported" in (
                        method.__code__.co_names
                    ):
                        count = sum(
                            each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
                            for each in inspect.signature(method).parameters.values()
                        )
                        named = {
                            each.name: 1.0
                            for each in inspect.signature(method).parameters.values()
                            if each.kind is each.KEYWORD_ONLY and each.default is each.empty
                        }
                        bound = getattr(objects[concept.name], name)
                        with pytest.raises(UnsupportedError, match=f"`{name}`.*distributedlog://"):
                            await outcome(lambda b=bound, c=count, n=named: b(*[1] * (c - 1), **n))
            with pytest.raises(UnsupportedError, match="`truncate` of the log"):
                await writer.truncate(txid=1)
            with pytest.raises(UnsupportedError, match=r"lock_timeout_s=3.*buffer_bytes and flush"):
                await namespace.open_log("clicks", config=LogConfig(lock_timeout_s=3.0))
            await writer.aclose()

    with_proxies("clicks")(scenario)


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("grpc://127.0.0.1:1", {"create": True}),
        ("grpc://127.0.0.1:1", {"client_id": "me"}),
        ("grpc://127.0.0.1:1", {"capabilities": True}),
        ("grpc+tls://127.0.0.1:1", {"client_config": LedgerClientConfig()}),
        ("distributedlog://127.0.0.1:1/dlog", {"patience_s": 1.0}),
    ],
)
def test_arguments_of_the_other_kind_of_uri(uri: str, named: dict[str, Any]) -> None:
    """Refused before anything is opened, by name and value."""
    (argument,) = named
    with pytest.raises(UnsupportedError, match=f"{argument}="):
        asyncio.run(open_namespace(uri, **named))


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1", "zookeeper://127.0.0.1:1/dlog", 5])
def test_a_uri_is_of_one_of_two_kinds(uri: Any) -> None:
    """The error names the URI."""
    with pytest.raises(InvalidNamespaceUriError, match=f"{uri!r}: expected"):
        asyncio.run(open_namespace(uri))


def test_a_record_of_proxies_does_not_know_its_place_in_the_segment() -> None:
    """It says so instead of a wrong number."""
    place = EntryPlace(1, 0, 5, None, 0)
    record = LogRecordWithDLSN(1, b"x", 2, place)
    assert record.sequence_id == 7
    with pytest.raises(UnsupportedError, match="position_in_segment"):
        _ = record.position_in_segment
