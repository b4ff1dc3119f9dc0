"""Run by `test_distributed.py` under torchrun: two ranks train one model sharded by FSDP2, on the batches of
`ddp_worker.py`, after a forward without gradients; each prints what it saw as a line of JSON."""

import sys
from datetime import timedelta

import tiny
import torch
import torch.distributed as dist
from ddp_worker import STEPS, batch_of, loss_of, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fx_packing


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    options = {"inner": "aot_eager"}
    model = tiny.build("llama").train()
    if "checkpointed" in how:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "compiled first" in how:
        model.model.compile(backend="grpo_pack", options=options)
    for part in model.model.layers if "layers" in how else ():
        fully_shard(part, mesh=mesh)
    if "backbone on its own" in how:
        fully_shard(model.model, mesh=mesh, reshard_after_forward=True)
    more = {}
    if "bf16" in how:
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, **more)
    run = model
    if "backbone" in how:
        model.model.compile(backend="grpo_pack", options=options)
    if "in place" in how:
        model.compile(backend="grpo_pack", options=options)
    if "wrapped" in how:
        run = torch.compile(model, backend="grpo_pack", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():  # leaves the root's parameters gathered
        loss_of(run, batch_of(rank, 0))
    curve = []
    for step in range(STEPS):
        falls_back = "falls back" in how and rank == 1 and step % 2
        with fx_packing.disabled() if falls_back else torch.enable_grad():
            loss = loss_of(run, batch_of(rank, step))
            loss.backward()
        curve.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    tell(rank, {name: p.full_tensor() for name, p in model.state_dict().items()}, curve)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
