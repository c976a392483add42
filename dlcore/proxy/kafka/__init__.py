"""Kafka's protocol at a proxy: each log is a topic of one partition."""
