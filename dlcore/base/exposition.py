"""Samples in Prometheus' format, and for registries of `prometheus_client`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlcore.base.extras import missing_packages_explained
from dlcore.base.metrics import Durations, Kind, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dlcore.base.metrics import Metric, Source

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SampleCollector:
    """A collector for a registry of `prometheus_client`: it asks its sources at each scrape.

    Args:
        metrics: the metrics that may occur.
        sources: return the samples.
    """

    def __init__(self, metrics: Sequence[Metric], *sources: Source) -> None:
        with missing_packages_explained():
            import prometheus_client.core  # noqa: F401  # fails now, and not at the first scrape
        self._metrics = metrics
        self._sources = sources

    def describe(self) -> Iterator[Any]:
        """Yield the empty families; a registry refuses two of one name."""
        for each in self._metrics:
            yield _family(each)

    def collect(self) -> Iterator[Any]:
        """Yield the families with their samples."""
        samples = [sample for source in self._sources for sample in source()]
        families = {each: _family(each) for each in dict.fromkeys(s.metric for s in samples)}
        for sample in samples:
            _add(families[sample.metric], sample)
        yield from families.values()


def exposition(collectors: Iterable[SampleCollector]) -> bytes:
    """Return what collectors have, with the figures of this process, in Prometheus' format."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for each in collectors:
        registry.register(each)
    return generate_latest(registry)


def _family(metric: Metric) -> Any:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    kinds = {
        Kind.COUNTER: CounterMetricFamily,
        Kind.GAUGE: GaugeMetricFamily,
        Kind.HISTOGRAM: HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.name, metric.text, labels=metric.labels)


def _add(family: Any, sample: Sample) -> None:
    value = sample.value
    if isinstance(value, Durations):
        family.add_metric(sample.labels, value.cumulative(), value.total_s)
    else:
        family.add_metric(sample.labels, value)
