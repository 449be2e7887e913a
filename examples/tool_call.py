"""Let a model call a function, run it, and let the model answer with its result.

Needs a model whose chat template knows tools, such as Qwen3, and the package
llguidance, since the call is asked for: pip install "minivllm[grammar,server]".

Run it with `python examples/tool_call.py --model Qwen/Qwen3-0.6B`.
"""

import argparse
import json

from minivllm import LLM
from minivllm.server.local import LocalHandlers

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "temperature_in",
            "description": "Return the temperature in a city, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def temperature_in(city: str) -> dict[str, object]:
    """Return what a weather service would."""
    return {"city": city, "celsius": 21}


def main() -> None:
    """Ask, call, and ask again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--max-tokens", type=int, default=120)
    arguments = parser.parse_args()
    messages = [{"role": "user", "content": "How warm is it in Paris?"}]
    with LLM(arguments.model, max_num_seqs=2, max_model_len=2048) as llm:
        handlers = LocalHandlers(llm)
        body = {
            "messages": messages,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "temperature_in"}},
            "temperature": 0,
            "max_tokens": arguments.max_tokens,
        }
        message = handlers.handle_chat(body)["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            result = temperature_in(**given)
            print(f"{call['function']['name']}({given}) -> {result}")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": json.dumps(result),
                }
            )
        answer = handlers.handle_chat(
            {"messages": messages, "tools": TOOLS, "max_tokens": arguments.max_tokens}
        )
        print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
