"""When an ordinary writer starts another segment: by size or by age, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingPolicy:
    """Bounds of one segment; the record that reaches a bound is the last one in it."""

    size_bytes_max: int
    age_max_ms: int

    def should_roll(self, *, size_bytes: int, age_ms: int) -> bool:
        """Return whether the next entry goes to another segment than one that has some already."""
        return size_bytes >= self.size_bytes_max or age_ms >= self.age_max_ms
