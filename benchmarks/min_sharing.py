"""How much must rows share before ``layout="prefix"`` pays? Both layouts over the same batches, on one GPU.

    python benchmarks/min_sharing.py --out benchmarks/results/min_sharing-h200.json

Chains run on FlashAttention, trees on FlexAttention, which is slower a token; so computing a short
prompt once may not make up for it. Batches of 16 rows (2 prompts, 8 completions each), in which the
prompt's length sets the sharing: tokens of ``varlen`` over tokens of ``prefix``. The model is the trunk
of grpo_batches.py (Qwen3-1.7B widths, bf16, random weights); the gradient of its output is random. All
batches have one padded shape, so that nothing but T differs. Both layouts are timed by turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

import torch
from grpo_batches import build_model, header, measure

import fx_packing
from fx_packing import runtime
from fx_packing.backend import grpo_pack

ROWS, GROUP = 16, 8
SHARING = (1.0, 1.05, 1.1, 1.2, 1.4)
ROW_TOKENS = (768, 2560)  # on average, prompt and completion


def build_batch(sharing, mean, columns, vocabulary, device):
    """Completions of 0.5 to 1.5 times their mean, prompts as long as `sharing` wants."""
    completion = mean / (1 + GROUP * (sharing - 1) / (GROUP - sharing)) if GROUP > sharing else mean
    prompt = max(0, round(mean - completion))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (ROWS, columns), generator=generator)
    ids[:, :prompt] = ids[torch.arange(ROWS) // GROUP * GROUP, :prompt]
    lengths = prompt + completion * torch.linspace(0.5, 1.5, ROWS)
    mask = torch.arange(columns) < lengths.round()[:, None]
    return ids.to(device), mask.long().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--verify", default="first", help="the option of that name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script on a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.toy else "cpu"
    row_tokens = (20, 40) if args.toy else ROW_TOKENS
    model = build_model(2 if args.toy else args.layers, args.toy, device)
    others = {"verify": args.verify} | ({"inner": "aot_eager"} if device == "cpu" else {})
    layouts = ("varlen", "prefix")
    trunks = {
        layout: torch.compile(model.model, backend=grpo_pack, options={"layout": layout, **others})
        for layout in layouts
    }
    columns, size = int(1.5 * max(row_tokens)) + 8, model.config.hidden_size
    direction = torch.randn(ROWS, columns, size, device=device, dtype=torch.bfloat16)
    head = header(device, args.layers) | {"date": datetime.date.today().isoformat(), "results": []}
    print(head, flush=True)
    for mean in row_tokens:
        for sharing in SHARING:
            ids, mask = build_batch(sharing, mean, columns, model.config.vocab_size, device)
            result = {"row_tokens": mean}
            for key, backward in (("forward_ms", False), ("both_ms", True)):

                def step(layout, ids=ids, mask=mask, backward=backward):
                    runtime._plans.clear()  # every run makes its own plan
                    batch = {"input_ids": ids.clone(), "attention_mask": mask.clone()}
                    with torch.set_grad_enabled(backward):
                        out = trunks[layout](**batch, use_cache=False).last_hidden_state
                    if backward:
                        out.backward(direction)
                        model.zero_grad(set_to_none=True)

                for layout in layouts:
                    step(layout)  # the first of all captures, compiles and checks
                    step(layout)
                    last = [g.last for g in fx_packing.report().graphs if g.last and g.last.layout == layout]
                    assert last, str(fx_packing.report())
                    result[f"{layout}_tokens"] = last[-1].run_tokens
                for repeat in range(2):
                    for layout in layouts:
                        took, _ = measure(lambda layout=layout: step(layout), device, args.repeats // 2)
                        name = f"{layout}_{key}"
                        result[name] = took if repeat == 0 else min(took, result[name])
                result[f"faster_{key[:-3]}"] = result[f"varlen_{key}"] / result[f"prefix_{key}"]
            result["sharing"] = result["varlen_tokens"] / result["prefix_tokens"]
            if any("padded" in g.runs for g in fx_packing.report().graphs):
                raise SystemExit(f"a batch ran padded:\n{fx_packing.report()}")
            head["results"].append(result)
            print(json.dumps(result), flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(head, indent=1) + "\n")


if __name__ == "__main__":
    main()
