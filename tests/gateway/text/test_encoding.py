"""tiktoken's ids are taken only where they are those of the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gyre_hpc.gateway.text import encoding
from gyre_hpc.gateway.text.encoding import BLANK, Encoder, probes

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = ("<|im_end|>", "<|im|>", "<tool_call>")
CORPUS = [*probes(())[:200], Path(encoding.__file__).read_text(), json.dumps(list(range(500)))]


def trained(pattern: str | None = QWEN, normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer with a few hundred merges; `pattern` None: split as GPT-2 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained(normalizer=normalizers.NFC())


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def slowly(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


parts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from([*ADDED, "<|im_end", "|>", "  ", "\n\n", "\r\n", "e\u0301", "'LL", "1234", "def f(x):", "\u1e9b\u0323", "\u0958"]),
)


@given(st.lists(parts, max_size=12).map("".join))
def test_any_text_has_the_tokenizers_ids(tokenizer: Tokenizer, encoder: Encoder, text: str) -> None:
    assert encoder.fast
    assert encoder.encode(text) == slowly(tokenizer, text)


def test_gpt2s_split_is_known() -> None:
    gpt2 = trained(None)
    made = Encoder(gpt2)
    assert made.fast
    for text in probes(ADDED):
        assert made.encode(text) == slowly(gpt2, text)


def test_tiktoken_does_the_work_where_it_is_safe_and_only_there(encoder: Encoder, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    """Long white space, characters that were not probed, and text that NFC changes go to the other tokenizer."""
    seen: list[str] = []
    ordinary = tiktoken.Encoding.encode_ordinary

    def watched(self: Any, text: str) -> list[int]:
        seen.append(text)
        return ordinary(self, text)

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", watched)
    for text in ("plain <|im_end|> text", "größer 你好", " " * (BLANK - 1)):
        assert encoder.encode(text) == slowly(tokenizer, text)
    assert seen == ["plain ", " text", "größer 你好", " " * (BLANK - 1)]
    for text in ("x" + " \n" * BLANK, "\U00020000", "e\u0301"):
        assert encoder.encode(text) == slowly(tokenizer, text)
    assert len(seen) == 4


def test_a_panic_of_tiktoken_is_survived(encoder: Encoder, tokenizer: Tokenizer, monkeypatch: Any) -> None:
    class PanicException(BaseException):
        pass

    def panic(self: Any, text: str) -> list[int]:
        raise PanicException("StackOverflow")

    monkeypatch.setattr(tiktoken.Encoding, "encode_ordinary", panic)
    assert encoder.encode("some text") == slowly(tokenizer, "some text")


Change = Callable[[dict[str, Any]], object]


def swap_merges(described: dict[str, Any]) -> None:
    merges = described["model"]["merges"]
    merges[10], merges[300] = merges[300], merges[10]


def orphan(described: dict[str, Any]) -> None:
    described["model"]["vocab"]["zzzzqq"] = len(described["model"]["vocab"]) + len(ADDED)


def whole_word(described: dict[str, Any], *merges: str) -> None:
    """`zqj` is a word of its own, but z and qj, which meet in any longer word, have no merge (unless it is in `merges`)."""
    model = described["model"]
    first = max(max(model["vocab"].values()), *(token["id"] for token in described["added_tokens"])) + 1
    model["vocab"] |= {"qj": first, "zq": first + 1, "zqj": first + 2}
    model["merges"] += [["q", "j"], ["z", "q"], *(merge.split() for merge in ("zq j", *merges))]
    model["ignore_merges"] = True


def test_words_that_are_taken_whole_are_safe_where_any_two_parts_of_them_merge() -> None:
    described = json.loads(trained().to_str())
    whole_word(described, "z qj")
    tokenizer = Tokenizer.from_str(json.dumps(described))
    made = Encoder(tokenizer)
    assert made.fast
    for text in ("zqj", " zqj", "azqjzqj", "zzqjj"):
        assert made.encode(text) == slowly(tokenizer, text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
        (lambda d: d["added_tokens"][0].update(lstrip=True), "looks beside itself"),
        (lambda d: d["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "something else"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True), "bytes alone"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": True}), "3 steps"),
        (swap_merges, "another place"),
        (orphan, "not made by a merge"),
        (whole_word, "'zqj' is not what its text gives"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\p{L}+"}), "differ"),
    ],
)
def test_what_is_not_proven_is_encoded_by_the_tokenizer(change: Change, why: str, caplog: pytest.LogCaptureFixture) -> None:
    described = json.loads(trained().to_str())
    change(described)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    with caplog.at_level("INFO"):
        made = Encoder(tokenizer)
    assert not made.fast
    assert why in caplog.text
    assert made.encode("Some text, <|im_end|>  2 ") == slowly(tokenizer, "Some text, <|im_end|>  2 ")


def test_one_proof_serves_all_that_are_alike(tokenizer: Tokenizer, encoder: Encoder, monkeypatch: Any) -> None:
    monkeypatch.setattr(encoding, "_probed", lambda way, tokenizer: pytest.fail("proven again"))
    assert Encoder(Tokenizer.from_str(tokenizer.to_str())).fast
