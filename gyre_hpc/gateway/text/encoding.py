"""Text to token ids by the fastest way whose ids are proven to be those of the model's tokenizer.

Hugging Face's `tokenizers` needs 10 ms for the 4,000 tokens that a turn adds to a conversation, tiktoken 1 ms with the same vocabulary.
`Encoder` uses tiktoken where the tokenizer is a byte-level BPE that splits by one regular expression, and only if these hold:
- every merge makes the token that its place says, in ascending order, and every token is a byte, the product of a merge, or added; then
  merging by the rank of the product (tiktoken) is merging by the rank of the merge (Hugging Face);
- added tokens match literally, without regard to what stands beside them;
- each token, alone, is encoded as itself by merges; so whichever two tokens meet that make it, they are those of its merge; or, where whole
  words are taken without merges (`ignore_merges`), whichever two tokens make it have a merge;
- a probe gives equal ids: words, code, numbers, white space, emoji, random text, and every character up to U+1FFFF beside others.
  Characters that the probe does not confirm, and text that its normal form (NFC) would change, go to Hugging Face at run time.
Everything else, and whatever tiktoken can't encode, is encoded by Hugging Face: slower, never different. The log says which it is, and why.
"""

from __future__ import annotations

import logging
import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import orjson
import tiktoken
from blake3 import blake3
from tokenizers import Tokenizer

log = logging.getLogger(__name__)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What Hugging Face's ByteLevel splits by when it is not told otherwise."""
BLANK = 10_000
"""White space in one run from which on text is left to Hugging Face: tiktoken's regular expressions give up at about 100,000."""
_PROBED = 0x20000
_BLOCK = 0x100
_LONG_BLANK = re.compile(rf"(?<!\s)\s{{{BLANK}}}")
_STRIDE = BLANK // 10
_SAMPLED_BLANK = re.compile(r"\s{10}")
"""What every run of BLANK leaves of itself in a text of which each `_STRIDE`th character is taken."""


class Unproven(ValueError):
    """Why only Hugging Face's tokenizer is safe; for the log."""


@dataclass(frozen=True)
class _Way:
    """How tiktoken encodes for one tokenizer. `left`: characters that are left to Hugging Face."""

    core: tiktoken.Encoding
    added: dict[str, int]
    names: re.Pattern[str]
    nfc: bool
    left: tuple[int, ...] = ()

    @cached_property
    def unsafe(self) -> re.Pattern[str]:
        """Finds characters that differ, and those that are not probed."""
        return re.compile(f"[{''.join(re.escape(chr(code)) for code in self.left)}\U00020000-\U0010ffff]")

    @cached_property
    def ascii_is_safe(self) -> bool:
        return all(code >= 128 for code in self.left)

    def safe(self, text: str) -> bool:
        """Whether tiktoken may see this text."""
        if len(text) > BLANK and _SAMPLED_BLANK.search(text[::_STRIDE]) and _LONG_BLANK.search(text):
            return False
        if text.isascii():
            return self.ascii_is_safe
        return not self.unsafe.search(text) and (not self.nfc or unicodedata.is_normalized("NFC", text))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.names.split(text):
            added = self.added.get(part)
            if added is not None:
                ids.append(added)
            elif part:
                ids += self.core.encode_ordinary(part)
        return ids


class Encoder:
    """Ids of a text, special tokens by their names, nothing added. `fast`: tiktoken's ids were proven to be the same."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._way = _proven(tokenizer)

    @property
    def fast(self) -> bool:
        """Text is tokenised by tiktoken."""
        return self._way is not None

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        if self._way is None or not self._way.safe(text):
            return _slowly(self._tokenizer, text)
        try:
            return self._way.encode(text)
        except BaseException as error:  # a panic of Rust is no Exception
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            log.warning("tiktoken gave up on %d characters: %s", len(text), error)
            return _slowly(self._tokenizer, text)


_known: dict[bytes, _Way | None] = {}
"""By digest of the tokenizer: the proof takes a second."""


def _proven(tokenizer: Tokenizer) -> _Way | None:
    text = tokenizer.to_str()
    digest = blake3(text.encode()).digest()
    if digest not in _known:
        try:
            settings = orjson.loads(text)
            way = _tiktoken_of(settings)
            _check_alone(settings, way)
            _known[digest] = _probed(way, tokenizer)
        except Unproven as error:
            _known[digest] = None
            log.info("text is tokenised by Hugging Face's tokenizer: %s", error)
    return _known[digest]


def _check_alone(settings: dict[str, Any], way: _Way) -> None:
    """Raises Unproven for a token that two tokens make of which the tokenizer would not make it."""
    described = settings["model"]
    ignoring = bool(described.get("ignore_merges"))
    model = Tokenizer.from_str(orjson.dumps({**settings, "model": {**described, "ignore_merges": False}}).decode()).model
    vocabulary: dict[str, int] = described["vocab"]
    merges = {tuple(merge if isinstance(merge, list) else merge.split(" ")) for merge in described["merges"]} if ignoring else set()
    for token, index in vocabulary.items():
        if token in way.added or [part.id for part in model.tokenize(token)] == [index]:
            continue
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        if not ignoring or any(a in vocabulary and b in vocabulary and (a, b) not in merges for a, b in pairs):
            raise Unproven(f"the token {token!r} is not what its text gives")


def _probed(way: _Way, tokenizer: Tokenizer) -> _Way:
    """`way` with the characters that are left to Hugging Face. Raises Unproven where other ids differ."""
    for text in probes(tuple(way.added)):
        text = unicodedata.normalize("NFC", text) if way.nfc else text
        if way.encode(text) != _slowly(tokenizer, text):
            raise Unproven(f"tiktoken's ids differ, for example of {text[:40]!r}")

    def same(first: int, last: int) -> bool:
        text = "".join(_beside(chr(code), way.nfc) for code in range(first, last))
        return way.encode(text) == _slowly(tokenizer, text)

    differ = [start for start in range(0, _PROBED, _BLOCK) if not same(start, start + _BLOCK)]
    left = tuple(code for start in differ for code in range(start, start + _BLOCK) if not same(code, code + 1))
    if len(left) > _PROBED // 8:
        raise Unproven(f"tiktoken's ids differ for {len(left)} characters")
    return replace(way, left=left)


def _beside(char: str, nfc: bool) -> str:
    """A character behind and before letters, digits, spaces, marks and itself; nothing, for what never reaches tiktoken."""
    text = f"a{char} {char}1{char}{char}\n{char}."
    return "" if 0xD800 <= ord(char) < 0xE000 or (nfc and not unicodedata.is_normalized("NFC", text)) else text


def _slowly(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def probes(added: Sequence[str]) -> list[str]:
    """Texts on which two tokenizers are compared."""
    rng = random.Random(5)
    words = re.findall(
        r"\S+", "the def return self import class naïve größer Привет мир 你好 世界 こんにちは مرحبا नमस्ते 한국어 ﬁ ǆ İ ß 'll 'S 'Re don't"
    )
    marks = [
        *"(){}[]<>=+-*/\\|&^%$#@!~`'\"_,.;:?",
        *re.findall(r"\S+", "-> == ... // /* */ ```"),
        "\u2028",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "\u0085",
    ]
    spaces = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", " \n\n  ", "\t\t", "        ", "\u3000", "\x0b", "\x0c"]
    emoji = ["😀", "👩\u200d👧", "🇩🇪", "👍🏽", "✈\ufe0f", "e\u0301", "\U0001d54f"]
    numbers = ["0", "7", "42", "1234567890", "3.14", "1e-9", "0x1F", "²", "½", "٣", "Ⅻ"]
    kinds = [words, words, marks, spaces, spaces, emoji, numbers, list(added) or words]
    texts = ["".join(rng.choice(rng.choice(kinds)) for _ in range(size)) for size in [1, 2, 3, 5] * 40 + [200] * 40]
    for _ in range(20):
        places = [rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0xD800)]) for _ in range(300)]
        texts.append("".join(map(chr, places)))
    texts.append("def f(x):\n    return {'a': [1, 2.5], \"b\": x}\n\n\nclass A:\n\tpass\n" * 4)
    texts += [text * 2000 for text in ("a", " ", "\n", "ab", "=", "\r\n", "é")]
    return texts


def _tiktoken_of(settings: dict[str, Any]) -> _Way:
    """tiktoken's form of what stands in a tokenizer.json. Raises Unproven."""
    model, normalizer = settings["model"], settings.get("normalizer")
    if model.get("type") != "BPE":
        raise Unproven(f"a {model.get('type')} model")
    for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk"):
        if model.get(name):
            raise Unproven(f"its model has {name}")
    if settings.get("truncation"):
        raise Unproven("it truncates")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise Unproven(f"a normalizer {normalizer.get('type')}")
    added = {token["content"]: int(token["id"]) for token in settings.get("added_tokens") or ()}
    for token in settings.get("added_tokens") or ():
        if token["single_word"] or token["lstrip"] or token["rstrip"] or (token["normalized"] and normalizer is not None):
            raise Unproven(f"its added token {token['content']} looks beside itself")
    ranks = _ranks(model, added)
    core = tiktoken.Encoding("policy", pat_str=_pattern(settings.get("pre_tokenizer")), mergeable_ranks=ranks, special_tokens={})
    return _Way(core, added, _names(added), normalizer is not None)


def _ranks(model: dict[str, Any], added: dict[str, int]) -> dict[bytes, int]:
    vocabulary: dict[str, int] = model["vocab"]
    ranks = {spelled(token): index for token, index in vocabulary.items() if token not in added}
    if sum(len(token) == 1 for token in ranks) != 256:
        raise Unproven("its vocabulary lacks a byte")
    made: set[int] = set()
    last = -1
    for merge in model["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        product = vocabulary[left + right]
        if product < last:
            raise Unproven(f"the merge to {left + right} stands in another place than the token")
        last = product
        made.add(product)
    odd = [token for token, index in ranks.items() if index not in made and len(token) > 1]
    if odd:
        raise Unproven(f"{len(odd)} tokens are not made by a merge, {odd[0]!r} is one")
    return ranks


def _pattern(splitter: dict[str, Any] | None) -> str:
    """The regular expression by which text is split. Raises Unproven."""
    steps = splitter.get("pretokenizers", [splitter]) if splitter else []
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise Unproven("text is not split at bytes alone")
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return GPT2
    if len(steps) != 2 or steps[-1].get("use_regex", True):
        raise Unproven(f"text is split in {len(steps)} steps")
    split = steps[0]
    pattern = (split.get("pattern") or {}).get("Regex")
    if split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert") or not pattern:
        raise Unproven("text is split by something else than one regular expression")
    return str(pattern)


def _names(added: dict[str, int]) -> re.Pattern[str]:
    """Matches the longest added token that begins at a place; never, when there is none."""
    names = sorted(added, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "((?!))")


def _letters() -> dict[str, int]:
    """The byte for which each letter of a byte-level vocabulary stands (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


_LETTERS = _letters()
_NO_LETTER = re.compile(f"[^{re.escape(''.join(_LETTERS))}]")
_LETTERS_TO_LATIN = str.maketrans({letter: chr(byte) for letter, byte in _LETTERS.items()})


def spelled(token: str | None) -> bytes:
    """The bytes of a token of a byte-level tokenizer: its letters, or its text when it has others (an added one). None: no token."""
    if token is None:
        return b""
    return token.encode() if _NO_LETTER.search(token) else token.translate(_LETTERS_TO_LATIN).encode("latin-1")
