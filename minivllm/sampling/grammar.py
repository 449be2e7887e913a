"""Answers that follow a grammar: forbid every token that would break it.

llguidance, a library, knows which bytes may come next; here are the parts around it:
our tokens in its terms, the grammar of a request, and the row of scores in which all
forbidden tokens become -inf. What is left keeps the model's own proportions.

Invariant: a token is allowed exactly if the grammar goes on with its bytes, an end
token exactly if the answer is complete, and any other special token only if a Lark
grammar names it. So an answer that ends by itself follows its grammar. The engine makes
one processor for each continuation; the samplers call it as a logits processor.

In vLLM: vllm/v1/structured_output/backend_guidance.py (GuidanceBackend,
GuidanceGrammar), vllm/v1/structured_output/utils.py (apply_grammar_bitmask).
Source: appendix A13, "Structured output".
"""

import json
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from minivllm.errors import BackendUnavailable, RequestError
from minivllm.sampling.params import GUIDES, SamplingParams
from minivllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# One space at most, and only where Python's json.dumps puts it: allowed more, a small
# model may go on with spaces and line breaks until its tokens are used up.
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class GrammarProcessor:
    """Forbid, for one continuation, all tokens that its grammar does not allow next."""

    def __init__(self, start: "LLMatcher") -> None:
        self._start = start
        self._restart()

    def _restart(self) -> None:
        # A matcher that has refused a token cannot go back: it is copied, not reset.
        self._matcher = self._start.deep_copy()
        self._consumed: list[int] = []

    def fresh(self) -> "GrammarProcessor":
        """Return a processor at the start of the same grammar, without compiling it."""
        return GrammarProcessor(self._start)

    @property
    def num_consumed(self) -> int:
        """Output tokens that the state of the grammar takes into account."""
        return len(self._consumed)

    def __call__(self, output_token_ids: list[int], logits: Any) -> None:
        """Set the scores of all forbidden tokens to -inf, in place.

        Args:
            output_token_ids: All of the answer so far. What the last call has seen is
                not read again; an answer that does not continue it starts over.
            logits: One per row of the model, float, NumPy or torch on any device.

        Raises:
            RequestError: The answer has left the grammar, or what may follow is too
                complex for llguidance.
        """
        if output_token_ids[: self.num_consumed] != self._consumed:
            self._restart()
        new_token_ids = output_token_ids[self.num_consumed :]
        self._matcher.consume_tokens(new_token_ids)
        self._consumed += new_token_ids
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        # After an error, the library's mask would let the answer end.
        if self._matcher.is_error():
            raise RequestError(
                f"llguidance cannot go on with the grammar after {self.num_consumed} "
                "tokens of the answer: simplify the grammar, and leave out what forces "
                f"other tokens; it says:\n{_reason(self._matcher)}"
            )
        is_forbidden = np.ones(len(logits), dtype=bool)  # rows without a token included
        is_allowed = np.unpackbits(bits, bitorder="little")[: len(logits)]
        is_forbidden[: len(is_allowed)] = is_allowed == 0
        logits[is_forbidden] = -np.inf


def make_grammar(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> GrammarProcessor | None:
    r"""Return a processor for the guide of a request, or None if it has none.

    JSON has at most one space after each comma and colon, unless the schema has
    llguidance's key "x-guidance": {"whitespace_flexible": True}. A string without
    maxLength may use up max_tokens; such an answer is cut off, and no JSON. A regular
    expression is one of Rust's: without look-around, and its \d are the digits 0 to 9.

    Raises:
        RequestError: llguidance cannot follow the guide (in its words), or the model
            has no tokenizer or no end token.
        BackendUnavailable: llguidance is not installed.
    """
    guide = next((name for name in GUIDES if getattr(params, name) is not None), None)
    if guide is None:
        return None
    try:
        import llguidance
    except ImportError as error:
        raise BackendUnavailable(
            f"{guide} needs the package llguidance, which is not installed: "
            'pip install "minivllm[grammar]"'
        ) from error
    if tokenizer is None:
        raise RequestError(
            f"{guide} is about text, but this model has no tokenizer: leave it out, or "
            "use a model with a tokenizer.json"
        )
    # Where only one text can follow, llguidance would force the tokens of its encoding,
    # with the space that some tokenizers put in front; now it never encodes.
    start = '%llguidance {"no_forcing": true}\nstart: @answer'
    value = getattr(params, guide)
    try:
        answer = _grammar(guide, value) | {"name": "answer"}
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{guide} is {value!r:.200}, but must be Unicode text ({error}): write "
            "whole characters, not half ones (surrogates)"
        ) from error
    matcher = llguidance.LLMatcher(
        _ll_tokenizer(tokenizer),
        json.dumps({"grammars": [{"lark_grammar": start}, answer]}),
        log_level=0,  # warnings would go to stderr
        limits=llguidance.LLParserLimits(verbose_errors=False),
    )
    may_begin = any(matcher.compute_bitmask())  # of what is too complex, this tells it
    if matcher.is_error() or not may_begin:
        raise RequestError(
            f"{guide} is {value!r:.200}, but llguidance cannot follow that: correct "
            f"it, or leave a part of it out; it says:\n{_reason(matcher)}"
        )
    return GrammarProcessor(matcher)


def _grammar(guide: str, value: Any) -> dict[str, Any]:
    """Return a guide as a grammar in llguidance's terms."""
    if guide == "guided_json":
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, bool):  # any JSON, or none at all
            schema = {} if schema else {"enum": []}
        style = schema.get("x-guidance", {})
        if isinstance(style, dict):  # anything else is for llguidance to refuse
            style = JSON_STYLE | style
        return {"json_schema": {**schema, "x-guidance": style}}
    if guide == "guided_regex":
        from llguidance import regex_to_lark

        return {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}
    if guide == "guided_choice":
        # A terminal (in capitals) is a single automaton. As alternatives of the parser,
        # the texts would all be open at once, and it gives up at 2,000.
        texts = " | ".join(map(json.dumps, value))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
    return {"lark_grammar": value}


def _reason(matcher: "LLMatcher") -> str:
    reason = matcher.get_error().strip().removesuffix("\n<non-verbose/>")
    if not reason or reason.startswith("NoExtension"):
        return "no token of this model may come next"
    return reason


class _Vocabulary:
    """A tokenizer in llguidance's terms."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: list[int]) -> None:
        self.tokens = list(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))
        self.special_token_ids = [*tokenizer.special_token_ids.union(eos_token_ids)]
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = None


_ll_tokenizers: "WeakKeyDictionary[Tokenizer, LLTokenizer]" = WeakKeyDictionary()
_lock = threading.Lock()


def _ll_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """Return the tree of all tokens: built once for a tokenizer, it takes a while."""
    from llguidance import LLTokenizer

    with _lock:
        if tokenizer not in _ll_tokenizers:
            known = range(tokenizer.vocab_size)
            eos_token_ids = sorted(tokenizer.eos_token_ids.intersection(known))
            if not eos_token_ids:
                raise RequestError(
                    "this model names no end token, so an answer that follows a "
                    "grammar could never end: use a model with an eos_token_id"
                )
            vocabulary = _Vocabulary(tokenizer, eos_token_ids)
            _ll_tokenizers[tokenizer] = LLTokenizer(vocabulary, eos_token=eos_token_ids)
        return _ll_tokenizers[tokenizer]
