"""Several engines behind one address, run by Ray Serve.

    client --> Ray's proxy --+--> replica: application, AsyncLLM, engine
                             +--> replica: application, AsyncLLM, engine

Invariant: a replica answers as a server of its own does, and what Ray's proxy says
itself has the same form. Called by the command line.

In vLLM: vllm/v1/engine/core_client.py (DPLBAsyncMPClient), which shares out requests to
the engines of one server.
Source: appendix A35, "One machine, many machines".
"""

import logging.config
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from minivllm.engine.async_engine import AsyncLLM
from minivllm.engine.config import EngineConfig
from minivllm.errors import (
    ConfigError,
    EngineClosing,
    EngineDead,
    EngineOverloaded,
    MinivllmError,
)
from minivllm.server.errors import error_of
from minivllm.server.handlers import handlers_of
from minivllm.server.options import ServerOptions
from minivllm.server.stream import DONE, event

if TYPE_CHECKING:
    from prometheus_client.core import Metric

APP, DEPLOYMENT = "minivllm", "engine"  # their names in Ray
HEALTH_PERIOD_S = 2.0
# By the proxy's choice: the one of two that has fewer requests, or always the same.
ROUTERS = {
    "least": None,
    "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many engines there are, and who gets a request.

    Attributes:
        num_replicas: At least so many.
        max_replicas: Ray starts more when they are busy, up to so many; None for a
            fixed number.
        target_ongoing_requests: With `max_replicas`: requests that each should have.
        routing: "least" gives a request to the less busy one of two replicas,
            "session" gives all with the same header `x-session-id` to the same.
        num_cpus: Cores for each; None shares out what there is.
        num_gpus: GPUs for each; None for one, if the engine is to run on a GPU.
        address: Of a Ray cluster, "auto" for the one that runs on this machine; None
            starts one that ends with the server.

    Raises:
        ConfigError: A value is impossible.
    """

    num_replicas: int = 2
    max_replicas: int | None = None
    target_ongoing_requests: float = 16.0
    routing: str = "least"
    num_cpus: float | None = None
    num_gpus: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if type(self.num_replicas) is not int or self.num_replicas < 1:
            raise ConfigError(
                f"num_replicas is {self.num_replicas!r}, but must be an integer from 1"
            )
        if self.max_replicas is not None and (
            type(self.max_replicas) is not int or self.max_replicas < self.num_replicas
        ):
            raise ConfigError(
                f"max_replicas is {self.max_replicas!r}, but must be an integer from "
                f"num_replicas, which is {self.num_replicas}"
            )
        if self.routing not in ROUTERS:
            raise ConfigError(
                f"routing is {self.routing!r}, but must be one of {', '.join(ROUTERS)}"
            )
        if not 0 < self.target_ongoing_requests < math.inf:
            raise ConfigError(
                f"target_ongoing_requests is {self.target_ongoing_requests!r}, but "
                "must be a number above 0"
            )
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value!r}, but must be a number from 0")

    @property
    def most(self) -> int:
        """Replicas that there may be at the same time."""
        return self.max_replicas or self.num_replicas


class EngineReplica:
    """An engine and its application, in a process of Ray's."""

    def __init__(
        self,
        config: EngineConfig,
        limits: dict[str, Any],
        reading: dict[str, Any],
        options: ServerOptions,
        log_level: str,
    ) -> None:
        """Load the model.

        Args:
            config: Of the engine.
            limits: Of `AsyncLLM`.
            reading: Of `handlers_of`.
            options: Of the application.
            log_level: Of the replica.
        """
        from ray import serve

        from minivllm.server.serve import log_config

        logging.config.dictConfig(log_config(log_level))
        self.context = serve.get_replica_context()
        config = replace(config, seed=config.seed + self.context.rank.rank)
        self.llm = AsyncLLM(config, **limits)
        self.handlers = handlers_of(self.llm.engine, **reading)
        self.options = options

    def __serve_build_asgi_app__(self) -> Any:
        """Make the application; Ray calls this."""
        from starlette.routing import Route

        from minivllm.server.app import create_app

        app = create_app(self.llm, self.handlers, self.options)
        app.router.routes.insert(0, Route("/metrics", self._show_metrics))
        return app

    def check_health(self) -> None:
        """Raise EngineDead if the engine has died; Ray calls this."""
        self.llm.check_health()

    def metrics(self) -> list["Metric"]:
        """Return the metrics of this replica, labelled with its name."""
        from minivllm.server.metrics import EngineCollector

        collector = EngineCollector(self.llm, self.handlers.model)
        collector.labels["replica"] = self.context.replica_tag
        return list(collector.collect())

    async def _show_metrics(self, request: Any) -> Any:
        from prometheus_client import CONTENT_TYPE_LATEST
        from ray import serve
        from starlette.responses import Response

        names = (self.context.deployment, self.context.app_name)
        everybody = serve.get_deployment_handle(*names).broadcast("metrics")
        found = await everybody.results_async(timeout_s=5.0)
        return Response(joined_exposition(found), media_type=CONTENT_TYPE_LATEST)

    def __del__(self) -> None:
        self.llm.close()


def joined_exposition(found: list[list["Metric"]]) -> bytes:
    """Write the metrics of several replicas as one text.

    Args:
        found: Metrics of each replica, all with the same names.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    families: dict[str, Metric] = {}
    for metric in (metric for metrics in found for metric in metrics):
        family = families.setdefault(metric.name, metric)
        if family is not metric:
            family.samples += metric.samples

    class Found:
        def collect(self) -> Any:
            return families.values()

    registry = CollectorRegistry()
    registry.register(Found())
    return generate_latest(registry)


Message = dict[str, Any]
REPLICA_GONE = EngineDead(
    "the replica that computed this answer has stopped: ask again, others go on"
)
# What the proxy says itself, by its status.
PROXY_ERRORS: dict[int, MinivllmError] = {
    404: EngineClosing("no replica serves this yet, or not any more: try again later"),
    500: REPLICA_GONE,
    503: EngineOverloaded("no replica is free: try again later", 1),
}

REQUEST_ID = b"x-request-id"


class ProxyErrors:
    """Say what Ray's proxy says in the form of all other errors."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, and look at what comes back."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = ProxyAnswer(send)
        await self.app(scope, receive, answer.send)
        await answer.finish(dict(scope["headers"]).get(REQUEST_ID))


class ProxyAnswer:
    """An answer that is on its way through the proxy."""

    def __init__(self, send: Callable[[Message], Awaitable[None]]) -> None:
        self._send = send
        self._refused: int | None = 500  # the status, if the proxy refuses or is silent
        self._is_open_stream = False

    async def send(self, message: Message) -> None:
        """Pass a message on, unless the proxy itself says it."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": named_once(message["headers"])}
            kind = dict(message["headers"]).get(b"content-type", b"")
            is_own = message["status"] >= 400 and kind.startswith(b"text/plain")
            self._refused = message["status"] if is_own else None
            self._is_open_stream = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self._is_open_stream = False
        if self._refused is None:
            await self._send(message)

    async def finish(self, request_id: bytes | None) -> None:
        """Say what went wrong, if something did; the proxy has named the request."""
        if self._is_open_stream:
            data = event(error_of(REPLICA_GONE).body()) + DONE
            await self._send({"type": "http.response.body", "body": data})
        if self._refused is not None:
            error = PROXY_ERRORS.get(self._refused, REPLICA_GONE)
            await self._refuse(error, request_id)

    async def _refuse(self, error: MinivllmError, request_id: bytes | None) -> None:
        from starlette.responses import JSONResponse

        found = error_of(error)
        headers = {"X-Request-Id": request_id.decode()} if request_id else {}
        if isinstance(error, EngineOverloaded):
            headers["Retry-After"] = str(error.retry_after_s)
        response = JSONResponse(found.body(), found.status, headers)
        await response({"type": "http"}, None, self._send)


def named_once(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leave out the proxy's name of a request behind the replica's, which is equal."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.lower() != REQUEST_ID or REQUEST_ID not in dict(kept):
            kept.append((name.lower(), value))
    return kept


def proxy_middlewares() -> list[Any]:
    """Return what wraps the proxy; Ray calls this, by the name in `PROXY_HOOK`."""
    from starlette.middleware import Middleware

    return [Middleware(ProxyErrors)]


PROXY_HOOK = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": (
        "minivllm.server.replicas:proxy_middlewares"
    )
}


def deployment(
    replicas: ReplicaOptions,
    actor: dict[str, float],
    config: EngineConfig,
    limits: dict[str, Any],
    reading: dict[str, Any],
    options: ServerOptions,
    log_level: str,
) -> Any:
    """Describe to Ray what each replica is, and how many there are.

    Args:
        replicas: How many, and who gets a request.
        actor: Cores and GPUs of each.
        config: What each is made of, as the next four; see `EngineReplica`.
        limits: Of each `AsyncLLM`.
        reading: Of each `handlers_of`.
        options: Of each application.
        log_level: Of each replica.

    Returns:
        An application of Ray Serve.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    settings: dict[str, Any] = {
        "name": DEPLOYMENT,
        # An engine refuses by itself when it is full, and says when to come again.
        "max_ongoing_requests": config.max_num_seqs + limits["max_num_waiting"] + 64,
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": options.shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": actor,
    }
    if replicas.max_replicas is None:
        settings["num_replicas"] = replicas.num_replicas
    else:
        settings["autoscaling_config"] = {
            "min_replicas": replicas.num_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_ongoing_requests,
        }
    if router := ROUTERS[replicas.routing]:
        settings["request_router_config"] = RequestRouterConfig(
            request_router_class=router
        )
    kind = serve.deployment(serve.ingress()(EngineReplica), **settings)
    return kind.bind(config, limits, reading, options, log_level)


def shared_gpus(
    replicas: ReplicaOptions, config: EngineConfig, num_gpus: float
) -> float:
    """Return the GPUs of each replica: one, if there are any and the engine can."""
    if replicas.num_gpus is not None:
        return replicas.num_gpus
    can = config.backend in ("auto", "torch") and config.device != "cpu"
    return 1.0 if can and num_gpus >= 1 else 0.0


def shared_cpus(replicas: ReplicaOptions, num_cores: float) -> float:
    """Return the cores of each replica.

    Raises:
        ConfigError: There are not enough.
    """
    num_cpus = replicas.num_cpus
    if num_cpus is None:
        num_cpus = num_cores / replicas.most
        num_cpus = float(int(num_cpus)) if num_cpus >= 1 else num_cpus
    if num_cpus * replicas.num_replicas > num_cores:
        raise ConfigError(
            f"{replicas.num_replicas} replicas with {num_cpus:g} cores each need "
            f"{num_cpus * replicas.num_replicas:g}, but Ray has {num_cores:g}: ask for "
            "fewer replicas, or fewer cores for each"
        )
    return num_cpus


class Ending:
    """Waits for signals: the first one ends politely, the second at once."""

    def __init__(self) -> None:
        self._told = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._told.is_set():
            os._exit(128 + number)  # Ray's processes end when their driver does
        self._told.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the first signal; False if it did not come in this time."""
        return self._told.wait(seconds)


def serve_replicas(
    replicas: ReplicaOptions,
    address: tuple[str, int],
    *,
    config: EngineConfig,
    limits: dict[str, Any],
    reading: dict[str, Any],
    options: ServerOptions,
    log_level: str = "info",
) -> int:
    """Start the replicas, and serve until a signal comes.

    Args:
        replicas: How many, and who gets a request.
        address: Where to listen: host and port.
        config: Of each engine.
        limits: Of each `AsyncLLM`: `max_num_waiting` and `timeout_s`.
        reading: Of each `handlers_of`: `names`, and more.
        options: Of each application.
        log_level: Of Ray and of the replicas.

    Returns:
        The exit code: 0, or 1 if no replica is left that could be started.

    Raises:
        ConfigError: Ray cannot be reached, has too few cores, or no replica starts.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # tell nobody
    os.environ |= PROXY_HOOK  # Ray's processes inherit it
    import ray
    from ray import serve

    start_ray(ray, replicas, log_level)
    ending = Ending()  # Ray has handlers of its own, so ours come later
    try:
        there = ray.cluster_resources()
        num_cpus = shared_cpus(replicas, there.get("CPU", 0.0))
        num_gpus = shared_gpus(replicas, config, there.get("GPU", 0.0))
        actor = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        host, port = address
        wait_s = options.keep_alive_timeout_s
        http = {"host": host, "port": port, "keep_alive_timeout_s": wait_s}
        where = "HeadOnly" if replicas.address is None else "EveryNode"
        serve.start(http_options=http, proxy_location=where)
        app = deployment(replicas, actor, config, limits, reading, options, log_level)
        # A replica logs requests by itself, without what stands behind a "?".
        logging_config = {"log_level": log_level.upper(), "enable_access_log": False}
        try:
            serve.run(app, name=APP, logging_config=logging_config)
        except RuntimeError as error:  # Ray's words have the traceback of the replica
            raise ConfigError(f"no replica can be started: {error}") from error
        most = f" to {replicas.most}" if replicas.max_replicas else ""
        print(
            f"minivllm: {reading['names'][0]} at http://{host}:{port}/v1; replicas: "
            f"{replicas.num_replicas}{most}; cores for each: {num_cpus:g}",
            file=sys.stderr,
            flush=True,
        )
        while not ending.wait(5.0):
            status = serve.status().applications.get(APP)
            if status is None or status.status == "DEPLOY_FAILED":
                print("minivllm: no replica can be started", file=sys.stderr)
                return 1
        serve.delete(APP)  # waits until the replicas have ended
        return 0
    finally:
        serve.shutdown()
        ray.shutdown()


def start_ray(ray: Any, replicas: ReplicaOptions, log_level: str) -> None:
    """Start Ray here, or find a cluster.

    Raises:
        ConfigError: There is none at this address.
    """
    options: dict[str, Any] = {"logging_level": log_level.upper()}
    if replicas.address is None:
        options |= {"include_dashboard": False}
    else:
        options |= {"address": replicas.address}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {replicas.address}: {error}; start one with `ray start "
            "--head`, or leave out --ray-address"
        ) from error
