"""Log-probs of a batch's targets without the [targets, vocabulary] tensor: the head sees a few targets at a time.

A row of an agent has tens of thousands of targets and a vocabulary 150,000 entries: their logits in float32, and what log-softmax and its
gradient add, would be the largest tensors of a step by far. So the model's body runs once, and what comes after it, the head, is run for
chunks of targets whose float32 logits fill `HEAD_BYTES`; nothing of a chunk is kept, the backward computes it again.

Invariants
- "The head" is whatever the model does from its output embeddings on (scaling, soft caps): the model's own `forward` is run, with its body
  answering at once and the head given the chunk's hidden states. A model that calls its head otherwise is refused with ValueError.
- Values and gradients are those of one chunk, to rounding: a target's logits depend on its own hidden state alone, and gradients of the
  head's weights are added up in float32 whatever their dtype is, and rounded once.
- Where all targets fit into one chunk the logits are kept, and nothing is computed twice.
- Collectives that a sharded model runs in its body are as many for any number of chunks: chunks go past the hooks of the model and of its
  body. The head's own weights must be whole from the forward to the end of the backward, as FSDP2 leaves those of a root module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

HEAD_BYTES = 256 << 20
"""Of one chunk's float32 logits. Three to five times as much lives for a moment: the model's own dtype, log-softmax, its gradient."""

Score = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Hidden states [C, H] and the tokens that follow them -> what `_scored` gives."""


def target_logprobs(
    model: Any, ids: torch.Tensor, row: torch.Tensor, position: torch.Tensor, temperature: float = 0.0, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32[N] nats of the tokens at (row, position), each after those before it; their entropies' sum in nats, without gradient).

    `ids` int64[R, L], right-padded; `position` >= 1; `temperature` by which logits are divided (0: 1); `chunk`: most targets whose logits
    live at once (None: what `HEAD_BYTES` hold). Raises ValueError for a model that calls its head in a way we don't know.
    """
    count = len(row)
    size = chunk if chunk is not None else max(1, HEAD_BYTES // (4 * int(model.config.get_text_config(decoder=True).vocab_size)))
    tokens = ids[row, position]
    kept = count if count <= size else 1  # one, that the model has something to do until its end
    with _watched(model, row, position - 1, kept) as seen:
        logits = model(input_ids=ids, use_cache=False).logits
    if seen.hidden is None or logits.shape[:-1] != (1, kept):
        raise ValueError(f"{type(model).__name__} gave logits {tuple(logits.shape)} for {kept} targets")
    if kept == count:
        return _scored(logits[0], tokens, temperature)
    tail = _Tail(model, seen)

    def score(hidden: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _scored(tail(hidden), wanted, temperature)

    pieces = -(-count // size)
    weights = [p for p in model.get_output_embeddings().parameters() if p.requires_grad]
    logprobs, entropy = _Chunked.apply(score, -(-count // pieces), seen.hidden, tokens, *weights)
    return logprobs, entropy


def _scored(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [C, V]: log-probs of `tokens` float32[C], and the distributions' entropies summed."""
    logits = logits.float()
    if temperature > 0.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        detached = distribution.detach()
        entropy = -detached.exp().mul_(detached).nan_to_num_().sum()  # 0 * -inf is 0 here
    return distribution.gather(1, tokens.unsqueeze(1)).squeeze(1), entropy


class _Chunked(torch.autograd.Function):
    """`score` over `size` targets at a time, computed again in the backward.

    Instead of `torch.utils.checkpoint` for each chunk, because that adds the chunks' gradients of the head's weights up in their own dtype:
    dozens of roundings to bfloat16 of one sum.
    """

    @staticmethod
    def forward(
        ctx: Any, score: Score, size: int, hidden: torch.Tensor, tokens: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = zip(*(score(h, t) for h, t in zip(hidden.split(size), tokens.split(size), strict=True)), strict=True)
        ctx.score, ctx.size, ctx.weights = score, size, weights
        ctx.save_for_backward(hidden, tokens)
        entropy = torch.stack(entropies).sum()
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor, _of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, tokens = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        pieces = (tensor.split(ctx.size) for tensor in (hidden, tokens, of_logprobs, of_hidden))
        for part, wanted, outer, into in zip(*pieces, strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                logprobs, _ = ctx.score(leaf, wanted)
            of_leaf, *of_weights = torch.autograd.grad(logprobs, (leaf, *ctx.weights), outer)
            into.copy_(of_leaf)
            for sum_, gradient in zip(sums, of_weights, strict=True):
                sum_.add_(gradient)
        return None, None, of_hidden, None, *(s.to(w.dtype) for s, w in zip(sums, ctx.weights, strict=True))


class _Seen:
    """What passed in one forward: `hidden` [N, H] before the head, the body and its answer."""

    def __init__(self) -> None:
        self.hidden: torch.Tensor | None = None
        self.body: Any = None
        self.answer: Any = None


@contextlib.contextmanager
def _watched(model: Any, row: torch.Tensor, before: torch.Tensor, kept: int) -> Iterator[_Seen]:
    """Meanwhile the head sees the hidden states at (row, before) only, and of them the first `kept`."""
    seen = _Seen()

    def only_targets(_head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *rest = args
        seen.hidden = hidden[row, before]
        return (seen.hidden[:kept].unsqueeze(0), *rest)

    def answered(body: torch.nn.Module, _args: Any, answer: Any) -> None:
        if _hidden(answer) is not None:
            seen.body, seen.answer = body, answer  # the outermost answers last

    head = model.get_output_embeddings()
    parts = {id(part): part for part in (model.get_decoder(), *model.children())}
    bodies = [part for part in parts.values() if all(inner is not head for inner in part.modules())]
    hooks = [head.register_forward_pre_hook(only_targets), *(body.register_forward_hook(answered) for body in bodies)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class _Tail:
    """What a model does from its head on, for given hidden states."""

    def __init__(self, model: Any, seen: _Seen) -> None:
        if seen.body is None:
            raise ValueError(f"{type(model).__name__} calls no body whose hidden states we know, so its head can't be run for some targets")
        self._model, self._body = model, seen.body
        self._answer = _shortened(seen.answer)
        self._ids = torch.zeros((1, 1), dtype=torch.int64, device=seen.hidden.device if seen.hidden is not None else None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [C, V] of `hidden` [C, H]."""

        def chunk(_head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (hidden.unsqueeze(0), *args[1:])

        hook = self._model.get_output_embeddings().register_forward_pre_hook(chunk)
        own = self._body.__dict__.get("forward")
        self._body.forward = lambda *_args, **_kwargs: self._answer
        try:
            logits: torch.Tensor = self._model.forward(input_ids=self._ids, use_cache=False).logits
        finally:
            hook.remove()
            if own is None:
                del self._body.forward
            else:
                self._body.forward = own
        if logits.shape[:-1] != (1, len(hidden)):
            raise ValueError(f"{type(self._model).__name__} gave logits {tuple(logits.shape)} for {len(hidden)} targets")
        return logits[0]


def _hidden(answer: Any) -> torch.Tensor | None:
    """The hidden states in what a body answered; None: there are none that we know."""
    found = answer.get("last_hidden_state") if isinstance(answer, dict) else answer[0] if isinstance(answer, tuple) and answer else None
    return found if isinstance(found, torch.Tensor) and found.dim() == 3 else None


def _shortened(answer: Any) -> Any:
    """The same with hidden states of one position: what reads them is replaced at the head."""
    hidden = _hidden(answer)
    assert hidden is not None
    short = hidden[:1, :1].detach().clone()  # a view would keep all of it
    return (short, *answer[1:]) if isinstance(answer, tuple) else type(answer)(**{**answer, "last_hidden_state": short})
