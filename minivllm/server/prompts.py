"""The prompt of a chat: messages of OpenAI's interface, as a chat template takes them.

Called by the handlers.

In vLLM: vllm/renderers/hf.py (HfRenderer).
Source: appendix A30, "Speaking OpenAI".
"""

import json
from typing import Any

from minivllm.errors import RequestError
from minivllm.server.errors import ApiError
from minivllm.server.messages import AssistantMessage, Message, ToolCall
from minivllm.server.protocol import ChatFields, CompletionRequest
from minivllm.text.tokenizer import Tokenizer


def message_of(number: int, message: Message) -> dict[str, Any]:
    """Return a message as a chat template takes it."""
    values = message.model_dump(exclude_none=True, exclude={"tool_calls"})
    if values["role"] == "developer":  # OpenAI's new name; templates have the old one
        values["role"] = "system"
    if isinstance(message, AssistantMessage) and message.tool_calls:
        values["tool_calls"] = [
            call_of(f"messages[{number}].tool_calls[{place}]", call)
            for place, call in enumerate(message.tool_calls)
        ]
    return values


def call_of(place: str, call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object: templates write the JSON anew."""
    text = call.function.arguments
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{place}.function.arguments"
        raise ApiError(
            f"{param} is {text!r:.80}, but must be the JSON text of an object: send "
            "back what the model has written, or leave the call out",
            param=param,
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


OWN_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")


def encode_request(
    tokenizer: Tokenizer, request: ChatFields, *, with_tools: bool = True
) -> list[int]:
    """Return the tokens of a chat.

    Args:
        tokenizer: Has the chat template.
        request: The messages, the tools, and how the prompt ends.
        with_tools: Whether the model is told of the tools.

    Raises:
        RequestError: The template refuses the messages.
        ApiError: The template does not take tools, or what else it is given.
    """
    variables = dict(request.chat_template_kwargs or {})
    for name in OWN_FIELDS:
        if name in variables:
            raise ApiError(
                f"chat_template_kwargs has {name!r}, which is a field of its own: put "
                "it beside messages",
                param="chat_template_kwargs",
            )
    tools = request.tools if with_tools else None
    if tools:
        dumped = [tool.model_dump(exclude_none=True) for tool in tools]
        variables["tools"] = dumped
        check_takes_tools(tokenizer, dumped)
    goes_on = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    if goes_on and begins:
        raise ApiError(
            "continue_final_message and add_generation_prompt are true, but an answer "
            "either goes on with the last message or begins a new one: leave one out",
            param="continue_final_message",
        )
    return tokenizer.encode_chat(
        [message_of(n, message) for n, message in enumerate(request.messages)],
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
        **tokenizer.check_template_kwargs(variables),
    )


def check_takes_tools(tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> None:
    """Refuse tools if the model would never hear of them."""
    try:
        tokenizer.check_template_kwargs({"tools": tools})
    except RequestError:
        raise ApiError(
            "tools are given, but this model's chat template has no place for them: "
            "leave them out, or use a model that was trained to call functions",
            param="tools",
        ) from None


def needed(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """Return the tokenizer, or refuse a field because there is none."""
    if tokenizer is None:
        raise ApiError(
            f"{param} is text, but this model has no tokenizer: send token ids as "
            "the prompt of a completion, without echo",
            param=param,
        )
    return tokenizer


def as_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """Return a list of prompts, whether one was given or many."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt


def encode_prompts(
    tokenizer: Tokenizer | None, request: CompletionRequest
) -> list[list[int]]:
    """Return the tokens of every prompt of a completion."""
    prompts = as_prompts(request.prompt)
    if not isinstance(prompts[0], str):
        return prompts
    encode = needed(tokenizer, "prompt").encode
    with_special = request.add_special_tokens is not False
    return [encode(text, add_special_tokens=with_special) for text in prompts]


def echoes_of(tokenizer: Tokenizer | None, request: CompletionRequest) -> list[str]:
    """Return the text of every prompt of a completion."""
    prompts = as_prompts(request.prompt)
    if isinstance(prompts[0], str):
        return prompts
    decode = needed(tokenizer, "echo").decode
    skips = request.skip_special_tokens is not False
    return [decode(token_ids, skip_special_tokens=skips) for token_ids in prompts]
