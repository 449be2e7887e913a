"""What a load test sends: made-up prompts of given lengths, or a recording.

Invariant: the same arguments give the same requests. Called by `minivllm bench serve`.

In vLLM: vllm/benchmarks/datasets/datasets.py (RandomDataset, CustomDataset).
Source: appendix A31, "Load".
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.benchmarks.load import LoadRequest, Prompt
from minivllm.benchmarks.workloads import HIGHEST_ID, random_ids
from minivllm.errors import ConfigError

# Most tokenizers have a token for each of them, with a blank before it.
WORDS = (
    "time year people way day man thing woman life child world school state family "
    "student group country problem hand part place case week company system program "
    "question work government number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """Makes prompts up.

    Attributes:
        as_text: Words instead of token ids; then the lengths are about right.
        vocab_size: Token ids are drawn below it.
        prefix_len: Tokens at the beginning that all prompts share.
        seed: Of the random choices.
    """

    as_text: bool = False
    vocab_size: int = HIGHEST_ID
    prefix_len: int = 0
    seed: int = 0

    def make(self, index: int, num_tokens: int) -> Prompt:
        """Return the prompt of a request; `num_tokens` come behind the prefix."""
        prefix = self._draw("prefix", self.prefix_len)
        drawn = prefix + self._draw(str(index), num_tokens)
        return " ".join(drawn) if self.as_text else drawn

    def _draw(self, name: str, count: int) -> list[Any]:
        rng = random.Random(f"{self.seed} {name}")
        if self.as_text:
            return rng.choices(WORDS, k=count)
        return random_ids(rng, count, self.vocab_size)


def random_requests(
    maker: PromptMaker, count: int, input_len: int, output_len: int
) -> list[LoadRequest]:
    """Return requests of the same lengths, all due at once."""
    return [
        LoadRequest(prompt=maker.make(index, input_len), max_tokens=output_len)
        for index in range(count)
    ]


PROMPTS = ("prompt", "messages", "prompt_token_ids", "num_prompt_tokens")


def recorded_requests(
    path: Path, maker: PromptMaker, output_len: int, endpoint: str
) -> list[LoadRequest]:
    """Read requests from a file with a JSON object in each line.

        {"arrival_s": 0.25, "num_prompt_tokens": 374, "max_tokens": 44}
        {"arrival_s": 1.5, "prompt": "Why is the sky blue?"}

    Args:
        path: The file.
        maker: Makes up the prompts of which there is only a length.
        output_len: For lines without `max_tokens`.
        endpoint: "completions" or "chat".

    Returns:
        The requests; without `arrival_s` all are due at once.

    Raises:
        ConfigError: A line is wrong; the message has its number.
    """
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
        try:
            requests.append(
                read_request(fields, maker, len(requests), output_len, endpoint)
            )
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if not requests:
        raise ConfigError(f"{path} has no requests: write a JSON object in each line")
    return requests


def read_request(
    fields: Any, maker: PromptMaker, index: int, output_len: int, endpoint: str
) -> LoadRequest:
    """Turn a line of a recording into a request.

    Raises:
        ConfigError: A field is missing, unknown or impossible.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{fields!r:.80} is no object such as {{...}}")
    for name in fields:
        if name not in (*PROMPTS, "arrival_s", "max_tokens"):
            raise ConfigError(f"unknown field {name!r}")
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise ConfigError(f"it has {given or 'none'} of {', '.join(PROMPTS)}: give one")
    arrival_s = fields.get("arrival_s", 0.0)
    is_number = isinstance(arrival_s, int | float) and not isinstance(arrival_s, bool)
    if not (is_number and 0 <= arrival_s < math.inf):
        raise ConfigError(f"arrival_s is {arrival_s!r}, but must be seconds from 0")
    max_tokens = count_in(fields, "max_tokens", output_len)
    prompt = fields[given[0]]
    kinds = {"prompt": str, "messages": list, "prompt_token_ids": list}
    if given[0] == "num_prompt_tokens":
        prompt = maker.make(index, count_in(fields, "num_prompt_tokens", 0))
    elif not isinstance(prompt, kinds[given[0]]):
        raise ConfigError(
            f"{given[0]} is {prompt!r:.80}, which is no {kinds[given[0]]}"
        )
    needed = {"messages": "chat", "prompt_token_ids": "completions"}
    if needed.get(given[0], endpoint) != endpoint:
        raise ConfigError(
            f"{given[0]} cannot be sent to {endpoint}: use --endpoint "
            f"{needed[given[0]]}"
        )
    return LoadRequest(prompt=prompt, max_tokens=max_tokens, arrival_s=arrival_s)


def count_in(fields: Mapping[str, Any], name: str, default: int) -> int:
    """Return a field that counts tokens.

    Raises:
        ConfigError: It is no integer of at least 1.
    """
    value = fields.get(name, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}, but must be an integer of at least 1")
    return value
