"""The tables of entrances are whole, and docs/entrances.md is made of them."""

from __future__ import annotations

from bookie.serving import control
from dlcore.base.proto import bookie_pb2
from dlcore.wire.bookie_end import ENTRANCES
from dlcore.wire.messages import Kind
from tests.entrances_document import DOCUMENT, page
from tests.fixtures.made_parts import require_as_made


def test_the_page_is_that_of_the_tables() -> None:
    """`make pages` was run after the last change."""
    require_as_made(DOCUMENT, page())


def test_each_message_of_a_client_is_an_entrance() -> None:
    """A new kind of message needs a row before it is merged."""
    differing = {each.name for each in ENTRANCES} ^ {k.name for k in Kind if k < Kind.WELCOME}
    assert not differing, "dlcore/wire/bookie_end.py has a row for each message of a client"


def test_each_call_of_the_control_service_is_an_entrance() -> None:
    """As the messages."""
    (service,) = bookie_pb2.DESCRIPTOR.services_by_name.values()
    assert {each.name for each in control.ENTRANCES} == {each.name for each in service.methods}
