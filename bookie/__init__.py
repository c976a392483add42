"""The storage node: durable ledger entries over a framed TCP protocol, and control by gRPC."""

from __future__ import annotations
