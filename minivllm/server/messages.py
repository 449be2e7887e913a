"""The messages of a chat, and the tools it may use.

Invariant: as for all records of bodies. Used by the bodies.

In vLLM: vllm/entrypoints/openai/chat_completion/protocol.py (ChatCompletionToolsParam);
messages are of OpenAI's own types there.
Source: appendix A30, "Speaking OpenAI".
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from minivllm.server.fields import JsonObject, RequestModel


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


def check_parts(content: Any) -> Any:
    """Refuse pictures, sound and files by their name."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "no_text",
                "has a part of type {kind} at {number}, but this server reads text "
                "only: send parts such as {example}",
                {
                    "kind": repr(kind[:40]),
                    "number": number,
                    "example": '{"type": "text", "text": "Hello"}',
                },
            )
    return content


Content = Annotated[
    str | Annotated[list[TextPart], Field(min_length=1)], BeforeValidator(check_parts)
]


class SystemMessage(RequestModel):
    """What the model is told about its task; a developer is a system."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestModel):
    """A question."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class ToolMessage(RequestModel):
    """What a function has returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class CalledFunction(RequestModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(RequestModel):
    """A call that the model has made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # left over from a stream


class AssistantMessage(RequestModel):
    """An earlier answer, as it came."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    # What OpenAI's client sends back with an answer.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1)]


class Function(RequestModel):
    """A function that the model may call; the parameters are a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A function, packed up."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    """A function by its name."""

    name: str


class NamedTool(RequestModel):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName
