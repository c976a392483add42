"""The service tier: a proxy that serves logs to clients over Arrow Flight."""
