"""Arrow Flight as a proxy speaks it: what clients send, checked, and what they are told."""
