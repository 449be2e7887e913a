"""What a model's folder says about its tokens, beside `tokenizer.json`.

Several files have a say, each in more than one form. Here they become plain values.

Invariant: a missing file says nothing, a damaged one is an error with its name.
Called by the tokenizer.

Source: appendix A2, "Text".
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, CorruptFile
from minivllm.json_files import read_json

_NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "pad_token"),
    *("sep_token", "cls_token", "mask_token"),
)


def _content(token: Any) -> str | None:
    """Return the text of a token that a settings file gives as a string or a dict."""
    return token.get("content") if isinstance(token, Mapping) else token


def _is_text(value: Any) -> bool:
    # JSON can spell half a character, a surrogate, which is no text.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_token(value: Any) -> bool:
    return _is_text(_content(value))


def _are_tokens(value: Any) -> bool:
    tokens = value.values() if isinstance(value, dict) else value
    return isinstance(value, (list, dict)) and all(map(_is_token, tokens))


def _are_templates(value: Any) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(entry, dict)
            and _is_text(entry.get("name"))
            and _is_text(entry.get("template"))
            for entry in value
        )
    templates = value.values() if isinstance(value, dict) else [value]
    return all(map(_is_text, templates))


# Key of a settings file -> what it must be, as a test and in words.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_NAMED_TOKENS, (_is_token, "a token")),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "extra_special_tokens": (_are_tokens, "tokens, in a list or by name"),
    "add_bos_token": (lambda value: isinstance(value, bool), "true or false"),
    "add_eos_token": (lambda value: isinstance(value, bool), "true or false"),
    "chat_template": (_are_templates, "text, or names and texts"),
    "text_config": (lambda value: isinstance(value, dict), "a JSON object"),
}


def _read_if_there(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.is_file() else {}
    for key, (fits, kind) in _KINDS.items():
        value = content.get(key)
        if value is not None and not fits(value):
            raise CorruptFile(
                f"{path} is damaged: its {key} is {value!r:.80}, but must be {kind}; "
                "correct it or get the file again"
            )
    return content


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's settings; `tokenizer_config.json` has the last word."""
    return {
        **_read_if_there(folder / "special_tokens_map.json"),
        **_read_if_there(folder / "tokenizer_config.json"),
    }


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> token: for the tokenizer, and as variables of the template."""
    extra = settings.get("extra_special_tokens")
    named = {name: settings.get(name) for name in _NAMED_TOKENS}
    named |= extra if isinstance(extra, Mapping) else {}
    return {name: _content(token) for name, token in named.items() if token}


def unnamed_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the special tokens that have no name."""
    lists = (
        settings.get("additional_special_tokens"),
        settings.get("extra_special_tokens"),
    )
    return [_content(t) for tokens in lists if isinstance(tokens, list) for t in tokens]


def read_eos(folder: Path) -> set[int]:
    """Return the union of the EOS ids in the two configurations of the model."""
    config = _read_if_there(folder / "config.json")
    sources = {
        "config.json": config,
        "config.json (text_config)": config.get("text_config") or {},
        "generation_config.json": _read_if_there(folder / "generation_config.json"),
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


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> template; a plain template is called "default"."""
    value = settings.get("chat_template") or {}
    if isinstance(value, str):
        value = {"default": value}
    templates = (
        {entry["name"]: entry["template"] for entry in value}
        if isinstance(value, list)
        else dict(value)
    )
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {file.stem: file for file in named}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, file in files.items():
        try:
            templates[name] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CorruptFile(
                f"the chat template {file} is no UTF-8 ({error.reason} at byte "
                f"{error.start}): get the file again"
            ) from error
    return templates
