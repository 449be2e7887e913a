"""What a model's folder says about its tokens, beside `tokenizer.json`.

Several files have a say, each in more than one form. Here they become plain values.

Invariant: a missing file says nothing, a damaged one is an error with its name.
Called by the tokenizer.

Source: appendix A2, "Text".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, CorruptFile
from minivllm.json_files import read_json

_NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "pad_token"),
    *("sep_token", "cls_token", "mask_token"),
)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer's settings; `tokenizer_config.json` has the last word."""
    return {
        **_read_if_there(folder / "special_tokens_map.json"),
        **_read_if_there(folder / "tokenizer_config.json"),
    }


def _content(token: Any) -> str | None:
    """Return the text of a token that a settings file gives as a string or a dict."""
    return token.get("content") if isinstance(token, Mapping) else token


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
