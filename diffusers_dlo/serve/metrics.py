# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what Prometheus is told. Must not count anything that it is not told of, and shares no registry with other servers
in its process.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .jobs import Job
from .scheduler import Scheduler


_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
_BYTES = ("device_slot_bytes", "resident_bytes", "device_placed_bytes", "host_private_bytes", "host_shared_bytes")
_PREFIX = "diffusers_dlo"


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        in_registry: dict[str, Any] = {"namespace": _PREFIX, "registry": self._registry}
        self._jobs = Counter("jobs", "Pictures and videos that have ended", ["kind", "status", "code"], **in_registry)
        self._seconds = Histogram(
            "job_seconds", "Time that a rank took for one", ["kind"], buckets=_SECONDS, **in_registry
        )
        self._waiting = Gauge("queue_length", "Pictures and videos that wait for a rank", **in_registry)
        self._running = Gauge("running", "Pictures and videos that ranks compute", **in_registry)
        self._ready = Gauge("ready", "1 if ranks take requests", **in_registry)
        self._restarts = Gauge("restarts", "How often the ranks were started anew", **in_registry)
        self._bytes = Gauge(
            "memory_bytes", "Memory of weights, as the offload counts it", ["rank", "of"], **in_registry
        )
        self._overlap = Gauge(
            "overlap_ratio",
            "The part of transfers that hid behind computing, in the last job",
            ["rank"],
            **in_registry,
        )

    def count(self, job: Job) -> None:
        """A job has ended."""
        code = "" if job.failure is None else job.failure.code
        self._jobs.labels(job.request.kind, job.status.value, code).inc()
        if job.seconds is not None:
            self._seconds.labels(job.request.kind).observe(job.seconds)

    def page(self, scheduler: Scheduler) -> bytes:
        """Everything, in the format of Prometheus."""
        self._waiting.set(scheduler.waiting)
        self._running.set(scheduler.running)
        self._ready.set(int(scheduler.fleet.ready))
        self._restarts.set(scheduler.fleet.restarts)
        for rank, figures in scheduler.fleet.figures.items():
            for name in _BYTES:
                self._bytes.labels(str(rank), name.removesuffix("_bytes")).set(figures.get(name, 0))
            if figures.get("overlap") is not None:
                self._overlap.labels(str(rank)).set(figures["overlap"])
        return generate_latest(self._registry)
