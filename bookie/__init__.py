"""The storage node: durable ledger entries behind a gRPC service."""

from __future__ import annotations
