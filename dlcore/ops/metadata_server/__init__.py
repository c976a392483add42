"""The metadata server of one host: the part of ZooKeeper's protocol that dlog uses, over SQLite."""
