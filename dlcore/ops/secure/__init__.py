"""Certificates and configuration of a secured cluster, made in one folder."""
