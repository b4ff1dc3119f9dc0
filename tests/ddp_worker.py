"""Run by `test_distributed.py` under torchrun: two ranks train one model with DDP, packed, on batches of
unlike sizes; each prints what it saw as a line of JSON."""

import contextlib
import json
import sys
from datetime import timedelta

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fx_packing

STEPS = 10


def batch_of(rank: int, step: int) -> tiny.Batch:
    """Other rows, columns and sharing on each rank: rank 0 has groups, rank 1 none."""
    if rank == 0:
        return tiny.Batch(*tiny.group_batch((5 + step, 9), 3, 8, seed=step)[:2])
    return tiny.batch("left", rows=4 + step % 5, length=20 + 3 * step, seed=100 + step)


def loss_of(model, batch: tiny.Batch) -> torch.Tensor:
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits.float()
    return (logits.logsumexp(-1) * batch.mask).sum() / batch.mask.sum()


def reference(rank: int, micro_batches: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after the same steps in one process, each row alone, and the losses of one rank."""
    model, curve = tiny.build("llama").train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS * micro_batches):
        for each in (0, 1):
            batch = batch_of(each, step)
            logits = tiny.per_row(model, *batch)
            loss = (logits.logsumexp(-1) * batch.mask).sum() / batch.mask.sum()
            (loss / 2).backward()
            if each == rank:
                curve.append(float(loss))
        if step % micro_batches == micro_batches - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), curve


def tell(rank: int, got: dict[str, torch.Tensor], curve: list[float], micro_batches: int = 1) -> None:
    """Print how far weights and losses are from the `reference`, and what ran."""
    want, wanted = reference(rank, micro_batches)
    error = max(float((p - want[n]).abs().max()) for n, p in got.items())
    off = max(abs(a - b) for a, b in zip(curve, wanted, strict=True))
    runs: dict[str, int] = {}
    for graph in fx_packing.report().graphs:
        for layout, times in graph.runs.items():
            runs[layout] = runs.get(layout, 0) + times
    reasons = [g.reason for g in fx_packing.report().graphs if g.reason]
    told = {"rank": rank, "error": max(error, off), "runs": runs, "reasons": reasons}
    print("RESULT " + json.dumps(told), flush=True)


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    if "split" not in how:
        torch._dynamo.config.optimize_ddp = False
    model = tiny.build("llama").train()
    options = {"inner": "aot_eager"}
    if "backbone" in how:
        model.model.compile(backend="grpo_pack", options=options)
    wrapped = DistributedDataParallel(model)
    if "outer" in how:
        wrapped.compile(backend="grpo_pack", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    micro_batches, curve = 1 + ("accumulates" in how), []
    for step in range(STEPS * micro_batches):
        falls_back = "falls back" in how and rank == 1 and step % 2
        last = step % micro_batches == micro_batches - 1
        with fx_packing.disabled() if falls_back else torch.enable_grad():
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = loss_of(wrapped, batch_of(rank, step))
                loss.backward()
        curve.append(float(loss))
        if last:
            optimizer.step()
            optimizer.zero_grad()
    tell(rank, model.state_dict(), curve, micro_batches)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
