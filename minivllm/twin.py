"""The digital twin: the same requests again, on the runner that everybody can read.

`replay` sends recorded requests through the real engine with the NumPy runner. Its
choice of every token is compared with the recorded one, which then takes its place
(teacher forcing), so that one difference does not derail all that follows.

Called by users and chapters.

In vLLM: there is no twin; its tests compare with `transformers` instead.
Source: appendix A8, "Traces"; appendix A14, "One prompt, many answers".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.engine.engine import LLMEngine
from minivllm.engine.scheduler import POLICIES
from minivllm.engine.trace import read_trace
from minivllm.errors import ConfigError, MinivllmError, RequestError
from minivllm.loading.hub import resolve_model
from minivllm.loading.loader import load_model
from minivllm.outputs import RequestOutput
from minivllm.reference.decoder import NumpyDecoder
from minivllm.request import ModelOutput, Request, SchedulerOutput, check_token_ids
from minivllm.runners.kv_cache import num_blocks_for
from minivllm.runners.numpy_runner import NumpyRunner
from minivllm.sampling.defaults import read_sampling_defaults
from minivllm.sampling.params import GUIDES, SamplingParams
from minivllm.sampling.uniform import seed_of
from minivllm.text.tokenizer import Tokenizer

Record = Mapping[str, Any]

# What an engine has by default, for outputs that do not say how they were made.
DEFAULTS = {
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "policy": "mixed",
    "enable_prefix_caching": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """A token that the twin would have chosen otherwise.

    Attributes:
        request_id: Whose answer it is in.
        index: Its place in that answer, from 0.
        recorded: The token of the recording.
        recomputed: The token of the twin.
        gap: The twin's score of its own token minus that of the recorded one; near 0
            if the two were equally good (at temperature 0).
    """

    request_id: str
    index: int
    recorded: int
    recomputed: int
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinReport:
    """How far a recording and its twin agree.

    Attributes:
        num_requests: Requests with at least one token.
        num_tokens: Tokens compared.
        num_different: Of these, how many the twin would have chosen otherwise.
        first_difference: The first of them in the order of the steps.
        largest_logit_difference: Between the recorded score of a recorded token and
            the twin's score of it; None if no scores were recorded.
        where: Request id and index of the token with that difference.
        num_guided: Of the tokens, how many were chosen with a logits processor or a
            grammar. The twin does not have these, and compares the scores alone.
    """

    num_requests: int
    num_tokens: int
    num_different: int
    first_difference: TokenDifference | None
    largest_logit_difference: float | None
    where: tuple[str, int] | None
    num_guided: int = 0

    def __str__(self) -> str:
        lines = [f"{self.num_requests:,} requests, {self.num_tokens:,} tokens compared"]
        first = self.first_difference
        if first is None:
            lines.append("every token is the same")
        else:
            differ = "token differs" if self.num_different == 1 else "tokens differ"
            lines.append(
                f"{self.num_different:,} {differ}; the first: request "
                f"{first.request_id!r}, token {first.index}: {first.recorded} "
                f"recorded, {first.recomputed} recomputed, logit gap {first.gap:.3g}"
            )
        if self.num_guided:
            lines.append(
                f"{self.num_guided:,} were chosen with a logits processor: not compared"
            )
        if self.where is None:
            lines.append("no logits were recorded")
        else:
            request_id, index = self.where
            lines.append(
                f"largest logit difference: {self.largest_logit_difference:.3g}, "
                f"request {request_id!r}, token {index}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class Recorded:
    """A request of a recording, and what was answered."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    step: int = 0  # it arrived before this one
    priority: int = 0
    cache_salt: str | None = None
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    has_processors: bool = False  # functions chose with the model, and are not here
    token_ids: list[int] = field(default_factory=list)
    token_logits: list[float] = field(default_factory=list)  # empty: not recorded

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    def guess_ends(self, eos_token_ids: Iterable[int]) -> None:
        """Say which tokens may end the answer, and may not before `min_tokens`.

        Args:
            eos_token_ids: Of the model.
        """
        params = self.sampling_params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        # One in the middle of the answer has not ended it: the engine was another one.
        self.stop_token_ids = frozenset(ends.difference(self.token_ids[:-1]))

    def as_request(self, name: str, defaults: Mapping[str, Any]) -> Request:
        """Return the request, to be answered with as many tokens as were recorded.

        Args:
            name: For the twin's engine.
            defaults: What the model recommends for parameters that are unset.
        """
        return Request(
            request_id=name,
            token_ids=list(self.prompt_token_ids),
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling_params=replace(
                self.sampling_params.filled(defaults),
                n=1,
                logprobs=None,
                prompt_logprobs=None,
            ),
            max_tokens=len(self.token_ids),
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            cache_salt=self.cache_salt,
            bad_words=self.bad_words,
        )


def recorded_requests(records: Iterable[Record]) -> list[Recorded]:
    """Collect the requests of a trace with their tokens, in the order of arrival.

    Raises:
        RequestError: The trace has tokens of a request, but not its start.
    """
    requests: list[Recorded] = []
    unfinished: dict[str, Recorded] = {}
    for number, record in enumerate(records):
        for added in record["added"]:
            request = Recorded(
                request_id=added["request_id"],
                prompt_token_ids=added["prompt_token_ids"],
                sampling_params=SamplingParams(**added["sampling_params"]),
                step=number,
                priority=added["priority"],
                cache_salt=added["cache_salt"],
                stop_token_ids=frozenset(added["stop_token_ids"]),
                bad_words=tuple(map(tuple, added["bad_words"])),
                has_processors=added["num_logits_processors"] > 0,
            )
            requests.append(request)
            unfinished[request.request_id] = request
        for request_id, token_ids in record["sampled_token_ids"].items():
            if request_id not in unfinished:
                raise RequestError(
                    f"step {record['step']} has a token of request {request_id!r}, but "
                    "the trace does not have its start: record before the request is "
                    "added, with LLM(trace=...) or a listener of the engine"
                )
            unfinished[request_id].token_ids += token_ids
            logits = record["token_logits"].get(request_id, ())
            unfinished[request_id].token_logits += logits
    return requests


def answered_requests(
    outputs: Sequence[RequestOutput],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[Recorded]:
    """Take requests and tokens from outputs; these say nothing of the sampling.

    Raises:
        RequestError: Parameters are missing, or not enough to draw the tokens again.
    """
    if sampling_params is None:
        raise RequestError(
            "sampling_params is None, but outputs do not say how their tokens were "
            "chosen: give the ones that generate() got, or replay a trace"
        )
    if isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params] * len(outputs)
    if len(sampling_params) != len(outputs):
        raise RequestError(
            f"sampling_params has {len(sampling_params)} entries for {len(outputs)} "
            "outputs: give one for all, or one for each"
        )
    requests = []
    for output, params in zip(outputs, sampling_params, strict=True):
        temperature = params.filled({}).temperature
        if temperature > 0 and params.seed is None:
            raise RequestError(
                f"request {output.request_id!r} was sampled at temperature "
                f"{temperature}, with a seed that only the engine knows: give a "
                "seed in sampling_params, or replay a trace"
            )
        guides = (*params.bad_words, *params.logits_processors)
        has_guide = any(getattr(params, name) is not None for name in GUIDES)
        for answer in output.outputs:
            seed = None if params.seed is None else seed_of(params.seed, answer.index)
            requests.append(
                Recorded(
                    request_id=output.request_id,
                    prompt_token_ids=output.prompt_token_ids,
                    sampling_params=replace(params, seed=seed),
                    has_processors=bool(guides) or has_guide,
                    token_ids=answer.token_ids,
                )
            )
    return requests


class TeacherForcedRunner(NumpyRunner):
    """The NumPy runner, which compares its choice and then takes the recorded one."""

    def __init__(
        self, decoder: NumpyDecoder, recorded: Mapping[str, Recorded], **options: Any
    ) -> None:
        """Reserve the cache.

        Args:
            decoder: The model.
            recorded: For a request id, what it is to say.
            options: As for `NumpyRunner`.
        """
        super().__init__(decoder, **options)
        self.recorded = recorded
        self.num_tokens = 0
        self.differences: list[TokenDifference] = []
        self.largest = -1.0  # difference of two logits
        self.where: tuple[str, int] | None = None

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Compute a step, compare its tokens, and answer with the recorded ones."""
        output = super().execute(step)
        for row, index in enumerate(self.batch.sampled):
            request = step.requests[index]
            if request.request_id not in output.errors:
                token_ids = output.sampled_token_ids[request.request_id]
                token_ids[:] = [self._compare(request, token_ids[0], row)]
        return output

    num_guided = 0  # tokens that a logits processor had a say in

    def _compare(self, request: Request, token_id: int, row: int) -> int:
        """Note how a token and its score differ, and return the recorded one."""
        recorded = self.recorded[request.request_id]
        index = request.num_output_tokens
        wanted = recorded.token_ids[index]
        logit = float(self.logits[row, wanted])
        self.num_tokens += 1
        if recorded.has_processors:
            self.num_guided += 1
        elif token_id != wanted:
            self.differences.append(
                TokenDifference(
                    request_id=recorded.request_id,
                    index=index,
                    recorded=wanted,
                    recomputed=token_id,
                    gap=float(self.logits[row, token_id]) - logit,
                )
            )
        if recorded.token_logits:
            difference = abs(recorded.token_logits[index] - logit)
            if difference > self.largest:
                self.largest, self.where = difference, (recorded.request_id, index)
        return wanted


def replay(
    trace: (
        str
        | Path
        | tuple[Record, Iterable[Record]]
        | Sequence[Record]
        | Sequence[RequestOutput]
    ),
    model: str | Path | NumpyDecoder | None = None,
    *,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    kv_cache_memory_bytes: int = 2**30,
) -> TwinReport:
    """Run recorded requests again on the NumPy runner, and compare.

    Requests that were aborted or failed are compared as far as they came.

    Args:
        trace: A trace file; or the header and the records of one; or the records that
            a listener of the engine has collected; or what `LLM.generate` returned.
        model: A short name, a folder, a .gguf file, a hub id or a NumPy decoder; by
            default the model that a trace names.
        sampling_params: For outputs, what `generate` got: one for all, or one for each.
            A decoder does not know the end tokens that `min_tokens` bans; a name does.
        kv_cache_memory_bytes: Size of the twin's KV cache at most, unless a single
            request needs more. With less than was recorded, the steps differ; the
            tokens do not depend on them.

    Returns:
        The report; `print` it.

    Raises:
        ConfigError: There is no model to compute with, or it is another one.
        RequestError: The recording does not say enough, or has nothing to compare.
        MinivllmError: The twin fails, or the model cannot be loaded.

    Cost:
        As slow as the NumPy runner: it recomputes every token.
    """
    if isinstance(trace, str | Path):
        trace = read_trace(trace)
    header: Record = {}
    if isinstance(trace, tuple):
        header, trace = trace
    if header.get("backend") == "fake":
        raise ConfigError(
            "the trace was recorded with backend 'fake', whose tokens are random "
            "numbers: record with 'torch' or 'numpy' to have something to compare"
        )
    if trace and isinstance(trace[0], RequestOutput):
        requests = answered_requests(trace, sampling_params)
    else:
        requests = recorded_requests(trace)
    requests = [request for request in requests if request.token_ids]
    if not requests:
        raise RequestError(
            "the recording has no answer of at least 1 token, so there is nothing to "
            "compare: record while the engine generates"
        )
    decoder, vocab_size, defaults, eos_token_ids = load_twin(model, header)
    for request in requests:
        check_token_ids([*request.prompt_token_ids, *request.token_ids], vocab_size)
        if isinstance(trace[0], RequestOutput):  # a record says what ends a request
            request.guess_ends(eos_token_ids)
    recorded = {str(number): request for number, request in enumerate(requests)}
    settings = {name: header.get(name, value) for name, value in DEFAULTS.items()}
    block_size = settings.pop("block_size")
    runner = TeacherForcedRunner(
        decoder,
        recorded,
        num_blocks=count_blocks(
            requests, header, decoder, block_size, kv_cache_memory_bytes
        ),
        block_size=block_size,
        max_model_len=max(request.num_tokens for request in requests),
        vocab_size=vocab_size,
    )
    if settings["policy"] not in POLICIES:
        settings["policy"] = DEFAULTS["policy"]  # the recording had one of its own
    run_again(LLMEngine(runner, **settings, sampling_defaults=defaults), recorded)
    return TwinReport(
        num_requests=len(requests),
        num_tokens=runner.num_tokens,
        num_different=len(runner.differences),
        first_difference=runner.differences[0] if runner.differences else None,
        largest_logit_difference=runner.largest if runner.where else None,
        where=runner.where,
        num_guided=runner.num_guided,
    )


def load_twin(
    model: str | Path | NumpyDecoder | None, header: Mapping[str, Any]
) -> tuple[NumpyDecoder, int, dict[str, Any], frozenset[int]]:
    """Load the model in float32.

    Returns:
        The decoder, how many token ids may be chosen, what the model recommends for
        sampling parameters that are unset, and its end tokens: none if the recording
        has a header, or the model is a decoder.
    """
    model = header.get("model") if model is None else model
    if model is None:
        raise ConfigError(
            "model is None, and the recording does not name one: say which model it "
            "was recorded with"
        )
    vocab_size = header.get("vocab_size")
    defaults: dict[str, Any] = {}
    eos_token_ids: frozenset[int] = frozenset()
    if isinstance(model, str | Path):
        folder = resolve_model(model, progress=True)
        decoder = load_model(folder, backend="numpy")
        if vocab_size is None:
            tokenizer = Tokenizer.from_dir(folder)
            vocab_size = min(tokenizer.vocab_size, decoder.spec.vocab_size)
            eos_token_ids = tokenizer.eos_token_ids
        defaults = read_sampling_defaults(folder)
    elif isinstance(model, NumpyDecoder):
        decoder = model
    else:
        raise ConfigError(
            f"model is a {type(model).__name__}, but the twin computes with NumPy: "
            "give a NumpyDecoder, or the name or folder of a model"
        )
    known = decoder.spec.vocab_size
    if vocab_size is not None and vocab_size > known:
        raise ConfigError(
            f"the recording chose among {vocab_size:,} tokens, but this model scores "
            f"{known:,}: give the model that it was recorded with"
        )
    return decoder, vocab_size or known, defaults, eos_token_ids


def count_blocks(
    requests: Sequence[Recorded],
    header: Mapping[str, Any],
    decoder: NumpyDecoder,
    block_size: int,
    memory_bytes: int,
) -> int:
    """Return how many blocks the twin gets: as recorded, if memory allows."""
    needs = [-(-request.num_tokens // block_size) for request in requests]
    affordable = num_blocks_for(memory_bytes, decoder.spec, block_size, 4)
    wanted = min(sum(needs), header.get("num_blocks", sum(needs)))
    return max(max(needs), min(wanted, affordable))


def run_again(engine: LLMEngine, recorded: Mapping[str, Recorded]) -> None:
    """Send the requests in the steps in which they came, and run all of them.

    Raises:
        MinivllmError: One of them fails.
    """
    to_come = list(recorded.items())
    number = 0
    while to_come or engine.has_unfinished_requests():
        while to_come and to_come[0][1].step <= number:
            name, request = to_come.pop(0)
            engine.submit(request.as_request(name, engine.sampling_defaults))
        number += 1
        for output in engine.step():
            answer = output.outputs[0]
            if answer.finish_reason == "error":
                request_id = recorded[output.request_id].request_id
                raise MinivllmError(
                    f"request {request_id!r} fails on the NumPy runner: {answer.error}"
                )
