"""The CUDA kernels against float64, in half precision within the noise of plain attention, and
the time and the synchronisations that a plan costs. Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import random
import re
import statistics
import warnings
from functools import partial

import forests
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import flex_attention

from fx_packing import compat, tiles
from fx_packing.attention import choose, flex, segments, varlen
from fx_packing.forest import make_plan
from fx_packing.masks import block_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(lengths, prompt=0, group=1, vocabulary=1000, seed=0):
    """``mask, ids`` on the GPU, left-aligned; each ``group`` of rows shares ``prompt`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(lengths)
    ids = torch.randint(vocabulary, (len(lengths), columns), generator=generator)
    owner = torch.arange(len(lengths)) // group * group
    ids[:, :prompt] = ids[owner, :prompt]
    mask = torch.arange(columns) < torch.tensor(lengths)[:, None]
    return mask.cuda(), ids.cuda()


def plan_of(layout, *args, **options):
    mask, ids = batch(*args, **options)
    return make_plan(mask, [ids], layout=layout), mask


def random_qkv(plan, heads, sizes, dtype, seed=0):
    """Leaves as a model's projections lie in memory: ``[1, T, H, D]`` seen as ``[1, H, T, D]``."""
    made = forests.qkv(plan, heads=heads, sizes=sizes, seed=seed, dtype=dtype, device="cuda")
    return [t.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for t in made]


def finish(out, tensors, seed=0):
    """``out``, and the gradients of a random projection of it, the same one in every dtype."""
    generator = torch.Generator("cuda").manual_seed(seed)
    direction = torch.randn(out.shape, generator=generator, device="cuda").bfloat16()
    return out.detach(), *torch.autograd.grad(out, tensors, direction.to(out.dtype))


def row_by_row(tensors, rows, window, softcap, scale):
    """Plain attention over each row alone, in the dtype of the tensors."""
    outs = []
    for slot in rows:
        q, k, v = (t[:, :, slot] for t in tensors)
        index = torch.arange(len(slot), device="cuda")
        offset = index[:, None] - index
        keep = (offset >= 0) & (offset < (window or len(slot)))
        # Rows of a few tokens too: torch's fused backward once gave NaN there (1 of 2 runs on an H200).
        if softcap is not None or len(slot) < 16:
            outs.append(forests.attention(q, k, v, keep, scale, softcap))
            continue
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = None if window is None else keep
        outs.append(
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        )
    return torch.cat(outs, dim=2)


def check(kernel, run, plan, mask, *, heads, sizes, dtype, window=None, softcap=None):
    """The kernel's error against float64 is no worse than that of plain attention, row by row."""
    scale = sizes[0] ** -0.5
    tensors = random_qkv(plan, heads, sizes, dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    rows = [slot[real] for slot, real in zip(plan.slot, mask, strict=True) if real.any()]
    read = torch.cat(rows)

    inputs = kernel.inputs(plan, window)
    out = run(*tensors, *inputs)
    assert out.shape == (1, heads[0], plan.length, sizes[1])
    assert out.dtype == dtype
    assert out.isfinite().all()
    ours = finish(out[:, :, read], tensors)
    exact = segments.attend(
        *wide, *segments.inputs(plan, window), scale=scale, window=window, softcap=softcap
    )
    truth = finish(exact[:, :, read], wide)
    plain = finish(row_by_row(tensors, rows, window, softcap, scale), tensors)
    for name, a, b, t in zip(("out", "q", "k", "v"), ours, plain, truth, strict=True):
        assert a.isfinite().all(), name
        error, noise = (a - t).abs(), (b - t).abs()
        # Where the truth is 0 (rows of one token give q and k no gradient), what cancels rounds.
        size = (t if t.any() else truth[0]).abs().amax() * torch.finfo(dtype).eps
        assert error.square().mean().sqrt() <= 1.5 * noise.square().mean().sqrt() + size, name
        # In float32 the order of the sums is the whole error; a shared token sums over its rows.
        slack = 32 if dtype == torch.float32 else 1
        assert error.max() <= 3 * noise.max() + slack * size, name
    if plan.run_tokens < plan.length:  # nothing leaks from or into the pads
        assert not any(g[:, :, plan.run_tokens :].any() for g in ours[1:])


UNEVEN = [1, 130, 1, 8192, 127, 128, 129, 700, 2, 333]
SHARED = [1, 900, 1500, 700, 701, 8192, 650, 1024, 700, 1111, 699, 2000]


def compiled(kernel, backend="inductor", **constants):
    count = CompileCounterWithBackend(backend)
    run = torch.compile(
        lambda *args: kernel.attend(*args, **constants), backend=count, fullgraph=True
    )

    def attend(q, k, v, *inputs):
        for tensor in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        return run(q, k, v, *inputs)

    return attend, count


@pytest.mark.parametrize("window", (None, 1, 200))
@pytest.mark.parametrize("heads, size", (((8, 2), 64), ((4, 4), 128), ((4, 1), 256)))
def test_varlen(heads, size, window):
    plan, mask = plan_of("varlen", UNEVEN)
    assert plan.run_tokens % 128
    run = partial(varlen.attend, scale=size**-0.5, window=window)
    check(
        varlen,
        run,
        plan,
        mask,
        heads=heads,
        sizes=(size, size),
        dtype=torch.bfloat16,
        window=window,
    )


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("window", (None, 200))
@pytest.mark.parametrize("size", (64, 128))
def test_flex(size, window, layout):
    lengths = UNEVEN if layout == "varlen" else SHARED
    plan, mask = plan_of(layout, lengths, prompt=0 if layout == "varlen" else 650, group=4)
    assert plan.run_tokens % 128
    run, _ = compiled(flex, scale=size**-0.5, window=window)
    check(
        flex, run, plan, mask, heads=(8, 2), sizes=(size, size), dtype=torch.bfloat16, window=window
    )


@pytest.mark.parametrize(
    "sizes, dtype, softcap",
    (
        ((256, 256), torch.bfloat16, None),
        ((192, 128), torch.bfloat16, None),
        ((80, 80), torch.float16, None),
        ((128, 128), torch.bfloat16, 20.0),
        ((64, 64), torch.float32, None),
        ((128, 128), torch.float32, None),
    ),
)
def test_flex_at_other_sizes(sizes, dtype, softcap):
    plan, mask = plan_of("prefix", [300, 500, 420, 301, 7, 260], prompt=250, group=3)
    run, _ = compiled(flex, scale=sizes[0] ** -0.5, softcap=softcap)
    check(flex, run, plan, mask, heads=(4, 2), sizes=sizes, dtype=dtype, softcap=softcap)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("softcap", (None, 20.0))
def test_segments(dtype, softcap):
    plan, mask = plan_of("prefix", [300, 500, 420, 301, 7, 260], prompt=250, group=3)
    run = partial(segments.attend, scale=0.125, softcap=softcap)
    check(segments, run, plan, mask, heads=(4, 2), sizes=(64, 64), dtype=dtype, softcap=softcap)


@pytest.mark.parametrize("kernel", (flex, varlen))
def test_no_recompilation(kernel):
    """Thirty lengths, with ever new structure, in training: one compilation."""
    run, count = compiled(kernel, scale=0.125)
    rng, seen = random.Random(0), set()
    while len(seen) < 30:
        lengths = [rng.randint(1, rng.choice((60, 600, 3000))) for _ in range(rng.randint(2, 12))]
        layout = "varlen" if kernel is varlen else rng.choice(("varlen", "prefix"))
        plan, _ = plan_of(layout, lengths, prompt=20, group=3)
        if plan.length == 128:
            continue  # a single block is a size of 1, which Dynamo always compiles by itself
        seen.add(plan.length)
        tensors = random_qkv(plan, (4, 2), (64, 64), torch.bfloat16)
        out = run(*tensors, *kernel.inputs(plan, None))
        assert all(g.isfinite().all() for g in finish(out, tensors)[1:])
    assert count.frame_count == 1


@pytest.mark.parametrize("kernel", (flex, varlen))
def test_mixed_dtypes_under_autocast(kernel):
    """Rotary embedding leaves q and k in float32 while v is half precision."""
    plan, _ = plan_of("varlen", [200, 60])
    tensors = random_qkv(plan, (4, 2), (64, 64), torch.bfloat16)
    mixed = [tensors[0].detach().float(), tensors[1].detach().float(), tensors[2]]
    run, _ = compiled(kernel, scale=0.125)
    with torch.autocast("cuda", torch.bfloat16):
        out = run(*mixed, *kernel.inputs(plan, None))
        same = run(*tensors, *kernel.inputs(plan, None))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, same)


def test_rows_without_tokens():
    """Empty rows are chains of length 0; with and without longer ones beside them."""
    for lengths in ([0, 5, 0, 0, 300, 0], [0, 1, 1], [0, 0]):
        mask = torch.arange(300).cuda() < torch.tensor(lengths).cuda()[:, None]
        plan = make_plan(mask, layout="varlen")
        if plan.run_tokens == 0:
            tensors = random_qkv(plan, (4, 2), (64, 64), torch.bfloat16)
            out = varlen.attend(*tensors, *varlen.inputs(plan, None), scale=0.125)
            assert all(x.isfinite().all() for x in finish(out, tensors))
            continue
        run = partial(varlen.attend, scale=0.125)
        check(varlen, run, plan, mask, heads=(4, 2), sizes=(64, 64), dtype=torch.bfloat16)


def test_too_many_tokens_for_flash():
    plan, _ = plan_of("varlen", [20])
    q = torch.empty(1, 1, 1, 128, device="cuda", dtype=torch.bfloat16).expand(1, 128, 2**17, 128)
    with pytest.raises(RuntimeError, match="32-bit offsets"):
        varlen.attend(q, q, q, *varlen.inputs(plan, None), scale=0.125)


def test_choice_of_kernel():
    facts = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "v_head_dim": 128,
        "window": None,
        "softcap": None,
        "training": True,
    }
    assert choose("auto", layout="varlen", **facts)[0] == "varlen"
    assert choose("auto", layout="prefix", **facts)[0] == "flex"


def milliseconds(run, repeats=20):
    """The median time of a call, its host side included."""
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def rollouts():
    """64 rows of up to 4096 tokens: 8 prompts, 8 answers each."""
    rng = random.Random(0)
    return batch([rng.randint(1100, 4096) for _ in range(64)], prompt=1000, group=8)


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
def test_a_plan_is_fast(layout):
    mask, ids = rollouts()
    took = milliseconds(lambda: make_plan(mask, [ids], layout=layout))
    print(f"plan, {layout}: {took:.2f} ms")
    assert took < 2


@pytest.mark.parametrize("window", (None, 4096))
def test_a_block_mask_is_fast(window):
    rng = random.Random(0)
    lengths = [rng.randint(1100, 3000) for _ in range(40)]
    plan, _ = plan_of("prefix", lengths, prompt=800, group=8)
    assert plan.length > 50_000
    took = milliseconds(lambda: block_tensors(plan.end, plan.depth, window))
    print(f"block mask, {plan.length} tokens, window {window}: {took:.2f} ms")
    assert took < 2


@pytest.mark.parametrize("layout", ("varlen", "prefix"))
def test_a_plan_synchronises_once(layout):
    mask, ids = rollouts()
    reads = [(1000, mask.shape[1]), (0, 1000)]
    make_plan(mask, [ids], layout=layout, reads=reads)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            plan = make_plan(mask, [ids], layout=layout, reads=reads)
            after_plan = sum("synchronizing CUDA" in str(w.message) for w in caught)
            block_tensors(plan.end, plan.depth, 100)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    messages = [str(w.message) for w in caught if "synchronizing CUDA" in str(w.message)]
    assert after_plan == 1, messages
    assert len(messages) == 1, messages


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_weight_gradient_is_summed_in_float32(dtype):
    """Over 20 tiles: no farther from the truth than one rounding of the sum, and nothing of its size."""
    generator = torch.Generator("cuda").manual_seed(0)
    total = torch.zeros(60_000, 1024, device="cuda")
    truth = total.double()
    for _ in range(20):
        made = (torch.randn(301, n, device="cuda", generator=generator) for n in total.shape)
        left, right = (m.to(dtype) for m in made)
        truth += left.double().T @ right.double()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tiles._add_product(total, left, right)
        assert torch.cuda.max_memory_allocated() - before < total.nbytes / 2
    torch.testing.assert_close(total.double(), truth, rtol=1e-5, atol=1e-3)
    assert float((total - truth).norm() / truth.norm()) < 1e-6


def test_rotated_queries_are_stored_as_eager_does():
    """Inductor alone stores them with the head's elements outermost, and the kernel takes twice as long."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, 4, 4)
    )
    angles = torch.randn(64, 512, device="cuda", generator=generator)

    def attend(q, k, v, angles):
        cos, sin = angles.T.cos().bfloat16(), angles.T.sin().bfloat16()
        q, k = (t.transpose(1, 2) for t in (q, k))
        q, k = (t * cos + torch.cat([-t[..., 32:], t[..., :32]], -1) * sin for t in (q, k))
        return flex_attention(q, k, v.transpose(1, 2), enable_gqa=True)

    compiled = torch.compile(attend, options=compat.inductor_options()["config_patches"])
    with torch.no_grad():
        got, codes = run_and_get_code(compiled, q, k, v, angles)
        wide = attend(q.double(), k.double(), v.double(), angles)
    layout = r"empty_strided_cuda\(\(1, [48], 512, 64\), \(([\d, ]*)\), torch.bfloat16"
    stored = re.findall(layout, "".join(codes))
    assert stored and {s.split(", ")[-1] for s in stored} == {"1"}, stored
    assert float((got - wide).abs().max()) < 0.05
