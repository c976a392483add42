"""The ports of a server: their certificates change, and operators speak HTTP."""
