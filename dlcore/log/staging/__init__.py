"""Appends of many tasks to many logs: records wait in ledgers, one transaction commits them."""
