"""TRL's trainers, unmodified, with the model compiled in place: ``pip install trl peft``, then
``pytest -m slow tests/test_trl.py``."""

from __future__ import annotations

import pytest
import tiny
import torch
import trainers
from trainers import assert_same_curve, generated_outside, grpo, packed_runs

import fx_packing

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

STEPS = 10


def compiled(model, what: str, **options):
    """`model`, with its backbone or the whole of it compiled in place."""
    part = model.model if what == "backbone" else model
    part.compile(backend="grpo_pack", options={"inner": "aot_eager"} | options)
    return model


KINDS = {
    "as it comes": {},  # gradient checkpointing, non-reentrant
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "no checkpointing": {"gradient_checkpointing": False},
    "accumulation, old log-probs": {"gradient_accumulation_steps": 2, "num_iterations": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ("backbone", "whole model"))
def test_grpo_is_the_same_run(what, kind, tmp_path):
    if what == "whole model" and kind in ("reentrant", "accumulation, old log-probs"):
        pytest.skip("tried with the backbone")
    config = {"max_steps": STEPS} | KINDS[kind]
    want, saved, _ = grpo(tiny.build("llama"), tmp_path, **config)
    got, _, trainer = grpo(compiled(tiny.build("llama"), what), tmp_path, saved, **config)
    assert_same_curve(got, want)
    forwards = STEPS * trainer.args.gradient_accumulation_steps
    runs = packed_runs()
    assert set(runs) <= {"prefix", "varlen"} and sum(runs.values()) >= forwards
    assert runs["prefix"] > forwards // 2
    assert generated_outside() > STEPS * 10  # a call a token


def lora(**settings):
    """A LoRA model whose adapters are not zero, so that it differs from its base."""
    peft = pytest.importorskip("peft")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            tiny.build("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **config | settings)
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize(
    ("what", "reentrant", "beta"),
    (("backbone", False, 0.1), ("backbone", True, 0.0), ("whole model", False, 0.0)),
)
def test_grpo_with_lora_is_the_same_run(what, reentrant, beta, tmp_path):
    config = {
        "max_steps": STEPS, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, "beta": beta,
    }  # fmt: skip
    want, saved, _ = grpo(lora(), tmp_path, **config)
    model = lora()
    part = model.base_model.model.model if what == "backbone" else model
    part.compile(backend="grpo_pack", options={"inner": "aot_eager"})
    got, _, _ = grpo(model, tmp_path, saved, **config)
    assert_same_curve(got, want)
    runs = packed_runs()
    reference = STEPS if beta else 0  # the same model without its adapter scores the reference
    assert set(runs) <= {"prefix", "varlen"} and sum(runs.values()) == STEPS + reference
    if reentrant:  # its hook on the embeddings stays: the graph starts after them
        assert runs == {"varlen": STEPS}
        assert any("embeddings passed in need gradients" in (g.last.reason or "") for g in graphs())
    else:
        assert runs["prefix"] >= STEPS + reference - 1
    verdicts = [v for g in graphs() if g.rewritten for v in g.verifications]
    assert verdicts and all(v.passed for v in verdicts)
    if what == "backbone":
        assert generated_outside() > STEPS * 10


def graphs():
    return [g for g in fx_packing.report().graphs if g.last is not None]


# -- other losses ----------------------------------------------------------------------------------


def other(kind: str, folder, packed: bool, whole: bool = False) -> list:
    """Ten steps of TRL's trainer of that kind: what it logged."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    g = tiny.generator(3)
    starts = trainers.prompts(16)
    ends = [" " + trainers.words(int(torch.randint(3, 14, (), generator=g)), g) for _ in range(32)]
    pairs = {"chosen": ends[:16], "rejected": ends[16:]}
    whole_pairs = {k: [a + b for a, b in zip(starts, v, strict=True)] for k, v in pairs.items()}
    rows = {
        "DPO": {"prompt": starts} | pairs, "Reward": whole_pairs, "SFT": {"text": whole_pairs["chosen"]},
    }[kind]  # fmt: skip
    model, more = tiny.build("llama"), {}
    if kind == "Reward":
        model.config.num_labels = 1
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)
    if kind == "DPO":
        more["ref_model"] = tiny.build("llama", seed=1)
    if packed:
        for each in (model, *more.values()):
            compiled(each, "whole model" if whole else "backbone")
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], seed=0, save_strategy="no",
        disable_tqdm=True, logging_steps=1, learning_rate=1e-3, per_device_train_batch_size=4,
        max_steps=STEPS,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=Dataset.from_dict(rows),
        processing_class=trainers.tokenizer(), **more,
    )  # fmt: skip
    trainer.train()
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


@pytest.mark.parametrize(
    ("kind", "whole", "runs"),
    (
        ("DPO", False, {"prefix": 2 * STEPS}), ("DPO", True, {"prefix": 2 * STEPS}),
        ("SFT", False, {"varlen": STEPS}), ("Reward", False, {"prefix": STEPS}),
    ),
)  # fmt: skip
def test_other_trainers_are_the_same_run(kind, whole, runs, tmp_path):
    """DPO: prompts shared by chosen and rejected, policy and reference, each with a check of its own."""
    want = other(kind, tmp_path, packed=False)
    assert_same_curve(other(kind, tmp_path, packed=True, whole=whole), want)
    assert packed_runs() == runs


def test_a_whole_reward_model_is_refused_with_the_reason(tmp_path):
    want = other("Reward", tmp_path, packed=False)
    assert other("Reward", tmp_path, packed=True, whole=True) == want
    reasons = {g.reason for g in fx_packing.report().graphs}
    assert packed_runs() == {} and reasons
    assert all("argmax" in r and "model.model.compile" in r for r in reasons), reasons


def test_the_example_on_a_small_model(tmp_path, capsys, monkeypatch):
    import importlib.util
    from pathlib import Path

    words = trainers.tokenizer()
    words.chat_template = "{% for m in messages %}w5 {{ m['content'] }} w6 {% endfor %}w7"
    for part in (tiny.build("llama"), words):
        part.save_pretrained(tmp_path)
    examples = Path(__file__).parent.parent / "examples"
    monkeypatch.syspath_prepend(str(examples))
    spec = importlib.util.spec_from_file_location("grpo_trl", examples / "grpo_trl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--model", str(tmp_path), "--steps", "2"]) == 0
    assert "2 of 2 scoring forwards ran packed" in capsys.readouterr().out
