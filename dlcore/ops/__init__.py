"""The operator's tools and services: command line, sandbox, auto-recovery, upkeep, inspection."""
