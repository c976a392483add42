"""Access: who a caller is, what it may do, and what is told of it.  It knows no server."""
