"""The metrics of an engine in the text format of Prometheus, under vLLM's names.

Called by the route `/metrics`: nothing is kept for it while the engine runs.

In vLLM: vllm/v1/metrics/loggers.py (PrometheusStatLogger).
Source: chapter 9, "Serving".
"""

import itertools
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from minivllm.engine.async_engine import AsyncLLM

# Name: what it is, and the attribute of EngineMetrics.
COUNTERS = {
    "vllm:prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens of answers.", "generation_tokens"),
    "vllm:num_preemptions": ("Times a request lost its blocks.", "preemptions"),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_queries",
    ),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache.",
        "prefix_cache_hits",
    ),
}
HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("Tokens of a step.", "iteration_tokens"),
    "minivllm:step_seconds": ("Duration of a step.", "step_seconds"),
    "vllm:time_to_first_token_seconds": (
        "From the arrival to the first token.",
        "time_to_first_token",
    ),
    "vllm:inter_token_latency_seconds": (
        "From one token to the next.",
        "inter_token_latency",
    ),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time from one token to the next, of a request.",
        "time_per_output_token",
    ),
    "vllm:request_queue_time_seconds": (
        "From the arrival until it is computed.",
        "queue_time",
    ),
    "vllm:request_prefill_time_seconds": (
        "From there to the first token.",
        "prefill_time",
    ),
    "vllm:request_decode_time_seconds": (
        "From the first token to the end.",
        "decode_time",
    ),
    "vllm:e2e_request_latency_seconds": ("From the arrival to the end.", "e2e_latency"),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", "request_prompt_tokens"),
    "vllm:request_generation_tokens": (
        "Tokens of an answer.",
        "request_generation_tokens",
    ),
}


class EngineCollector:
    """Reads an engine when somebody asks."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self.llm = llm
        self.labels = {"engine": "0", "model_name": model}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they are now."""
        scheduler, metrics = self.llm.engine.scheduler, self.llm.metrics
        manager = scheduler.block_manager
        names, values = list(self.labels), list(self.labels.values())
        gauges = {
            "vllm:num_requests_running": (
                "Requests that run.",
                len(scheduler.running),
            ),
            "vllm:num_requests_waiting": (
                "Requests that wait.",
                len(scheduler.waiting),
            ),
            "vllm:kv_cache_usage_perc": (
                "Share of the KV cache's blocks in use, 1 is all.",
                1 - manager.num_free_blocks / manager.num_blocks,
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=names)
            family.add_metric(values, value)
            yield family
        for name, (text, attribute) in COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=names)
            family.add_metric(values, getattr(metrics, attribute))
            yield family
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by their reason.",
            labels=[*names, "finished_reason"],
        )
        for reason, count in metrics.finished.items():
            family.add_metric([*values, reason], count)
        yield family
        for name, (text, attribute) in HISTOGRAMS.items():
            histogram = getattr(metrics, attribute)
            family = HistogramMetricFamily(name, text, labels=names)
            edges = [*map(str, histogram.buckets), "+Inf"]
            counts = itertools.accumulate(histogram.counts)
            buckets = list(zip(edges, counts, strict=True))
            family.add_metric(values, buckets, histogram.sum)
            yield family


def exposition(llm: AsyncLLM, model: str) -> tuple[bytes, str]:
    """Return the metrics as text, and the type of its format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm, model))
    return generate_latest(registry), CONTENT_TYPE_LATEST
