"""Render a chat as the text that a model was trained on.

The template is a program that came with the model, so it runs in a sandbox.

Invariant: a template cannot reach Python, nor change the messages; whatever goes wrong
in it is an error of ours. Called by the tokenizer.

In vLLM: vllm/renderers/hf.py, safe_apply_chat_template, around transformers.
Source: appendix A2, "Text"; appendix A27, "Thinking"; appendix A30, "Speaking OpenAI".
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.errors import ConfigError, RequestError

# What a template may raise on messages it does not expect: its own refusals
# (raise_exception, undefined names, the sandbox) and slips of Python under it.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
# What Python may raise on a template that is valid Jinja, but too deep or too large.
_COMPILER_FAILURES = (
    MemoryError,
    OverflowError,
    RecursionError,
    SyntaxError,
    ValueError,
)


class _GenerationTag(Extension):
    """Let `{% generation %}` pass, which marks answers in training templates."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML and everything that is not ASCII.
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that `transformers` defines."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"line {error.lineno} of the chat template is no valid Jinja: "
            f"{error.message}; correct chat_template in the model's folder"
        ) from error
    except _COMPILER_FAILURES as error:
        raise ConfigError(
            f"the chat template of {len(template):,} characters cannot be compiled "
            f"({error!r:.80}): correct chat_template in the model's folder"
        ) from error


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the shape of a chat and return a copy without empty fields."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            f"messages is {messages!r}, but must be a list of at least one message "
            'such as {"role": "user", "content": "Hello"}'
        )
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {n} is a {type(message).__name__}, but must be a dict such "
                'as {"role": "user", "content": "Hello"}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {n} has the role {message.get('role')!r}, but must have a "
                "string such as 'user', 'assistant' or 'system'"
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(
                f"message {n} has no content: give it a string, or tool_calls"
            )
        if content is not None and not isinstance(content, (str, list)):
            raise RequestError(
                f"the content of message {n} is a {type(content).__name__}, but must "
                "be a string or a list of parts"
            )
    # Templates print an explicit None as "None".
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


_LOOP_OVER_CONTENT = re.compile(
    r"\bfor\s+\w+\s+in\s+[\w.()\[\]'\"]*\bcontent\b['\")\]]*\s*(-?%}|\||if\b)"
)


def _join_parts(n: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return message `n` with a string for its list of text parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"message {n} has a part of type {kind!r:.80} ({part!r:.80}), but this "
                "model's chat template takes text only: send parts such as "
                '{"type": "text", "text": "Hello"}'
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


def render_chat(template: str, messages: Any, variables: Mapping[str, Any]) -> str:
    """Render messages by a template.

    The time and the memory that a template takes are not limited: it is as trusted
    as the weights that came with it.

    Args:
        template: Jinja.
        messages: From the user, not checked yet.
        variables: What else the template may read.

    Raises:
        RequestError: The messages are malformed, or the template refuses them.
        ConfigError: The template is no valid Jinja, or cannot be compiled.
    """
    messages = _check_messages(messages)
    if not _LOOP_OVER_CONTENT.search(template):
        messages = [_join_parts(n, message) for n, message in enumerate(messages)]
    compiled = _compile(template)
    try:
        return compiled.render({**variables, "messages": messages})
    except _TEMPLATE_FAILURES as error:
        raise RequestError(
            f"the chat template refused these messages: {error}"
        ) from error


@lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Return the names that a chat template may take from its caller; not messages.

    A name that is set in one branch and read behind it is among them.

    Raises:
        ConfigError: The template is no valid Jinja, or cannot be compiled.
    """
    environment = _compile(template).environment
    names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    return frozenset(names - {"messages", *environment.globals})


# Put behind the last content, to be found in the prompt: a text nobody would write.
MARK = "⟦minivllm goes on here: 5f0c1d7be2a9⟧"


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with a mark behind the content of the last one."""
    *before, last = messages if isinstance(messages, Sequence) and messages else [{}]
    content = last.get("content")
    if isinstance(content, str) and content:
        return [*before, {**last, "content": content + MARK}]
    if isinstance(content, list) and content and content[-1].get("text"):
        part = {**content[-1], "text": content[-1]["text"] + MARK}
        return [*before, {**last, "content": [*content[:-1], part]}]
    raise RequestError(
        "continue_final_message is true, but the last message has no text to go on "
        "with: give it some, or leave continue_final_message out"
    )


def cut_behind(prompt: str) -> str:
    """Return the prompt up to the mark."""
    before, mark, _ = prompt.rpartition(MARK)
    if not mark:
        raise RequestError(
            "continue_final_message is true, but this model's chat template leaves the "
            "last message out: leave continue_final_message out"
        )
    return before
