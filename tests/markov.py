"""A policy that needs no training: a Qwen3 whose weights were written down, for tests with long contexts and many turns.

What it says next hangs on the last token alone (attention and feed-forward add nothing yet, but are computed, cached and trained like
those of any model): a few words, now and then a thought, then a call of a shell that adds a line to out.txt, or the end. So it behaves
alike at any length of the context and with any harness whose shell is called `bash` or `Bash`; the wrong one of the two is answered with
an error, by which it is not put off. Its window is as large as real clients need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.gateway.fakes import CHATML, MARKS, SPECIAL
from trees.records import Fate, Role
from trees.tree import Tree

WINDOW = 65_536
VOCABULARY = 4096
HIDDEN = 64
WORDS = tuple(f" {word}" for word in ("lorem", "ipsum", "dolor", "amet", "tempor", "magna"))
THOUGHTS = tuple(f" {word}" for word in ("cogito", "dubito", "credo"))
SHELLS = {name: f'\n{{"name": "{name}", "arguments": {{"command": "echo x >> out.txt"}}}}\n' for name in ("bash", "Bash")}
END, CALL, CALLED, THINK, THOUGHT = "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"
MOST = 1000
"""Lines of out.txt for the full score of the task below."""
_NEVER = -20.0
"""Log-odds of all else."""


@dataclass(frozen=True)
class Habits:
    """`words`: mean length of a text, in tokens; `calls`: share of turns with a call, by which a conversation goes on; `thoughts`: share of
    turns that begin with one; `more`: share of calls with another one behind them."""

    words: float = 30.0
    calls: float = 0.9
    thoughts: float = 0.2
    more: float = 0.1


def markov(directory: Path, habits: Habits | None = None) -> Path:
    """Write the model's directory: weights, tokenizer, template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHATML)
    named = {"eos_token": END, "pad_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    model = _model(tokenizer, _chain(habits or Habits()))
    model.generation_config.eos_token_id = tokenizer.token_to_id(END)
    model.save_pretrained(directory)
    return directory


def counting_task(path: Path) -> Path:
    """A task in Harbor format whose score says how many calls of the shell a harness was given: one line each, 1 for MOST."""
    for name in ("environment", "tests", "solution"):
        (path / name).mkdir(parents=True)
    (path / "task.toml").write_text('version = "1.0"\n[agent]\ntimeout_sec = 3600.0\n[verifier]\ntimeout_sec = 60.0\n')
    (path / "instruction.md").write_text("Say what you see.\nWrite a line.\nWrite another line.\n")
    (path / "environment/given.txt").write_text("given\n")
    reward = f'printf "{{\\"reward\\": %d.%03d}}" $((lines / {MOST})) $((lines % {MOST}))'
    lines = f"lines=$(cat out.txt 2>/dev/null | wc -l)\n[ $lines -gt {MOST} ] && lines={MOST}"
    (path / "tests/test.sh").write_text(f"#!/bin/bash\n{lines}\n{reward} > /logs/verifier/reward.json\n")
    (path / "solution/solve.sh").write_text(f"seq {MOST} > out.txt\n")
    return path


def given(tree: Tree, model: Path, shell: str) -> int:
    """Calls of `shell` in the answers that a harness got and acts upon: a summary's are not."""
    token = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(SHELLS[shell])
    answers = [
        call.sampled
        for call in tree.calls.values()
        if call.fate is Fate.DELIVERED and call.sampled >= 0 and call.role in (Role.MAIN, Role.SUB_AGENT)
    ]
    return int((tree.tokens_of(answers) == token).sum())


def offered(tree: Tree, model: Path, shell: str) -> bool:
    """Whether the prompt of the first call offers a tool of that name: tells a real client's execution from the bundled harness's."""
    first = next(iter(tree.calls.values()))
    prompt = tree.tokens_of(tree.path(first.prompt)).tolist()
    return f'"name": "{shell}"' in Tokenizer.from_file(str(model / "tokenizer.json")).decode(prompt, skip_special_tokens=False)


def _chain(habits: Habits) -> Mapping[str, Mapping[str, float]]:
    """State -> what comes next with which probability. The state "" is any token that is none of ours: the prompt's last one."""
    words, thoughts = dict.fromkeys(WORDS, 1 / len(WORDS)), dict.fromkeys(THOUGHTS, 1 / len(THOUGHTS))
    first = {**{word: (1 - habits.thoughts) * p for word, p in words.items()}, THINK: habits.thoughts}
    return {
        "": first,
        THINK: thoughts,
        **{word: _until(thoughts, habits.words, {THOUGHT: 1.0}) for word in THOUGHTS},
        THOUGHT: words,
        **{word: _until(words, habits.words, {CALL: habits.calls, END: 1 - habits.calls}) for word in WORDS},
        CALL: dict.fromkeys(SHELLS.values(), 0.5),
        **{shell: {CALLED: 1.0} for shell in SHELLS.values()},
        CALLED: {CALL: habits.more, END: 1 - habits.more},
    }


def _until(words: Mapping[str, float], length: float, then: Mapping[str, float]) -> Mapping[str, float]:
    """More of `words`, of which there are `length` in the mean, or what comes then."""
    last = 1 / length
    return {**{word: (1 - last) * p for word, p in words.items()}, **{token: last * p for token, p in then.items()}}


def _tokenizer() -> Tokenizer:
    """Byte-level BPE of English and code; what the policy says are tokens of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ours = [*MARKS, *WORDS, *THOUGHTS, *SHELLS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ours),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(__file__).parents[1]
    texts = [path.read_text() for path in [*sorted(root.glob("docs/*.md")), *sorted(root.glob("gyre_hpc/gateway/*.py"))]]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ours])
    return tokenizer


def _model(tokenizer: Tokenizer, chain: Mapping[str, Mapping[str, float]]) -> Qwen3ForCausalLM:
    """One layer. Embeddings say the state, one dimension each; the head says what follows."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM computes on a CPU
        max_position_embeddings=WINDOW,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(SPECIAL[0]),
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embeddings, head = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
        embeddings[:, 0] = 1.0
        head[:, : len(chain)] = _NEVER / math.sqrt(HIDDEN)
        for place, (state, follows) in enumerate(chain.items()):
            if state:
                embeddings[tokenizer.token_to_id(state)] = torch.nn.functional.one_hot(torch.tensor(place), HIDDEN).float()
            for token, probability in follows.items():
                if probability > 0:
                    head[tokenizer.token_to_id(token), place] = math.log(probability) / math.sqrt(HIDDEN)
    return model
