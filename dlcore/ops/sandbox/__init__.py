"""A cluster on this machine: metadata and bookies as child processes, with a blocking API."""

from __future__ import annotations

from dlcore.ops.sandbox.cluster import Bookie, Sandbox
from dlcore.ops.sandbox.metadata_server import EmbeddedMetadataServer
from dlcore.ops.sandbox.zookeeper import EmbeddedZooKeeper

__all__ = ["Bookie", "EmbeddedMetadataServer", "EmbeddedZooKeeper", "Sandbox"]
