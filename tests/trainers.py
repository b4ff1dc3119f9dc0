"""What tests of trainers need: a tokenizer without files, prompts, a reward, and a GRPO run whose
completions are recorded or replayed. Importing it needs nothing beyond transformers."""

from __future__ import annotations

from typing import Any

import tiny
import torch

import fx_packing

GROUP = 4


def tokenizer() -> Any:
    """Words ``w3`` to ``w127`` are the ids 3 to 127 of `tiny`'s models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, tiny.VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def words(length: int, g: torch.Generator) -> str:
    """That many random words."""
    return " ".join(f"w{i}" for i in torch.randint(3, tiny.VOCAB, (length,), generator=g).tolist())


def prompts(number: int = 24) -> list[str]:
    """Prompts of 4 to 12 words."""
    g = tiny.generator(0)
    return [words(int(torch.randint(4, 13, (), generator=g)), g) for _ in range(number)]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs within a group."""
    return [len(set(c.split())) / 10 + sum(map(len, c.split())) % 7 / 7 for c in completions]


def grpo(model: Any, folder: Any, saved: list | None = None, **config: Any) -> tuple[list, list, Any]:
    """Train with TRL's GRPOTrainer, unmodified; returns what it logged, the completions, the trainer.

    With the `saved` completions of another run it still generates, and then trains on the saved ones:
    sampling is discrete, so rounding would give two runs different batches sooner or later.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    peft = config.pop("peft_config", None)
    settings = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "seed": 0,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 2 * GROUP, "num_generations": GROUP, "max_completion_length": 24,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=GRPOConfig(**settings | config), peft_config=peft,
        train_dataset=Dataset.from_dict({"prompt": prompts()}), processing_class=tokenizer(),
    )  # fmt: skip
    generate, kept, replay = trainer._generate_single_turn, [], iter(saved or [])

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        made = next(replay, made)
        kept.append(made)
        return made

    trainer._generate_single_turn = recorded
    trainer.train()
    logged = [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]
    return logged, kept, trainer


def assert_same_curve(got: list, want: list, tolerance: float = 2e-4) -> None:
    """Losses and gradient norms, step by step."""
    assert len(got) == len(want) > 0
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), (step, got, want)


def packed_runs() -> dict[str, int]:
    """How many calls ran in which layout, in graphs that can be packed; none of them was wrong."""
    runs: dict[str, int] = {}
    for graph in fx_packing.report().graphs:
        assert not any(v.max_error is not None and not v.passed for v in graph.verifications), str(graph)
        for layout, times in graph.runs.items() if graph.rewritten else ():
            runs[layout] = runs.get(layout, 0) + times
    return runs


def generated_outside() -> int:
    """How many calls with a KV cache ran past Dynamo; no other call did."""
    outside = fx_packing.report().outside
    assert all("KV cache" in o.why for o in outside), outside
    return sum(o.calls for o in outside)
