"""Metadata of bookies: registrations and cookies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dlcore.config import DEFAULT_RACK
from dlcore.html_tables import ShownFields
from dlcore.ids import BookieId
from dlcore.metadata.stored import LAYOUT, Count, Text


class BookieRegistration(ShownFields, msgspec.Struct, frozen=True, kw_only=True):
    """What a live bookie says of itself: who it is and where (``host:port``) it answers.

    Entries are at `address`, the control service at `control_address`.

    The space is that of its disk a while ago, a total of 0 means not known.  The session changes
    with each new registration and not while one is kept up to date.
    """

    layout: int = LAYOUT
    name: Text
    incarnation: Text
    address: Annotated[str, msgspec.Meta(pattern=r"^.+:[0-9]+$")]
    read_only: bool = False
    rack: Text = DEFAULT_RACK
    free_bytes: Count = 0
    total_bytes: Count = 0
    session: str = ""
    control_address: Annotated[str, msgspec.Meta(pattern=r"^(.+:[0-9]+)?$")] = ""

    @property
    def bookie(self) -> BookieId:
        """The bookie that this registers."""
        return BookieId(self.name, self.incarnation)


class BookieCookie(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a bookie's data; it must agree in every data directory and here.

    `life` counts the starts on this data, and `start` names the last one: a folder that was copied
    before it is not the bookie.  Both are told to the folder first.
    """

    layout: int = LAYOUT
    name: Text
    incarnation: Text
    cluster_id: Text
    created_ms: Count
    life: Count = 0
    start: str = ""

    @property
    def bookie(self) -> BookieId:
        """The bookie whose data this marks."""
        return BookieId(self.name, self.incarnation)
