"""What `tool_choice` means: are tools shown, and does a grammar force a call?

Called by the handlers.

In vLLM: vllm/tool_parsers/utils.py (get_json_schema_from_tools).
Source: appendix A30, "Speaking OpenAI".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.server.errors import ApiError
from minivllm.server.messages import NamedTool, Tool
from minivllm.server.protocol import ChatCompletionRequest
from minivllm.server.tools import CallReader, ListedCalls, NamedCall, TaggedCalls


def schema_of(tools: list[Tool], name: str | None, max_calls: int | None) -> Any:
    """Return the schema of a forced call: of arguments, or of a list of calls.

    Args:
        tools: What may be called.
        name: The one to call; None for one or more of all.
        max_calls: Of a list.

    Raises:
        ApiError: There is no such tool, or its parameters are no object.
    """
    if not tools:
        raise ApiError(
            "tool_choice asks for a call, but there are no tools: give tools, or "
            "leave tool_choice out",
            param="tool_choice",
        )
    if name is not None:
        for number, tool in enumerate(tools):
            if tool.function.name == name:
                return parameters_of(number, tool)
        names = ", ".join(tool.function.name for tool in tools)
        raise ApiError(
            f"tool_choice names the function {name!r:.80}, but the tools are {names}: "
            "name one of these",
            param="tool_choice",
        )
    schemas = [parameters_of(number, tool) for number, tool in enumerate(tools)]
    items = [call_schema(t, s) for t, s in zip(tools, schemas, strict=True)]
    listed = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if max_calls is not None:
        listed["maxItems"] = max_calls
    return {**listed, **definitions_of(schemas)}


DEFINITIONS = ("$defs", "definitions")  # what references point into


def parameters_of(number: int, tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    parameters = tool.function.parameters
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        param = f"tools[{number}].function.parameters"
        raise ApiError(
            f"{param} has the type {str(parameters['type'])!r:.80}, but arguments are "
            "an object: wrap it in properties",
            param=param,
        )
    return {"type": "object", **parameters}


def call_schema(tool: Tool, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one call in a list."""
    inner = {k: v for k, v in parameters.items() if k not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"enum": [tool.function.name]}, "parameters": inner},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def definitions_of(schemas: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Gather the definitions of all functions, where their references find them."""
    gathered: dict[str, dict[str, Any]] = {}
    for schema in schemas:
        for key in DEFINITIONS:
            definitions = schema.get(key)
            if not isinstance(definitions, dict):
                continue  # anything else is for the grammar to refuse
            for name, definition in definitions.items():
                known = gathered.setdefault(key, {}).setdefault(name, definition)
                if known != definition:
                    raise ApiError(
                        f"tools has two different {key} of the name {name!r:.80}: "
                        "rename one of them",
                        param="tools",
                    )
    return gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """How an answer deals with tools.

    Attributes:
        are_shown: Whether the model is told of them.
        schema: Of the answer, if a call is forced.
        call_reader: Makes what finds calls in the answer; None for no calls.
        is_named: Whether one tool was named.
        max_calls: Calls to tell at most.
    """

    are_shown: bool = False
    schema: dict[str, Any] | None = None
    call_reader: Callable[[], CallReader] | None = None
    is_named: bool = False
    max_calls: int | None = None


def tool_options(request: ChatCompletionRequest) -> ToolOptions:
    """Return what a body wants of its tools.

    Raises:
        ApiError: It wants a call of a tool that is not there.
    """
    tools, choice = request.tools or [], request.tool_choice
    max_calls = 1 if request.parallel_tool_calls is False else None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return ToolOptions(
            are_shown=True,
            schema=schema_of(tools, name, max_calls),
            call_reader=lambda: NamedCall(name),
            is_named=True,
        )
    if choice == "required":
        schema = schema_of(tools, None, max_calls)
        return ToolOptions(are_shown=True, schema=schema, call_reader=ListedCalls)
    if choice == "none" or not tools:
        return ToolOptions()
    return ToolOptions(are_shown=True, call_reader=TaggedCalls, max_calls=max_calls)
