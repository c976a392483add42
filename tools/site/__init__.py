"""The documentation site: the pages of the tree, and notebooks with what their runs showed."""

from __future__ import annotations
