"""Logs over proxies; it needs no bookies and no ZooKeeper."""
