"""Faults to put into a healthy run, each a small change at one seam: a plan, a mask, a position, a
kernel's argument, the rewritten graph, a gradient, or what is kept from call to call.

Every seam lies on the packed side: what a fault changes, the packed run and the check's own packed
runs do, and the captured graph never does.

Faults that turned out to change nothing, and are left out (equivalent mutants):

- positions of a rotary model shifted by one everywhere, or not reset between chains: rotary attention
  sees differences only. Both are here for learned positions, and for rotary ones where rows branch.
- the weight of a norm left out of a fresh model: it is one. Its gradient is lost, and that is here.
- a soft cap far above all scores (50, the default of Gemma 2, at these sizes): the caps here are low.
- what is stored at pads, and what the padded result holds where there is no token.

On CPUs the kernel is `segments`; the masks of FlexAttention have faults of their own, in
test_flex_faults.py.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import bench
import pytest
import tiny
import torch
import torch.nn.functional as F
from bench import COMPLETION, PROMPTS, Setting, Subject, groups, longer
from seams import (
    Fault,
    Inject,
    argument,
    attends,
    in_function,
    in_graph,
    in_module,
    in_plan,
    in_runs,
    in_tail,
    inputs_of,
    method,
    nodes,
    operand,
    result,
    weight,
)
from torch import Tensor
from torch.fx import Graph, Node

from fx_packing import runtime, tiles, verdicts
from fx_packing.attention import segments
from fx_packing.forest import Plan, Read
from fx_packing.masks import BLOCK
from fx_packing.runtime import Packed

FAULTS: list[Fault] = []


def fault(name: str, changes: str, setting: Setting, inject: Inject, **also) -> None:
    """Add one to the catalogue."""
    FAULTS.append(Fault(name, changes, setting, inject, **also))


# -- settings --------------------------------------------------------------------------------------

HALF = torch.bfloat16
LAST = COMPLETION + 1  # columns: the completions, and the last token of each prompt

chains = Setting(layout="varlen")
tree = Setting()
tail = Setting(keep=LAST)
tail_in_half = Setting("llama", keep=LAST, dtype=HALF)
given = Setting(inputs="positions")
embeddings = Setting(layout="varlen", training=True, inputs="embeddings")
capped = Setting(layout="varlen", options=(("max_tokens", 60),))
growing = Setting(dynamic=True)
llama = Setting("llama", training=True, keep=LAST)
logps = Setting("llama", training=True, keep=COMPLETION, outputs="logps")
weighted = dataclasses.replace(logps, outputs="weighted")
llama_in_half = Setting("llama", training=True, dtype=HALF)
layers = Setting("llama", outputs="hidden")
qwen3 = Setting("qwen3", "varlen", training=True)
mistral = Setting("mistral")
mistral_trained = Setting("mistral", "varlen", training=True)
gemma2 = Setting("gemma2", training=True)
gpt2 = Setting("gpt2", "varlen", padding="right")
gpt2_left = Setting("gpt2", padding="left")
gpt2_captured = Setting("gpt2", training=True, padding="left", options=(("positions", "captured"),))


# -- the plan: who sees whom -----------------------------------------------------------------------


def children(runs: list[list[int]]) -> list[tuple[int, int, int]]:
    """``(run, its parent, its root)`` of each run that has a parent."""
    found = []
    for number, (_, _, parent) in enumerate(runs):
        root = parent
        while root >= 0 and runs[root][2] >= 0:
            root = runs[root][2]
        if parent >= 0:
            found.append((number, parent, root))
    return found


def boundary(by: int) -> Callable:
    def change(runs):
        runs[5][1] += by
        runs[6][0] += by

    return change


def attends_the_one_before(runs):
    runs[7][2] = 6


def other_prompt(runs):
    """A completion hangs below the prompt of another group."""
    direct = [(number, parent) for number, parent, root in children(runs) if parent == root]
    (_, first), (last, own) = direct[0], direct[-1]
    assert own != first
    runs[last][2] = first


def no_prompt(runs):
    number, _, _ = children(runs)[4]
    runs[number][2] = -1


def no_grandparent(runs):
    number, _, root = next(c for c in children(runs) if c[1] != c[2])
    runs[number][2] = root


def ends_short(plan):
    low, high = plan.starts[9:11].tolist()
    end = plan.end.clone()
    end[low : high - 1] -= 1
    return {"end": end}


def groups_merged(plan):
    """The first prompt goes on to the end of the second group."""
    roots = (plan.depth[: plan.run_tokens] == 0).nonzero().flatten().tolist()
    if len(roots) < 3:
        return {}
    end = plan.end.clone()
    trunk = int(plan.segments()[3])
    end[:trunk] = roots[2]
    return {"end": end}


def no_boundaries(plan):
    end = plan.end.clone()
    end[: plan.run_tokens] = plan.run_tokens
    return {"end": end}


for number, change in (("late", boundary(1)), ("early", boundary(-1))):
    fault(f"a boundary between rows one token {number}", "plan", chains, in_runs(change))
fault("a row attends the previous row", "plan", chains, in_runs(attends_the_one_before))
fault("a row's end one short", "plan", chains, in_plan(ends_short))
fault("no boundaries between rows", "plan", chains, in_plan(no_boundaries))
fault("two groups merged", "plan", tree, in_plan(groups_merged))
fault("two groups merged, half precision", "plan", tail_in_half, in_plan(groups_merged))
fault("a completion below another group's prompt", "plan", tail, in_runs(other_prompt))
fault("a completion below another's prompt, half precision", "plan", tail_in_half, in_runs(other_prompt))
fault("a completion without its prompt", "plan", tail, in_runs(no_prompt))
fault("a run attends its grandparent but not its parent", "plan", tail, in_runs(no_grandparent))
fault(
    "the last stored token left out", "plan", tail,
    in_plan(lambda plan: {"run_tokens": plan.run_tokens - 1}),
)  # fmt: skip


# -- what is shared --------------------------------------------------------------------------------


def coarse(real):
    def keys(self, batch):
        first, *rest = real(self, batch)
        return [first // 2, *rest]

    return keys


def first_key_only(real):
    return lambda self, batch: real(self, batch)[:1]


fault("tokens that differ in their last bit are shared", "plan", tail, in_function(Packed, "_keys", coarse))
fault("tokens at different positions are shared", "plan", given, in_function(Packed, "_keys", first_key_only))


# -- positions -------------------------------------------------------------------------------------


def positions(change: Callable[[Plan], Tensor]) -> Inject:
    def blocks(plan: Plan) -> Tensor:
        return change(plan).clone().view(-1, BLOCK)

    return in_function(Packed, "_positions", lambda real: lambda self, plan: blocks(plan))


def one_row_lags(plan):
    row = int(plan.added[1:].argmax()) + 1  # from its last token but one on
    position = plan.depth.clone()
    position[plan.starts[row + 1] - 2 : plan.starts[row + 1]] -= 1
    return position


def not_reset(plan):
    return torch.arange(plan.length)


for name, setting, change in (
    ("not reset where rows branch", tail, not_reset),
    ("not reset where rows branch, half precision", tail_in_half, not_reset),
    ("a gap of one behind the fifth token", tail, lambda plan: plan.depth + (plan.depth >= 5)),
    ("of one row lag by one", tail, one_row_lags),
    ("all zero", tail, lambda plan: torch.zeros_like(plan.depth)),
    ("learned, not reset between chains", gpt2, not_reset),
    ("learned, shifted by one", gpt2, lambda plan: plan.depth + 1),
    ("learned, the columns instead of the row's own", gpt2_left, lambda p: p.source % p.columns),
    ("learned, the row's own instead of the columns", gpt2_captured, lambda plan: plan.depth),
):
    fault(f"positions {name}", "positions", setting, positions(change))


# -- the way in ------------------------------------------------------------------------------------


def rows_exchanged_in(plan):
    low, other = plan.starts[[2, 3]].tolist()
    source = plan.source.clone()
    count = int(plan.added[2:4].min())
    source[low : low + count], source[other : other + count] = (
        plan.source[other : other + count],
        plan.source[low : low + count],
    )
    return {"source": source}


def one_token_in(plan):
    """The last token of the last row but two is taken from the column before it."""
    source = plan.source.clone()
    source[plan.starts[-3] - 1] -= 1
    return {"source": source}


fault(
    "every token taken from the column before it", "way in", tail,
    in_plan(lambda plan: {"source": (plan.source - 1).clamp_min(0)}),
)  # fmt: skip
fault("two rows exchange their tokens", "way in", chains, in_plan(rows_exchanged_in))
fault("one token of one row taken from the column before it", "way in", chains, in_plan(one_token_in))


# -- the way out -----------------------------------------------------------------------------------


def in_slot(change: Callable[[Tensor, Plan], None]) -> Inject:
    """`change` edits where each real position of the whole sequence is read."""

    def edit(plan):
        slot = plan.slot.clone()
        change(slot, plan)
        return {"slot": slot}

    return in_plan(edit)


def in_read(change: Callable[[Tensor, Plan], None]) -> Inject:
    """The same for the columns that are wanted."""

    def edit(plan):
        if not plan.reads:
            return {}
        slot = plan.reads[0].slot.clone()
        change(slot, plan)
        return {"reads": (dataclasses.replace(plan.reads[0], slot=slot), *plan.reads[1:])}

    return in_plan(edit)


def exchanged(one, other):
    def change(slot, plan):
        slot[[one, other]] = slot[[other, one]]

    return change


def one_before(slot, plan):
    slot[slot > 0] -= 1


def last_of_one_row(slot, plan):
    column = int((slot[13] >= 0).nonzero()[-1])
    slot[13, column] -= 1


def lost(slot, plan):
    column = int((slot[11] >= 0).nonzero()[-1])
    slot[11, column] = -1


def as_stored(slot, plan):
    slot[:] = slot[plan.order.argsort()[plan.order.roll(1)]]


def wrong_group(slot, plan):
    """The first column read is the last token of each prompt."""
    slot[:, 0] = slot[:, 0].roll(4)


def read_before(plan):
    read = plan.reads[0]
    index = (read.index - 1).clamp_min(0)
    return {"reads": (Read(index, read.slot, read.tokens), *plan.reads[1:])}


fault("unpack index swapped between two rows", "way out", chains, in_slot(exchanged(3, 7)))
fault("unpack index swapped between two rows of a group", "way out", tail, in_read(exchanged(14, 15)))
fault("unpack index swapped, half precision", "way out", tail_in_half, in_read(exchanged(14, 15)))
fault("unpack index off by one", "way out", chains, in_slot(one_before))
fault("last token of one row read one too early", "way out", chains, in_slot(last_of_one_row))
fault("a real token unpacked as padding", "way out", chains, in_slot(lost))
fault("rows come back in another order", "way out", tree, in_slot(as_stored))
fault("last prompt token mapped to the wrong group", "way out", tail, in_read(wrong_group))
fault("last prompt token to the wrong group, half", "way out", tail_in_half, in_read(wrong_group))
fault("the tokens that are read off by one", "way out", tail, in_plan(read_before))


def rows_of_parts_exchanged(real):
    """Two rows of different parts change places where the parts are joined."""

    def run(self, batch, parts, flat):
        first, second = (p.remember("rows", lambda: None)[-1] for p in parts[:2])
        outputs = []
        for value in real(self, batch, parts, flat):
            order = torch.arange(len(value))
            order[first], order[second] = second, first
            outputs.append(value[order])
        return tuple(outputs)

    return run


def rows_of_a_part_in_reverse(real):
    """A part's rows are handed over in reverse, behind the back of its plan."""

    def part(self, batch, rows):
        found = real(self, batch, rows)
        args = list(found.args)
        for item in self._tokens:
            args[item.index] = args[item.index].flip(0)
        return dataclasses.replace(found, args=args)

    return part


fault(
    "parts joined in the wrong order", "way out", capped,
    in_function(Packed, "_run_parts", rows_of_parts_exchanged),
)  # fmt: skip
fault(
    "rows of a part in another order than its plan", "way in", capped,
    in_function(Packed, "part", rows_of_a_part_in_reverse),
)  # fmt: skip


# -- the kernel and its arguments ------------------------------------------------------------------


def keys_as_values(graph):
    node = attends(graph)[1]
    q, k, v, *plan = node.args
    node.args = (q, v, k, *plan)


def one_chain(structure: Tensor) -> Tensor:
    """The structure of a batch that is all one row."""
    tokens = structure[1:2]
    one = torch.ones_like(tokens)
    return torch.cat([one, tokens, one - 1, tokens, -one])


def in_half(graph):
    node = attends(graph)[0]
    q, k, v, *plan = node.args
    with graph.inserting_before(node):
        v = graph.call_method("to", (v, HALF))
    node.args = (q, k, v, *plan)
    with graph.inserting_after(node):
        wide = graph.call_method("to", (node, torch.float32))
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def windows_exchanged(graph):
    first, second = attends(graph)
    windows = first.kwargs["window"], second.kwargs["window"]
    assert windows[0] != windows[1]
    first.kwargs = first.kwargs | {"window": windows[1]}
    second.kwargs = second.kwargs | {"window": windows[0]}


def mask_of(condition: Callable[[Tensor, int | None], Tensor]) -> Inject:
    """The kernel's own mask, by how far behind the query each key is."""

    def wrap(real):
        def mask(low, high, size, length, window, device):
            query = torch.arange(length - size + low, length - size + high, device=device)[:, None]
            return condition(query - torch.arange(length, device=device), window)

        return mask

    return in_function(segments, "_mask", wrap)


fault("scale wrong in one layer", "kernel", qwen3, argument(0, scale=lambda scale: scale / 4))
fault("scale off by a hundredth", "kernel", llama, argument(1, scale=lambda scale: scale * 1.01))
fault("scale wrong, half precision", "kernel", llama_in_half, argument(0, scale=lambda scale: scale * 8))
fault("window dropped in one layer", "kernel", mistral, argument(1, window=lambda window: None))
fault("window one too wide", "kernel", mistral, argument(0, window=lambda window: window + 1))
fault("window one too narrow", "kernel", mistral_trained, argument(1, window=lambda window: window - 1))
fault("windows of two layers exchanged", "kernel", gemma2, in_graph(windows_exchanged))
fault("softcap dropped in one layer", "kernel", gemma2, argument(0, softcap=lambda cap: None))
fault("softcap wrong in one layer", "kernel", gemma2, argument(1, softcap=lambda cap: cap * 1.5))
kv_flipped = operand(0, 1, 2, through=method("flip", 1))
fault("K/V heads permuted", "kernel", llama, kv_flipped)
fault("K/V heads permuted, half precision", "kernel", llama_in_half, kv_flipped)
fault("V heads permuted", "kernel", qwen3, operand(1, 2, through=method("flip", 1)))
fault("query heads permuted", "kernel", tail, operand(0, 0, through=method("roll", 1, 1)))
fault("keys and values exchanged", "kernel", tail, in_graph(keys_as_values))
fault(
    "one layer left unmasked", "kernel", tail,
    operand(1, 3, through=lambda graph, node: graph.call_function(one_chain, (node,))),
)  # fmt: skip
fault("attention in half precision in one layer", "kernel", tail, in_graph(in_half))
fault("a token sees the next one", "kernel", tree, mask_of(lambda behind, window: behind >= -1))
fault("a token does not see itself", "kernel", tree, mask_of(lambda behind, window: behind > 0))
fault(
    "the kernel's window one too wide", "kernel", mistral,
    mask_of(lambda behind, window: (behind >= 0) & (behind <= window)),
)  # fmt: skip


# -- the rewritten graph ---------------------------------------------------------------------------


def weights_exchanged(graph):
    key, value = (inputs_of(graph, "layers", "1", name, "weight")[0] for name in "kv")
    users = list(value.users)
    key.replace_all_uses_with(value)
    for user in users:
        user.replace_input_with(value, key)


def sums(graph: Graph) -> list[Node]:
    """The additions of two computed tensors: the residual stream."""
    return [n for n in nodes(graph, operator.add) if all(isinstance(a, Node) for a in n.args)]


def addend_dropped(graph):
    node = sums(graph)[-1]
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def without(target) -> Callable[[Graph], None]:
    def change(graph):
        node = nodes(graph, target)[-1]
        node.replace_all_uses_with(node.args[0])

    return change


def outputs_exchanged(graph):
    (output,) = nodes(graph, "output")
    first, *rest = output.args[0]
    assert len(rest) == 3
    output.args = ((first, rest[0], rest[2], rest[1]),)


def epsilon(graph):
    node = next(n for n in nodes(graph, operator.add) if any(isinstance(a, float) for a in n.args))
    node.args = tuple(a * 1e5 if isinstance(a, float) else a for a in node.args)


fault("weights of two projections exchanged", "graph", tail, in_graph(weights_exchanged))
fault("a residual branch left out", "graph", llama, in_graph(addend_dropped))
fault("the last soft cap left out", "graph", gemma2, in_graph(without(torch.tanh)))
fault("two outputs exchanged", "graph", layers, in_graph(outputs_exchanged))
fault("an epsilon wrong", "graph", tail, in_graph(epsilon))


# -- the tail: from the LM head to log-probabilities, in tiles of tokens ----------------------------


def one_slice_off(real):
    """The ids of the tokens and the logits that they are looked up in come one entry apart."""

    def entries(self, batch, plan, columns):
        found = real(self, batch, plan, columns)
        first, *rest = found.index
        assert rest
        return dataclasses.replace(found, index=found.index | {first: found.index[first].roll(1)})

    return entries


def entries_exchanged(real):
    """Two rows get each other's numbers."""

    def entries(self, batch, plan, columns):
        found = real(self, batch, plan, columns)
        slot = found.slot.clone()
        if len(slot) == bench.ROWS:
            slot[[3, 7]] = slot[[7, 3]]
        return dataclasses.replace(found, slot=slot)

    return entries


def second_tile_early(real):
    def bounds(tokens, width):
        found = real(tokens, width)
        return [found[0], *((low - 1, high - 1) for low, high in found[1:])]

    return bounds


def last_tile_only(total, left, right):
    total.copy_(left.T @ right)


def first_tile_lost(real):
    def add(self, low, high, *given):
        real(self, low, high, *given)
        if low == 0:
            self.hidden.narrow(self.hidden_dim, low, high - low).zero_()

    return add


def warmer(graph):
    """The logits are divided by another temperature."""
    (node,) = nodes(graph, operator.truediv)
    node.args = (node.args[0], node.args[1] * 1.25)


fault("ids and logits one entry apart", "tail", logps, in_function(Packed, "_entries", one_slice_off))
fault("numbers of two rows exchanged", "tail", logps, in_function(Packed, "_entries", entries_exchanged))
fault("a tile one token early", "tail", logps, in_function(tiles, "tile_bounds", second_tile_early))
fault("another temperature", "tail", logps, in_tail(warmer))


# -- gradients: the values are right ---------------------------------------------------------------


def scatter_gradient(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Inject:
    """`change` edits index and gradient before the way out adds them up."""

    def inject(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        real = runtime._Scatter.backward

        class Saved:
            def __init__(self, ctx, index):
                self.saved_tensors, self.rows = (index,), ctx.rows

        def backward(ctx, grad):
            index, grad = change(ctx.saved_tensors[0], grad)
            return real(Saved(ctx, index), grad)

        patch.setattr(runtime._Scatter, "backward", staticmethod(backward))

    return inject


def once(index, grad):
    """Of the places that read one token, only the first hands its gradient on."""
    order = torch.arange(len(index))
    first = torch.full((int(index.max()) + 2,), len(index)).scatter_reduce(
        0, index.clamp_min(-1) + 1, order, "amin"
    )
    return torch.where(first[index + 1] == order, index, -1), grad


def one_row_of_gradients(index, grad):
    columns = len(index) // len(PROMPTS) // 4
    index = index.clone()
    index[11 * columns : 12 * columns] = -1
    return index, grad


def kept_once(x, path, parts):
    """The gradient of keys and values that several runs share is the last run's alone."""
    sizes = [stop - start for start, stop in path]
    for (start, stop), part in zip(path, parts.split(sizes, dim=2), strict=True):
        x[:, :, start:stop] = part


def backward_with(**changed) -> Inject:
    """The kernel's backward computes with another scale, window or soft cap than its forward."""

    def wrap(real):
        def backward(grad, q, k, v, structure, scale, window, softcap):
            constants = {"scale": scale, "window": window, "softcap": softcap}
            constants |= {name: new(constants[name]) for name, new in changed.items()}
            return real(grad, q, k, v, structure, *constants.values())

        return backward

    return in_function(segments, "_backward", wrap)


def no_gradient_of(place: int) -> Inject:
    def wrap(real):
        def backward(*args):
            grads = list(real(*args))
            grads[place] = torch.zeros_like(grads[place])
            return tuple(grads)

        return backward

    return in_function(segments, "_backward", wrap)


def doubled(graph, node):
    """The same value, twice the gradient."""
    apart = graph.call_method("detach", (node,))
    return graph.call_function(operator.add, (node, graph.call_function(operator.sub, (node, apart))))


def embedded(through: Callable[[Graph, Node], Node], which: int = 0) -> Inject:
    def change(graph):
        node = nodes(graph, F.embedding)[which]
        with graph.inserting_after(node):
            new = through(graph, node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return in_graph(change)


def stream_detached(graph):
    """The residual stream between the two layers."""
    node = sums(graph)[-3]
    with graph.inserting_after(node):
        new = graph.call_method("detach", (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def not_detached(graph):
    """What the captured graph computes without gradients has them."""
    for node in nodes(graph, "detach"):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def gathered_apart(real):
    return lambda batch, plan, value, dim: real(batch, plan, value.detach(), dim)


def in_prefix(real):
    """Layout "prefix" in spite of embeddings that need gradients."""

    def plan(self, batch, layout):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Packed, "_embeddings_need_gradients", lambda self, batch: False)
            return real(self, batch, "prefix")

    return plan


detached = method("detach")
last_tile = in_function(tiles, "_add_product", lambda real: last_tile_only)
given_once = in_function(segments, "_give", lambda real: kept_once)
GRADIENTS: list[tuple[str, Setting, Inject]] = [
    ("of a shared token counted once instead of G times", llama, scatter_gradient(once)),
    ("of a shared token counted once, half precision", llama_in_half, scatter_gradient(once)),
    ("of the last prompt token counted once, in the tail", logps, scatter_gradient(once)),
    ("of the head from the last tile alone", logps, last_tile),
    ("of the first tile lost", logps, in_function(tiles._Totals, "add", first_tile_lost)),
    ("of weights that have none, in the tail", weighted, in_tail(not_detached)),
    ("of one row lost", qwen3, scatter_gradient(one_row_of_gradients)),
    ("added up one token off", qwen3, scatter_gradient(lambda index, grad: (index.roll(1), grad))),
    ("of shared keys and values from one completion only", llama, given_once),
    ("of shared keys and values once, half precision", llama_in_half, given_once),
    ("with another scale than the values", llama, backward_with(scale=lambda scale: scale * 2)),
    ("without the window", mistral_trained, backward_with(window=lambda window: None)),
    ("with a window one too wide", mistral_trained, backward_with(window=lambda window: window + 1)),
    ("without the soft cap", gemma2, backward_with(softcap=lambda cap: None)),
    ("of the queries lost", qwen3, no_gradient_of(0)),
    ("of the keys lost", gpt2_captured, no_gradient_of(1)),
    ("detached behind the attention of one layer", qwen3, result(1, detached)),
    ("detached behind it, half precision", llama_in_half, result(1, detached)),
    ("detached at the keys of one layer", llama, operand(1, 1, through=detached)),
    ("detached at the values of one layer", mistral_trained, operand(0, 2, through=detached)),
    ("detached between two layers", llama, in_graph(stream_detached)),
    ("of one projection lost", llama, weight("layers", "1", "q_proj", through=detached)),
    ("of the embedding lost", llama, embedded(detached)),
    ("of the learned positions lost", gpt2_captured, embedded(detached, which=-1)),
    ("of one bias lost", gpt2_captured, weight("h", "1", "c_attn", "bias", through=detached)),
    ("of a norm lost with its weight", qwen3, weight("layers", "0", "q_norm", through=detached)),
    ("of the embeddings passed in lost", embeddings, in_function(runtime, "_gather", gathered_apart)),
    ("of one norm doubled", llama, weight("layers", "0", "input_layernorm", through=doubled)),
]  # fmt: skip
for name, setting, inject in GRADIENTS:
    fault(f"gradient {name}", "gradient", setting, inject, gradient=True)


fault(
    "gradient of shared embeddings passed in goes to one of their rows", "gradient", embeddings,
    in_function(Packed, "_plan", in_prefix), gradient=True, runs="prefix",
)  # fmt: skip


# -- what is kept from call to call ----------------------------------------------------------------


def other_content() -> tiny.Batch:
    """The same shape and lengths as the batch of every setting, with other tokens and another tree."""
    batch = groups(seed=7)
    return tiny.Batch(batch.ids, groups().mask.roll(4, 0))


def scored_before(subject: Subject) -> None:
    subject.scored(other_content())


def plans_by_shape(real):
    """Plans kept by what they are for, whatever the tensors hold."""
    kept = {}

    def get(self, sources, facts, make):
        key = (facts, tuple(tuple(t.shape) for t in sources))
        if key not in kept:
            kept[key] = make()
        return kept[key]

    return get


def first_forest(real):
    """The first forest's structure, for all that follow."""
    kept = []

    def inputs(plan, window):
        kept.append(real(plan, window))
        return kept[0]

    return inputs


def first_positions(real):
    kept = []

    def positions(self, plan):
        kept.append(real(self, plan))
        return kept[0]

    return positions


def baked(patch: pytest.MonkeyPatch, subject: Subject) -> None:
    """A weight of the first model written into the graph that both models run."""

    def change(gm):
        (node,) = inputs_of(gm.graph, "layers", "1", "down", "weight")
        gm.register_buffer("baked", subject.models[0].layers[1].down.weight.detach())
        with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
            node.replace_all_uses_with(gm.graph.get_attr("baked"))

    in_module(change)(patch, subject)


def baked_and_ids_reused(patch: pytest.MonkeyPatch, subject: Subject) -> None:
    """As `baked`, and the second model's tensors have the addresses that the first one's had."""
    baked(patch, subject)
    patch.setattr(verdicts, "id", lambda _: 0, raising=False)


def first_model_before(subject: Subject) -> None:
    subject.run(model=subject.models[0])


def this_batch_before(subject: Subject) -> None:
    subject.run()


def table_too_short(real):
    """Positions stop at the longest of the first batch."""
    return lambda self, plan: real(self, plan).clamp_max(19)


def rows_beyond(slot, plan):
    if len(slot) > 16:
        slot[16:] = slot[16:].roll(1, 0)


def tokens_beyond(plan):
    """Behind the 256th stored token, each is taken from the one before it."""
    source = plan.source.clone()
    source[257:] = plan.source[256:-1]
    return {"source": source}


for name, *seam in (
    ("a plan kept for another batch of the same shape", runtime._PlanCache, "get", plans_by_shape),
    ("the forest of an earlier batch", segments, "inputs", first_forest),
    ("the positions of an earlier batch", Packed, "_positions", first_positions),
):
    fault(name, "state", llama, in_function(*seam), before=scored_before)
fault(
    "a verdict inherited from scoring by training", "state", llama,
    result(0, detached), gradient=True, before=lambda subject: subject.scored(subject.batch),
)  # fmt: skip
fault("a verdict inherited by another model", "state", tail, baked, before=first_model_before, model=1)
fault(
    "a verdict inherited by a model at the same addresses", "state", tail, baked_and_ids_reused,
    before=first_model_before, model=1,
)  # fmt: skip
for name, inject in (
    ("the longest row", in_function(Packed, "_positions", table_too_short)),
    ("the number of rows", in_slot(rows_beyond)),
    ("the tokens", in_plan(tokens_beyond)),
):
    fault(
        f"wrong only beyond {name} of the first batch", "state", growing, inject,
        before=this_batch_before, batch=longer,
    )  # fmt: skip
