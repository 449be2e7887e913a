"""Write an answer piece by piece, then several answers to one prompt.

Run it with `python examples/streaming.py`.
"""

import argparse

from minivllm import DEFAULT_MODEL, LLM, SamplingParams


def main() -> None:
    """Stream a text, then three that compete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("prompt", nargs="?", default="In the beginning")
    arguments = parser.parse_args()
    with LLM(arguments.model, max_num_seqs=4) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
        print(arguments.prompt, end="", flush=True)
        for piece in llm.stream(arguments.prompt, greedy):
            print(piece.text, end="", flush=True)
        print("\n")
        params = SamplingParams(
            n=3, temperature=0.9, seed=1, max_tokens=arguments.max_tokens
        )
        texts = dict.fromkeys(range(3), arguments.prompt)
        for piece in llm.stream(arguments.prompt, params):  # the pieces come mixed
            texts[piece.index] += piece.text
        for index, text in texts.items():
            print(f"{index}: {text!r}")


if __name__ == "__main__":
    main()
