"""The blocking face: twins of the async classes, which run on one event loop per process."""
