"""What happened in a step, as one dictionary of plain values: one line of a trace.

A trace is a file of JSON lines. The first is a header that describes the engine, every
other one a step, whole as soon as it is written: what a crash leaves can be read.

Invariant: whoever has the header and the records can send every request again, and
knows the owner of every block in every step. Called by the engine, once for each step
that somebody listens to; `read_trace` by the viewer, the twin and the command line.

In vLLM: there is no such file; its engine publishes events of the block pool
(vllm/distributed/kv_events.py) and statistics (vllm/v1/metrics/stats.py).
Source: chapter 4, "Continuous batching"; appendix A7, "LLM"; appendix A8, "Traces";
    appendix A14, "One prompt, many answers"; appendix A25, "Experts in the engine".
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from minivllm.engine.scheduler import Scheduler
from minivllm.errors import ConfigError, CorruptFile
from minivllm.request import ModelOutput, Request, SchedulerOutput
from minivllm.runners.base import Runner


class TracedEngine(Protocol):
    """What a trace needs to know of an engine."""

    runner: Runner
    scheduler: Scheduler
    num_steps: int
    added: list[Request]
    aborted: list[str]


def describe_request(request: Request) -> dict[str, Any]:
    """Return what is needed to send a request again: all but functions of the user's.

    Each continuation of a prompt is described as a request of its own.
    """
    params = request.sampling_params.given() | {"seed": request.seed}
    for name in ("n", "logits_processors", "max_tokens"):
        params.pop(name, None)
    if "logit_bias" in params:  # in JSON, keys are texts
        biases = params["logit_bias"].items()
        params["logit_bias"] = {str(token_id): bias for token_id, bias in biases}
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "sampling_params": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in params.items()
        },
        "bad_words": list(map(list, request.bad_words)),
        "num_logits_processors": len(request.logits_processors),
        "max_tokens": request.max_tokens,
        "stop_token_ids": sorted(request.stop_token_ids),
        "arrival_time": request.arrival_time,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
    }


def begin_record(engine: TracedEngine, plan: SchedulerOutput) -> dict[str, Any]:
    """Describe a step that is planned and not computed yet."""
    scheduler = engine.scheduler
    manager = scheduler.block_manager
    used = {block_id for ids in manager.block_ids.values() for block_id in ids}
    return {
        "step": engine.num_steps,
        "start_s": engine.runner.now(),
        "added": [describe_request(request) for request in engine.added],
        "aborted": list(engine.aborted),
        "waiting": [request.request_id for request in scheduler.waiting],
        "running": [request.request_id for request in scheduler.running],
        "num_tokens": {r.request_id: r.num_tokens for r in scheduler.running},
        "num_computed_tokens": {
            r.request_id: r.num_computed_tokens for r in scheduler.running
        },
        "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
        "block_ids": {
            request_id: list(ids) for request_id, ids in manager.block_ids.items()
        },
        # Few: a block in use is cached as soon as it is full. The cached free ones,
        # which are many, follow: they were in use and not among these.
        "uncached_block_ids": sorted(used - manager.key_of.keys()),
        "num_free_blocks": manager.num_free_blocks,
        "num_cached_blocks": len(manager.key_of),
        "num_prefix_hits": dict(plan.num_prefix_hits),
        "preempted": [request.request_id for request in plan.preempted],
    }


def finish_record(
    record: dict[str, Any],
    engine: TracedEngine,
    result: ModelOutput,
    told: Iterable[Request],
) -> None:
    """Add to a record what became of its step."""
    record["end_s"] = engine.runner.now()
    record["sampled_token_ids"] = dict(result.sampled_token_ids)
    record["token_logits"] = dict(result.token_logits)
    record["finished"] = {
        request.request_id: request.status.value
        for request in told
        if request.status.is_finished
    }
    counts = getattr(engine.runner, "expert_counts", None)
    if counts is not None:  # in JSON, keys are texts
        tokens_of = counts.take().items()
        record["tokens_per_expert"] = {str(layer): rows for layer, rows in tokens_of}


logger = logging.getLogger(__name__)

VERSION = 2  # of the format; a reader refuses any other


def describe_engine(engine: TracedEngine, model: str | None = None) -> dict[str, Any]:
    """Return the header of a trace: what the engine is and what its limits are.

    Args:
        engine: The engine.
        model: The name of its model, for whoever wants to run it again.
    """
    runner, scheduler = engine.runner, engine.scheduler
    kv_cache = getattr(runner, "kv_cache", None)  # a fake runner has none
    dtype = getattr(kv_cache, "dtype", None)
    return {
        "minivllm_trace": VERSION,
        "model": model,
        "backend": type(runner).__name__.removesuffix("Runner").lower(),
        "dtype": dtype and str(dtype).removeprefix("torch."),
        "vocab_size": runner.vocab_size,
        "max_model_len": runner.max_model_len,
        "block_size": runner.block_size,
        "num_blocks": runner.num_blocks,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "policy": scheduler.policy.name,
        "enable_prefix_caching": scheduler.block_manager.enable_prefix_caching,
    }


def check_trace_path(path: str | Path) -> Path:
    """Refuse a place for a trace where no file can be, before a model is loaded.

    Raises:
        ConfigError: It is a folder, or in a folder that is not there.
    """
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(
            f"trace is {str(path)!r}, which {what}: name a file, such as trace.jsonl"
        )
    return path


class TraceWriter:
    """A listener of the engine that writes a line for every step.

    `engine.listeners.append(TraceWriter("trace.jsonl", describe_engine(engine)))`
    """

    def __init__(self, path: str | Path, header: dict[str, Any]) -> None:
        """Start a file; one that is there is replaced.

        Args:
            path: Its name, by custom with the ending .jsonl.
            header: From `describe_engine`.

        Raises:
            ConfigError: No file can have that name.
        """
        self._path = check_trace_path(path)
        # No buffer: a line is in the file, whole, as soon as it is written.
        self._file = open(self._path, "wb", buffering=0)
        self(header)

    def __call__(self, record: dict[str, Any]) -> None:
        """Write a record; when the disk is full the trace ends, not the engine."""
        if self._file.closed:
            return
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError("there was room for a part of a line only")
        except OSError as error:
            logger.error("the trace %s ends here (%s)", self._path, error)
            self._file.close()

    def close(self) -> None:
        """Close the file; records that follow are dropped."""
        self._file.close()


# What every record has; the rest of it may grow.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "start_s": (int, float),
    "end_s": (int, float),
    **dict.fromkeys(("added", "aborted", "waiting", "running", "preempted"), list),
    **dict.fromkeys(("num_tokens", "num_computed_tokens"), dict),
    **dict.fromkeys(("num_scheduled_tokens", "num_prefix_hits"), dict),
    "block_ids": dict,
    "uncached_block_ids": list,
    **dict.fromkeys(("num_free_blocks", "num_cached_blocks"), int),
    **dict.fromkeys(("sampled_token_ids", "token_logits", "finished"), dict),
}
HEADER_FIELDS = {
    **dict.fromkeys(("model", "dtype"), (str, type(None))),
    **dict.fromkeys(("backend", "policy"), str),
    **dict.fromkeys(("vocab_size", "max_model_len", "block_size", "num_blocks"), int),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), int),
    "enable_prefix_caching": bool,
}


def read_trace(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a trace; a last line that was cut off is left out.

    Returns:
        The header and the records.

    Raises:
        CorruptFile: A line is damaged, with its number.
        ConfigError: It is the trace of another version.
        OSError: There is no such file.
    """
    lines = Path(path).read_bytes().splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith(b"\n"):
        del lines[-1]  # the writer died in the middle of it
    if not lines or b'"minivllm_trace"' not in lines[0]:
        raise CorruptFile(
            f"{path} is no trace: its first line has no header; make one with "
            "LLM(trace='trace.jsonl')"
        )
    header = _parse_line(path, 1, lines[0])
    version = header.get("minivllm_trace")
    if version != VERSION:
        raise ConfigError(
            f"{path} has version {version!r} of the format, but this minivllm reads "
            f"version {VERSION}: use the minivllm that wrote it"
        )
    _check_fields(path, 1, header, HEADER_FIELDS)
    records = []
    for number, line in enumerate(lines[1:], 2):
        record = _parse_line(path, number, line)
        _check_fields(path, number, record, FIELDS)
        records.append(record)
    return header, records


def _parse_line(path: str | Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"line {number} of {path} is damaged: it is no JSON ({error}); delete it "
            "and all after it, or record again"
        ) from None
    if not isinstance(value, dict):
        raise CorruptFile(
            f"line {number} of {path} is damaged: it holds no JSON object; delete it "
            "and all after it, or record again"
        )
    return value


def _check_fields(
    path: str | Path,
    number: int,
    value: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    for name, kind in fields.items():
        if name not in value or not isinstance(value[name], kind):
            found = repr(value[name])[:40] if name in value else "missing"
            raise CorruptFile(
                f"line {number} of {path} is damaged: its {name!r} is {found}; delete "
                "it and all after it, or record again"
            )


def expert_loads(records: Iterable[dict[str, Any]]) -> dict[int, list[int]]:
    """Add up how many tokens each expert got, by layer; {} if nobody has counted.

    Args:
        records: Of a trace whose engine was told to count, see `LLM.count_experts`.
    """
    loads: dict[int, list[int]] = {}
    for record in records:
        for key, counts in record.get("tokens_per_expert", {}).items():
            before = loads.get(int(key), [0] * len(counts))
            loads[int(key)] = [a + b for a, b in zip(before, counts, strict=True)]
    return loads
