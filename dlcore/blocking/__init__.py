"""The blocking API: twins of the async classes, which run on one event loop per process."""
