"""The small policy's tokenizer: byte-level BPE, trained on generated transcripts, with a ChatML template and Hermes tool calls.

Invariants:
- deterministic: the same transcripts give the same files;
- any text round-trips (bytes are the alphabet);
- the template is append-only: the rendering of a conversation's prefix is a prefix of the rendering of the conversation, and a
  generation prompt followed by the canonical text of a turn and `<|im_end|>` is what the template renders for that turn.

What keeps sequences short: a pre-token is a file name, a number of one or two digits, or everything between them up to the end of a
line, so that BPE may merge a whole phrase, and an argument is the same token wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL = (PAD, "<|im_start|>", END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")

_PIECE = r"[a-z]+\.[a-z]+|[0-9]{1,2}"
_LINE = r"[^\n]*\n"


def train(texts: Iterable[str], vocabulary: int, window: int) -> PreTrainedTokenizerFast:
    """Train on rendered transcripts; `vocabulary` counts everything, special tokens included."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), "isolated"),
            pre_tokenizers.Split(Regex(_LINE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=False, normalized=False) for mark in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(marks),
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens(marks)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE.read_text(),
        model_max_length=window,
        clean_up_tokenization_spaces=False,
    )
