"""The examples run. (The quickstart needs the demo's model and minutes: see README.md.)"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tree_rollouts(capsys):
    assert load("tree_rollouts").main() == 0
    said = capsys.readouterr().out
    assert said.count("-- question") == 3 and said.count("-- turn") == 6 and said.count("-- answer") == 18
    stored = [int(n) for n in re.findall(r"(\d+) tokens\n", said)]
    layouts = {m[0]: int(m[1]) for m in re.findall(r"^(padded|varlen|prefix) +\d+ +\d+ +(\d+)", said, re.M)}
    assert layouts["prefix"] == sum(stored) < layouts["varlen"] < layouts["padded"]


def test_grpo_step(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo_step.py", "--steps", "2", "--inner", "eager"])
    load("grpo_step").main()
    said = capsys.readouterr().out
    rows = re.findall(r"^\d +(?:loss|gradient norm|largest \|ratio - 1\|) +(\S+) +(\S+) +(\S+)$", said, re.M)
    assert len(rows) == 6
    for padded, packed, difference in rows:
        assert abs(float(padded) - float(packed)) < 2e-5 and float(difference) < 2e-5
    assert all(float(row[1]) == 0 for row in rows[2::3])  # the ratio is 1 to the last bit
    assert "prefix: 2" in said and "runs as captured" not in said
