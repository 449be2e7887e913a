"""Read a body: JSON to a checked record, or an error that names the field.

Invariant: whatever the bytes are, the only exception is ApiError, with status 400.
A dictionary is read as strictly as the JSON that it would be. Called by the handlers.

In vLLM: FastAPI reads, and
vllm/entrypoints/serve/exception_handling/handlers/validation.py words the errors.
Source: appendix A30, "Speaking OpenAI".
"""

import difflib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from minivllm.server.errors import ApiError

Body = bytes | bytearray | str | Mapping[str, Any]


def refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object that has a name twice.

    Parsers take the first or the last of them: who checks a body before us, such as a
    proxy, might see another one than we.
    """
    counts = Counter(name for name, _ in pairs)
    if len(counts) < len(pairs):
        [(name, _)] = counts.most_common(1)
        raise ValueError(f"the name {name!r:.80} is there twice")


def read_json(body: Body) -> dict[str, Any]:
    """Return a JSON object as a dictionary, or refuse it."""
    is_mapping = isinstance(body, Mapping)
    try:
        if is_mapping:
            # By way of text: what JSON cannot say is no request either.
            body = json.dumps(dict(body), allow_nan=False, ensure_ascii=False)
        value = from_json(body, allow_inf_nan=False)
        if not is_mapping:
            json.loads(body, object_pairs_hook=refuse_twins)
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError(
            f"the body is no JSON ({error}): send one object in UTF-8, with whole "
            "characters and without NaN or Infinity"
        ) from None
    if not isinstance(value, dict):
        raise ApiError(
            f"the body is {shown(value)}, but must be an object: send fields such as "
            '{"model": "..."}'
        )
    return value


def shown(value: Any) -> str:
    """Return the beginning of a value, as JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


class Foreign(NamedTuple):
    """A field of OpenAI or vLLM that we do not have, but may be told to leave alone."""

    neutral: tuple[Any, ...]  # values that ask for nothing, beside null
    way_out: str


def drop_foreign(value: dict[str, Any], foreign: Mapping[str, Foreign]) -> None:
    """Take out the fields that ask for nothing; refuse those that ask for something."""
    for name in [name for name in value if name in foreign]:
        given = value.pop(name)
        same = (given == n and type(given) is type(n) for n in foreign[name].neutral)
        if given is not None and not any(same):
            raise ApiError(
                f"{name} is {shown(given)}, but this server does not do that: "
                f"{foreign[name].way_out}",
                param=name,
            )


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the records that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def names_at(model: type[BaseModel], path: list[str | int]) -> list[str]:
    """Return the names of the fields that may stand in a place of a body."""
    models = [model]
    for name in (step for step in path if isinstance(step, str)):
        fields = [m.model_fields[name] for m in models if name in m.model_fields]
        models = [found for field in fields for found in models_in(field.annotation)]
    return [f.alias or n for m in models for n, f in m.model_fields.items()]


# What pydantic calls an error -> what the value must be.
WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "less_than": "below {lt}",
    "greater_than_equal": "at least {ge}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text of at least {min_length} characters",
    "string_type": "a text",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "union_tag_invalid": "{expected_tags}",
}


def walk(body: Any, place: tuple[str | int, ...]) -> tuple[list[str | int], Any]:
    """Follow an error's place as far as the body goes; return the path and the value.

    Pydantic puts the names of types between the steps.
    """
    path: list[str | int] = []
    for step in place:
        is_key = isinstance(body, dict) and step in body
        if is_key or (isinstance(body, list) and isinstance(step, int)):
            body = body[step]
            path.append(step)
    return path, body


def spelled(path: list[str | int]) -> str:
    """Return a path as it would be written: messages[0].content."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


Model = TypeVar("Model", bound=BaseModel)


def read(
    model: type[Model], body: Body, foreign: Mapping[str, Foreign] | None = None
) -> Model:
    """Return a body as a record.

    Args:
        model: The record's class.
        body: JSON, or what it would be in Python.
        foreign: Fields that are taken only if they ask for nothing.

    Raises:
        ApiError: It is no JSON, a field is unknown, or a value is of the wrong kind.
    """
    value = read_json(body)
    drop_foreign(value, foreign or {})
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise describe(model, value, error) from None


def describe(
    model: type[BaseModel], body: dict[str, Any], error: ValidationError
) -> ApiError:
    """Word the innermost of the errors that pydantic has found."""
    errors = [(*walk(body, e["loc"]), e) for e in error.errors(include_url=False)]
    path, value, first = max(errors, key=lambda found: len(found[0]))  # the first such
    kind, context = first["type"], first.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        name = context.get("discriminator", "").strip("'") or first["loc"][-1]
        param = spelled([*path, name])
        return ApiError(f"{param} is missing: add it", param=param)
    if kind == "extra_forbidden":
        return describe_unknown(names_at(model, path[:-1]), path)
    if kind == "union_tag_invalid":
        path = [*path, context["discriminator"].strip("'")]
        value = value[path[-1]]
    param = spelled(path)
    if kind not in WORDS:  # one of our own, which begins with a verb
        return ApiError(f"{param} {first['msg']}", param=param)
    same = [e for other, _, e in errors if other == path and e["type"] in WORDS]
    words = [WORDS[e["type"]].format(**e.get("ctx", {})) for e in same or [first]]
    return ApiError(
        f"{param} is {shown(value)}, but must be {' or '.join(dict.fromkeys(words))}: "
        "correct it",
        param=param,
    )


def describe_unknown(names: list[str], path: list[str | int]) -> ApiError:
    """Name the field that comes nearest to an unknown one."""
    name, place = str(path[-1])[:40], spelled(path[:-1])
    nearest = difflib.get_close_matches(name, names, n=1)
    known = f"it takes {', '.join(names)}" if len(names) <= 12 else "leave it out"
    hint = f"did you mean {nearest[0]}?" if nearest else known
    where = f"{place} has" if place else "the body has"
    return ApiError(
        f"{where} the unknown field {name}: {hint}", param=spelled([*path[:-1], name])
    )
