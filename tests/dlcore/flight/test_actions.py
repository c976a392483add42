"""The table of actions: what it says, and that proxies and documents keep to it."""

from __future__ import annotations

import grpc
import msgspec
import pytest

from dlcore.flight import actions
from dlcore.flight.actions import ACTIONS, described
from tests.fixtures.made_parts import require_as_made
from tests.fixtures.served_proxies import Proxies, with_proxies
from tests.flight_document import DOCUMENTS, render


def test_the_documents_are_as_the_tables() -> None:
    """`make pages` was run after the last change."""
    for document in DOCUMENTS:
        require_as_made(document, render(document.read_text(encoding="utf-8")))


def test_every_action_that_is_declared_is_on_the_table_once() -> None:
    """An action that is left off would have no handler, and no line in the document."""
    declared = [each for each in vars(actions).values() if isinstance(each, actions.Action)]
    assert sorted(each.name for each in declared) == sorted({each.name for each in ACTIONS})
    assert len(declared) == len(ACTIONS)


def test_messages_refuse_what_they_do_not_know() -> None:
    """A client of a later release learns that this proxy would ignore a field."""
    for each in ACTIONS:
        with pytest.raises(msgspec.ValidationError, match="unknown field `later`"):
            msgspec.json.decode(b'{"later": 1}', type=each.request)


def test_a_description_names_the_fields_of_the_body() -> None:
    """Those that may be left out in brackets."""
    wanted = "Give a log another name. Body: {log, [log_id], new_name}."
    assert described(actions.RENAME) == wanted


def test_a_proxy_lists_and_performs_them() -> None:
    """A body that does not fit is refused with the description."""

    async def scenario(served: Proxies) -> None:
        client = await served.start()
        for each in ACTIONS:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.act(each.name, later=1)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert described(each) in str(refused.value.details())

    with_proxies()(scenario)
