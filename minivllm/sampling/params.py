"""What a request asks of its answer: how tokens are chosen, and when to stop.

Invariant: the values are legal from the moment the object exists, and a list that the
caller goes on to change changes nothing. Read by the scheduler (limits and stops), by
the runners (choice of tokens) and by the engine (text).

In vLLM: vllm/sampling_params.py (SamplingParams).
Source: appendix A5, "Records"; appendix A11, "Sampling parameters"; appendix A14, "One
    prompt, many answers".
"""

import difflib
import enum
import functools
import inspect
import json
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minivllm.errors import ConfigError, RequestError

DEFAULT_MAX_TOKENS = 16  # as in vLLM


class Unset(enum.Enum):
    """The value of a parameter that was not given; None may mean something else."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET = Unset.UNSET

MAX_N = 1024
MAX_BIAS = 100.0  # as in OpenAI's interface

# What an unset parameter means where the model's generation_config is silent.
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def _refuse_unknown_names(cls: type) -> type:
    """Let a class answer a misspelt argument with the nearest name."""
    initialise = cls.__init__
    names = [
        name for name in inspect.signature(initialise).parameters if name != "self"
    ]

    @functools.wraps(initialise)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        if args:
            raise RequestError(
                f"{cls.__name__} got {args[0]!r} without a name: write, for example, "
                f"{cls.__name__}(temperature=0.5)"
            )
        for name in values:
            if name in names:
                continue
            nearest = difflib.get_close_matches(name, names, n=1)
            hint = f": did you mean {nearest[0]}?" if nearest else ""
            raise RequestError(
                f"{cls.__name__} has no parameter {name}"
                f"{hint or ', but ' + ', '.join(names)}"
            )
        initialise(self, **values)

    cls.__init__ = checked
    return cls


@_refuse_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How to choose the tokens of one request, and when to stop.

    A parameter that is UNSET is filled from the model's generation_config, and if that
    is silent, with the value in brackets. The others are taken as they are.

    The scores (logits) of the tokens go through these in this order: logits processors
    and grammar, allowed tokens, bad words, min_tokens, logit_bias, repetition,
    frequency and presence penalty, temperature, min_p, top_k, top_p. Then a token is
    drawn.

    Args:
        n: Continuations of the prompt; they share its keys and values.
        temperature: 0 takes the best token, 1 draws from the model's own distribution,
            higher is more random. (1)
        top_p: Draw among the best tokens whose probabilities add up to this. (1: off)
        top_k: Draw among so many of the best tokens; 0 and -1 are off. (0)
        min_p: Draw among tokens at least so probable, as a share of the probability
            of the best. (0: off)
        presence_penalty: Subtracted from the logits of tokens that the answer has. (0)
        frequency_penalty: Subtracted as often as the answer has the token. (0)
        repetition_penalty: Divides positive logits of tokens of the prompt and the
            answer, multiplies negative ones. (1: off)
        logit_bias: Added to the logits of tokens, by id.
        bad_words: Texts that the answer must not have, in the tokenizer's spelling:
            the token that would complete one is never chosen.
        allowed_token_ids: Only these tokens are chosen.
        seed: Makes the random choices of this request repeatable, whatever else runs.
        max_tokens: Tokens to generate at most; None for as many as fit. (16; in a chat,
            as many as fit)
        min_tokens: Tokens to generate before anything may stop the text.
        stop: Texts that end the answer when it holds one.
        stop_token_ids: Tokens that end the answer, beside the model's own end tokens.
        include_stop_str_in_output: Keep the stop text, or the text of the stop token.
        ignore_eos: Go on after the model's own end tokens.
        logprobs: For each token of the answer, the log-probabilities of it and of so
            many of the best; -1 for all tokens, if the engine's `max_logprobs` (20)
            allows it. They are the model's own, before anything above has changed the
            logits.
        prompt_logprobs: The same for each token of the prompt but the first.
        skip_special_tokens: Leave out of the text the tokens that are markup.
        spaces_between_special_tokens: Put spaces between them where the tokenizer does
            so; no tokenizer of `tokenizer.json` does, so nothing depends on it.
        split_reasoning: Put what the model thinks, between <think> and </think> at the
            start of its answer, into `reasoning_content`, apart from the text. It
            changes no token; stop texts count in both.
        logits_processors: Functions of the token ids of the answer so far and the
            logits, [vocab_size], NumPy or torch; they change the logits in place or
            return others. One that keeps a state has a method `fresh`, which returns
            a new one: each continuation gets its own. Whatever one raises ends its own
            request; but a KeyboardInterrupt in the main thread counts as Ctrl-C, and
            ends the call that makes the step.
        guided_json: The answer is JSON that satisfies this schema, or
        guided_regex: it matches this regular expression, or
        guided_choice: it is one of these texts, or
        guided_grammar: it follows this grammar, in the notation of Lark. These need the
            package llguidance.

    Raises:
        RequestError: A value is out of range, or a name is unknown.
    """

    n: int = 1
    temperature: float | Unset = UNSET
    top_p: float | Unset = UNSET
    top_k: int | Unset = UNSET
    min_p: float | Unset = UNSET
    presence_penalty: float | Unset = UNSET
    frequency_penalty: float | Unset = UNSET
    repetition_penalty: float | Unset = UNSET
    logit_bias: Mapping[int, float] | None = None
    bad_words: Collection[str] | None = ()
    allowed_token_ids: Collection[int] | None = None
    seed: int | None = None
    max_tokens: int | Unset | None = UNSET
    min_tokens: int = 0
    stop: str | Collection[str] | None = ()
    stop_token_ids: Collection[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    split_reasoning: bool = False
    logits_processors: Sequence[Callable[[list[int], Any], Any]] | None = ()
    guided_json: Mapping[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Collection[str] | None = None
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        for name, make in _COPIES.items():
            object.__setattr__(self, name, make(getattr(self, name)))
        for name, (is_legal, words) in _RULES.items():
            value = getattr(self, name)
            if value is UNSET and (name in DEFAULTS or name == "max_tokens"):
                continue
            if not is_legal(value):
                raise RequestError(f"{name} is {value!r:.200}, but must be {words}")
        if isinstance(self.max_tokens, int):
            check_min_tokens(self.min_tokens, self.max_tokens)
        guides = [name for name in GUIDES if getattr(self, name) is not None]
        if len(guides) > 1:
            raise RequestError(
                f"{' and '.join(guides)} are given, but an answer follows one of them: "
                "choose one"
            )
        if guides and self.ignore_eos:
            raise RequestError(
                f"{guides[0]} ends the answer with the model's end token, but "
                "ignore_eos is True: leave one of them out"
            )

    def __repr__(self) -> str:
        values = (f"{name}={value!r}" for name, value in self.given().items())
        return f"SamplingParams({', '.join(values)})"

    def filled(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Return a copy in which nothing but `max_tokens` may be unset.

        Args:
            defaults: From the model's generation_config; what is not in it is filled
                from `DEFAULTS`.
        """
        values = {
            name: defaults.get(name, fallback)
            for name, fallback in DEFAULTS.items()
            if getattr(self, name) is UNSET
        }
        if self.max_tokens is UNSET and "max_tokens" in defaults:
            values["max_tokens"] = defaults["max_tokens"]
        return replace(self, **values)

    def given(self) -> dict[str, Any]:
        """Return the parameters that differ from what is set if none is given."""
        plain = SamplingParams()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value != getattr(plain, name)
        }


def _is_integer(value: object, minimum: int, maximum: int | None = None) -> bool:
    return type(value) is int and minimum <= value and (not maximum or value <= maximum)


GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def _is_number(value: object, minimum: float, maximum: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and minimum <= value <= maximum


def _are(
    is_one: Callable[[Any], bool], container: type = Collection
) -> Callable[[Any], bool]:
    """Make a test of a collection: of all that is in it."""
    # An iterator would be empty after this look at it, and a text is one value.
    return lambda values: (
        isinstance(values, container)
        and not isinstance(values, str | bytes | Mapping)
        and all(map(is_one, values))
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_sayable(value: object) -> bool:
    """Tell a text that tokens can spell: without half characters (surrogates)."""
    return _is_text(value) and value == value.encode(errors="replace").decode()


def _is_token_id(value: object) -> bool:
    return _is_integer(value, 0)


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_token_id(token_id) and _is_number(bias, -MAX_BIAS, MAX_BIAS)
        for token_id, bias in value.items()
    )


def _is_schema(value: object) -> bool:
    try:
        value = json.loads(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, dict | bool)


# Name -> what its value must be, as a test and in words.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: _is_integer(v, 1, MAX_N), f"an integer from 1 to {MAX_N:,}"),
    "temperature": (
        lambda v: _is_number(v, 0, 1e6),
        "a number from 0 (greedy) to 1,000,000 (blind)",
    ),
    "top_p": (
        lambda v: _is_number(v, 0, 1) and v > 0,
        "a number above 0, up to 1 (off)",
    ),
    "top_k": (
        lambda v: _is_integer(v, -1),
        "an integer of at least 1, or 0 or -1 (off)",
    ),
    "min_p": (lambda v: _is_number(v, 0, 1), "a number from 0 (off) to 1"),
    "repetition_penalty": (
        lambda v: _is_number(v, 0.01, 100),
        "a number from 0.01 to 100, where 1 is off",
    ),
    "presence_penalty": (lambda v: _is_number(v, -2, 2), "a number from -2 to 2"),
    "frequency_penalty": (lambda v: _is_number(v, -2, 2), "a number from -2 to 2"),
    "logit_bias": (
        _is_bias,
        f"a dictionary from token ids to numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}",
    ),
    "bad_words": (
        _are(_is_sayable),
        "a list of texts, none of them empty or with half a character (surrogate)",
    ),
    "allowed_token_ids": (
        lambda v: v is None or (_are(_is_token_id)(v) and len(v) > 0),
        "a list of token ids with at least one, or None for all",
    ),
    "seed": (
        lambda v: v is None or _is_integer(v, 0, 2**64 - 1),
        "an integer from 0 to 2**64 - 1, or None",
    ),
    "max_tokens": (
        lambda v: v is None or _is_integer(v, 1),
        "an integer above 0, or None for as many as fit",
    ),
    "min_tokens": (lambda v: _is_integer(v, 0), "an integer of at least 0"),
    "stop": (
        _are(_is_sayable),
        "a text or a list of texts, none of them empty or with half a character "
        "(surrogate)",
    ),
    "stop_token_ids": (
        _are(_is_token_id),
        "a list of token ids, integers of at least 0",
    ),
    "logprobs": (
        lambda v: v is None or _is_integer(v, -1),
        "an integer of at least 0, -1 for all tokens, or None for no logprobs",
    ),
    "logits_processors": (_are(callable, Sequence), "a list of functions"),
    "guided_json": (
        lambda v: v is None or _is_schema(v),
        "a JSON schema, as a dictionary or as text, or None",
    ),
    "guided_choice": (
        lambda v: v is None or (_are(_is_text)(v) and len(v) > 0),
        "a list of texts with at least one, none of them empty, or None",
    ),
    **dict.fromkeys(
        ("guided_regex", "guided_grammar"),
        (lambda v: v is None or _is_text(v), "a text, or None"),
    ),
    **dict.fromkeys(
        (
            *("include_stop_str_in_output", "ignore_eos"),
            *("skip_special_tokens", "spaces_between_special_tokens"),
            "split_reasoning",
        ),
        (lambda v: type(v) is bool, "True or False"),
    ),
}

_RULES["prompt_logprobs"] = _RULES["logprobs"]


def _as_number(value: Any) -> Any:
    """Return a number of any library as one of Python's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _as_tuple(values: Any) -> Any:
    if values is None:
        return ()
    if isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping):
        return tuple(map(_as_number, values))
    return values  # the rule refuses it


def _as_biases(biases: Any) -> Any:
    """Return biases by integer ids: in JSON, the keys of an object are texts."""
    if not isinstance(biases, Mapping):
        return {} if biases is None else biases
    keys: dict[Any, Any] = {}  # token id: the key that it had
    for key in biases:
        is_number = isinstance(key, str) and key.isdecimal() and len(key) < 20
        token_id = int(key) if is_number else _as_number(key)
        if token_id in keys:
            raise RequestError(
                f"logit_bias has two biases for token {token_id}, under "
                f"{keys[token_id]!r} and {key!r}: leave one of them out"
            )
        keys[token_id] = key
    return {token_id: _as_number(biases[key]) for token_id, key in keys.items()}


def _as_schema(schema: Any) -> Any:
    try:
        return json.loads(json.dumps(schema)) if isinstance(schema, dict) else schema
    except (TypeError, ValueError, RecursionError):
        return schema  # the rule refuses it


# Name -> how its value becomes one that belongs to the parameters alone.
_COPIES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("bad_words", "stop_token_ids", "logits_processors"), _as_tuple),
    **dict.fromkeys(
        ("allowed_token_ids", "guided_choice"),
        lambda values: None if values is None else _as_tuple(values),
    ),
    "stop": lambda stop: (stop,) if isinstance(stop, str) else _as_tuple(stop),
    "logit_bias": _as_biases,
    "guided_json": _as_schema,
    **dict.fromkeys(
        (
            *(*DEFAULTS, "n", "seed", "max_tokens", "min_tokens"),
            *("logprobs", "prompt_logprobs"),
        ),
        _as_number,
    ),
}


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raise RequestError if an answer would have to be longer than it may be."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {min_tokens}, but must be at most max_tokens, which is "
            f"{max_tokens}: raise max_tokens"
        )


def check_max_logprobs(value: int) -> None:
    """Refuse a limit that is none.

    The log-probabilities of all tokens are seconds of work and gigabytes of answer for
    a short prompt already, while every neighbour waits.
    """
    if type(value) is not int or value < -1:
        raise ConfigError(
            f"max_logprobs is {value!r}, but must be an integer of at least 0, or -1 "
            "for no limit"
        )
