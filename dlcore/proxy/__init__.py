"""The service tier: a proxy that serves logs to clients which speak Arrow Flight."""
