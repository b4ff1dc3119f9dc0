"""Score a tree of rollouts three times: padded, and packed as chains and as the tree that it is.

    python examples/tree_rollouts.py

One system prompt, several questions, several first turns to each, several answers to each turn: the rows
of such a batch repeat most of their tokens. Layout "prefix" finds the tree in the padded batch by itself
and computes each of its tokens once. The model is a tiny Llama with random weights: only the numbers'
agreement counts here. The exit code is 0 only if the packed graphs really ran and all agree.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

VOCABULARY = 512
LEVELS = (  # of the tree: what a piece is called, how many a parent has, how long they are
    ("system prompt", 1, (40, 40)),
    ("question", 3, (12, 30)),
    ("turn", 2, (10, 25)),
    ("answer", 3, (8, 40)),
)
PROMPT = 2  # this many levels are given, the others were sampled
TOLERANCE = 1e-4  # of a log-probability, and of a gradient relative to its norm


@dataclass
class Piece:
    """A piece of text, and what was said after it."""

    tokens: list[int]
    children: list[Piece] = field(default_factory=list)


@dataclass
class Batch:
    """What a trainer hands to the model: right-padded rows, and which of their tokens were sampled."""

    input_ids: Tensor  #      [B, L]
    attention_mask: Tensor  # [B, L]
    sampled: Tensor  #        [B, L]


def grow(generator: torch.Generator, level: int = 0) -> list[Piece]:
    """All pieces that follow one piece of the level above."""
    if level == len(LEVELS):
        return []
    _, count, (low, high) = LEVELS[level]
    pieces = []
    for _ in range(count):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        tokens = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        pieces.append(Piece(tokens, grow(generator, level + 1)))
    return pieces


def rows_of(piece: Piece, level: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Every way from here to a leaf: its tokens, and whether each was sampled."""
    own = [level >= PROMPT] * len(piece.tokens)
    below = [row for child in piece.children for row in rows_of(child, level + 1)] or [([], [])]
    return [(piece.tokens + tokens, own + sampled) for tokens, sampled in below]


def build_batch(rows: list[tuple[list[int], list[bool]]], generator: torch.Generator) -> Batch:
    """The rows in any order, as a data loader may give them, padded on the right."""
    shape = len(rows), max(len(tokens) for tokens, _ in rows)
    ids, mask, sampled = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for b, place in enumerate(torch.randperm(len(rows), generator=generator).tolist()):
        tokens, own = rows[place]
        ids[b, : len(tokens)] = torch.tensor(tokens)
        mask[b, : len(tokens)] = 1
        sampled[b, : len(tokens)] = torch.tensor(own)
    return Batch(ids, mask, sampled)


def build_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1,  # the default of 0.02 leaves attention close to uniform
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


# ------------------------------------------------------------------------------------------------


def score(forward, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens, and their sum weighted as advantages would do it."""
    logits = forward(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logps = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    logps = logps.where(batch.sampled[:, 1:].bool(), 0.0)
    return logps, (logps.sum(1) * torch.linspace(-1, 1, len(logps))).sum() / batch.sampled.sum()


def evaluate(model, forward, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and every parameter's gradient."""
    logps, objective = score(forward, batch)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return logps.detach(), dict(zip(names, torch.autograd.grad(objective, parameters), strict=True))


def row_by_row(model):
    """A forward that never sees two rows, nor any padding, at once."""

    def forward(input_ids: Tensor, attention_mask: Tensor, **kwargs):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for b, (ids, real) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            logits[b, real] = model(input_ids=ids[real][None], **kwargs).logits[0]
        return SimpleNamespace(logits=logits)

    return forward


def difference(a, b) -> tuple[float, float]:
    """The largest difference of a log-probability, and of a gradient relative to its norm."""
    relative = ((a[1][n] - g).norm() / g.norm().clamp(min=1e-30) for n, g in b[1].items())
    return float((a[0] - b[0]).abs().max()), float(max(relative))


def draw(batch: Batch) -> None:
    """The forest as layout "prefix" stores it, one line a piece.

    A token sees those before it whose `end` lies beyond it, and its depth is its position.
    """
    from fx_packing.forest import make_plan

    plan = make_plan(batch.attention_mask.bool(), [batch.input_ids], layout="prefix")
    _, _, *runs = plan.segments().tolist()
    runs = [runs[i : i + 3] for i in range(0, len(runs), 3)]  # start, stop, number of the parent
    levels: list[int] = []
    say(f"{'stored':>9}  {'depth':>9}  {'end':>5}")
    for start, stop, parent in runs:
        level = levels[parent] + 1 if parent >= 0 else 0
        levels.append(level)
        depth, end = int(plan.depth[start]), int(plan.end[start])
        twigs = "|   " * (level - 1) + "|-- " * (level > 0)
        name = f"{LEVELS[level][0]}, {stop - start} tokens"
        say(f"{start:4}-{stop - 1:<4}  {depth:4}-{depth + stop - start - 1:<4}  {end:5}  {twigs}{name}")


def say(text: str = "") -> None:
    print(text, flush=True)


def main() -> int:
    import fx_packing

    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    (tree,) = grow(generator)
    batch = build_batch(rows_of(tree), generator)
    model = build_model()
    say(f"{len(batch.input_ids)} rows, which share their beginnings:\n")
    draw(batch)

    alone = evaluate(model, row_by_row(model), batch)
    say(f"\n{'':8} {'tokens':^20}   {'difference from each row alone':^30}")
    say(f"{'layout':8} {'padded':>6} {'real':>6} {'run':>6}   {'log-prob':>14} {'gradient':>14}")
    padded, real = batch.attention_mask.numel(), int(batch.attention_mask.sum())
    problems = []
    for layout in ("padded", "varlen", "prefix"):
        run, forward = padded, model
        if layout != "padded":
            options = {"layout": layout, "inner": "eager"}  # which compiles fastest, and runs slowest
            forward = torch.compile(model, backend="grpo_pack", options=options)
        logps, gradients = difference(evaluate(model, forward, batch), alone)
        if layout != "padded":
            last = fx_packing.report().graphs[-1].last
            run = last.run_tokens
            if last.layout != layout:
                problems.append(f"{layout}: ran {last.layout} instead ({last.reason})")
        if not (logps <= TOLERANCE and gradients <= TOLERANCE):  # also when one is NaN
            problems.append(f"{layout}: differs by more than {TOLERANCE}")
        say(f"{layout:8} {padded:6} {real:6} {run:6}   {logps:14.1e} {gradients:14.1e}")
    say(f"\nTook {time.perf_counter() - started:.0f} seconds, compiling included.")
    for problem in problems:
        say(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
