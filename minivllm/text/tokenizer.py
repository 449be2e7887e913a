"""Turn text and chats into token ids, and token ids back into bytes and text.

The `tokenizers` library cuts and merges; here are the parts around it where engines
go wrong: one BOS and never two, the union of all EOS ids, and decoding by bytes.

Invariant: `decode(ids)` is the UTF-8 text of the joined `token_bytes`, so that text
can be streamed with at most three bytes held back. Nothing changes after
construction, so threads may share one tokenizer. Called by the engine, the server
and the command line.

In vLLM: vllm/tokenizers/hf.py, CachedHfTokenizer, around transformers' tokenizers.
Source: appendix A2, "Text"; appendix A27, "Thinking"; appendix A30, "Speaking OpenAI";
    appendix A32, "A server that stays up".
"""

import copy
import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, RequestError
from minivllm.text.chat_template import cut_behind, render_chat, variables_of, with_mark
from minivllm.text.settings import (
    named_tokens,
    read_chat_templates,
    read_eos,
    read_settings,
    unnamed_tokens,
)
from minivllm.text.spelling import Spelling, steps_of


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelNotFound(
            f"{path.parent} has no tokenizer.json: get all files of the model, or "
            "convert its tokenizer with transformers (save_pretrained writes the file)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise CorruptFile(
            f"{path} is no valid tokenizer ({error}): get the model's files again"
        ) from error


def as_token_id(token_id: SupportsIndex) -> int:
    """Return an id as a plain int: NumPy's and torch's integers are taken, too.

    Raises:
        RequestError: It is no integer.
    """
    try:
        return operator.index(token_id)
    except TypeError:
        raise RequestError(
            f"token id {token_id!r:.80} is a {type(token_id).__name__}, but must be an "
            "integer: take ids from the tokenizer's own encode"
        ) from None


class Tokenizer:
    """Encode, decode and render chats for one model.

    Attributes:
        vocab_size: The largest token id plus one; a model may have more rows.
        missing_token_ids: Those below `vocab_size` that are no token.
        bos_token_id: The token that starts a text, or None.
        eos_token_ids: Every token that ends an answer: the union of what the
            tokenizer, `config.json` and `generation_config.json` name.
        special_token_ids: The tokens that are markup, not text.
        chat_template: The default Jinja template, or None.
        spelling: How tokens spell bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        *,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        # A tokenizer.json may have kept these settings from training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.spelling = Spelling.of(backend.decoder)
        token_ids = set(backend.get_vocab().values())
        self.vocab_size = max(token_ids, default=-1) + 1
        self.missing_token_ids = sorted(token_ids ^ set(range(self.vocab_size)))
        self._named_tokens = named_tokens(settings)
        self.special_token_ids = self._make_special(settings)
        self.bos_token_id = self._id_of("bos_token")
        own_eos = self._id_of("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) | (
            {own_eos} if own_eos is not None else frozenset()
        )
        self._before, self._after = self._wrapping(settings)
        self._chat_templates = dict(chat_templates or {})
        self.chat_template = self._chat_templates.get("default")

    def _id_of(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @classmethod
    def from_dir(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a model folder in Hugging Face's layout.

        Args:
            folder: Holds `tokenizer.json`; `tokenizer_config.json`,
                `special_tokens_map.json`, `config.json`, `generation_config.json`,
                `chat_template.jinja` and `additional_chat_templates/NAME.jinja` are
                read where they exist.

        Raises:
            ModelNotFound: There is no `tokenizer.json`.
            CorruptFile: A file cannot be read.
            ConfigError: The kind of tokenizer, or a value in a file, is not supported.
        """
        folder = Path(folder)
        settings = read_settings(folder)
        return cls(
            _read_backend(folder / "tokenizer.json"),
            settings,
            eos_token_ids=read_eos(folder),
            chat_templates=read_chat_templates(folder, settings),
        )

    def _make_special(self, settings: Mapping[str, Any]) -> frozenset[int]:
        """Find the special tokens in raw text too, and return their ids."""
        named = {*self._named_tokens.values(), *unnamed_tokens(settings)}
        added = self._backend.get_added_tokens_decoder().values()
        missing = named - {token.content for token in added}
        self._backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=True)
                for token in sorted(missing)
                # One that the vocabulary lacks has no row in the model.
                if self._backend.token_to_id(token) is not None
            ]
        )
        return frozenset(
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special or token.content in named
        )

    def _wrapping(self, settings: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the ids that a text gets before and after its own.

        The post-processor of `tokenizer.json` says; an explicit flag in the settings
        overrules it, as in `transformers`.
        """
        before, after = [], []
        for step in steps_of(self._backend.post_processor):
            if step["type"] != "TemplateProcessing":
                continue
            side = before
            for piece in step["single"]:
                if "Sequence" in piece:
                    side = after
                else:
                    name = piece["SpecialToken"]["id"]
                    side += step["special_tokens"][name]["ids"]
        return (
            _overrule(before, self.bos_token_id, settings.get("add_bos_token")),
            _overrule(after, self._id_of("eos_token"), settings.get("add_eos_token")),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Special tokens written in it become their ids.
            add_special_tokens: Put BOS before (and EOS behind) the text where this
                tokenizer does so. A text that starts with BOS gets no second one.

        Raises:
            RequestError: Not a string, or a string that is no Unicode text.
        """
        token_ids = self._encode(text)
        if not add_special_tokens:
            return token_ids
        return self._with_start(token_ids) + self._after

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(
                f"the text to encode is a {type(text).__name__}, but must be a str: "
                "pass token ids by the argument that takes ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"character {error.start} of the text is the lone surrogate "
                f"{text[error.start]!r}, which is half a character and no text: "
                "decode the bytes it came from as UTF-8"
            ) from None
        return self._backend.encode(text, add_special_tokens=False).ids

    def _with_start(self, token_ids: list[int]) -> list[int]:
        start = self._before
        if not start:
            return token_ids
        n = 0
        while token_ids[n : n + len(start)] == start:
            n += len(start)
        return start + token_ids[n:]

    def decode(
        self, token_ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids.

        Bytes that are no character become U+FFFD. Nothing else is tidied up: `decode`
        after `encode` gives the text back, if its normalisation changed nothing.

        Raises:
            RequestError: An id is no integer, negative, or `vocab_size` or more.
        """
        data = b"".join(
            self.token_bytes(token_id)
            for token_id in map(as_token_id, token_ids)
            if not (skip_special_tokens and token_id in self.special_token_ids)
        )
        if self.spelling.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """Return the bytes of one token; none for an id that the vocabulary lacks.

        Raises:
            RequestError: The id is no integer, negative, or `vocab_size` or more.
        """
        token_id = as_token_id(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is out of range: this tokenizer has ids from 0 "
                f"to {self.vocab_size - 1:,}; take ids from its own encode"
            )
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.spelling.bytes_of(token)

    def check_embedding_rows(self, num_rows: int) -> None:
        """Raise ConfigError if a token of text has no row in the embedding matrix.

        More rows than tokens is normal: the matrix is padded to a round number. So is
        an added token without a row, such as the one for images of a model that sees
        none, unless it is BOS or EOS; a prompt that holds it is refused.
        """
        if num_rows >= self.vocab_size:
            return  # without another walk over all tokens
        added = self._backend.get_added_tokens_decoder().keys()
        needed = set(self._backend.get_vocab().values()) - added
        needed |= {self._id_of("bos_token"), self._id_of("eos_token")} - {None}
        largest = max(needed, default=-1)
        if largest >= num_rows:
            raise ConfigError(
                f"the tokenizer's largest token id for text is {largest:,}, but the "
                f"embedding matrix has only {num_rows:,} rows: tokenizer and weights "
                "belong to different models; take both from the same folder"
            )

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a chat as the text that this model was trained on.

        Args:
            messages: Each has a `role` and a `content`, or `tool_calls`. A content is
                a string or a list of parts; text parts are joined by line breaks if
                the template has no loop over `content`.
            add_generation_prompt: End with the line that opens the model's answer.
            tools: JSON descriptions of the functions that the model may call.
            **kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: The messages are malformed, the template refuses them (in
                its own words), or the model has no template.
            ConfigError: The template itself is no valid Jinja.
        """
        variables = {
            "documents": None,
            **self._named_tokens,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._choose_template(has_tools=bool(tools))
        return render_chat(template, messages, variables)

    def _choose_template(self, *, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._chat_templates:
            return self._chat_templates["tool_use"]
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template (its chat templates: "
                f"{sorted(self._chat_templates) or 'none'}), so it cannot take "
                "messages: send raw text instead"
            )
        return self.chat_template

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a chat: the template's text, and one BOS.

        A tokenizer that starts every text with BOS gets exactly one, whether the
        template writes it or not. (`transformers` leaves it out where the template
        does.) A message that spells a special token gets that token, so a user can
        write `<|im_end|>` and end a turn: whoever minds must refuse such texts.
        Arguments and errors are those of `apply_chat_template`; and with
        `continue_final_message` the text ends where the content of the last message
        does, so that the model goes on with it; `add_generation_prompt` says nothing
        then.
        """
        variables = {"tools": tools, **kwargs}
        if continue_final_message:
            marked = with_mark(messages)
            text = cut_behind(
                self.apply_chat_template(
                    marked, add_generation_prompt=False, **variables
                )
            )
        else:
            text = self.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, **variables
            )
        return self._with_start(self._encode(text))

    def check_template_kwargs(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return variables for `encode_chat`, all of which the chat template reads.

        Raises:
            RequestError: One of them it does not read: a misspelling, or a switch that
                this model does not have. Or there is no template.
        """
        if not isinstance(kwargs, Mapping | None):
            raise RequestError(
                f"chat_template_kwargs is {kwargs!r:.80}, but must be a dictionary "
                'such as {"enable_thinking": False}'
            )
        if not kwargs:
            return {}
        tools = kwargs.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(t, Mapping) for t in tools
        ):
            raise RequestError(
                f"tools in chat_template_kwargs is {tools!r:.80}, but must be a list "
                'of dictionaries such as {"type": "function", "function": {...}}'
            )
        template = self._choose_template(has_tools=bool(tools))
        known = variables_of(template)
        for name in kwargs:
            if name in known:
                continue
            nearest = difflib.get_close_matches(str(name), known, n=1)
            others = ", ".join(sorted(known - self._named_tokens.keys())) or "nothing"
            hint = f"did you mean {nearest[0]}?" if nearest else f"it takes {others}"
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which this model's chat template "
                f"does not take: {hint}"
            )
        return dict(kwargs)

    def with_chat_template(self, template: str) -> "Tokenizer":
        """Return this tokenizer with one chat template in place of all it has.

        Raises:
            ConfigError: It is no valid Jinja.
        """
        variables_of(template)
        other = copy.copy(self)
        other._chat_templates = {"default": template}
        other.chat_template = template
        return other


def _overrule(ids: list[int], token_id: int | None, flag: bool | None) -> list[int]:
    if flag is None or token_id is None:
        return ids
    if not flag:
        return [other for other in ids if other != token_id]
    return ids if token_id in ids else [token_id]
