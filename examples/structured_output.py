"""Get an answer that is JSON by a schema, in Python and as OpenAI's clients ask for it.

Needs the package llguidance: pip install "minivllm[grammar,server]".

Run it with `python examples/structured_output.py`.
"""

import argparse
import json

from minivllm import DEFAULT_MODEL, LLM, SamplingParams
from minivllm.server.local import LocalHandlers

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "inhabitants", "is_capital"],
    "additionalProperties": False,
}
QUESTION = "Describe Paris as JSON with city, inhabitants and is_capital."


def main() -> None:
    """Ask twice: with a parameter of ours, and with a body of OpenAI's interface."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    arguments = parser.parse_args()
    messages = [{"role": "user", "content": QUESTION}]
    with LLM(arguments.model, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=80, guided_json=SCHEMA)
        [output] = llm.chat(messages, params)
        print(json.loads(output.outputs[0].text))

        body = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": 80,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": SCHEMA},
            },
        }
        answer = LocalHandlers(llm).handle_chat(body)
        print(json.loads(answer["choices"][0]["message"]["content"]))


if __name__ == "__main__":
    main()
