"""Answer many prompts at once, without a server.

Run it with `python examples/offline.py`.
"""

import argparse

from minivllm import DEFAULT_MODEL, LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "Water boils at"]
QUESTIONS = ["Why is the sky blue?", "What is seven times eight?"]


def main() -> None:
    """Continue some texts, then answer some questions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    with LLM(arguments.model, max_num_seqs=8) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=True):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(chats, params), strict=True):
            print(f"{question} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
