"""A whole GRPO step in plain PyTorch, padded and packed side by side from the same start.

    python examples/grpo_step.py                       # a small random model, seconds
    python examples/grpo_step.py --model NAME_OR_PATH  # any causal LM of transformers

Each step samples a group of completions for each prompt, scores them (old and reference
log-probabilities), turns rewards into advantages within the group, and takes one optimiser step on the
clipped loss with a KL penalty (Shao et al., "DeepSeekMath", 2024, equations 3 and 4). The padded column
calls `fx_packing.per_token_logps` as it is; the packed one compiles it, and that is the only difference.
Both learn from the same completions, so that their numbers can be compared: the columns agree.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor

import fx_packing

PROMPTS, GROUP, PROMPT_LENGTH, ANSWER = 3, 4, 24, 16
CLIP, KL, RATE = 0.2, 0.04, 1e-3


def small_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
        )
    ).eval()  # fmt: skip


@torch.no_grad()
def rollouts(model: torch.nn.Module, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """ids and mask ``[PROMPTS * GROUP, PROMPT_LENGTH + ANSWER]``: prompts padded on the left, answers
    sampled token by token and padded on the right after the end-of-text token."""
    lengths = torch.randint(8, PROMPT_LENGTH + 1, (PROMPTS,), generator=generator)
    ids = torch.randint(3, 500, (PROMPTS, PROMPT_LENGTH), generator=generator)
    mask = (torch.arange(PROMPT_LENGTH) >= PROMPT_LENGTH - lengths[:, None]).long()
    ids, mask = (t.repeat_interleave(GROUP, 0) for t in (ids * mask, mask))
    going = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(ANSWER):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits[:, -1]
        logits[:, 2] += 3.0  # so that answers end, at different lengths
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0] * going
        ids, mask = torch.cat([ids, drawn[:, None]], 1), torch.cat([mask, going.long()[:, None]], 1)
        going = going & (drawn != 2)
    return ids, mask


def rewards(ids: Tensor, mask: Tensor) -> Tensor:
    """``[B]``: the share of an answer's tokens that are even numbers. Any function of the answers will do."""
    answers, real = ids[:, -ANSWER:], mask[:, -ANSWER:]
    return ((answers % 2 == 0) * real).sum(1) / real.sum(1).clamp_min(1)


def advantages(reward: Tensor) -> Tensor:
    """``[B, 1]``: how much better than its group, in standard deviations of the group."""
    groups = reward.view(PROMPTS, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()[:, None]


def step(logps, model, optimizer, reference: Tensor, ids: Tensor, mask: Tensor) -> dict[str, float]:
    """One optimiser step. `logps` is `fx_packing.per_token_logps`, compiled or not."""
    real = mask[:, -ANSWER:]
    with torch.no_grad():
        old = logps(model, ids, mask, ANSWER)
    new = logps(model, ids, mask, ANSWER)
    ratio = (new - old).exp()
    advantage = advantages(rewards(ids, mask))
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    kl = (reference - new).exp() - (reference - new) - 1
    loss = ((KL * kl - gain) * real).sum() / real.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    worst = (ratio - 1).abs().max()
    return {"loss": loss.item(), "gradient norm": norm.item(), "largest |ratio - 1|": worst.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal LM of transformers; a small random one if left out")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--inner", default="aot_eager", help="compiler of the packed graph")
    args = parser.parse_args()
    if args.model:
        from transformers import AutoModelForCausalLM

        start = AutoModelForCausalLM.from_pretrained(args.model).eval()
    else:
        start = small_model()
    packed_logps = torch.compile(
        fx_packing.per_token_logps, backend="grpo_pack", options={"inner": args.inner}, dynamic=True
    )
    columns = {}
    for name, logps in (("padded", fx_packing.per_token_logps), ("packed", packed_logps)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        columns[name] = (logps, model, optimizer)
    generator = torch.Generator().manual_seed(1)
    print(f"{'step':4} {'':22} {'padded':>12} {'packed':>12} {'difference':>12}")
    for number in range(args.steps):
        ids, mask = rollouts(columns["padded"][1], generator)
        found = {}
        for name, (logps, model, optimizer) in columns.items():
            with torch.no_grad():
                reference = logps(start, ids, mask, ANSWER)
            found[name] = step(logps, model, optimizer, reference, ids, mask)
        for key in ("loss", "gradient norm", "largest |ratio - 1|"):
            a, b = found["padded"][key], found["packed"][key]
            print(f"{number:<4} {key:22} {a:12.6f} {b:12.6f} {abs(a - b):12.1e}")
    print()
    print(fx_packing.report())


if __name__ == "__main__":
    main()
