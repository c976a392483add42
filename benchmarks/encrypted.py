"""Encrypted logs beside clear ones: the same records are written and read, in turn."""

from __future__ import annotations

import base64
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, Target, measure
from benchmarks.logs import (
    CONFIG,
    RECORD_BYTES,
    SHORT_ROUNDS,
    WRITE_BYTES,
    CpuCost,
    drop_log,
    read_to_its_end,
    record_batches,
    write_log,
)
from dlcore.sync import open_namespace

if TYPE_CHECKING:
    from pathlib import Path

    from dlcore.ops.sandbox.cluster import Sandbox

_ENCRYPTED = replace(CONFIG, encrypted=True)


def _new_keys(folder: Path) -> str:
    path = folder / "encryption-keys"
    path.touch(mode=0o600)
    path.write_text(f"bench {base64.b64encode(os.urandom(32)).decode()}\n")
    return str(path)


def encrypted_write(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """As core_write, beside the same without encryption, and the CPU time of both."""
    keys = _new_keys(folder)
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    costs = {each: CpuCost([bookie.pid for bookie in sandbox.bookies]) for each in (True, False)}

    def rate(*, encrypted: bool) -> float:
        name, seconds = write_log(
            sandbox.uri,
            batches,
            config=_ENCRYPTED if encrypted else CONFIG,
            encryption_keys=keys,
            counted=costs[encrypted].counted,
        )
        drop_log(sandbox.uri, name)
        return WRITE_BYTES / 1e6 / seconds

    figure = measure(
        name="encrypted_write",
        unit="MB/s",
        target=Target(ratio=0.9, is_rate=True),
        value=lambda: rate(encrypted=True),
        limit=lambda: rate(encrypted=False),
    )
    return [figure, _cpu_figure("encrypted_write_cpu", costs)]


def encrypted_read(sandbox: Sandbox, folder: Path) -> list[Figure]:
    """As core_read, beside a read of a clear log, and the CPU time of both."""
    keys = _new_keys(folder)
    batches = record_batches(total_bytes=WRITE_BYTES, record_bytes=RECORD_BYTES)
    names = {
        each: write_log(
            sandbox.uri, batches, config=_ENCRYPTED if each else CONFIG, encryption_keys=keys
        )[0]
        for each in (True, False)
    }
    del batches
    costs = {each: CpuCost([bookie.pid for bookie in sandbox.bookies]) for each in (True, False)}
    with open_namespace(sandbox.uri, encryption_keys=keys) as namespace:

        def rate(*, encrypted: bool) -> float:
            started = time.perf_counter()
            with namespace.open_log(names[encrypted]) as log, costs[encrypted].counted():
                read_to_its_end(log)
            return WRITE_BYTES / 1e6 / (time.perf_counter() - started)

        figure = measure(
            name="encrypted_read",
            unit="MB/s",
            target=Target(ratio=0.75, is_rate=True),
            value=lambda: rate(encrypted=True),
            limit=lambda: rate(encrypted=False),
            rounds=SHORT_ROUNDS,
        )
    for name in names.values():
        drop_log(sandbox.uri, name)
    return [figure, _cpu_figure("encrypted_read_cpu", costs)]


def _cpu_figure(name: str, costs: dict[bool, CpuCost]) -> Figure:
    (encrypted, _), (clear, _) = costs[True].per_gb(), costs[False].per_gb()
    target = Target(ratio=2.0, is_rate=False)
    return Figure(name=name, unit="s/GB", value=encrypted, limit=clear, target=target)
