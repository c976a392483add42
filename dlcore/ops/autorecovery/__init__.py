"""Auto-recovery: the auditor finds missing replicas, and the workers make them again."""
