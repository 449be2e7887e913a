"""The subcommand `serve`: OpenAI's interface to a model, over HTTP.

In vLLM: vllm/entrypoints/cli/serve.py (ServeSubcommand).
Source: appendix A32, "A server that stays up"; appendix A35, "One machine, many
    machines".
"""

import argparse
import importlib.util
import ipaddress
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli.options import add_model_options, apply_model_options, integer
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from minivllm.engine.config import EngineConfig
    from minivllm.server.options import ServerOptions

EXAMPLES = """\
examples:
  minivllm serve
  minivllm serve Qwen/Qwen3-0.6B --port 8080 --api-key secret
  minivllm serve ./my-model --backend numpy --max-num-seqs 8
  curl http://127.0.0.1:8000/v1/models
"""
PACKAGES = ("fastapi", "prometheus_client", "pydantic", "uvicorn")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
POLICIES = ("mixed", "prefill_first", "decode_first", "priority", "shortest")


def seconds(text: str) -> float:
    """Parse a number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0")
    return value


def share(text: str) -> float:
    """Parse a share above 0, for argparse."""
    value = seconds(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0, up to 1")
    return value


def is_local(host: str) -> bool:
    """Tell whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add_server_options(parser)
    add_replica_options(parser.add_argument_group("several engines, with Ray Serve"))
    add_engine_options(parser.add_argument_group("the engine"))
    add_model_options(parser, "fake")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server, and the name of its model."""
    parser.add_argument(
        "positional",
        metavar="MODEL",
        nargs="?",
        help="the model, as for --model",
    )
    group = parser.add_argument_group("the server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="where to listen (default: %(default)s)")
    add("--port", type=integer(0, 65535), default=8000, help="(default: %(default)s)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="let in only who has it; may be given several times (default: what "
        "MINIVLLM_API_KEY says, or everybody)",
    )
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be given several times",
    )
    add(
        "--max-num-waiting",
        type=integer(0),
        default=256,
        metavar="N",
        help="requests that may wait; more are told to come again (default: 256)",
    )
    add(
        "--request-timeout",
        type=seconds,
        metavar="S",
        help="abort a request after so many seconds (default: never)",
    )
    add(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests have at the end (default: 30)",
    )
    add(
        "--max-body-bytes",
        type=integer(1),
        default=4 * 2**20,
        metavar="N",
        help="size of a request at most (default: 4 MiB)",
    )
    add(
        "--body-timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds in which a request must be read (default: 60)",
    )
    add(
        "--keep-alive-timeout",
        type=seconds,
        default=5.0,
        metavar="S",
        help="seconds that an idle connection is kept; behind a proxy, more than the "
        "proxy keeps it (default: 5)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template for chats, in place of the model's own",
    )
    add(
        "--no-reasoning",
        action="store_true",
        help="do not tell thoughts apart from answers (a request may ask for it)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin ask, * for all; may be given several times",
    )
    add(
        "--page",
        action=argparse.BooleanOptionalAction,
        help="show a chat and the engine's live view at / (default: if only this "
        "machine can ask)",
    )
    add(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="(default: %(default)s)",
    )
    add(
        "--log-prompts",
        action="store_true",
        help="show in the log what users write and what they are answered",
    )


def add_engine_options(parser: argparse._ArgumentGroup) -> None:
    """Add the options of an engine that are not about the model itself."""
    add = parser.add_argument
    add("--max-num-seqs", type=integer(1), default=64, metavar="N", help="at once")
    add(
        "--max-num-batched-tokens",
        type=integer(1),
        default=2048,
        metavar="N",
        help="tokens of a step at most (default: 2,048)",
    )
    add(
        "--max-model-len",
        type=integer(1),
        metavar="N",
        help="tokens of a request at most (default: 4,096, or what the model can)",
    )
    add("--max-logprobs", type=int, default=20, metavar="N", help="(default: 20)")
    add("--block-size", type=integer(1), default=16, metavar="N", help="(default: 16)")
    add("--num-blocks", type=integer(1), metavar="N", help="of the KV cache; or")
    add("--kv-cache-memory-bytes", type=integer(1), metavar="N", help="or")
    add("--gpu-memory-utilization", type=share, metavar="SHARE", help="on a GPU")
    add("--no-prefix-caching", action="store_true", help="share no beginnings")
    add("--policy", choices=POLICIES, default="mixed", help="(default: mixed)")
    add("--seed", type=integer(0), default=0, metavar="N", help="(default: 0)")
    add("--trace", metavar="FILE", help="record every step in a file")


def read_template(path: str | None) -> str | None:
    """Return a chat template, checked before a model is loaded.

    Raises:
        ConfigError: There is no such file, or no template in it.
    """
    if path is None:
        return None
    from minivllm.text.chat_template import variables_of

    try:
        template = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template is {path}, which cannot be read ({error}): name a text "
            "file in UTF-8"
        ) from error
    variables_of(template)
    return template


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(
            f"the server needs {', '.join(missing)}, which is not installed: "
            'pip install "minivllm[server]"'
        )
    if arguments.positional and arguments.model not in (
        DEFAULT_MODEL,
        arguments.positional,
    ):
        arguments.refuse(
            f"two models are named, {arguments.positional} and {arguments.model}: "
            "leave one of them out"
        )


# Imported only in functions: NumPy and torch read the number of threads when they load.
def engine_config(arguments: argparse.Namespace) -> "EngineConfig":
    """Return what the engine needs to know."""
    from minivllm.engine.config import EngineConfig

    names = (
        *("backend", "dtype", "device", "enforce_eager", "max_num_seqs", "block_size"),
        *("max_num_batched_tokens", "max_model_len", "max_logprobs", "num_blocks"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "policy", "seed", "trace"),
    )
    return EngineConfig(
        model=arguments.positional or arguments.model,
        enable_prefix_caching=not arguments.no_prefix_caching,
        **{name: getattr(arguments, name) for name in names},
    )


def engine_limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `AsyncLLM` needs to know beside that."""
    return {
        "max_num_waiting": arguments.max_num_waiting,
        "timeout_s": arguments.request_timeout or None,
    }


def handler_options(
    arguments: argparse.Namespace, config: "EngineConfig"
) -> dict[str, Any]:
    """Return what `handlers_of` needs to know."""
    name = os.path.basename(config.model_name)
    return {
        "names": arguments.served_model_name or [name],
        "chat_template": read_template(arguments.chat_template),
        "splits_reasoning": not arguments.no_reasoning,
    }


def server_options(arguments: argparse.Namespace) -> "ServerOptions":
    """Return what the application needs to know."""
    from minivllm.server.options import ServerOptions

    keys = arguments.api_key or os.environ.get("MINIVLLM_API_KEY", "").split()
    return ServerOptions(
        api_keys=tuple(keys),
        max_body_bytes=arguments.max_body_bytes,
        body_timeout_s=arguments.body_timeout,
        cors_origins=tuple(arguments.cors_origin),
        keep_alive_timeout_s=arguments.keep_alive_timeout,
        page=is_local(arguments.host) if arguments.page is None else arguments.page,
        shutdown_timeout_s=arguments.shutdown_timeout,
        log_prompts=arguments.log_prompts,
    )


def add_replica_options(parser: argparse._ArgumentGroup) -> None:
    """Add the options of several engines behind one address."""
    add = parser.add_argument
    add("--replicas", type=integer(1), metavar="N", help="so many engines")
    add(
        "--max-replicas",
        type=integer(1),
        metavar="N",
        help="start more when they are busy, up to so many",
    )
    add(
        "--target-ongoing-requests",
        type=seconds,
        default=16.0,
        metavar="N",
        help="with --max-replicas: requests that each should have (default: 16)",
    )
    add(
        "--routing",
        choices=("least", "session"),
        default="least",
        help="to the less busy one of two, or by the header x-session-id always to "
        "the same one (default: %(default)s)",
    )
    add("--cpus-per-replica", type=seconds, metavar="N", help="(default: a share)")
    add("--gpus-per-replica", type=seconds, metavar="N", help="(default: 1 or none)")
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="of a Ray cluster; auto for the one that runs on this machine (default: "
        "start one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Load the model, serve it, and return the exit code."""
    check_arguments(arguments)
    apply_model_options(arguments)
    if arguments.replicas is not None:
        return run_replicas(arguments)
    if arguments.max_replicas is not None:
        arguments.refuse("--max-replicas needs --replicas, the smallest number")
    return run_one(arguments)


def run_one(arguments: argparse.Namespace) -> int:
    """Serve with one engine, in this process; return the exit code."""
    from minivllm.engine.async_engine import AsyncLLM
    from minivllm.server.handlers import handlers_of
    from minivllm.server.serve import open_port, serve

    config, options = engine_config(arguments), server_options(arguments)
    reading = handler_options(arguments, config)
    with open_port(arguments.host, arguments.port) as port:
        llm = AsyncLLM(config, **engine_limits(arguments))
        handlers = handlers_of(llm.engine, **reading)
        runner = llm.engine.runner
        host, number = port.getsockname()[:2]
        page = f"; a page at http://{host}:{number}/" if options.page else ""
        print(
            f"minivllm: {handlers.model} at http://{host}:{number}/v1, with a KV cache "
            f"for {runner.num_blocks * runner.block_size:,} tokens and up to "
            f"{runner.max_model_len:,} for each request{page}",
            file=sys.stderr,
            flush=True,
        )
        return serve(llm, handlers, options, port, arguments.log_level)


def fetched(config: "EngineConfig") -> "EngineConfig":
    """Fetch the model, and name it so that every process of this machine finds it."""
    from minivllm.loading.hub import resolve_model

    if config.model_name == "fake":
        return config
    folder = resolve_model(config.model, progress=True)
    is_local = Path(config.model).expanduser().exists()
    return replace(config, model=folder.absolute()) if is_local else config


def run_replicas(arguments: argparse.Namespace) -> int:
    """Serve with several engines; return the exit code."""
    if importlib.util.find_spec("ray") is None:
        raise BackendUnavailable(
            "--replicas needs Ray Serve, which is not installed: "
            'pip install "minivllm[ray]"'
        )
    if arguments.trace:
        arguments.refuse("--trace writes one file, and replicas are several engines")
    from minivllm.server.replicas import ReplicaOptions, serve_replicas
    from minivllm.server.serve import open_port

    config = fetched(engine_config(arguments))
    replicas = ReplicaOptions(
        num_replicas=arguments.replicas,
        max_replicas=arguments.max_replicas,
        target_ongoing_requests=arguments.target_ongoing_requests,
        routing=arguments.routing,
        num_cpus=arguments.cpus_per_replica,
        num_gpus=arguments.gpus_per_replica,
        address=arguments.ray_address,
    )
    with open_port(arguments.host, arguments.port) as port:  # is it free?
        address = port.getsockname()[:2]
    return serve_replicas(
        replicas,
        address,
        config=config,
        limits=engine_limits(arguments),
        reading=handler_options(arguments, config),
        options=server_options(arguments),
        log_level=arguments.log_level,
    )
