"""The entry log: records in files, their index, reading them, and replay after a crash."""
