"""Where the time of a step goes: a timer around each part, and the floor of each.

For as long as a profile is taken, functions that the engine, the runner and the decoder
hold are replaced by the same ones with a timer around them. At any other time nothing
of this is there.

Invariant: every moment of a step belongs to one part, the innermost that runs. So the
parts and the cost of the timers add up to the step.

Called by the command line.

In vLLM: vllm/profiler/layerwise_profile.py (layerwise_profile), vllm/v1/utils.py
(record_function_or_nullcontext).
Source: appendix A22, "Profiling"; appendix A25, "Experts in the engine"; appendix A28,
    "Delta nets in torch".
"""

import itertools
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

from minivllm.benchmarks.machine import Limits
from minivllm.benchmarks.workloads import random_ids
from minivllm.engine.engine import LLMEngine
from minivllm.models.spec import DeltaNetSpec, ModelSpec
from minivllm.runners.kv_cache import kv_bytes_per_token
from minivllm.sampling.params import SamplingParams
from minivllm.text.detokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class Spent:
    """What timers have counted, by part.

    Attributes:
        seconds: In the part, but in no part inside it.
        num_calls: How often it began.
        num_inside: How often another part began inside it.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_calls: Counter[str] = field(default_factory=Counter)
    num_inside: Counter[str] = field(default_factory=Counter)


class Timers:
    """A stack of parts, of which the last one's time runs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spent = Spent()
        self._stack: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        """Begin a part; that of the one around it stands still."""
        now = self.clock()
        if self._stack:
            around = self._stack[-1]
            self.spent.seconds[around] += now - self._since
            self.spent.num_inside[around] += 1
        self.spent.num_calls[part] += 1
        self._stack.append(part)
        self._since = now

    def leave(self) -> None:
        """End the last part; the one around it goes on."""
        now = self.clock()
        self.spent.seconds[self._stack.pop()] += now - self._since
        self._since = now

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                return function(*arguments, **options)
            finally:
                self.leave()

        return timed

    def take(self) -> Spent:
        """Return what was counted, and begin again."""
        spent, self.spent = self.spent, Spent()
        return spent


class TimerCost(NamedTuple):
    """What a timer around a call costs: seconds that go to the part, and around it."""

    inside_s: float = 0.0
    around_s: float = 0.0


def measure_timer_cost(
    clock: Callable[[], float] = time.perf_counter, num_calls: int = 2000
) -> TimerCost:
    """Time a function that does nothing, with a timer and without."""

    def nothing(x: int) -> int:
        return x

    def seconds_of(function: Callable[[int], int]) -> float:
        start = clock()
        for number in range(num_calls):
            function(number)
        return clock() - start

    def empty_loop() -> float:
        start = clock()
        for _ in range(num_calls):
            pass
        return clock() - start

    timers = Timers(clock)
    wrapped = timers.wrap("part", nothing)
    tries = []
    for _ in range(9):
        times = [empty_loop(), seconds_of(nothing), seconds_of(wrapped)]
        tries.append([*times, timers.take().seconds["part"]])
    # Of each, the shortest counts: what made others longer is no cost.
    loop_s, bare_s, whole_s, part_s = map(min, zip(*tries, strict=True))
    inside_s = max(part_s - (bare_s - loop_s), 0.0)
    around_s = max(whole_s - bare_s - inside_s, 0.0)
    return TimerCost(inside_s / num_calls, around_s / num_calls)


def without_timers(spent: Spent, cost: TimerCost) -> dict[str, float]:
    """Return the seconds of each part, less what its timers cost."""
    return {
        part: seconds
        - spent.num_calls[part] * cost.inside_s
        - spent.num_inside[part] * cost.around_s
        for part, seconds in spent.seconds.items()
    }


# Part -> the group it is shown in; both in the order of the table.
GROUP_OF = {
    "scheduler": "bookkeeping",
    "outputs": "bookkeeping",
    "detokenizer": "bookkeeping",
    "batch": "metadata",
    "groups": "metadata",
    "sampling inputs": "metadata",
    "to the device": "metadata",
    "attention set-up": "metadata",
    "qkv": "linear",
    "o": "linear",
    "gate_up": "linear",
    "down": "linear",
    "head": "linear",
    "paged_attention": "attention",
    "prefill_attention": "attention",
    "embedding": "small operations",
    "rms_norm": "small operations",
    "rotary_embedding": "small operations",
    "activation": "small operations",
    "reshape_and_cache": "small operations",
    "scores to float32": "sampler",
    "argmax": "sampler",
    "draw": "sampler",
    "results": "sampler",
    "sampler": "sampler",
    "decoder, between": "between",
    "runner, between": "between",
    "engine, between": "between",
    "router": "linear",
    "shared expert's gate": "linear",
    "topk_softmax": "small operations",
    "moe_permute": "small operations",
    "moe_combine": "small operations",
    "in_proj": "linear",
    "out_proj": "linear",
    "causal_conv1d": "delta nets",
    "recurrent_delta_rule": "delta nets",
    "chunked_delta_rule": "delta nets",
}
STEP = "engine, between"  # the whole step, less what is in it
# What a layer, a part of it or the decoder holds -> the part of the step.
ATTRIBUTES = {
    "embedding": "embedding",
    "input_layernorm": "rms_norm",
    "post_attention_layernorm": "rms_norm",
    "norm": "rms_norm",
    "qkv_proj": "qkv",
    "rotary_embedding": "rotary_embedding",
    "o_proj": "o",
    "gate_up_proj": "gate_up",
    "silu_and_mul": "activation",
    "down_proj": "down",
    "lm_head": "head",
    "pre_feedforward_layernorm": "rms_norm",
    "post_feedforward_layernorm": "rms_norm",
    "act_and_mul": "activation",
    "gate": "router",
    "shared_expert_gate": "shared expert's gate",
    "topk_softmax": "topk_softmax",
    "moe_permute": "moe_permute",
    "moe_combine": "moe_combine",
    "in_proj": "in_proj",
    "out_proj": "out_proj",
}
# A weight of the checkpoint -> the product that it is in.
USES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    "o_proj": "o",
    "down_proj": "down",
    "gate": "router",
    "shared_expert_gate": "shared expert's gate",
    "in_proj_qkv": "in_proj",
    "in_proj_z": "in_proj",
    "in_proj_b": "in_proj",
    "in_proj_a": "in_proj",
    "out_proj": "out_proj",
}


class Place(NamedTuple):
    """A function that somebody holds under a name, and how it is timed.

    Attributes:
        holder: A module, a class or an object.
        name: Of the function.
        how: Its part, or what makes a timed function of it.
    """

    holder: Any
    name: str
    how: str | Callable[[Callable[..., Any]], Callable[..., Any]]


def engine_places(engine: LLMEngine) -> Iterator[Place]:
    """List what to time in an engine, around its runner."""
    yield Place(engine.scheduler, "schedule", "scheduler")
    yield Place(engine.scheduler, "update", "scheduler")
    yield Place(engine, "_emit", "outputs")
    yield Place(IncrementalDetokenizer, "add", "detokenizer")
    yield Place(IncrementalDetokenizer, "finish", "detokenizer")
    yield Place(engine.runner, "execute", "runner, between")


def torch_places(runner: Any, timers: Timers) -> Iterator[Place]:
    """List what to time in a torch runner."""
    from minivllm.runners import torch_runner

    yield from _named(torch_runner, "batch", "make_batch")
    yield from _named(torch_runner, "groups", "group_queries", "begun_blocks")
    yield from _named(torch_runner, "sampling inputs", "answer_rows", "prompt_rows")
    yield Place(runner.sampling, "inputs", "sampling inputs")
    yield from _named(torch_runner, "to the device", "to_device")
    yield from _named(torch_runner, "attention set-up", "PagedContext")
    yield Place(runner.ops, "attention", partial(timed_attention, timers))
    yield Place(torch_runner.FreshPieces, "attend", "prefill_attention")
    ops = ["reshape_and_cache", "argmax", "draw"]
    if runner.states is not None:
        ops += ["causal_conv1d", "recurrent_delta_rule", "chunked_delta_rule"]
    for op in ops:
        yield Place(runner.ops, op, op)
    yield Place(runner, "_sample", "sampler")
    yield from _named(torch_runner, "results", "to_model_output")
    decoder = runner.decoder
    yield Place(decoder, "forward", "decoder, between")
    yield Place(decoder, "compute_logits", "scores to float32")
    for layer in decoder.layers:
        for holder in (layer, layer.mixer, layer.mlp):
            yield from _held_by(holder)
    yield from _held_by(decoder)


def numpy_places(runner: Any, timers: Timers) -> Iterator[Place]:
    """List what to time in a NumPy runner."""
    from minivllm.reference import decoder as reference
    from minivllm.runners import numpy_runner

    yield from _named(numpy_runner, "batch", "make_batch")
    for op in ("reshape_and_cache", "paged_attention"):
        yield Place(numpy_runner, op, op)
    if runner.states is not None:
        yield Place(runner.states, "convolve", "causal_conv1d")
        yield Place(runner.states, "mix", "recurrent_delta_rule")
    yield from _named(numpy_runner, "results", "to_model_output")
    yield Place(runner, "_sample", "sampler")
    decoder = runner.decoder
    yield Place(decoder, "forward", "decoder, between")
    yield Place(decoder, "linear", partial(timed_linear, timers))
    yield Place(decoder, "norm", "rms_norm")
    yield Place(decoder, "activation", "activation")
    yield Place(decoder, "compute_logits", "head")
    yield Place(reference, "apply_rope", "rotary_embedding")


def _named(module: ModuleType, part: str, *names: str) -> Iterator[Place]:
    return (Place(module, name, part) for name in names)


def _held_by(holder: Any) -> Iterator[Place]:
    """List the operations that a layer, or a part of one, holds."""
    return (
        Place(holder, name, ATTRIBUTES[name])
        for name in vars(holder)
        if name in ATTRIBUTES
    )


def timed_attention(timers: Timers, make: Callable[..., Any]) -> Callable[..., Any]:
    """Time the attention that torch's runner makes for a step."""

    def timed(rows: Any, positions: Any, *arguments: Any) -> Any:
        attention = make(rows, positions, *arguments)
        is_one = positions.shape[1] == 1
        part = "paged_attention" if is_one else "prefill_attention"
        attention.attend = timers.wrap(part, attention.attend)
        return attention

    return timed


def timed_linear(timers: Timers, linear: Callable[..., Any]) -> Callable[..., Any]:
    """Time NumPy's products, each under its own name."""
    products = {use: timers.wrap(use, linear) for use in USES.values()}

    def timed(name: str, x: Any) -> Any:
        return products[USES[name.rpartition(".")[2]]](name, x)

    return timed


@contextmanager
def timed(engine: LLMEngine, timers: Timers) -> Iterator[None]:
    """Put timers around the parts of an engine, for as long as the block runs."""
    places = list(engine_places(engine))
    if hasattr(engine.runner, "ops"):
        places += torch_places(engine.runner, timers)
    elif hasattr(engine.runner, "decoder"):
        places += numpy_places(engine.runner, timers)
    undo: list[tuple[Place, Any]] = []
    inherited = object()  # stands for: its class has it
    try:
        for place in places:
            holder, name, how = place
            wrap = how if callable(how) else partial(timers.wrap, how)
            undo.append((place, vars(holder).get(name, inherited)))
            setattr(holder, name, wrap(getattr(holder, name)))
        yield
    finally:
        for (holder, name, _), old in reversed(undo):
            if old is inherited:
                vars(holder).pop(name, None)
            else:
                setattr(holder, name, old)


WARM_UP = 8  # steps
NUM_PROMPT_TOKENS = 128


class Work(NamedTuple):
    """What a step computes.

    Attributes:
        num_tokens: Rows of the flat batch.
        num_sampled: Rows of scores, one for each request.
        num_keys: Tokens in the texts of all requests.
        num_pairs: Pairs of a query and a key that it sees.
    """

    num_tokens: float
    num_sampled: float
    num_keys: float
    num_pairs: float


def decoding(
    engine: LLMEngine, num_requests: int, num_steps: int, **params: Any
) -> Iterator[Work]:
    """Bring an engine to where so many requests decode; yield before each step.

    Args:
        engine: Without requests.
        num_requests: How many decode.
        num_steps: How many steps they may take.
        params: Of `SamplingParams`, beside the number of tokens; greedy by default.
    """
    assert engine.scheduler.max_num_seqs >= num_requests
    numbers = random.Random(num_requests)
    # Prompts that do not fit into one step come while others answer already.
    room = max(1, engine.scheduler.max_num_batched_tokens - num_requests)
    num_prompt_steps = -(-num_requests * NUM_PROMPT_TOKENS // room)
    max_tokens = num_prompt_steps + WARM_UP + num_steps + 1
    options = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | params
    names = [f"profile {number}" for number in range(num_requests)]
    vocab_size = engine.runner.vocab_size
    try:
        for name in names:
            prompt = random_ids(numbers, NUM_PROMPT_TOKENS, vocab_size)
            engine.add_request(name, prompt, SamplingParams(**options))
        scheduler = engine.scheduler
        while sum(r.num_output_tokens > 0 for r in scheduler.running) < num_requests:
            engine.step()
        for _ in range(WARM_UP):
            engine.step()
        while True:
            assert len(scheduler.running) == num_requests
            num_keys = sum(request.num_tokens for request in scheduler.running)
            yield Work(num_requests, num_requests, num_keys, num_keys)
    finally:
        for name in names:
            engine.abort_request(name)


def prefilling(
    engine: LLMEngine, num_tokens: int = NUM_PROMPT_TOKENS
) -> Iterator[Work]:
    """Give an engine a prompt and ask for one token; yield before each step.

    Nothing is kept for later prompts, which are others: some models would stop within
    a prompt for it, and take two steps.
    """
    numbers, manager = random.Random(0), engine.scheduler.block_manager
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    was_caching, manager.enable_prefix_caching = manager.enable_prefix_caching, False
    try:
        for number in itertools.count():
            prompt = random_ids(numbers, num_tokens, engine.runner.vocab_size)
            engine.add_request(f"profile {number}", prompt, params)
            if number < WARM_UP:
                engine.step()
            else:
                num_pairs = num_tokens * (num_tokens + 1) / 2
                yield Work(num_tokens, 1, num_tokens, num_pairs)
    finally:
        manager.enable_prefix_caching = was_caching


@dataclass(frozen=True, slots=True)
class Part:
    """What a part takes of a step.

    Attributes:
        name: A key of `GROUP_OF`.
        backend: What runs it, if it is an op.
        num_calls: In a step.
        seconds: In a step, without timers.
        floor_s: How fast this machine could do it at best; None where its data is not
            in memory, but was written just now.
    """

    name: str
    backend: str
    num_calls: float
    seconds: float
    floor_s: float | None


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Where the time of a step goes: a mean of many steps.

    Attributes:
        name: What kind of step, such as "decode, 16 requests".
        num_steps: Of which these are the middle half, by the time they took.
        text_lengths: The shortest and the longest text.
        parts: In the order of the table.
        timers_s: What the timers cost.
        bare_s: The median of as many steps without timers, each run in between.
    """

    name: str
    num_steps: int
    text_lengths: tuple[int, int]
    parts: list[Part]
    timers_s: float
    bare_s: float

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(part.seconds for part in self.parts)

    def of_groups(self) -> dict[str, float]:
        """Return the seconds of each group."""
        groups = dict.fromkeys(GROUP_OF.values(), 0.0)
        for part in self.parts:
            groups[GROUP_OF[part.name]] += part.seconds
        return groups

    def as_json(self) -> dict[str, Any]:
        """Return plain values, in milliseconds."""

        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1e3, 4)

        return {
            "workload": "profile",
            "step": self.name,
            "steps": self.num_steps,
            "text_lengths": list(self.text_lengths),
            "ms": ms(self.seconds),
            "without_timers_ms": ms(self.bare_s),
            "timers_ms": ms(self.timers_s),
            "parts": {
                part.name: {
                    "group": GROUP_OF[part.name],
                    "backend": part.backend or None,
                    "calls": round(part.num_calls, 2),
                    "ms": ms(part.seconds),
                    "floor_ms": ms(part.floor_s),
                }
                for part in self.parts
            },
        }


def middle_half(values: Sequence[Any], key: Callable[[Any], float]) -> list[Any]:
    """Return what lies between the quartiles.

    Its mean forgets a disturbed step, as a median does; and means of parts add up to
    the mean of their sum, which medians do not.
    """
    ordered = sorted(values, key=key)
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def profile_steps(
    engine: LLMEngine,
    name: str,
    steps: Iterator[Work],
    num_steps: int,
    limits: Limits | None = None,
    cost: TimerCost | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepProfile:
    """Run steps, every other one with timers, and return where their time goes.

    Args:
        engine: Around a torch or a NumPy runner.
        name: What to call it.
        steps: From `decoding` or `prefilling`.
        num_steps: How many steps count, of each kind.
        limits: Of this machine; without them nothing has a floor.
        cost: Of the timers; measured by default.
        clock: For a GPU, one that waits for it.
    """
    cost = cost or measure_timer_cost(clock)
    timers = Timers(clock)
    records: list[tuple[Spent, Work]] = []
    bare = []
    with closing(steps):
        for _ in range(num_steps):
            work = next(steps)
            with timed(engine, timers):
                timers.enter(STEP)
                engine.step()
                timers.leave()
            records.append((timers.take(), work))
            next(steps)
            start = clock()
            engine.step()
            bare.append(clock() - start)
    kept = middle_half(records, key=lambda record: sum(record[0].seconds.values()))
    work = Work(*(statistics.fmean(x) for x in zip(*(w for _, w in kept), strict=True)))
    floors: Mapping[str, float] = {}
    if limits is not None:
        floors = floors_of(engine.runner, work, limits)
    sums = [without_timers(spent, cost) for spent, _ in kept]
    parts = [
        Part(
            part,
            backend_of(engine.runner, part),
            statistics.fmean(spent.num_calls[part] for spent, _ in kept),
            statistics.fmean(seconds.get(part, 0.0) for seconds in sums),
            floors.get(part),
        )
        for part in GROUP_OF
        if any(part in spent.seconds for spent, _ in kept)
    ]
    whole_s = statistics.fmean(sum(spent.seconds.values()) for spent, _ in kept)
    lengths = [round(w.num_keys / w.num_sampled) for _, w in records]
    return StepProfile(
        name=name,
        num_steps=num_steps,
        text_lengths=(min(lengths), max(lengths)),
        parts=parts,
        timers_s=whole_s - sum(part.seconds for part in parts),
        bare_s=statistics.median(bare),
    )


def floors_of(runner: Any, work: Work, limits: Limits) -> dict[str, float]:
    """Return for each part the seconds below which this machine cannot do it.

    A product reads its weights, attention reads keys and values, a delta net reads and
    writes states; all of them also multiply. What is slower counts. Of experts, those
    of one token have to be read at least. All other parts work on numbers that were
    written just now and lie in a cache: memory sets them no limit.
    """
    spec: ModelSpec = runner.decoder.spec
    num_bytes = runner.kv_cache.itemsize

    def seconds(num_bytes: float, num_flops: float) -> float:
        return max(num_bytes / limits.read_bytes_per_s, num_flops / limits.flops_per_s)

    num_weights: Counter[str] = Counter(head=spec.vocab_size * spec.hidden_size)
    for name, shape in spec.weight_shapes().items():
        use = USES.get(name.split(".")[-2])
        if use:
            num_weights[use] += prod(shape)
    if spec.moe is not None:
        skipped = spec.moe.num_experts - spec.moe.top_k
        idle = skipped * len(spec.moe.layers) * spec.moe.intermediate_size
        num_weights["gate_up"] -= 2 * idle * spec.hidden_size
        num_weights["down"] -= idle * spec.hidden_size
    floors = {}
    for use, count in num_weights.items():
        num_rows = work.num_sampled if use == "head" else work.num_tokens
        floors[use] = seconds(count * num_bytes, 2 * count * num_rows)
    read = work.num_keys * kv_bytes_per_token(spec, num_bytes)
    num_attending = len(spec.full_layers) + len(spec.window_layers)
    multiplied = 4 * num_attending * spec.num_heads * spec.head_dim * work.num_pairs
    for part in ("paged_attention", "prefill_attention"):
        floors[part] = seconds(read, multiplied)
    if spec.delta_net is not None:
        of_states = work_on_states(spec.delta_net, work, num_bytes)
        floors |= {part: seconds(*numbers) for part, numbers in of_states.items()}
    return floors


def backend_of(runner: Any, part: str) -> str:
    """Return what runs a part, if it is an op; of products, that of most layers."""
    if not hasattr(runner, "choices"):
        is_other = GROUP_OF[part] in ("bookkeeping", "metadata", "sampler", "between")
        return "" if is_other else "numpy"
    spec = runner.decoder.spec
    op = "linear" if GROUP_OF[part] == "linear" else part
    if part == "activation":
        op = f"{spec.hidden_act}_and_mul"
    elif part in ("gate_up", "down") and spec.moe is not None:
        op = "grouped_linear"
    choice = runner.choices.get(op)
    return choice.backend.name if choice else ""


def clock_of(device: str) -> Callable[[], float]:
    """Return a clock for the work on a device.

    A GPU works on after the call has returned: the clock waits for it. So each part
    has its time; but a step with timers cannot be faster than its parts one after
    another, which a step without them is.
    """
    if not device.startswith("cuda"):
        return time.perf_counter
    import torch

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def profile_engine(
    engine: LLMEngine,
    limits: Limits | None,
    num_steps: int,
    device: str = "cpu",
    note: Callable[[str], None] = lambda text: None,
) -> list[StepProfile]:
    """Profile a decode step of 1 and of 16 requests, and a prompt.

    Args:
        engine: Without requests, for 128 tokens a step. If it runs fewer than 16
            requests, as one with little memory for states, so many are taken.
        limits: Of this machine.
        num_steps: Of each kind that count.
        device: Where the model is.
        note: Is told how far it has come.
    """
    clock = clock_of(device)
    cost = measure_timer_cost(clock)
    plans: dict[str, Iterator[Work]] = {
        "decode, 1 request": decoding(engine, 1, 2 * num_steps)
    }
    if (num := min(16, engine.scheduler.max_num_seqs)) > 1:
        plans[f"decode, {num} requests"] = decoding(engine, num, 2 * num_steps)
    plans[f"a prompt of {NUM_PROMPT_TOKENS} tokens"] = prefilling(engine)
    profiles = []
    for name, steps in plans.items():
        profile = profile_steps(engine, name, steps, num_steps, limits, cost, clock)
        note(f"{name}: {profile.seconds * 1e3:.2f} ms")
        profiles.append(profile)
    return profiles


def profile_table(profile: StepProfile) -> str:
    """Write a profile for people: each part, its floor, and how far it is from it."""
    lengths = " to ".join(map(str, dict.fromkeys(profile.text_lengths)))
    lines = [
        f"{profile.name}: {profile.seconds * 1e3:.2f} ms (the middle half of "
        f"{profile.num_steps} steps, texts of {lengths} tokens)",
        f"  {'':20}  {'backend':8}  {'calls':>5}  {'ms':>7}  {'share':>6}  "
        f"{'floor, ms':>9}  {'times it':>8}",
    ]

    def line(name: str, backend: str, calls: str, seconds: float) -> str:
        ms = f"{max(seconds, 0.0) * 1e3:.3f}"  # less than its timers: nothing
        share = f"{max(seconds, 0.0) / profile.seconds:.1%}"
        return f"  {name:20}  {backend:8}  {calls:>5}  {ms:>7}  {share:>6}"

    for group, seconds in profile.of_groups().items():
        if seconds:
            lines.append(line(group, "", "", seconds))
        for part in profile.parts:
            if GROUP_OF[part.name] != group:
                continue
            calls = f"{part.num_calls:.3g}"
            text = line(f"  {part.name}", part.backend, calls, part.seconds)
            if part.floor_s:
                ratio = part.seconds / part.floor_s
                text += f"  {part.floor_s * 1e3:9.3f}  {ratio:8.1f}"
            lines.append(text)
    lines.append(
        f"  without timers {profile.bare_s * 1e3:.2f} ms; the timers' own "
        f"{profile.timers_s * 1e3:.2f} ms are taken off"
    )
    return "\n".join(lines)


def draw_profiles(axes: Any, profiles: Sequence[StepProfile]) -> None:
    """Draw a stacked bar for each step: the shares of the groups.

    Args:
        axes: Of matplotlib.
        profiles: One bar each.
    """
    left = [0.0] * len(profiles)
    names = [f"{p.name}\n{p.seconds * 1e3:.2f} ms" for p in profiles]
    shares = [
        {name: max(s, 0.0) / p.seconds for name, s in p.of_groups().items()}
        for p in profiles
    ]
    for group in dict.fromkeys(GROUP_OF.values()):
        widths = [100 * share[group] for share in shares]
        color = {"color": "grey"} if group == "between" else {}
        bars = axes.barh(
            names, widths, left=left, label=group, edgecolor="white", **color
        )
        texts = [f"{width:.0f}" if width >= 5 else "" for width in widths]
        axes.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("percent of the step")
    axes.spines[["top", "right"]].set_visible(False)
    num_columns = int(axes.figure.get_figwidth() // 2)
    handles = axes.get_legend_handles_labels()
    axes.figure.legend(*handles, loc="outside lower center", ncols=num_columns)


def work_on_states(
    net: DeltaNetSpec, work: Work, num_bytes: int
) -> dict[str, tuple[float, float]]:
    """Return the bytes and the operations of the ops of all delta nets.

    Args:
        net: Their sizes.
        work: Of a step; each of its requests has a state.
        num_bytes: Of a weight, and of a number that the convolution keeps.
    """
    conv, matrix = prod(net.conv_state_shape), prod(net.state_shape)
    moved = 2 * work.num_sampled * len(net.layers)  # states, read and written
    rows = work.num_tokens * len(net.layers)
    weights = net.conv_size * net.conv_kernel_size
    # Of each token the rule multiplies the matrix with its key, adds an outer product,
    # and multiplies with the query. In chunks it is more, not less.
    rule = (4 * moved * matrix, 6 * rows * matrix)
    return {
        "causal_conv1d": (
            num_bytes * (moved * conv + len(net.layers) * weights),
            2 * rows * weights,
        ),
        "recurrent_delta_rule": rule,
        "chunked_delta_rule": rule,
    }
