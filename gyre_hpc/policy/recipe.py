"""The small policy of the quickstart: a Qwen3 of a few hundred thousand parameters, built by a fixed recipe and cached.

`ensure()` gives an ordinary Hugging Face directory (config.json, model.safetensors, tokenizer files with the chat template,
generation_config.json); nothing else in the package knows that it is small or ours.

Invariants:
- one recipe, one directory: its name holds a digest of the recipe's numbers, of the texts and of the code that makes transcripts;
- a directory appears whole or not at all (built beside, then renamed); builders that race build the same, the first to finish wins;
- the build is one thread of torch with fixed seeds; it touches neither the caller's random state nor its thread count.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gyre_hpc.errors import GyreError
from gyre_hpc.policy import transcripts
from gyre_hpc.policy.transcripts import Conversation, Habits

Progress = Callable[[str], None]

_SOURCES = ("policy/recipe.py", "policy/tokenizer.py", "policy/transcripts.py", "policy/shell.py", "policy/chat_template.jinja")
_SHARED = ("harness/texts.py", "tasks/chores.py")


@dataclass(frozen=True)
class Recipe:
    """Every number of the build. Sizes are what vLLM's CPU attention takes (head_dim 32)."""

    seed: int = 7
    hidden: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    vocabulary: int = 768
    """A multiple of 64. Enough for every file name and phrase; a third of the numbers take two tokens."""
    window: int = 4096
    rope_theta: float = 10_000.0
    steps: int = 450
    batch: int = 48
    drills: float = 0.5
    """Share of drills among the sequences."""
    lr: float = 5e-3
    """AdamW, for embeddings and norms."""
    matrix_lr: float = 0.02
    """Muon, for the matrices: with it copying is learnt within 40 CPU seconds, with AdamW alone not within 100."""
    warmup: int = 30
    difficulties: tuple[int, ...] = (1, 2, 3)
    habits: Habits = field(default_factory=Habits)


def cache_root() -> Path:
    """`$GYRE_CACHE`, else `~/.cache/gyre_hpc`."""
    root = os.environ.get("GYRE_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "gyre_hpc"


def digest(recipe: Recipe) -> str:
    """Twelve hexadecimal digits that change when the recipe, the texts or the code that makes the transcripts change."""
    package = Path(__file__).resolve().parent.parent
    h = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for name in (*_SOURCES, *_SHARED):
        h.update((package / name).read_bytes())
    return h.hexdigest()[:12]


def ensure(progress: Progress | None = None, recipe: Recipe | None = None) -> Path:
    """The directory of the built policy; builds it first if the cache has none (about 70 seconds of one core).

    `progress` gets a line now and then. Raises GyreError where the cache can't be written.
    """
    recipe = recipe or Recipe()
    target = cache_root() / f"policy-{digest(recipe)}"
    if (target / "model.safetensors").exists():
        return target
    say = progress or (lambda line: None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            build(recipe, building, say)
            _publish(building, target)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        remedy = "free some space there or set GYRE_CACHE to another folder"
        raise GyreError(f"the small model can't be kept in {target.parent}: {error}", remedy) from None
    return target


def build(recipe: Recipe, directory: Path, say: Progress) -> None:
    """Make tokenizer and model and save both into `directory`."""
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    rng = random.Random(recipe.seed)
    say("small model: training the tokenizer")
    tokenizer = make_tokenizer(recipe, rng)
    with _alone(torch, recipe.seed):
        model = make_model(recipe, tokenizer)
        warm_up(recipe, model, tokenizer, rng, say)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    say(f"small model: built in {time.monotonic() - started:.0f} s")


def _publish(building: Path, target: Path) -> None:
    for path in building.iterdir():
        path.chmod(0o644)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    building.chmod(0o755)
    try:
        building.rename(target)
    except OSError:
        if not (target / "model.safetensors").exists():  # somebody else was faster: theirs is as good
            raise


def make_tokenizer(recipe: Recipe, rng: random.Random) -> Any:
    """Train the tokenizer on the text of generated transcripts (marks cut out, as they are tokens of their own)."""
    from gyre_hpc.policy import tokenizer as tokenizers

    marks = re.compile("|".join(re.escape(mark) for mark in (*tokenizers.SPECIAL, *tokenizers.MARKS)))
    texts: list[str] = []
    render = _renderer(tokenizers.TEMPLATE.read_text())
    for _ in range(2000):
        for conversation in transcripts.demonstrate(rng, recipe.habits, rng.choice(recipe.difficulties)):
            texts += [piece for piece in marks.split(render(conversation)) if piece]
    return tokenizers.train(texts, recipe.vocabulary, recipe.window)


def _renderer(template: str) -> Callable[[Conversation], str]:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(template)
    tools = transcripts.tools_for_template()
    return lambda conversation: str(compiled.render(messages=conversation, tools=tools, add_generation_prompt=False))


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A fresh Qwen3 with tied embeddings, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.ffn,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.window,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        use_cache=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


def warm_up(recipe: Recipe, model: Any, tokenizer: Any, rng: random.Random, say: Progress) -> None:
    """Supervised warm-up on demonstrations and drills: only what the assistant says is a target."""
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    optimizers = [
        (torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.0), recipe.matrix_lr),
        (torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0), recipe.lr),
    ]
    batches = Encoder(tokenizer).batches(recipe, rng)
    model.train()
    for step in range(recipe.steps):
        rate = min(1.0, (step + 1) / recipe.warmup) * max(0.02, 1.0 - max(0.0, step / recipe.steps - 0.5) * 2.0)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
        ids, targets = next(batches)
        rows, places = torch.nonzero(targets, as_tuple=True)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[rows, places - 1])
        loss = torch.nn.functional.cross_entropy(logits, ids[rows, places])
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
        if step % 50 == 0 or step + 1 == recipe.steps:
            say(f"small model: warm-up step {step + 1} of {recipe.steps}, loss {float(loss.detach()):.3f}")
    model.eval()


class Encoder:
    """Turns conversations into token ids and marks of what the assistant says (its text and the end-of-turn token)."""

    def __init__(self, tokenizer: Any) -> None:
        self._core = tokenizer.backend_tokenizer
        self._render = _renderer(tokenizer.chat_template)
        self._start = self._core.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        self._end = tokenizer.eos_token_id
        self._pad = tokenizer.pad_token_id

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Token ids of the rendered conversation, and which of them are targets."""
        ids = self._core.encode(self._render(conversation), add_special_tokens=False).ids
        marks = [False] * len(ids)
        width = len(self._start)
        inside = False
        for at, token in enumerate(ids):
            if inside:
                marks[at] = True
                inside = token != self._end
            elif ids[at - width + 1 : at + 1] == self._start:
                inside = True
        return ids, marks

    def batches(self, recipe: Recipe, rng: random.Random) -> Iterator[tuple[Any, Any]]:
        """Endless batches (ids int64[B, L], targets bool[B, L]), right-padded; sequences of about the same length go together."""
        import torch

        while True:
            pool: list[tuple[list[int], list[bool]]] = []
            while len(pool) < recipe.batch * 8:
                difficulty = rng.choice(recipe.difficulties)
                if rng.random() < recipe.drills:
                    pool.append(self.encode(transcripts.drill(rng, difficulty)))
                else:
                    pool += [self.encode(c) for c in transcripts.demonstrate(rng, recipe.habits, difficulty)]
            pool = pool[: recipe.batch * 8]
            pool.sort(key=lambda item: len(item[0]))
            batches = [pool[at : at + recipe.batch] for at in range(0, len(pool), recipe.batch)]
            rng.shuffle(batches)
            for batch in batches:
                length = len(batch[-1][0])
                ids = torch.tensor([i + [self._pad] * (length - len(i)) for i, _ in batch])
                targets = torch.tensor([m + [False] * (length - len(m)) for _, m in batch])
                yield ids, targets


@contextmanager
def _alone(torch: Any, seed: int) -> Iterator[None]:
    """One thread and a random state of our own, restored afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
