"""Metadata of logs, and every change of it, planned and then applied."""
