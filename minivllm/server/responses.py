"""The answers, field by field: for the description of the interface, and for tests.

Answers are plain dictionaries, and no record is made for one: these say what is in
them. Used by whoever speaks HTTP.

In vLLM: vllm/entrypoints/openai/chat_completion/protocol.py (ChatCompletionResponse),
vllm/entrypoints/openai/completion/protocol.py (CompletionResponse),
vllm/entrypoints/serve/engine/protocol.py (ErrorResponse, UsageInfo).
Source: appendix A30, "Speaking OpenAI".
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """A record of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class PromptTokensDetails(ResponseModel):
    """How much of the prompt was known from earlier requests."""

    cached_tokens: int


class Usage(ResponseModel):
    """What was read and written, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerModel(ResponseModel):
    """What every answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ErrorObject(ResponseModel):
    """What is wrong, in words and for programs."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """An answer with a status of 400 or more."""

    error: ErrorObject


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class TokenLogprob(ResponseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class PlaceLogprobs(TokenLogprob):
    """The token of a place, and the best ones for it."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    """The logprobs of an answer."""

    content: list[PlaceLogprobs]
    refusal: None


class PromptLogprob(ResponseModel):
    """A token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(ResponseModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(ResponseModel):
    """A function that the client is asked to call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ResponseModel):
    """An answer of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ResponseModel):
    """One of n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletionResponse(AnswerModel):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(ResponseModel):
    """A piece of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(ResponseModel):
    """A piece of a call; id and name come with its first."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(ResponseModel):
    """What is new in an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """What is new in one of n answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatCompletionChunk(AnswerModel):
    """A piece of an answer to a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(ResponseModel):
    """The logprobs of a continuation, in lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(ResponseModel):
    """One continuation, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(AnswerModel):
    """Continuations of texts, or in a stream a piece of them."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    """All models."""

    object: Literal["list"]
    data: list[Model]


class TokenizeResponse(ResponseModel):
    """The tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    """The text of tokens."""

    prompt: str


class VersionResponse(ResponseModel):
    """Which minivllm answers."""

    version: str
