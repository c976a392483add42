"""Measures each figure beside the limit of the machine, both in one run; `make bench` runs it."""

from __future__ import annotations
