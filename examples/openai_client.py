"""Talk to `minivllm serve` with the official client.

Needs the package openai, and a server: minivllm serve

Run it with `python examples/openai_client.py --base-url http://127.0.0.1:8000/v1`.
"""

import argparse

import openai


def main() -> None:
    """Ask once for a whole answer, and once for a stream."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=40)
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "temperature": 0,
        "max_tokens": arguments.max_tokens,
        "extra_body": {"repetition_penalty": 1.1},  # one that OpenAI does not have
    }
    answer = client.chat.completions.create(**request)
    print(answer.choices[0].message.content)
    print(f"({answer.usage.completion_tokens} tokens by {answer.model})")
    for piece in client.chat.completions.create(**request, stream=True):
        if piece.choices and piece.choices[0].delta.content:
            print(piece.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
