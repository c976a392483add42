"""Requests to all bookies to remove every byte of ledgers that are gone, and their answers.

A request is a node below ``bookies/erasures``, with one node below it for each bookie that has
answered.  It stays until its maker has all answers, so a bookie that is down answers later.
"""

from __future__ import annotations

import msgspec

from dlcore.metadata.stored import LAYOUT, Count


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """A request, made at `asked_ms`.

    The caller deleted its `ledgers` before, so bookies need no other proof of that.
    """

    layout: int = LAYOUT
    ledgers: tuple[Count, ...]
    asked_ms: Count


class Erased(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a bookie, which has this incarnation; `waits` says why bytes are left."""

    layout: int = LAYOUT
    incarnation: str
    waits: str = ""
