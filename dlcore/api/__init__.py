"""The asynchronous face over bookies and ZooKeeper: namespaces, logs, scans, and copies."""
