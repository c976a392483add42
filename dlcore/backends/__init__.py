"""The two ways to logs: directly over the metadata store and bookies, and through proxies."""
