"""What a body says of sampling, in the engine's words.

Invariant: a field that is null changes nothing. Called by the handlers.

In vLLM: vllm/entrypoints/openai/chat_completion/protocol.py
(ChatCompletionRequest.to_sampling_params).
Source: appendix A30, "Speaking OpenAI".
"""

from dataclasses import fields
from typing import Any

from minivllm.sampling.params import GUIDES, SamplingParams
from minivllm.server.errors import ApiError
from minivllm.server.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    JsonSchemaFormat,
)

# Parameters that a body has under the same name, and with the same meaning.
SAME = [
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationRequest.model_fields
]


def sampling_values(request: GenerationRequest) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that a body gives, its guides apart."""
    values = {name: getattr(request, name) for name in SAME if name not in GUIDES}
    values = {name: value for name, value in values.items() if value is not None}
    if "seed" in values:
        values["seed"] %= 2**64  # OpenAI's is signed
    return values


def guides_of(request: GenerationRequest) -> list[tuple[str, str, Any]]:
    """Return what the answer must follow: the field, the parameter and its value."""
    guides = [(name, name, getattr(request, name)) for name in GUIDES]
    if outputs := request.structured_outputs:
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(outputs, "json_" if name == "json" else name)
            guides.append((f"structured_outputs.{name}", f"guided_{name}", value))
    form = request.response_format
    if isinstance(form, JsonSchemaFormat) and form.json_schema.schema_ is not None:
        guides.append(("response_format", "guided_json", form.json_schema.schema_))
    elif form is not None and form.type != "text":
        guides.append(("response_format", "guided_json", {"type": "object"}))
    return [guide for guide in guides if guide[2] is not None]


def take_guide(
    values: dict[str, Any], names: dict[str, str], guides: list[tuple[str, str, Any]]
) -> None:
    """Put the one guide into the values, and its field into the names."""
    if len(guides) > 1:
        origins = " and ".join(origin for origin, _, _ in guides)
        raise ApiError(
            f"{origins} are given, but an answer follows one of them: choose one",
            param=guides[-1][0],
        )
    for origin, name, value in guides:
        values[name] = value
        names[name] = origin


def check_stream(request: GenerationRequest) -> None:
    """Refuse what only makes sense with a stream, or without."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            "stream_options is given, but stream is not true: leave one out, or set "
            "stream to true",
            param="stream_options",
        )
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(
            "prompt_logprobs is given, but stream is true, and a stream has no place "
            "for them: leave one out",
            param="prompt_logprobs",
        )


def chat_values(
    request: ChatCompletionRequest, names: dict[str, str]
) -> dict[str, Any]:
    """Return what a chat says of sampling; the names learn what it calls it."""
    values = sampling_values(request)
    if request.max_completion_tokens is not None:
        if values.get("max_tokens", request.max_completion_tokens) != (
            request.max_completion_tokens
        ):
            raise ApiError(
                f"max_completion_tokens is {request.max_completion_tokens}, but "
                f"max_tokens, its old name, is {request.max_tokens}: leave it out",
                param="max_completion_tokens",
            )
        values["max_tokens"] = request.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise ApiError(
            f"top_logprobs is {request.top_logprobs}, but logprobs is not true: set "
            "logprobs to true, or leave top_logprobs out",
            param="top_logprobs",
        )
    return values
