"""Connections of clients: entries over the framed protocol, control over gRPC."""
