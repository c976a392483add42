"""Metadata of bookies: registrations and cookies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dlcore.base.config import DEFAULT_RACK
from dlcore.base.features import UNKNOWN_RELEASE, Release
from dlcore.base.html_tables import ShownFields
from dlcore.base.ids import BookieId
from dlcore.metadata.stored import LAYOUT, Count, Text


class BookieRegistration(ShownFields, msgspec.Struct, frozen=True, kw_only=True):
    """A live bookie's identity and its addresses (``host:port``), as it registered them.

    Entries are at `address`, the control service at `control_address`.

    `free_bytes` and `total_bytes` are those of its disk a while ago; a total of 0 means unknown.
    `session` is a new one for each registration.  Updates of a registration keep it.
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
    release: Release = UNKNOWN_RELEASE

    @property
    def bookie(self) -> BookieId:
        """The bookie that registered."""
        return BookieId(self.name, self.incarnation)


class BookieCookie(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a bookie's data; it must be the same in every data directory and here.

    `life` counts the starts on this data, and `start` names the last one.  A folder that was copied
    before the last start does not count as the bookie.  Both are written to the folder first.
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
        """The bookie that the data belongs to."""
        return BookieId(self.name, self.incarnation)
