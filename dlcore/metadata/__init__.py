"""The metadata store: a small versioned tree, in ZooKeeper or in memory."""
