"""What the fields of bodies are made of.

Invariant: a record takes no field that it does not name, and no value of another kind;
null stands for the default. Used by the records of bodies.

In vLLM: vllm/entrypoints/serve/engine/protocol.py (OpenAIBaseModel), which takes every
field.
Source: appendix A30, "Speaking OpenAI".
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class RequestModel(BaseModel):
    """A record of a body: strict in names and in kinds."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True
    )


def check_finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse 1e999, which becomes infinite, anywhere in an object."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError(
            "infinite", "holds a number too large for a float: write a smaller one"
        ) from None
    return value


def check_biases(biases: dict[str, float]) -> dict[str, float]:
    """Refuse keys that are no token ids: in JSON, the keys of an object are texts."""
    for key in biases:
        if not (key.isdecimal() and len(key) < 20):
            raise PydanticCustomError(
                "no_id",
                "has the key {key}, but keys are token ids, such as {example}: take "
                "them from /tokenize",
                {"key": repr(key[:40]), "example": "'50256'"},
            )
    return biases


JsonObject = Annotated[dict[str, Any], AfterValidator(check_finite)]
Biases = Annotated[dict[str, float], AfterValidator(check_biases)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Salt = Annotated[str, Field(min_length=1)]
