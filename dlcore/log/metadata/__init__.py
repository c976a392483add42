"""Metadata of logs, and all changes of it, which are planned and then applied."""
