"""Fields of OpenAI and vLLM that we do not have.

A client may send one with a value that asks for nothing. Called by the handlers.

Source: appendix A30, "Speaking OpenAI".
"""

from minivllm.server.reading import Foreign

_NO_LOSS = "leave it out"
_BY_TEMPLATE = (
    "use chat_template_kwargs, if the model's chat template has such a switch, for "
    'example {"enable_thinking": false}'
)

GENERATION: dict[str, Foreign] = {
    "use_beam_search": Foreign((False,), "use n and temperature"),
    "length_penalty": Foreign((1, 1.0), "it belongs to beam search, use n"),
    "truncate_prompt_tokens": Foreign((), "shorten the prompt before you send it"),
    "return_token_ids": Foreign((False,), "use /tokenize"),
    "return_tokens_as_token_ids": Foreign((False,), "use /tokenize"),
    "logits_processors": Foreign(([],), "use them in Python, with LLM"),
    "request_id": Foreign((), "take the id of the answer"),
    "prompt_cache_retention": Foreign(("in_memory", "in-memory"), _NO_LOSS),
}
CHAT: dict[str, Foreign] = {
    **GENERATION,
    "modalities": Foreign((["text"],), 'it writes text, ["text"], only'),
    "audio": Foreign((), "it writes text only"),
    "prediction": Foreign((), _NO_LOSS),
    "web_search_options": Foreign((), "search yourself, in a tool"),
    "functions": Foreign(([],), "use tools"),
    "function_call": Foreign(("none", "auto"), "use tool_choice"),
    "reasoning_effort": Foreign((), _BY_TEMPLATE),
    "verbosity": Foreign(("medium",), "ask for it in a message"),
    "echo": Foreign((False,), "use continue_final_message to go on with a message"),
    "add_special_tokens": Foreign((False,), "the chat template writes them"),
    "documents": Foreign(([],), "write them into a message"),
    "chat_template": Foreign((), "it runs the model's own chat template only"),
}
COMPLETION: dict[str, Foreign] = {
    **GENERATION,
    "split_reasoning": Foreign((False,), "ask for a chat"),
    "suffix": Foreign(("",), "it cannot write towards a text, only go on"),
}
TOKENIZE = {name: CHAT[name] for name in ("documents", "chat_template")}
