"""Texts on which tokenizers of the same model disagree when one of them is wrong.

Everything is generated from a fixed seed; nothing is read from a file.
"""

# ruff: noqa: RUF001 (look-alike characters are the point)

from __future__ import annotations

import random

SENTENCES = (
    "The quick brown fox doesn't jump over the lazy dog's bed.",
    "It's what they've said: we'll see, I'd go, he's in, you're out, I'm HERE'S",
    "Naïve café façade, Ærøskøbing, Łódź, Zürich, Ñandú, smørrebrød",
    "Cafe\u0301 with a combining accent, and A\u030angstro\u0308m",  # NFC differs
    "今天天气很好，我们去公园散步吧。",
    "你好，世界！１２３４５ 全角数字",
    "日本語とカタカナとひらがな、漢字。",
    "안녕하세요 세계",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "مرحبا بالعالم ١٢٣٤",
    "שלום עולם",
    "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก",
    "Nul’i l\u2019apostrophe « typographique » … – —",
    "ﬁne ﬂoor ½ ¾ ² ³ Ⅷ ①②③",
    "\u200bzero\u200cwidth\u200djoiner\ufeff",
    "https://example.org/a/b?c=1&d=%20#frag user@example.org",
    "$x^2 + \\frac{a}{b} = \\sum_{i=0}^{n} \\alpha_i$",
    "ALLCAPS MixedCase camelCase snake_case kebab-case CONSTANT_CASE x1y2z3",
)
CODE = (
    "def f(x):\n    return x + 1  # one\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < 10; ++i) {\n  printf("%d\\n", i);\n}\n',
    '{"key": [1, 2.5, -3e10, null, true], "nested": {"a": "b"}}',
    "<div class='x'>\n    <p>1 &lt; 2</p>\n</div>\n<h1>title</h1><table><tr>",
    "SELECT * FROM t WHERE a>=10 AND b!='x';--comment",
    "#!/bin/sh\nset -eu\necho \"$HOME\" | grep -v '^#' > /dev/null 2>&1 && exit 0\n",
    "a+=1;b<<=2;c=>d;e!==f;g::h;i->j;k??l;m...n",
    "\tif x:\n\t\ty = x ** 2\n\t\t\tz = -y // 3\n",
)
EMOJI = (
    "🙂",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "👍🏽",
    "🇩🇪🇯🇵",
    "🔥🔥🔥",
    "text🙂text",
    "1️⃣2️⃣",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "\U0001f468\u200d\U0001f680 \U00020000\U0002a6d6",
)
SPACES = (
    " ",
    "  ",
    "   a",
    "a   ",
    " a",
    "a ",
    "a  1 b",
    "a   1   22    333",
    "\n",
    "\n\n",
    " \n \n ",
    "\r\n\r\nx\r\n",
    "a\tb\t\tc\t1",
    "\u00a0nbsp\u00a0",
    "\u3000ideographic\u3000",
    "\u2003em\u2009thin",
    "line\u2028separator\u2029",
    "▁a ▁ b▁▁c",
    "\x00\x01\x7f\x1b[0m",
    "a\x0bb\x0cc\x85d",
)
MARKUP = (
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|im_end|>b",
    "<|im_start|><|im_start|>",
    "<|endoftext|>",
    "<|im_end",
    "<|im_start|> 12  3<|im_end|>  4",
    "<bos>text<eos>",
    "<start_of_turn>user\nHi<end_of_turn>\n",
    "<unk><pad><mask>",
    "<s>[INST] hi [/INST]</s>",
    "<think>\n\n</think>\n\n<tool_call>{}</tool_call>",
    "<0x0A><0xE2>",
    "<file_sep><repo_name>a/b<jupyter_code>",
    "<unused42>[multimodal]<b>bold</b>",
)


def hard_texts(count: int = 480, seed: int = 0) -> list[str]:
    """Return at least `count` distinct texts: the lists above, and mixtures of them."""
    rng = random.Random(seed)
    fixed = (*SENTENCES, *CODE, *EMOJI, *SPACES, *MARKUP)
    texts = dict.fromkeys((*fixed, ""))
    for length in (1, 2, 3, 4, 7, 10, 19):
        texts["".join(rng.choices("0123456789", k=length))] = None
        texts[f"n={'7' * length}, {'9' * length}.5"] = None
    for length in (2, 3, 5, 8, 15, 16, 17, 30, 31, 32, 33, 63, 70):
        texts.update(dict.fromkeys([" " * length + "x", "\n" * length, "\t" * length]))
        texts[f"a{' ' * length}1{' ' * length}b"] = None
    while len(texts) < count:
        texts[rng.choice((_pieces, _characters))(rng, fixed)] = None
    return list(texts)


def _pieces(rng: random.Random, fixed: tuple[str, ...]) -> str:
    """Join slices of the fixed texts, so that they meet at odd places."""
    joint = rng.choice(("", " ", "  ", "\n", "1", "'s "))
    return joint.join(_slice(rng, rng.choice(fixed)) for _ in range(rng.randint(2, 5)))


def _slice(rng: random.Random, text: str) -> str:
    start = rng.randint(0, len(text) - 1)
    return text[start : start + rng.randint(1, 24)]


def _characters(rng: random.Random, _fixed: tuple[str, ...]) -> str:
    """Draw single characters from all over Unicode, lone surrogates left out."""
    ranges = ((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x1FFF), (0x2000, 0x2BFF))
    ranges += ((0x3040, 0x9FFF), (0xE000, 0xFFFD), (0x1F300, 0x1FAFF))
    return "".join(
        chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(1, 30))
    )
