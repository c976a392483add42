"""Hostile and careless clients against real servers, and what they cost everybody else."""
