"""Connections of clients: entries on the framed protocol, control by gRPC."""
