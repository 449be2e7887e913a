"""The bodies of requests: every field, and of what kind it is.

Invariant: what is here is all that is taken. What a value may be beyond its kind, the
engine says. Called by the handlers; the description of the interface (OpenAPI) is made
of these, too.

In vLLM: vllm/entrypoints/openai/chat_completion/protocol.py (ChatCompletionRequest),
vllm/entrypoints/openai/completion/protocol.py (CompletionRequest),
vllm/entrypoints/serve/tokenize/protocol.py (TokenizeChatRequest, DetokenizeRequest).
Source: appendix A30, "Speaking OpenAI".
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from minivllm.server.fields import Biases, Int64, JsonObject, RequestModel, Salt
from minivllm.server.messages import Messages, NamedTool, Tool


class JsonSchema(RequestModel):
    """A schema with a name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(RequestModel):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(RequestModel):
    """What vLLM 0.32 has in place of the fields guided_json, guided_regex, ..."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None


class GenerationRequest(RequestModel):
    """What chats and completions have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    seed: Int64 | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    guided_json: JsonObject | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    # They change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def check_prompt(prompt: Any) -> Any:
    """Refuse a list of several kinds; pydantic would name its first entry."""
    kinds = {type(entry) for entry in prompt} if isinstance(prompt, list) else {str}
    if not kinds:
        raise PydanticCustomError("empty", "is [], but must have an entry: add one")
    if len(kinds) > 1 or not kinds <= {str, int, list}:
        raise PydanticCustomError(
            "mixed",
            "must be a text, a list of texts, a list of token ids, or a list of lists "
            "of token ids: choose one of these",
        )
    return prompt


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]], BeforeValidator(check_prompt)
]


class CompletionRequest(GenerationRequest):
    """Continue a text: /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatFields(RequestModel):
    """What becomes the prompt of a chat."""

    messages: Messages
    tools: list[Tool] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatCompletionRequest(ChatFields, GenerationRequest):
    """Answer a chat: /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    split_reasoning: bool | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(ChatFields):
    """Turn a text or a chat into tokens: /tokenize."""

    model: str | None = None
    messages: Messages | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Turn tokens into text: /detokenize."""

    model: str | None = None
    tokens: list[int]
