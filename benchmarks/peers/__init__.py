"""The same work done by dlog and by a Kafka on the same machine, in one run."""
