# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Several hosts: on each a replica of the server of `diffusers-dlo serve`, with its own ranks, behind Ray Serve.

    pip install -e ".[ray]"
    python examples/ray_serve.py --demo --replicas 2  # both here, on the CPU
    python examples/ray_serve.py PATH_OR_HUB_ID --ray-address auto --replicas 4 --data-parallel-size 8

Replicas share nothing: each loads the model from the disk of its host and has a queue of its own. Ray places them,
routes requests to them, looks after their health and replaces those that fail. All options of `diffusers-dlo serve`
are taken. See docs/deploy.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from diffusers_dlo.serve.access import error_body
from diffusers_dlo.serve.app import make_app
from diffusers_dlo.serve.options import ServeOptions, add_arguments, read_options


# Ray reads its settings when it is imported, so functions import it: a Ray for this machine alone is told these first.
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too this keeps Ray at the loopback address
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # otherwise Ray writes one into the home directory
}
OBJECT_STORE = 80 << 20
"""Bytes; requests and pictures do not go through it."""
NAME = "diffusers-dlo"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Sends all requests of a session, which is the header `X-Session-Id`, to the same replica."""
JOBS = ("/v1/videos", "/v1/jobs")
"""Where jobs are queued, which only their replica knows."""
HEALTH_SECONDS = 2.0
STARTS = 3
"""How often a replica may fail to start before Ray gives up."""
OBSERVERS = 64
"""Requests of a replica beside those that are computed or wait: for states, events and contents."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ReplicaName:
    r"""
    Stands before the application: says in the header `X-Replica` who answers, and refuses jobs that could not be found
    again.

    Args:
        app (`Callable`): the application.
        name (`str`): of the replica.
        jobs (`str`): which requests may queue jobs: "all", "session" (those of a session) or "none".
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], name: str, jobs: str) -> None:
        self._app = app
        self._name = name.encode()
        self._jobs = jobs

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._name)]
            await send(message)

        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in JOBS:
            session = any(name.lower() == b"x-session-id" and value for name, value in scope["headers"])
            if self._jobs == "none" or (self._jobs == "session" and not session):
                await self._refusal(scope["path"])(scope, receive, named)
                return
        await self._app(scope, receive, named)

    def _refusal(self, path: str) -> JSONResponse:
        way_out = (
            "send the header 'X-Session-Id', with the same value in every request about the job"
            if self._jobs == "session"
            else "start the replicas with --sticky"
        )
        message = (
            f"'{path}' queues a job that only one replica knows, and later requests about it would reach another; "
            f"{way_out}, or use '/v1/images/generations' or '/v1/videos/sync'."
        )
        return JSONResponse(error_body(message, "invalid_request_error", code="no_session"), 400)


async def _until_ready(app: FastAPI) -> None:
    """Until the ranks take requests: before, Ray is not told that there is a replica."""
    scheduler = app.state.service.scheduler
    while not scheduler.fleet.ready:
        if scheduler.fleet.error is not None:
            raise RuntimeError(f"The ranks could not start: {scheduler.fleet.error}") from scheduler.fleet.error
        seen = scheduler.pulse.beats
        await scheduler.pulse.after(seen)


def make_replica_app(arguments: argparse.Namespace, name: str) -> FastAPI:
    """The application of `diffusers-dlo serve`, which has started only once its ranks are ready."""
    # Read here, and not by who starts the replicas: a key's file is read on each host.
    app = make_app(read_options(arguments))
    ranks_live = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with ranks_live(app) as state:
            await _until_ready(app)
            yield state

    app.router.lifespan_context = lifespan
    jobs = "session" if arguments.sticky else "all" if arguments.replicas == 1 else "none"
    app.add_middleware(ReplicaName, name=name, jobs=jobs)  # type: ignore[arg-type]
    return app


def make_deployment(arguments: argparse.Namespace, options: ServeOptions) -> Any:
    """What Ray runs: `--replicas` times the application, each with all devices of its host."""
    from ray import serve

    # What these two see is stored in the cluster; not the options, which have the key from its file.
    patience = options.start_timeout

    def build() -> FastAPI:
        return make_replica_app(arguments, serve.get_replica_context().replica_id.unique_id)

    @serve.ingress(build)
    class Replica:
        def __init__(self) -> None:
            self._ready_last = time.monotonic()

        async def check_health(self) -> None:
            """Asked by Ray. Ranks that are started anew are not an illness; ranks that do not come back are."""
            fleet = self.app.state.service.scheduler.fleet  # type: ignore[attr-defined]
            if fleet.ready:
                self._ready_last = time.monotonic()
            elif time.monotonic() - self._ready_last > patience:
                raise RuntimeError(
                    f"The replica was not ready for {patience:g} s (--start-timeout), and is replaced: {fleet.reason}."
                )

    return serve.deployment(**placement(arguments, options))(Replica).bind()


def placement(arguments: argparse.Namespace, options: ServeOptions) -> dict[str, Any]:
    """What Ray is told of the replicas: how many, where, and with what."""
    resources: dict[str, Any] = {"num_cpus": arguments.cpus}
    if arguments.accelerator == "GPU":
        resources["num_gpus"] = options.ranks
    elif arguments.accelerator != "none":
        resources["resources"] = {arguments.accelerator: options.ranks}
    more: dict[str, Any] = {}
    if not options.demo:
        more["max_replicas_per_node"] = 1
    if arguments.sticky:
        more["request_router_config"] = {"request_router_class": ROUTER}
    return {
        "name": NAME,
        "num_replicas": arguments.replicas,
        "ray_actor_options": resources,
        # The queue that refuses, with a time to come again, is the replica's; Ray's would wait in silence.
        "max_ongoing_requests": 2 * (options.limits.queue + options.ranks) + OBSERVERS,
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": arguments.drain,
        "max_constructor_retry_count": STARTS,
        **more,
    }


def start_ray(address: str | None) -> None:
    """Joins a cluster, or starts a Ray for this machine alone: at the loopback address, without reports of its use."""
    if address is not None:
        import ray

        ray.init(address=address)
        return
    os.environ.update({name: os.environ.get(name, value) for name, value in LOCAL.items()})
    import ray

    ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line: that of `diffusers-dlo serve`, and Ray's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("--replicas", type=int, default=1, metavar="N", help="hosts, each with all its ranks (1)")
    hosts.add_argument(
        "--ray-address", metavar="ADDRESS", help="of the cluster; 'auto' finds it (default: a Ray of its own)"
    )
    hosts.add_argument(
        "--accelerator", default="GPU", help="what Ray calls the devices: GPU, NPU, none (default: %(default)s)"
    )
    hosts.add_argument("--cpus", type=float, help="of a replica (default: one for each rank; 0 with --demo)")
    hosts.add_argument("--sticky", action="store_true", help="route by the header X-Session-Id, which jobs need")
    hosts.add_argument(
        "--drain", type=float, default=60.0, metavar="S", help="for what is computed, when it ends (%(default)g)"
    )
    found = parser.parse_args(arguments)
    found.demo = found.demo or found.model is None
    if found.demo:
        found.accelerator = "none"
    if found.cpus is None:
        found.cpus = 0 if found.demo else found.ranks
    return found


def main() -> int:
    """Serves until a signal comes."""
    arguments = parse()
    try:
        options = read_options(arguments)
    except (ValueError, OSError) as error:
        print(f"ray_serve: {error}", file=sys.stderr)
        return 2
    if not options.loopback and options.api_key is None:
        print(f"ray_serve: '{options.host}' can be reached by others, and there is no key. Give --api-key-file.")
    start_ray(arguments.ray_address)
    import ray
    from ray import serve

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # after Ray's own
    try:
        everywhere = arguments.ray_address is not None
        serve.start(
            proxy_location="EveryNode" if everywhere else "HeadOnly",
            http_options={"host": options.host, "port": options.port},
        )
        serve.run(make_deployment(arguments, options), name=NAME, route_prefix="/")
        print(f"{arguments.replicas} replicas serve '{options.name}' at {options.host}:{options.port}", flush=True)
        asyncio.run(asyncio.Event().wait())
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        print(f"ray_serve: the replicas could not start. {error}", file=sys.stderr)
        return 1
    finally:
        if arguments.ray_address is None:
            serve.shutdown()
        else:
            serve.delete(NAME)  # others may have theirs in the cluster
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
