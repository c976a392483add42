"""Who may write when the disk is nearly full."""
