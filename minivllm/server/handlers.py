"""Turn bodies of OpenAI's interface into jobs for the engine.

Invariant: nothing is changed by a call, so any number of threads may read bodies at the
same time, and whatever is wrong with one is an ApiError. Who runs the jobs is somebody
else: the local handlers with an `LLM`, a server with an engine on a thread of its own.

In vLLM: vllm/entrypoints/openai/chat_completion/serving.py (OpenAIServingChat),
vllm/entrypoints/openai/completion/serving.py (OpenAIServingCompletion),
vllm/entrypoints/openai/models/serving.py (OpenAIServingModels),
vllm/entrypoints/serve/tokenize/serving.py.
Source: appendix A30, "Speaking OpenAI"; appendix A32, "A server that stays up".
"""

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import minivllm
from minivllm.engine.engine import LLMEngine
from minivllm.errors import MinivllmError
from minivllm.sampling.params import DEFAULT_MAX_TOKENS, SamplingParams
from minivllm.server.chat import ChatJob
from minivllm.server.completions import CompletionJob
from minivllm.server.errors import ApiError, error_of
from minivllm.server.foreign import CHAT, COMPLETION, TOKENIZE
from minivllm.server.prompts import echoes_of, encode_prompts, encode_request, needed
from minivllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from minivllm.server.reading import Body, read
from minivllm.server.sampling import (
    chat_values,
    check_stream,
    guides_of,
    sampling_values,
    take_guide,
)
from minivllm.server.tool_choice import tool_options
from minivllm.server.tools import CALL, TaggedCalls
from minivllm.text.reasoning import THINK, tag_ids
from minivllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What one has to know of an engine to read a body for it.

    Attributes:
        tokenizer: None if it has none.
        max_model_len: Tokens of a request at most.
    """

    tokenizer: Tokenizer | None
    max_model_len: int

    @classmethod
    def of(cls, engine: LLMEngine) -> "EngineView":
        """Look at an engine."""
        return cls(
            tokenizer=engine.tokenizer, max_model_len=engine.runner.max_model_len
        )


def can_think(tokenizer: Tokenizer | None) -> bool:
    """Tell whether a model's chat template or vocabulary knows thoughts."""
    if tokenizer is None:
        return False
    return THINK in (tokenizer.chat_template or "") or bool(tag_ids(tokenizer))


class Handlers:
    """Reads bodies."""

    def __init__(
        self,
        engine: EngineView,
        *,
        model: str,
        served_names: Sequence[str] = (),
        splits_reasoning: bool = True,
    ) -> None:
        """Prepare to read bodies for one engine.

        Args:
            engine: What they are for.
            model: The model's name.
            served_names: What clients may call it, by default its name; the first is
                what it is called in answers to bodies without a name.
            splits_reasoning: Whether thoughts are told apart from answers, unless a
                body says otherwise.
        """
        self.engine = engine
        self.model = model
        self.served_names = tuple(served_names) or (model,)
        self.created = int(time.time())
        settings = f"{minivllm.__version__} {model} {engine.max_model_len}"
        digest = hashlib.sha256(settings.encode()).hexdigest()
        self.system_fingerprint = f"fp_{digest[:10]}"
        self._can_think = splits_reasoning and can_think(engine.tokenizer)

    def list_models(self) -> dict[str, Any]:
        """Return the models that there are: one, under all its names."""
        return {"object": "list", "data": [*map(self.show_model, self.served_names)]}

    def show_model(self, name: str) -> dict[str, Any]:
        """Return the record of a model.

        Raises:
            ApiError: There is none of that name.
        """
        return {
            "id": self.check_model(name),
            "object": "model",
            "created": self.created,
            "owned_by": "minivllm",
            "root": self.model,
            "max_model_len": self.engine.max_model_len,
        }

    def check_model(self, name: str | None) -> str:
        """Return the name of the model that a body asks for, or refuse it."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            names = ", ".join(map(repr, self.served_names))
            raise ApiError(
                f"model is {name!r:.80}, but this server has {names}: ask for that",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def _common(self, request: GenerationRequest, prefix: str) -> dict[str, Any]:
        """Return what chats and completions hand on to their jobs unchanged."""
        options = request.stream_options
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.check_model(request.model),
            "system_fingerprint": self.system_fingerprint,
            "priority": request.priority or 0,
            "cache_salt": request.cache_salt,
            "stream": bool(request.stream),
            "include_usage": bool(options and options.include_usage),
            "tokenizer": self.engine.tokenizer,
        }

    def parse_chat(self, body: Body) -> ChatJob:
        """Read the body of /v1/chat/completions.

        Raises:
            ApiError: What is wrong with it: 404 for an unknown model, else 400; 500 if
                the model's own files are wrong.
        """
        request = read(ChatCompletionRequest, body, CHAT)
        common = self._common(request, "chatcmpl")
        check_stream(request)
        tools = tool_options(request)
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        values = chat_values(request, names)
        forced = ("tool_choice", "guided_json", tools.schema)
        guides = [*guides_of(request), forced] if tools.schema else guides_of(request)
        take_guide(values, names, guides)
        tokenizer = needed(self.engine.tokenizer, "messages")
        # A grammar holds from the first token on, and leaves no room for thoughts.
        is_split = request.split_reasoning and not guides
        if request.split_reasoning is None:
            is_split = self._can_think and not guides
        if tools.call_reader is TaggedCalls and is_markup(tokenizer, CALL):
            values.setdefault("skip_special_tokens", False)
        try:
            params = SamplingParams(**values, split_reasoning=bool(is_split))
            prompt = encode_request(tokenizer, request, with_tools=tools.are_shown)
        except MinivllmError as error:
            raise error_of(error, names, "messages") from error
        return ChatJob(
            **common,
            names=names,
            prompts=[prompt],
            sampling_params=[params],
            default_max_tokens=None,
            num_best=params.logprobs,
            include_reasoning=request.include_reasoning is not False,
            tools=tools,
        )

    def parse_completion(self, body: Body) -> CompletionJob:
        """Read the body of /v1/completions.

        Raises:
            ApiError: As for `parse_chat`.
        """
        request = read(CompletionRequest, body, COMPLETION)
        common = self._common(request, "cmpl")
        check_stream(request)
        check_best_of(request)
        names: dict[str, str] = {}
        values = sampling_values(request)
        if request.logprobs is not None:
            values["logprobs"] = request.logprobs
            if request.echo:
                values.setdefault("prompt_logprobs", request.logprobs)
        take_guide(values, names, guides_of(request))
        try:
            params = SamplingParams(**values)
            prompts = encode_prompts(self.engine.tokenizer, request)
            echoes = echoes_of(self.engine.tokenizer, request) if request.echo else None
        except MinivllmError as error:
            raise error_of(error, names, "prompt") from error
        return CompletionJob(
            **common,
            names=names,
            prompts=prompts,
            sampling_params=[params] * len(prompts),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            echoes=echoes,
            has_logprobs=request.logprobs is not None,
            has_prompt_logprobs=request.prompt_logprobs is not None,
        )

    def tokenize(self, body: Body) -> dict[str, Any]:
        """Answer the body of /tokenize: the tokens of a text or a chat."""
        request = read(TokenizeRequest, body, TOKENIZE)
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(
                "the body must have either prompt or messages: give one of them",
                param="prompt",
            )
        param = "prompt" if request.messages is None else "messages"
        tokenizer = needed(self.engine.tokenizer, param)
        try:
            if request.messages is None:
                with_special = request.add_special_tokens is not False
                token_ids = tokenizer.encode(
                    request.prompt, add_special_tokens=with_special
                )
            else:
                token_ids = encode_request(tokenizer, request)
        except MinivllmError as error:
            raise error_of(error, {"prompt": param}, param) from error
        texts = [tokenizer.token_bytes(i).decode(errors="replace") for i in token_ids]
        return {
            "count": len(token_ids),
            "max_model_len": self.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": texts if request.return_token_strs else None,
        }

    def detokenize(self, body: Body) -> dict[str, Any]:
        """Answer the body of /detokenize: the text of tokens, markup included."""
        request = read(DetokenizeRequest, body)
        self.check_model(request.model)
        tokenizer = needed(self.engine.tokenizer, "tokens")
        try:
            text = tokenizer.decode(request.tokens, skip_special_tokens=False)
        except MinivllmError as error:
            raise error_of(error, param="tokens") from error
        return {"prompt": text}


def is_markup(tokenizer: Tokenizer, text: str) -> bool:
    """Tell whether a text is a token that is left out of answers."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return len(token_ids) == 1 and token_ids[0] in tokenizer.special_token_ids


def check_best_of(request: CompletionRequest) -> None:
    """Refuse to throw answers away: OpenAI's interface draws best_of, and tells n."""
    n = request.n or 1
    if request.best_of not in (None, n):
        raise ApiError(
            f"best_of is {request.best_of}, but this server tells all {n} answers that "
            "it draws: leave it out, and choose by logprobs",
            param="best_of",
        )


def handlers_of(
    engine: LLMEngine,
    names: Sequence[str],
    *,
    chat_template: str | None = None,
    splits_reasoning: bool = True,
) -> Handlers:
    """Prepare to read bodies for an engine.

    Args:
        engine: Its tokenizer and its limits count.
        names: What clients call the model; the first is in the answers.
        chat_template: Jinja, in place of the tokenizer's own.
        splits_reasoning: Whether thoughts are told apart from answers.
    """
    view = EngineView.of(engine)
    if chat_template is not None and view.tokenizer is not None:
        tokenizer = view.tokenizer.with_chat_template(chat_template)
        view = replace(view, tokenizer=tokenizer)
    return Handlers(
        view,
        model=names[0],
        served_names=names,
        splits_reasoning=splits_reasoning,
    )
