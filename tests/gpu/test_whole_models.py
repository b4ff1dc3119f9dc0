"""Whole models on the GPU: bf16 at the widths of Qwen3-0.6B and 1.7B, each kernel against each row alone.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import fx_packing
from fx_packing.backend import grpo_pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


WIDTHS = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144},
}


@pytest.fixture(scope="module")
def model(request):
    config = Qwen3Config(
        vocab_size=32000, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        **WIDTHS[request.param],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).cuda().bfloat16().eval()


def make_batch(prompts, completions, seed=0):
    """Left-padded prompts, each with its completions, right-padded: ids, mask, logits_to_keep."""
    generator = torch.Generator().manual_seed(seed)
    before, after = max(prompts), max(max(c) for c in completions)
    ids, mask = [], []
    for prompt, lengths in zip(prompts, completions, strict=True):
        shared = torch.randint(3, 32000, (prompt,), generator=generator)
        for length in lengths:
            row, real = torch.zeros(2, before + after, dtype=torch.int64)
            row[before - prompt : before] = shared
            row[before : before + length] = torch.randint(3, 32000, (length,), generator=generator)
            real[before - prompt : before + length] = 1
            ids.append(row)
            mask.append(real)
    return torch.stack(ids).cuda(), torch.stack(mask).cuda(), after


def loss_of(logits, ids, mask, keep):
    """Mean log-probability of the completion tokens, float32."""
    targets = ids[:, -keep:]
    logps = logits[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    weights = mask[:, -keep:]
    return (logps * weights).sum() / weights.sum(), (logps * weights).detach()


def gradients(model, loss):
    names = [n for n, _ in model.named_parameters()]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip(names, (g.float() for g in grads), strict=True))


def by_row(model, ids, mask, keep, extra=0):
    """Log-probabilities and gradients of each row alone, with `extra` padding behind it."""
    total = mask[:, -keep:].sum()
    logps, sums = torch.zeros(ids.shape[0], keep, device="cuda"), None
    for b in range(len(ids)):
        real = mask[b].bool()
        row = torch.cat([ids[b, real], ids.new_zeros(extra)])[None]
        alone = torch.cat([ids.new_ones(int(real.sum())), ids.new_zeros(extra)])[None]
        logits = model(input_ids=row, attention_mask=alone, use_cache=False).logits[0]
        count = int(mask[b, -keep:].sum())
        size = int(real.sum())
        part = logits[size - count - 1 : size - 1].float().log_softmax(-1)
        part = part.gather(-1, ids[b, real][size - count :, None])[:, 0]
        logps[b, :count] = part.detach()
        grads = gradients(model, part.sum() / total)
        sums = grads if sums is None else {n: sums[n] + g for n, g in grads.items()}
    return logps, sums


def compiled(model, **options):
    return torch.compile(model, backend=grpo_pack, options=options)


CASES = {
    "groups": ([100, 37], [[65, 3, 40, 1], [20, 90, 7, 33]]),
    "one long row": ([2000, 1], [[1500, 2], [1, 1]]),
}


@pytest.mark.parametrize("model", WIDTHS, indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("layout", "attention"), [("varlen", "varlen"), ("varlen", "flex"), ("prefix", "flex")]
)
def test_forward_and_backward(model, layout, attention, case):
    torch._dynamo.reset()
    fx_packing.reset()
    ids, mask, keep = make_batch(*CASES[case])
    packed = compiled(model, layout=layout, attention=attention)
    kwargs = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": keep + 1}
    loss, logps = loss_of(packed(**kwargs, use_cache=False).logits, ids, mask, keep)
    grads = gradients(model, loss)
    with torch.no_grad():
        _, silent = loss_of(packed(**kwargs, use_cache=False).logits, ids, mask, keep)
    clean, clean_grads = by_row(model, ids, mask, keep)
    noisy, noisy_grads = by_row(model, ids, mask, keep, extra=61)

    graphs = fx_packing.report().graphs
    assert all(g.rewritten for g in graphs), [g.reason for g in graphs]
    assert {g.last.layout for g in graphs} == {layout}
    assert {g.last.kernel for g in graphs} == {attention}
    assert all(v.passed for g in graphs for v in g.verifications)
    noise = (noisy - clean).abs().max()
    print(f"\n{layout} {attention} {case}: error {(logps - clean).abs().max():.4f}, noise {noise:.4f}")
    assert (logps - clean).abs().max() <= 3 * noise + 0.02
    assert torch.equal(silent, logps)  # old and new log-probs
    for name, want in clean_grads.items():
        scale = want.norm()
        error = (grads[name] - want).norm() / scale
        allowed = 3 * (noisy_grads[name] - want).norm() / scale + 0.02
        assert error <= allowed, (name, float(error), float(allowed))


@pytest.mark.parametrize("layout", ["varlen", "prefix"])
def test_old_and_new_log_probs_are_equal(layout):
    """As deep as what differs between two ways to fuse takes to show: each mode has kernels of its own."""
    config = Qwen3Config(
        vocab_size=32000, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=True, **WIDTHS["1.7B"],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).cuda().bfloat16().eval()
    torch._dynamo.reset()
    fx_packing.reset()
    batch = make_batch([150, 64], [[700, 20, 300, 90], [400, 1, 33, 250]])
    logps = torch.compile(fx_packing.per_token_logps, backend=grpo_pack, options={"layout": layout})
    with torch.no_grad():
        old = logps(model, *batch)
    new = logps(model, *batch)
    assert new.requires_grad and torch.equal((new.detach() - old).exp(), torch.ones_like(old))
    graphs = fx_packing.report().graphs
    assert {g.last.layout for g in graphs} == {layout}, fx_packing.report()
    assert all(v.passed for g in graphs for v in g.verifications)


@pytest.mark.parametrize("model", ["0.6B"], indirect=True)
@pytest.mark.parametrize("attention", ["auto", "flex"])
def test_no_recompile_over_30_shapes(model, attention):
    """Layouts alternate and T goes up and down; after the first of each, nothing is compiled any more."""
    torch._dynamo.reset()
    fx_packing.reset()
    packed = compiled(model, layout="auto", attention=attention)
    counts, runs = [], []
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        size = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731, B023
        shared = step % 2 == 0
        prompts = [size(50, 700) for _ in range(3)] if shared else [size(50, 300) for _ in range(6)]
        most = 1200 if step % 5 > 2 else 300  # T on both sides of every bound that Inductor asks about
        groups = [[size(1, most) for _ in range(4 if shared else 1)] for _ in prompts]
        ids, mask, keep = make_batch(prompts, groups, seed=step)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                out = packed(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1, use_cache=False)
                if grad:
                    loss_of(out.logits, ids, mask, keep)[0].backward()
                    model.zero_grad(set_to_none=True)
        graphs = fx_packing.report().graphs
        runs.append((graphs[-1].last.layout, graphs[-1].last.run_tokens))
        totals: dict[str, int] = {}
        for graph in graphs:
            assert graph.rewritten, graph.reason
            for name, number in graph.compiles.items():
                totals[name] = max(totals.get(name, 0), number)
        counts.append((len(graphs), totals))
    print(f"\n{attention}: {counts[-1]}")
    print([c for i, c in enumerate(counts) if i == 0 or c != counts[i - 1]])
    print(runs)
    for layout in ("prefix", "varlen"):
        lengths = [tokens for name, tokens in runs if name == layout]
        assert min(lengths) < 2560 and max(lengths) > 5120
    assert counts[-1][1] == counts[3][1], "compiled again after warm-up"
    assert len(fx_packing.report().graphs) <= 6
