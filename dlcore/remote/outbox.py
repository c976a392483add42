"""The size of a message, under the name by which the blocking writer imports it."""

from __future__ import annotations

from dlcore.flight.producer_client import MESSAGE_BYTES

__all__ = ["MESSAGE_BYTES"]
