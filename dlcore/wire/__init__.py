"""The framed protocol between clients and bookies, without I/O; docs/wire.md specifies it."""
