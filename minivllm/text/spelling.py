"""How the tokens of a vocabulary spell bytes.

A `tokenizer.json` holds text, so the bytes of a token are written in characters: one
for each byte (byte-level BPE), or plain text with byte tokens for the rest
(SentencePiece). Its decoder says which.

Invariant: every token is some bytes, whatever tokens stand around it. Called by the
tokenizer.

Source: appendix A2, "Text".
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from minivllm.errors import ConfigError


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


def steps_of(component: Any) -> list[dict[str, Any]]:
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


_BYTE_OF = byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How the tokens of a vocabulary spell bytes."""

    byte_level: bool  # one visible character per byte
    byte_fallback: bool  # tokens such as <0xF0> are one byte
    strips_leading_space: bool  # encoding put one space before the text

    @classmethod
    def of(cls, decoder: Any) -> "Spelling":
        """Read the spelling off the decoder of a `tokenizer.json`."""
        steps = steps_of(decoder)
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
