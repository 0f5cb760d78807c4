"""Whatever the chunks, the text of a turn is what the tokenizer makes of its tokens."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gyre_hpc.gateway.text import decoding
from gyre_hpc.gateway.text.decoding import ByteDecoder, Decoder, WindowDecoder

STOP = 258


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    """Bytes, and a few added tokens."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def chunks(tokens: list[int], rng: random.Random) -> list[list[int]]:
    cut: list[list[int]] = []
    while tokens:
        size = rng.randrange(1, 4)
        cut, tokens = [*cut, tokens[:size]], tokens[size:]
    return cut


def said(decoder: Decoder, parts: list[list[int]]) -> str:
    return "".join([*(decoder.feed(np.array(part, np.int32)) for part in parts), decoder.finish()])


@pytest.mark.parametrize("seed", range(30))
def test_text_in_pieces_is_the_text(tokenizer: Tokenizer, seed: int) -> None:
    """Random bytes, most of them no UTF-8, between whole characters and added tokens."""
    rng = random.Random(seed)
    make = decoding.decoders(tokenizer, [STOP])
    tokens: list[int] = []
    for _ in range(60):
        tokens += rng.choice([tokenizer.encode(rng.choice(["é", "你", "😀", "a b", "</think>"])).ids, [rng.randrange(256)]])
    tokens = [token for token in tokens if token != STOP]
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    decoder = make()
    assert isinstance(decoder, ByteDecoder)
    assert said(decoder, chunks([*tokens, STOP], rng)) == whole
    assert said(WindowDecoder(tokenizer, frozenset([STOP])), [tokens]) == whole


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("é").ids
    for decoder in (decoding.decoders(tokenizer, [STOP])(), WindowDecoder(tokenizer, frozenset([STOP]))):
        assert decoder.feed(np.array([first])) == ""
        assert decoder.feed(np.array(rest)) == "é"
        assert decoder.feed(np.array([first])) == ""
        assert decoder.finish() == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    """A model's last layer is often padded, so that it may sample them."""
    assert said(decoding.decoders(tokenizer, [STOP])(), [[65, 100_000, 66]]) == tokenizer.decode([65, 100_000, 66])


def test_other_tokenizers_are_asked_themselves() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.WordPiece()
    assert said(decoding.decoders(words, [])(), [[0], [1, 0]]) == words.decode([0, 1, 0])


def test_ids_behind_the_holes_of_a_vocabulary_have_their_text() -> None:
    letters = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    sparse = Tokenizer(models.BPE(vocab={**letters, "far": 400}, merges=[]))
    sparse.decoder = decoders.ByteLevel()
    assert sparse.get_vocab_size() < 400
    decoder = decoding.decoders(sparse, [])()
    assert isinstance(decoder, ByteDecoder)
    assert said(decoder, [[400, letters["x"], 300, 9_000, 401]]) == "farx", "and ids that there are not have none"
