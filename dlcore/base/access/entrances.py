"""Entrances: every way in which another process or person can make a server do something.

Each server has a table of its entrances, and dispatches by it: what is not in the table cannot be
reached.  docs/entrances.md is made of the tables, and a test tries each row with each kind of
caller.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """One row of a table."""

    name: str
    """Its name on the wire."""
    resource: str
    """The object that it is about."""
    right: str
    """The right that a caller needs, in words."""
    callers: str
    """The callers that may use it."""
    cost: str
    """The cost to the server of a caller that is not let in."""
    logged: str = "denials"
    """The calls that the audit log, or the program's log, has lines of."""
