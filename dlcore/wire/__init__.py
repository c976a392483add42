"""The framed protocol between clients and bookies: messages and ends without I/O, connections.

docs/wire.md specifies it.
"""
