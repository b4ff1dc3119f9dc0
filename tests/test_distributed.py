"""Two processes on the CPU: ``pytest -m slow tests/test_distributed.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def ranks(how: str, worker: str = "ddp_worker.py") -> list[dict]:
    """What each rank of the worker printed. A dead-lock ends in the timeout."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / worker), how],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"},
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    told = done.stdout.split("RESULT ")[1:]  # both may stand on one line
    assert len(told) == 2, done.stdout + done.stderr
    found = [json.JSONDecoder().raw_decode(text)[0] for text in told]
    return sorted(found, key=lambda rank: rank["rank"])


@pytest.mark.parametrize("how", ("backbone", "outer"))
def test_ranks_of_unlike_sizes_and_layouts(how):
    first, second = ranks(how)
    assert first["runs"] == {"prefix": 10} and second["runs"] == {"varlen": 10}
    assert first["error"] < 1e-5 and second["error"] < 1e-5 and not first["reasons"]


@pytest.mark.parametrize("how", ("backbone", "outer"))
def test_gradients_are_accumulated_without_synchronising(how):
    first, second = ranks(f"{how}, accumulates")
    assert first["runs"] == {"prefix": 20} and second["runs"] == {"varlen": 20}
    assert first["error"] < 1e-5 and second["error"] < 1e-5 and not first["reasons"]


def test_one_rank_falls_back():
    first, second = ranks("backbone, one falls back")
    assert first["runs"] == {"prefix": 10} and second["runs"] == {"varlen": 5, "padded": 5}
    assert first["error"] < 1e-5 and second["error"] < 1e-5


def test_a_split_graph_is_refused_with_the_remedy():
    for found in ranks("outer, split"):
        assert set(found["runs"]) == {"padded"} and found["error"] < 1e-5
        assert all("optimize_ddp = False" in reason for reason in found["reasons"])


@pytest.mark.parametrize("how", ("in place", "wrapped", "backbone on its own", "compiled first"))
def test_a_model_that_fsdp_shards_as_a_whole_is_packed(how):
    """One rank falls back at every second step, and takes part in the same collectives."""
    first, second = ranks(f"{how}, one falls back", "fsdp_worker.py")
    assert first["runs"] == {"prefix": 11} and second["runs"] == {"varlen": 6, "padded": 5}
    assert first["error"] < 1e-5 and second["error"] < 1e-5 and not first["reasons"]


def test_fsdp_with_checkpointing():
    first, second = ranks("in place, checkpointed", "fsdp_worker.py")
    assert first["runs"] == {"prefix": 11} and second["runs"] == {"varlen": 11}
    assert first["error"] < 1e-5 and second["error"] < 1e-5 and not first["reasons"]


def test_fsdp_in_mixed_precision():
    first, second = ranks("in place, bf16", "fsdp_worker.py")
    assert first["runs"] == {"prefix": 11} and second["runs"] == {"varlen": 11} and not first["reasons"]
    assert first["error"] < 0.02 and second["error"] < 0.02  # of losses near 5, against float32


@pytest.mark.parametrize("how", ("in place", "wrapped", "backbone"))
def test_layers_that_fsdp_shards_are_refused_with_the_remedy(how):
    for found in ranks(f"{how}, layers", "fsdp_worker.py"):
        assert set(found["runs"]) == {"padded"} and found["error"] < 1e-5
        assert found["reasons"] and all("call fully_shard on" in reason for reason in found["reasons"])
