"""Access: who a caller is, what it may do, and what is logged of it.  It knows no server."""
