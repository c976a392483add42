"""Clients of bookies: over the framed protocol, over gRPC for control, and in memory."""
