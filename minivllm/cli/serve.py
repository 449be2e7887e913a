"""The subcommand `serve`: OpenAI's interface to a model, over HTTP.

In vLLM: vllm/entrypoints/cli/serve.py (ServeSubcommand).
Source: appendix A32, "A server that stays up".
"""

import argparse
import importlib.util
import os
import sys

from minivllm.cli.options import add_model_options, apply_model_options, integer
from minivllm.config import DEFAULT_MODEL
from minivllm.errors import BackendUnavailable

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
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
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin ask, * for all; may be given several times",
    )
    add(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="never shows what users write (default: %(default)s)",
    )
    add_engine_options(parser.add_argument_group("the engine"))
    add_model_options(parser, "fake")


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


def run(arguments: argparse.Namespace) -> int:
    """Load the model, serve it, and return the exit code."""
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
    apply_model_options(arguments)
    # Imported only now: NumPy and torch read the number of threads when they load.
    from minivllm.engine.async_engine import AsyncLLM
    from minivllm.engine.config import EngineConfig
    from minivllm.server.handlers import EngineView, Handlers
    from minivllm.server.options import ServerOptions
    from minivllm.server.serve import open_port, serve

    keys = arguments.api_key or os.environ.get("MINIVLLM_API_KEY", "").split()
    options = ServerOptions(
        api_keys=tuple(keys),
        max_body_bytes=arguments.max_body_bytes,
        cors_origins=tuple(arguments.cors_origin),
        shutdown_timeout_s=arguments.shutdown_timeout,
    )
    model = arguments.positional or arguments.model
    names = (
        *("backend", "dtype", "device", "enforce_eager", "max_num_seqs", "block_size"),
        *("max_num_batched_tokens", "max_model_len", "max_logprobs", "num_blocks"),
        *("kv_cache_memory_bytes", "gpu_memory_utilization", "policy", "seed", "trace"),
    )
    config = EngineConfig(
        model=model,
        enable_prefix_caching=not arguments.no_prefix_caching,
        **{name: getattr(arguments, name) for name in names},
    )
    with open_port(arguments.host, arguments.port) as port:
        llm = AsyncLLM(
            config,
            max_num_waiting=arguments.max_num_waiting,
            timeout_s=arguments.request_timeout or None,
        )
        served = arguments.served_model_name or [os.path.basename(config.model_name)]
        view = EngineView.of(llm.engine)
        handlers = Handlers(view, model=served[0], served_names=served)
        runner = llm.engine.runner
        host, number = port.getsockname()[:2]
        print(
            f"minivllm: {served[0]} at http://{host}:{number}/v1, with a KV cache for "
            f"{runner.num_blocks * runner.block_size:,} tokens and up to "
            f"{runner.max_model_len:,} for each request",
            file=sys.stderr,
            flush=True,
        )
        return serve(llm, handlers, options, port, arguments.log_level)
