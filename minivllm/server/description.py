"""The OpenAPI description: what each route takes and gives.

Called by the application. The routes read bytes themselves, so that every mistake in
them is told our way; the description is made of the same records.

In vLLM: FastAPI makes it, of the arguments of the routes.
Source: appendix A32, "A server that stays up".
"""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from minivllm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from minivllm.server.responses import (
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorResponse,
    Model,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)

# Path: what it takes, and what it gives; None where that is no JSON.
RECORDS: dict[str, tuple[type[BaseModel] | None, type[BaseModel] | None]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletionResponse),
    "/v1/completions": (CompletionRequest, CompletionResponse),
    "/v1/models": (None, ModelList),
    "/v1/models/{name}": (None, Model),
    "/version": (None, VersionResponse),
    "/tokenize": (TokenizeRequest, TokenizeResponse),
    "/detokenize": (DetokenizeRequest, DetokenizeResponse),
}
# Path: the type of an answer that is no JSON; None if it has no body.
PLAIN = {"/health": None, "/metrics": "text/plain"}
REFUSALS = ("400", "401", "404", "405", "408", "413", "429", "500", "503", "504")


def add_records(schema: dict[str, Any]) -> dict[str, Any]:
    """Add bodies and answers to a description of the routes, in place."""
    takes = {record for record, _ in RECORDS.values() if record}
    gives = {record for _, record in RECORDS.values() if record} | {ErrorResponse}
    modes = [(record, "validation") for record in sorted(takes, key=str)]
    modes += [(record, "serialization") for record in sorted(gives, key=str)]
    template = "#/components/schemas/{model}"
    places, shared = models_json_schema(modes, ref_template=template)
    schema.setdefault("components", {})["schemas"] = shared["$defs"]
    error = as_json(places[ErrorResponse, "serialization"], "Refused, and why")
    for path, operations in schema["paths"].items():
        body, answer = RECORDS.get(path, (None, None))
        for operation in operations.values():
            if body:
                content = as_json(places[body, "validation"])["content"]
                operation["requestBody"] = {"content": content, "required": True}
            if answer:
                found = as_json(places[answer, "serialization"], "The answer")
                if path in ("/v1/chat/completions", "/v1/completions"):
                    found["content"]["text/event-stream"] = {}
                operation["responses"] = {"200": found}
            if path in PLAIN:
                content = {PLAIN[path]: {}} if PLAIN[path] else {}
                found = {"description": "The answer", "content": content}
                operation["responses"] = {"200": found}
            operation["responses"].pop("422", None)
            operation["responses"] |= dict.fromkeys(REFUSALS, error)
    return schema


def as_json(schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    """Describe something that is JSON."""
    return {
        "description": description,
        "content": {"application/json": {"schema": schema}},
    }
