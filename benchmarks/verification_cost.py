"""What a check adds to the execution that it checks, in padded forward passes, in one run on one GPU.

    python benchmarks/verification_cost.py --out benchmarks/results/verification_cost.json
    python benchmarks/verification_cost.py --cpu                 # ratios alone, on a small model

The model's trunk at Qwen3-1.7B widths with random weights in bf16, on the three batches of
``grpo_batches.py``. With ``verify="always"`` each call is checked, with ``"never"`` none is: the
difference, compiles done, is what a first execution pays for its check. It is given in passes of the
same trunk under plain Inductor, forward without gradients and forward and backward in training, and
of the same trunk uncompiled, which is how the check evaluates its reference.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from grpo_batches import BATCHES, TOY, build_batch, build_model, compile_trunk, header, measure, verifications
from transformers import LlamaConfig, LlamaForCausalLM

import fx_packing
from fx_packing.backend import grpo_pack


def once(trunk, ids, mask, backward):
    with torch.set_grad_enabled(backward):
        hidden = trunk(input_ids=ids.clone(), attention_mask=mask.clone(), use_cache=False)[0]
        if backward:
            hidden[mask.bool()].float().square().mean().backward()


def seconds(function, repeats: int) -> float:
    """The best time of a call on a CPU: only ratios of these mean anything."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def on_cpu(repeats: int) -> None:
    """float32, 6 layers of width 256, 8 prompts of 10 to 60 tokens with 4 completions of up to 60."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids, mask, _ = build_batch([10, 17, 24, 31, 38, 45, 52, 60], 4, 30, 60, 4096, "cpu")
    found: dict[str, float] = {}
    for layout in ("varlen", "prefix"):
        for way in ("padded", "never", "always"):
            options = {"layout": layout, "verify": way} if way != "padded" else {"layout": "padded"}
            torch._dynamo.reset()
            fx_packing.reset()
            trunk = torch.compile(model.model, backend=grpo_pack, options=options | {"inner": "aot_eager"})
            for key, backward in (("forward", False), ("both", True)):
                once(trunk, ids, mask, backward)
                found[f"{way} {key}"] = seconds(lambda: once(trunk, ids, mask, backward), repeats)  # noqa: B023
        assert way == "always" and all(v.passed for v in verifications())
        for key in ("forward", "both"):
            cost = (found[f"always {key}"] - found[f"never {key}"]) / found[f"padded {key}"]
            print(f"{layout}, {key}: a check costs {cost:.2f} padded passes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", default="short,mid,long")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script on a CPU")
    parser.add_argument("--cpu", action="store_true", help="a small model on a CPU, ratios alone")
    args = parser.parse_args()
    if args.cpu:
        return on_cpu(args.repeats)
    device = "cuda" if torch.cuda.is_available() and not args.toy else "cpu"
    head, rows = header(device, args.layers) | {"layout": args.layout}, []
    model = build_model(2 if args.toy else args.layers, args.toy, device)
    for batch in args.batches.split(","):
        spec = (TOY if args.toy else BATCHES)[batch]
        ids, mask, _ = build_batch(*spec, model.config.vocab_size, device)
        row = {"batch": batch}
        for way in ("padded", "eager", "never", "always"):
            options = {"layout": args.layout, "verify": way} | ({"inner": "aot_eager"} if args.toy else {})
            trunk = model.model if way == "eager" else None
            trunk = trunk or compile_trunk(model, None if way == "padded" else options, device)
            for key, backward in (("forward", False), ("both", True)):
                try:
                    once(trunk, ids, mask, backward)  # compiles
                    row[f"{way}_{key}_ms"], row[f"{way}_{key}_gib"] = measure(
                        lambda: once(trunk, ids, mask, backward), device, args.repeats  # noqa: B023
                    )
                except torch.OutOfMemoryError:
                    row[f"{way}_{key}_ms"] = row[f"{way}_{key}_gib"] = None
                model.zero_grad(set_to_none=True)
        found = verifications()
        row["checks"], row["passed"] = len(found), sum(v.passed for v in found)
        for key in ("forward", "both"):
            cost = row[f"always_{key}_ms"] - row[f"never_{key}_ms"]
            for way in ("padded", "eager"):
                one = row[f"{way}_{key}_ms"]
                row[f"check_in_{way}_passes_{key}"] = one and round(cost / one, 2)
        print(json.dumps(row), flush=True)
        rows.append(row)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(head | {"results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
