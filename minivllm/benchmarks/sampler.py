"""What choosing the tokens costs, next to computing their scores.

One decode step of many requests is run as it is; then its scores are sampled again and
again, with several sets of parameters. `transformers`, where it is installed, does the
same with the same scores. It has one set for a whole batch, so only those are compared.

Called by the command line.

Source: appendix A12, "A sampler for a whole batch".
"""

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.engine.engine import LLMEngine
from minivllm.request import Request
from minivllm.sampling.params import SamplingParams

if TYPE_CHECKING:
    import torch

NUM_ROWS = 64
NUM_PROMPT_TOKENS = 200

# Name -> what all requests of the batch ask for; `mixed` below gives each its own.
SAME_FOR_ALL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition 1.1, top_p 0.9": {"repetition_penalty": 1.1, "top_p": 0.9},
}

MIXED = "mixed: each its own"


def mixed_params(number: int) -> SamplingParams:
    """Return the parameters of one request of a mixed batch."""
    choices: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1},
        {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.3},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 100, "logit_bias": {5: 2, 9: -5}},
        {"temperature": 1.0, "min_tokens": 5, "max_tokens": 9, "stop_token_ids": [7]},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0},
    ]
    return SamplingParams(seed=number, **choices[number % len(choices)])


@dataclass(frozen=True, slots=True)
class SamplerTime:
    """How long it takes to choose a token for every row.

    Attributes:
        name: What the requests ask for.
        median_s: With ours.
        other_s: With `transformers`; None where it cannot do that, or is missing.
    """

    name: str
    median_s: float
    other_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "workload": "sampler",
            "params": self.name,
            "ms": round(self.median_s * 1e3, 3),
            "transformers_ms": self.other_s and round(self.other_s * 1e3, 3),
        }


def median_time(run: Callable[[], object], num_counted: int) -> float:
    """Return the median of so many runs, in seconds, after one that does not count."""
    run()
    times = []
    for _ in range(num_counted):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class DecodeStep:
    """One decode step of many requests, to be run again and again.

    Attributes:
        plan: What the scheduler has planned.
        requests: In the order of the batch.
    """

    def __init__(self, engine: LLMEngine, num_rows: int = NUM_ROWS) -> None:
        """Bring an engine to where all requests have their prompts computed.

        Args:
            engine: A new one around a torch runner, which may run so many requests.
            num_rows: Requests in the step.
        """
        self.engine = engine
        numbers = random.Random(0)
        # Parameters of any kind: they are replaced later on.
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for name in range(num_rows):
            vocabulary = range(engine.runner.vocab_size)
            prompt = numbers.choices(vocabulary, k=NUM_PROMPT_TOKENS)
            engine.add_request(str(name), prompt, params)
        while engine.scheduler.waiting or any(
            request.num_tokens - request.num_computed_tokens > 1
            for request in engine.scheduler.running
        ):
            engine.step()
        self.plan = engine.scheduler.schedule()
        self.requests = self.plan.requests

    def time_step(self, num_counted: int) -> float:
        """Return the seconds of the whole step, at temperature 0."""
        return median_time(lambda: self.engine.runner.execute(self.plan), num_counted)

    def logits(self) -> "torch.Tensor":
        """Return the scores of the step, float32, [num_rows, vocab_size]."""
        runner = self.engine.runner
        found = []
        original = runner._sample

        def keep(logits: "torch.Tensor", *arguments: Any) -> Any:
            found.append(logits)
            return original(logits, *arguments)

        runner._sample = keep
        try:
            runner.execute(self.plan)
        finally:
            del runner._sample
        return found[0]

    def asking(self, params: Sequence[SamplingParams]) -> list[Request]:
        """Return requests like those of the step, with other wishes."""
        return [
            Request(
                request_id=request.request_id,
                token_ids=request.prompt_token_ids,
                num_prompt_tokens=NUM_PROMPT_TOKENS // 2,  # the rest counts as answer
                sampling_params=wishes.filled({}),
                max_tokens=8,
                stop_token_ids=frozenset(wishes.stop_token_ids),
                seed=number,
            )
            for number, (request, wishes) in enumerate(
                zip(self.requests, params, strict=True)
            )
        ]


def time_ours(
    runner: Any, logits: "torch.Tensor", requests: list[Request], num_counted: int
) -> float:
    """Return the seconds from the requests to their tokens, scores given."""
    import torch

    from minivllm.runners.torch_runner import to_device

    def run() -> None:
        inputs = runner.sampling.inputs(requests)
        inputs = inputs.on(to_device(inputs.arrays(), runner.device))
        with torch.inference_mode():
            results, _ = runner._sample(logits, requests, inputs)
        results.tolist()

    return median_time(run, num_counted)


def time_transformers(
    logits: "torch.Tensor",
    requests: list[Request],
    params: dict[str, Any],
    num_counted: int,
) -> float | None:
    """Return the seconds that `transformers` needs for the same; None without it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import torch
    from transformers import generation

    makers: dict[str, Callable[[float], Any]] = {
        "repetition_penalty": generation.RepetitionPenaltyLogitsProcessor,
        "temperature": generation.TemperatureLogitsWarper,
        "top_k": generation.TopKLogitsWarper,
        "top_p": generation.TopPLogitsWarper,
        "min_p": generation.MinPLogitsWarper,
    }
    processors = generation.LogitsProcessorList(
        makers[name](params[name])
        for name in makers
        if params.get(name) not in (None, 0, 1.0)
    )
    token_ids = torch.tensor([request.token_ids for request in requests])
    token_ids = token_ids.to(logits.device)
    is_greedy = params.get("temperature") == 0

    def run() -> None:
        with torch.inference_mode():
            scores = processors(token_ids, logits.clone())
            if is_greedy:
                chosen = scores.argmax(dim=-1)
            else:
                chosen = torch.multinomial(scores.softmax(dim=-1), 1).squeeze(-1)
        chosen.tolist()

    return median_time(run, num_counted)


def measure_sampler(
    engine: LLMEngine, num_counted: int
) -> tuple[float, list[SamplerTime]]:
    """Measure a decode step, and every way to choose its tokens.

    Args:
        engine: A new one around a torch runner, for `NUM_ROWS` requests at least.
        num_counted: Repetitions that count.

    Returns:
        The seconds of a decode step at temperature 0, and the times of the sampler.
    """
    step = DecodeStep(engine)
    runner, logits = engine.runner, step.logits()
    step_s = step.time_step(num_counted)
    mixed = step.asking([mixed_params(number) for number in range(NUM_ROWS)])
    times = [SamplerTime(MIXED, time_ours(runner, logits, mixed, num_counted))]
    for name, params in SAME_FOR_ALL.items():
        requests = step.asking([SamplingParams(**params)] * NUM_ROWS)
        ours = time_ours(runner, logits, requests, num_counted)
        other = time_transformers(logits, requests, params, num_counted)
        times.append(SamplerTime(name, ours, other))
    return step_s, times


def sampler_table(step_s: float, times: Sequence[SamplerTime]) -> str:
    """Write the times for people, with their share of a decode step."""
    lines = [
        f"sampler: {NUM_ROWS} rows; a decode step at temperature 0 takes "
        f"{step_s * 1e3:.1f} ms",
        f"{'parameters':26}  {'ms':>6}  {'of a step':>9}  {'transformers, ms':>16}",
    ]
    for row in times:
        other = "-" if row.other_s is None else f"{row.other_s * 1e3:.1f}"
        lines.append(
            f"{row.name:26}  {row.median_s * 1e3:6.1f}  "
            f"{row.median_s / step_s:9.1%}  {other:>16}"
        )
    return "\n".join(lines)
