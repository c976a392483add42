"""Logs as tables for SQL: a server of Arrow Flight SQL over proxies; docs/flight-sql.md."""
