"""Time and memory of one GRPO forward and backward, padded and packed, in one run on one GPU.

    python benchmarks/grpo_batches.py --out benchmarks/results/h200.json

Three batches at Qwen3-1.7B widths with random weights in bf16. The model's trunk gives hidden states;
the log-probabilities of the completions follow in tiles, the same code for every row of the table.
Padded is the trunk under plain Inductor; the packed rows are the same trunk under ``grpo_pack``.
Times are CUDA events, the best of several; memory is the peak of torch's allocator.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import fx_packing
from fx_packing.backend import grpo_pack

VOCABULARY = 151_936
BATCHES = {  # prompts' lengths, completions a prompt, mean and largest length of a completion
    "short": ([64, 110, 150, 200], 8, 300, 1024),
    "mid": ([800, 1100], 8, 400, 1024),
    "long": ([4096], 16, 256, 512),
}
TOY = {"short": ([12, 20], 3, 9, 16), "mid": ([30], 3, 9, 16), "long": ([60], 4, 9, 16)}


def build_model(layers: int, toy: bool, device: str):
    sizes = dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)
    if toy:
        sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    config = Qwen3Config(
        vocab_size=997 if toy else VOCABULARY, num_hidden_layers=layers, head_dim=16 if toy else 128,
        tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def build_batch(prompts, group, mean, most, vocabulary, device):
    """Lengths from an exponential distribution, cut at `most`; one completion has that length."""
    generator = torch.Generator().manual_seed(0)
    before, ids, mask = max(prompts), [], []
    for number, prompt in enumerate(prompts):
        shared = torch.randint(3, vocabulary, (prompt,), generator=generator)
        for member in range(group):
            draw = float(torch.rand((), generator=generator))
            length = int(min(most, max(1, -mean * torch.log1p(torch.tensor(-draw)))))
            length = most if (number, member) == (0, 0) else length
            row, real = torch.zeros(2, before + most, dtype=torch.int64)
            row[before - prompt : before] = shared
            row[before : before + length] = torch.randint(3, vocabulary, (length,), generator=generator)
            real[before - prompt : before + length] = 1
            ids.append(row)
            mask.append(real)
    return torch.stack(ids).to(device), torch.stack(mask).to(device), most


def tail(hidden, weight, targets, tile=2048):
    """Log-probabilities of `targets`, tile by tile, logits recomputed in the backward."""

    def part(h, t):
        return -F.cross_entropy((h @ weight.T).float(), t, reduction="none")

    parts = []
    for h, t in zip(hidden.split(tile), targets.split(tile), strict=True):
        parts.append(checkpoint(part, h, t, use_reentrant=False) if torch.is_grad_enabled() else part(h, t))
    return torch.cat(parts)


def step(trunk, model, ids, mask, keep, backward):
    hidden = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    real = mask[:, -keep:].bool()
    logps = tail(hidden[:, -keep - 1 : -1][real], model.lm_head.weight, ids[:, -keep:][real])
    if backward:
        (logps.mean()).backward()
        model.zero_grad(set_to_none=True)
    return logps.detach()


def measure(function, device, repeats):
    if device == "cpu":
        function()
        return float("nan"), 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times), torch.cuda.max_memory_allocated() / 2**30


def run(name, spec, model, options, repeats, device):
    ids, mask, keep = build_batch(*spec, model.config.vocab_size, device)
    torch._dynamo.reset()
    fx_packing.reset()
    if options is None:
        trunk = torch.compile(model.model, dynamic=False)
    else:
        trunk = torch.compile(model.model, backend=grpo_pack, options=options)
    result = {"batch": name, "options": options, "rows": len(ids), "columns": ids.shape[1]}
    with torch.no_grad():
        forward = lambda: step(trunk, model, ids, mask, keep, False)  # noqa: E731
        forward()
        logps = forward()
        result["forward_ms"], _ = measure(forward, device, repeats)
    both = lambda: step(trunk, model, ids, mask, keep, True)  # noqa: E731
    both()
    both()
    result["both_ms"], result["peak_gib"] = measure(both, device, repeats)
    if options is not None:
        graph = fx_packing.report().graphs[-1]
        assert graph.rewritten and graph.last.layout != "padded", str(fx_packing.report())
        result |= {"layout": graph.last.layout, "kernel": graph.last.kernel}
        result |= {"real": graph.last.real_tokens, "run": graph.last.run_tokens}
        result["verified"] = [v.passed for g in fx_packing.report().graphs for v in g.verifications]
    return result, logps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batches", default="short,mid,long")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script on a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.toy else "cpu"
    inner = {"inner": "aot_eager"} if device == "cpu" else {}
    ways = [None, {"layout": "varlen"}, {"layout": "prefix"}]
    card = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    head = {
        "card": card, "torch": torch.__version__, "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(), "layers": args.layers, "dtype": "bfloat16",
    }  # fmt: skip
    print(head, flush=True)
    model = build_model(2 if args.toy else args.layers, args.toy, device)
    results = []
    for name in args.batches.split(","):
        padded = logps = None
        for way in ways:
            options = None if way is None else {**way, **inner}
            if options is None and device == "cpu":
                torch.compiler.set_stance("force_eager")
            spec = (TOY if args.toy else BATCHES)[name]
            result, got = run(name, spec, model, options, args.repeats, device)
            torch.compiler.set_stance("default")
            padded, logps = (result, got) if padded is None else (padded, logps)
            result["max_logp_difference"] = float((got - logps).abs().max())
            result["mean_logp_difference"] = float((got - logps).abs().mean())
            for key in ("forward_ms", "both_ms", "peak_gib"):
                result[f"{key.split('_')[0]}_ratio"] = padded[key] / max(result[key], 1e-9)
            results.append(result)
            print(json.dumps(result), flush=True)
            if args.out:  # each time: a run that is cut short keeps what it measured
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(head | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
