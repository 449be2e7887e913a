"""Turn text and chats into token ids, and token ids back into bytes and text.

The `tokenizers` library cuts and merges; here are the parts around it where engines
go wrong: one BOS and never two, the chat template in a sandbox, the union of all EOS
ids, and decoding by bytes.

Invariant: `decode(ids)` is the UTF-8 text of the joined `token_bytes`, so that text
can be streamed with at most three bytes held back. Nothing changes after
construction, so threads may share one tokenizer. Called by the engine, the server
and the command line.

In vLLM: vllm/transformers_utils/tokenizer.py (transformers' tokenizers) and
vllm/entrypoints/chat_utils.py.
Source: appendix A2, "Text".
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minivllm.errors import ConfigError, CorruptFile, ModelNotFound, RequestError

_NAMED_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the 256 visible characters that stand for bytes in byte-level BPE.

    The visible characters of Latin-1 stand for their own byte; the other bytes
    (controls, spaces) take the characters from U+0100 on, in order. From GPT-2.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }


_BYTE_OF = byte_alphabet()


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a `tokenizer.json`, sequences laid flat."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        if state["type"] != "Sequence":
            return [state]
        parts = state.get("decoders") or state.get("processors") or []
        return [step for part in parts for step in flat(part)]

    # The library shows the settings of a part only in its pickled form, which is JSON.
    return [] if component is None else flat(json.loads(component.__getstate__()))


def _strips_a_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") != "never"
    return step["type"] == "Strip" and step["content"] == " " and step["start"] == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How the tokens of a vocabulary spell bytes."""

    byte_level: bool  # one visible character per byte
    byte_fallback: bool  # tokens such as <0xF0> are one byte
    strips_leading_space: bool  # encoding put one space before the text

    @classmethod
    def of(cls, decoder: Any) -> "Spelling":
        """Read the spelling off the decoder of a `tokenizer.json`."""
        steps = _steps(decoder)
        names = {step["type"] for step in steps}
        if not names & {"ByteLevel", "Metaspace", "Replace"}:
            raise ConfigError(
                f"tokenizer.json decodes with {sorted(names) or 'nothing'}, but only "
                "byte-level and SentencePiece tokenizers are supported: use a model "
                "of the Llama, Qwen or Gemma families"
            )
        return cls(
            byte_level="ByteLevel" in names,
            byte_fallback="ByteFallback" in names,
            strips_leading_space=any(map(_strips_a_space, steps)),
        )

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes that a token stands for."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, kept as plain text
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()


def _content(token: Any) -> str | None:
    """Return the text of a token that a settings file gives as a string or a dict."""
    return token.get("content") if isinstance(token, Mapping) else token


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> token, for the code here and as variables of the template."""
    extra = settings.get("extra_special_tokens")
    named = {name: settings.get(name) for name in _NAMED_TOKENS}
    named |= extra if isinstance(extra, Mapping) else {}
    return {name: _content(token) for name, token in named.items() if token}


def _extra_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that have no name."""
    lists = (
        settings.get("additional_special_tokens"),
        settings.get("extra_special_tokens"),
    )
    return [_content(t) for tokens in lists if isinstance(tokens, list) for t in tokens]


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptFile(
            f"{path} is no valid JSON ({error}): get the model's files again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptFile(
            f"{path} holds a {type(value).__name__}, but must hold a JSON object: "
            "get the model's files again"
        )
    return value


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


def _read_eos(folder: Path) -> set[int]:
    """Return the union of the EOS ids in the two configurations of the model."""
    config = _read_json(folder / "config.json")
    sources = {
        "config.json": config,
        "config.json (text_config)": config.get("text_config") or {},
        "generation_config.json": _read_json(folder / "generation_config.json"),
    }
    eos: set[int] = set()
    for name, source in sources.items():
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int or token_id < 0:
                raise ConfigError(
                    f"eos_token_id in {name} is {value!r}, but must be a token id or "
                    "a list of them: correct the file"
                )
        eos.update(ids)
    return eos


def _read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> template; a plain template is called "default"."""
    value = settings.get("chat_template") or {}
    if isinstance(value, str):
        value = {"default": value}
    try:
        templates = (
            {entry["name"]: entry["template"] for entry in value}
            if isinstance(value, list)
            else dict(value)
        )
        file = folder / "chat_template.jinja"
        if file.is_file():
            templates["default"] = file.read_text(encoding="utf-8")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"the chat template in {folder} cannot be read ({error!r}), since it is "
            "neither text nor a list of names and templates: get the files again"
        ) from error
    return templates


class Tokenizer:
    """Encode, decode and render chats for one model.

    Attributes:
        vocab_size: The largest token id plus one; a model may have more rows.
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
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self._named_tokens = _named_tokens(settings)
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
                `special_tokens_map.json`, `config.json`, `generation_config.json`
                and `chat_template.jinja` are read where they exist.

        Raises:
            ModelNotFound: There is no `tokenizer.json`.
            CorruptFile: A file cannot be read.
            ConfigError: The kind of tokenizer, or a value in a file, is not supported.
        """
        folder = Path(folder)
        settings = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        return cls(
            _read_backend(folder / "tokenizer.json"),
            settings,
            eos_token_ids=_read_eos(folder),
            chat_templates=_read_chat_templates(folder, settings),
        )

    def _make_special(self, settings: Mapping[str, Any]) -> frozenset[int]:
        """Find the special tokens in raw text too, and return their ids."""
        named = {*self._named_tokens.values(), *_extra_tokens(settings)}
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
        for step in _steps(self._backend.post_processor):
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
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids.

        Bytes that are no character become U+FFFD. Nothing else is tidied up: `decode`
        after `encode` gives the text back, if its normalisation changed nothing.

        Raises:
            RequestError: An id is negative or `vocab_size` or more.
        """
        data = b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self.special_token_ids)
        )
        if self.spelling.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id that the vocabulary lacks.

        Raises:
            RequestError: The id is negative or `vocab_size` or more.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"token id {token_id} is out of range: this tokenizer has ids from 0 "
                f"to {self.vocab_size - 1:,}; take ids from its own encode"
            )
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.spelling.bytes_of(token)

    def check_embedding_rows(self, num_rows: int) -> None:
        """Raise ConfigError if a token id has no row in the embedding matrix.

        More rows than tokens is normal: the matrix is padded to a round number.
        """
        if self.vocab_size > num_rows:
            raise ConfigError(
                f"the tokenizer's largest token id is {self.vocab_size - 1:,}, but the "
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
            messages: Each has a `role` and a `content` (a string, or a list of parts
                where the template knows them), or `tool_calls`.
            add_generation_prompt: End with the line that opens the model's answer.
            tools: JSON descriptions of the functions that the model may call.
            **kwargs: Further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: The messages are malformed, the template refuses them (in
                its own words), or the model has no template.
            ConfigError: The template itself is no valid Jinja.
        """
        variables = {
            **self._named_tokens,
            **kwargs,
            "messages": _check_messages(messages),
            "tools": list(tools) if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        template = _compile(self._choose_template(has_tools=bool(tools)))
        try:
            return template.render(variables)
        except _TEMPLATE_FAILURES as error:
            raise RequestError(
                f"the chat template refused these messages: {error}"
            ) from error

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Return the token ids of a chat: the template's text, and one BOS.

        A tokenizer that starts every text with BOS gets exactly one, whether the
        template writes it or not. (`transformers` leaves it out where the template
        does.) Arguments and errors are those of `apply_chat_template`.
        """
        text = self.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )
        return self._with_start(self._encode(text))


def _overrule(ids: list[int], token_id: int | None, flag: bool | None) -> list[int]:
    if flag is None or token_id is None:
        return ids
    if not flag:
        return [other for other in ids if other != token_id]
    return ids if token_id in ids else [token_id]


# What a template may raise on messages it does not expect: its own refusals
# (raise_exception, undefined names, the sandbox) and slips of Python under it.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """Let `{% generation %}` pass, which marks answers in training templates."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML and everything that is not ASCII.
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that `transformers` defines."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"line {error.lineno} of the chat template is no valid Jinja: "
            f"{error.message}; correct chat_template in the model's folder"
        ) from error


def _check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the shape of a chat and return a copy without empty fields."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            f"messages is {messages!r}, but must be a list of at least one message "
            'such as {"role": "user", "content": "Hello"}'
        )
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"message {n} is a {type(message).__name__}, but must be a dict such "
                'as {"role": "user", "content": "Hello"}'
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {n} has the role {message.get('role')!r}, but must have a "
                "string such as 'user', 'assistant' or 'system'"
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise RequestError(
                f"message {n} has no content: give it a string, or tool_calls"
            )
        if content is not None and not isinstance(content, (str, list)):
            raise RequestError(
                f"the content of message {n} is a {type(content).__name__}, but must "
                "be a string or a list of parts"
            )
    # Templates print an explicit None as "None".
    return [{k: v for k, v in m.items() if v is not None} for m in messages]
