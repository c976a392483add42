"""Auto-recovery: who notices that replicas are missing, and who makes them again."""
