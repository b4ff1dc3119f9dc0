"""Time and memory of one GRPO forward and backward, padded and packed, in one run on one GPU.

    python benchmarks/grpo_batches.py --out benchmarks/results/h200.json

Three batches at Qwen3-1.7B widths with random weights in bf16. The model's trunk gives hidden states;
the log-probabilities of the completions follow in tiles, the same code for every row of the table.
Padded is the trunk under plain Inductor; the packed rows are the same trunk under ``grpo_pack``.
Times are CUDA events, the best of several, after two runs that do not count (the first captures,
proves, compiles and checks; its seconds are given apart). Plans are forgotten before each run, so that
a packed one makes its own. Memory is the peak of torch's allocator. ``old_to_new`` is the largest
difference between log-probabilities with and without gradients, which old and new ones are, in nats.

``prefix+tiles`` is `per_token_logps` compiled whole, its tail in the graph's own tiles;
``prefix+one`` is the same with one tile of all tokens. ``+kept`` keeps plans, as
the old, reference and new passes of one step do, which share one. ``by_hand`` is the yardstick of
`by_hand.py`: shared prompts written by hand for these batches, the tree made before the time is taken.

``--ways`` and ``--batches`` choose rows; ``--out`` keeps the rows that it already holds of the same card
and versions, each with its date.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path
from types import SimpleNamespace

import by_hand
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import fx_packing
from fx_packing import runtime, tiles
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


def whole(function, model, ids, mask, keep):
    """The same with the model's own head and `per_token_logps`, compiled whole."""
    return function(model, ids, mask, keep)[mask[:, -keep:].bool()]


def after_trunk(trunk, model, ids, mask, keep):
    hidden = trunk(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    real = mask[:, -keep:].bool()
    return tail(hidden[:, -keep - 1 : -1][real], model.lm_head.weight, ids[:, -keep:][real])


def after_trunk_by_hand(trunk, model, tree):
    hidden = trunk(input_ids=tree.ids, position_ids=tree.positions, attention_mask=tree.mask, use_cache=False)
    return tail(hidden.last_hidden_state[0][tree.read], model.lm_head.weight, tree.targets)


def step(trunk, model, ids, mask, keep, backward, tree=None):
    """The log-probabilities of the completions, and with `backward` the gradients of their mean."""
    if tree is not None:
        logps = after_trunk_by_hand(trunk, model, tree)
    elif getattr(trunk, "whole", False):
        logps = whole(trunk.function, model, ids, mask, keep)
    else:
        logps = after_trunk(trunk, model, ids, mask, keep)
    if backward:
        logps.mean().backward()
        model.zero_grad(set_to_none=True)
    return logps.detach()


def measure(function, device, repeats):
    """``ms, GiB``: the best time and the peak memory of a call."""
    if device == "cpu":
        function()
        return float("nan"), float("nan")
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


def compile_trunk(model, options, device, by_hand_way=False):
    """The trunk of one way, compiled afresh: under plain Inductor if there are no options."""
    torch._dynamo.reset()
    fx_packing.reset()
    torch.compiler.set_stance("force_eager" if options is None and device == "cpu" else "default")
    model.set_attn_implementation("by_hand" if by_hand_way else "sdpa")
    if options is None:
        return torch.compile(model.model, dynamic=False)
    if options.pop("whole", False):
        function = torch.compile(fx_packing.per_token_logps, backend=grpo_pack, options=options)
        return SimpleNamespace(whole=True, function=function)
    return torch.compile(model.model, backend=grpo_pack, options=options)


def run(trunk, model, spec, repeats, device, kept=False):
    """One row of the table, and the log-probabilities that it found."""
    ids, mask, keep = build_batch(*spec, model.config.vocab_size, device)
    shape = len(ids), ids.numel()
    result = {"rows": len(ids), "columns": ids.shape[1], "real": int(mask.sum())}
    checked = len(verifications())
    tree, logps = None, None
    if model.config._attn_implementation == "by_hand":
        tree = by_hand.build_tree(ids, mask, keep, spec[1])
        result |= {"ran": "by hand", "kernel": "flex", "run": tree.tokens}
    for key, backward in (("forward", False), ("both", True)):

        def once(backward=backward):
            if not kept:
                runtime._plans.clear()
            return step(trunk, model, ids.clone(), mask.clone(), keep, backward, tree)

        with torch.set_grad_enabled(backward):
            began = time.perf_counter()
            last, logps = logps, once().cpu()  # waits for the GPU
            result[f"{key}_first_s"] = time.perf_counter() - began
            once()
            result[f"{key}_ms"], result["peak_gib"] = measure(once, device, repeats)
    result["old_to_new"] = float((logps - last).abs().max())  # without gradients, and in training
    ran = [g.last for g in fx_packing.report().graphs if g.last]
    ran = [r for r in ran if (r.rows, r.padded_tokens) == shape]
    if ran:  # none where the way is padded
        result |= {"ran": ran[-1].layout, "kernel": ran[-1].kernel, "run": ran[-1].run_tokens}
        result["verified"] = [
            {"gradients": v.gradients, "passed": v.passed, "error": v.max_error, "allowed": v.tolerance}
            for v in verifications()[checked:]
        ]
        if any(r.layout == "padded" for r in ran):
            print(fx_packing.report(), flush=True)
    return result, logps


def verifications():
    return [v for g in fx_packing.report().graphs for v in g.verifications]


def header(device, layers):
    card = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {
        "card": card, "torch": torch.__version__, "transformers": transformers.__version__,
        "layers": layers, "dtype": "bfloat16",
    }  # fmt: skip


def save(path, head, row):
    """Add a row to a file, in the place of an older one of the same way and batch."""
    found = json.loads(path.read_text()) if path.exists() else {}
    if {k: found.get(k) for k in head} != head:  # of another card or version
        found = {}
    rows = found.get("results", [])
    rows = [r for r in rows if (r["batch"], r["way"]) != (row["batch"], row["way"])] + [row]
    for r in rows:
        padded = next((p for p in rows if (p["batch"], p["way"]) == (r["batch"], "padded")), None)
        if padded:
            for key in ("forward_ms", "both_ms", "peak_gib"):
                r[f"{key.split('_')[0]}_ratio"] = round(padded[key] / r[key], 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head | found | {"results": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batches", default="short,mid,long")
    parser.add_argument("--ways", default="padded,varlen,prefix")
    parser.add_argument("--verify", default="first", help="the option of that name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to try the script on a CPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.toy else "cpu"
    head = header(device, args.layers)
    print(head, flush=True)
    model = build_model(2 if args.toy else args.layers, args.toy, device)
    first: dict[str, tuple[str, torch.Tensor]] = {}  # of each batch: the way measured first, its result
    for way in args.ways.split(","):
        layout, *details = way.split("+")
        options = None if way in ("padded", "by_hand") else {"layout": layout, "verify": args.verify}
        if "tiles" in details or "one" in details:  # the log-probabilities in the graph
            options["whole"] = True
            tiles._ELEMENTS = 1 << (62 if "one" in details else 28)
        if options and device == "cpu":
            options["inner"] = "aot_eager"
        trunk = compile_trunk(model, options, device, way == "by_hand")
        for batch in args.batches.split(","):
            spec = (TOY if args.toy else BATCHES)[batch]
            result, logps = run(trunk, model, spec, args.repeats, device, "kept" in details)
            result = {"batch": batch, "way": way, "date": datetime.date.today().isoformat(), **result}
            other, reference = first.setdefault(batch, (way, logps))
            if other != way:
                difference = (logps - reference).abs()
                result["logp_difference"] = {
                    "from": other, "mean": float(difference.mean()), "max": float(difference.max())
                }  # fmt: skip
            print(json.dumps(result), flush=True)
            if args.out:  # each time: a run that is cut short keeps what it measured
                save(args.out, head, result)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
