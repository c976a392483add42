"""The main job on real data; `make demo` runs it."""

from __future__ import annotations
