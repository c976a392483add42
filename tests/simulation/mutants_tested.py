"""All mutants that named tests catch."""

from __future__ import annotations

from tests.simulation import (
    mutants_tested_bookie,
    mutants_tested_client,
    mutants_tested_encryption,
    mutants_tested_files,
    mutants_tested_logs,
    mutants_tested_metadata,
    mutants_tested_producers,
    mutants_tested_proxy,
    mutants_tested_redaction,
    mutants_tested_repair,
    mutants_tested_sharing,
    mutants_tested_spark,
    mutants_tested_syncs,
    mutants_tested_tables,
    mutants_tested_tier,
    mutants_tested_ways,
    mutants_tested_wire,
)
from tests.simulation.tested import TESTED, Tested

__all__ = ["MODULES", "TESTED", "Tested"]

MODULES = (
    mutants_tested_bookie,
    mutants_tested_client,
    mutants_tested_encryption,
    mutants_tested_files,
    mutants_tested_logs,
    mutants_tested_metadata,
    mutants_tested_producers,
    mutants_tested_proxy,
    mutants_tested_redaction,
    mutants_tested_repair,
    mutants_tested_syncs,
    mutants_tested_tables,
    mutants_tested_sharing,
    mutants_tested_spark,
    mutants_tested_tier,
    mutants_tested_ways,
    mutants_tested_wire,
)
"""Each notes its own in `TESTED`."""
