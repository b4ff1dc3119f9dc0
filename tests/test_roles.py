"""Roles of dimensions: sizes that coincide, every way of spelling a size, and graphs made by hand."""

from __future__ import annotations

import operator
import time

import packing
import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

import fx_packing
from fx_packing import capture, passes
from fx_packing.errors import Refused
from fx_packing.passes.live import live_nodes
from fx_packing.passes.roles import Size, find_roles
from fx_packing.passes.tokenwise import prove

# hidden 64, heads 4, KV heads 2, head_dim 16, vocabulary 128, intermediate 96
COINCIDING = {
    "L=hidden": (3, 64, 5),
    "L=heads": (3, 4, 2),
    "L=kv_heads": (3, 2, 1),
    "L=head_dim": (3, 16, 5),
    "L=vocabulary": (2, 128, 5),
    "L=intermediate": (2, 96, 5),
    "B=heads": (4, 10, 5),
    "B=kv_heads": (2, 10, 5),
    "B=L": (5, 5, 2),
    "B=L=heads": (4, 4, 2),
    "B=1": (1, 10, 5),
    "B=L, B*L=hidden": (8, 8, 5),
    "B*L=hidden": (2, 32, 5),
    "B*L=head_dim": (2, 8, 5),
    "K=B": (3, 12, 3),
    "K=L": (3, 12, 12),
    "K=heads": (3, 12, 4),
    "K=1": (3, 12, 1),
}
MODELS = {
    "llama": lambda: tiny.build("llama", num_hidden_layers=1),
    "qwen3": lambda: tiny.build("qwen3", num_hidden_layers=1),
    "gemma2": lambda: tiny.build("gemma2"),
    "gpt2": lambda: tiny.build("gpt2", n_layer=1),
    "gpt2-eager": lambda: tiny.build("gpt2", n_layer=1, attn_implementation="eager"),
    "plain": lambda: tiny.PlainDecoder(layers=1),
    "plain-gqa": lambda: tiny.PlainDecoder(layers=1, kv_heads=2, enable_gqa=True),
    "plain-repeat": lambda: tiny.PlainDecoder(layers=1, kv_heads=2),
    "plain-learned": lambda: tiny.PlainDecoder(layers=1, positions="learned"),
    "plain-arange": lambda: tiny.PlainDecoder(layers=1, positions="learned", table="arange"),
}
QUICK = ("plain-repeat",)
FEW = ["L=heads", "B=kv_heads", "B=L=heads", "B=1"]


def check(name: str, case: str, dynamic: bool | None, second: bool = False) -> None:
    """The model packs this batch, and every row is what it is alone."""
    rows, length, keep = COINCIDING[case]
    model = MODELS[name]()
    packed = packing.pack(model, dynamic=dynamic, layout="varlen", verify="never")
    extra = {"use_cache": False} if hasattr(model, "config") else {}
    with torch.no_grad():
        if second:
            ids, mask = tiny.batch("left", rows=rows + 1, length=length + 3, seed=5)
            packed(ids, attention_mask=mask, logits_to_keep=keep, **extra)
        lengths = [length] + [max(1, length - 1 - 2 * i) for i in range(1, rows)]
        ids, mask = tiny.batch("left", lengths=lengths, length=length)
        got = packed(ids, attention_mask=mask, logits_to_keep=keep, **extra)
        want = tiny.per_row(model, ids, mask, logits_to_keep=keep)
    graph = fx_packing.report().graphs[-1]
    assert graph.rewritten, graph.reason
    assert graph.last.layout == "varlen", graph.last.reason
    assert graph.last.run_tokens == int(mask.sum())
    torch.testing.assert_close(tiny.logits_of(got), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("case", COINCIDING)
@pytest.mark.parametrize("name", QUICK)
def test_coinciding_sizes(name, case):
    check(name, case, None)


@pytest.mark.parametrize(
    "case", ["L=hidden", "L=heads", "L=head_dim", "B=kv_heads", "B=L=heads", "K=B"]
)
@pytest.mark.parametrize("name", ["llama"])
def test_coinciding_sizes_transformers(name, case):
    check(name, case, None)


@pytest.mark.parametrize("case", ["B=L", "B=L, B*L=hidden"])
@pytest.mark.parametrize("name", ["gpt2-eager", "gemma2", "llama"])
def test_as_many_rows_as_columns(name, case):
    check(name, case, None)


def test_one_symbol_for_rows_and_columns_is_told_and_no_other_shape_suffers():
    """With dynamic=True Dynamo has one symbol for B = L, and writes the halves of a head by it."""
    model = MODELS["llama"]()
    packed = packing.pack(model, dynamic=True)
    for rows, length in ((8, 8), (5, 9)):
        ids, mask = tiny.batch("left", rows=rows, length=length, seed=1)
        with torch.no_grad():
            got = packed(ids, attention_mask=mask, use_cache=False).logits
            want = tiny.per_row(model, ids, mask)
        assert float((got - want)[mask.bool()].abs().max()) < 2e-5
    square, other = fx_packing.report().graphs
    assert not square.rewritten and "B and L are the same size (8)" in square.reason
    assert other.rewritten and other.runs == {"varlen": 1}


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("name", ["gpt2-eager", "plain-gqa", "plain-learned", "plain-arange"])
def test_coinciding_sizes_more_models(name, case):
    check(name, case, None)


@pytest.mark.parametrize("case", [*FEW, "L=hidden", "K=L", "K=B", "B=L, B*L=hidden"])
def test_coinciding_sizes_dynamic(case):
    check("plain-repeat", case, True)


@pytest.mark.parametrize("case", FEW)
def test_coinciding_sizes_static(case):
    check("plain-repeat", case, False)


@pytest.mark.parametrize("case", ["L=hidden", "B=heads", "B=1", "K=B", "K=1"])
@pytest.mark.parametrize("name", ["plain-gqa"])
def test_coinciding_sizes_second_shape(name, case):
    check(name, case, None, second=True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2-eager", "qwen3"])
def test_dynamic_true_transformers(name):
    check(name, "B=kv_heads", True)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_second_shape_transformers(name):
    check(name, "L=heads", None, second=True)


def test_one_column_runs_as_captured():
    model = tiny.PlainDecoder(layers=1)
    ids = torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        got = packing.pack(model)(ids, torch.ones_like(ids))
        want = model(ids, torch.ones_like(ids))
    graph = fx_packing.report().graphs[-1]
    assert not graph.rewritten and "L = 1" in graph.reason
    assert torch.equal(got, want)


# -- graphs made by hand -------------------------------------------------------------------------


class Hand:
    """A torch-level graph with shapes, as Dynamo makes it: every value is computed as it is added."""

    def __init__(self, rows: int, length: int, hidden: int = 6, vocab: int = 50) -> None:
        self.graph, self.inputs, self.values = Graph(), [], {}
        ids = self.place("ids", torch.zeros(rows, length, dtype=torch.int64))
        weight = self.place("weight", nn.Parameter(torch.randn(vocab, hidden)))
        self.x = self.call(F.embedding, ids, weight)

    def place(self, name, value):
        node = self.graph.placeholder(name)
        node.meta["example_value"], self.values[node] = value, value
        self.inputs.append(value)
        return node

    def _add(self, node, run):
        lookup = lambda n: self.values[n]  # noqa: E731
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lookup)
        self.values[node] = node.meta["example_value"] = run(*args, **kwargs)
        return node

    def call(self, fn, *args, **kwargs):
        return self._add(self.graph.call_function(fn, args, kwargs), fn)

    def method(self, name, *args, **kwargs):
        node = self.graph.call_method(name, args, kwargs)
        return self._add(node, lambda x, *a, **k: getattr(x, name)(*a, **k))

    def read(self, *outputs):
        self.graph.output(outputs)
        return capture.read(GraphModule(nn.Module(), self.graph), self.inputs)

    def roles(self, *outputs):
        """The shapes of `outputs` as text."""
        roles = find_roles(self.read(*outputs))
        return [" ".join(map(str, roles.shape(n))) for n in outputs]


def test_hand_made_embedding():
    g = Hand(3, 5)
    assert g.roles(g.x) == ["B L 6"]


@pytest.mark.parametrize("rows, length", [(3, 5), (6, 5), (3, 6), (6, 6), (2, 3), (3, 2)])
def test_view_to_tokens_and_back(rows, length):
    g = Hand(rows, length)
    flat = g.method("view", g.x, -1, 6)
    named = g.method("view", g.x, rows * length, 6)
    back = g.method("view", flat, rows, length, 6)
    heads = g.method("view", g.x, rows, length, 3, 2)
    assert g.roles(flat, named, back, heads) == ["B*L 6", "B*L 6", "B L 6", "B L 3 2"]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_rows_and_heads_merged_as_einops_does(rows):
    g = Hand(rows, 7)
    heads = g.method("transpose", g.method("view", g.x, rows, 7, 3, 2), 1, 2)
    merged = g.method("reshape", heads, rows * 3, 7, 2)
    apart = g.method("reshape", merged, rows, 3, 7, 2)
    tokens_first = g.method("permute", heads, 2, 0, 1, 3)
    assert g.roles(merged, apart, tokens_first) == ["3*B L 2", "B 3 L 2", "L B 3 2"]


def test_a_wrong_first_reading_is_undone():
    # B = heads = 3: `arange(3)` reads as B first and fits everywhere until it meets the heads.
    g = Hand(3, 5)
    heads = g.method("transpose", g.method("view", g.x, 3, 5, 3, 2), 1, 2)
    slopes = g.call(torch.arange, 3)
    slopes = g.method("to", g.call(operator.add, slopes, 1), torch.float32)
    slopes = g.method("view", slopes, -1, 1, 1)
    scaled = g.call(operator.mul, heads, slopes)
    assert g.roles(slopes, scaled) == ["3 1 1", "B 3 L 2"]


def test_a_table_cut_to_the_length():
    g = Hand(3, 5, hidden=5)
    table = g.place("table", nn.Parameter(torch.randn(20, 5)))
    positions = g.call(operator.getitem, table, slice(None, 5))
    total = g.call(operator.add, g.x, positions)
    # The same slice of a weight, where it is no table: the last dimension decides.
    bias = g.place("bias", nn.Parameter(torch.randn(20)))
    both = g.call(operator.add, total, g.call(operator.getitem, bias, slice(None, 5)))
    assert g.roles(positions, total, both) == ["L 5", "B L 5", "B L 5"]


def test_a_table_of_one_number_a_position():
    g = Hand(3, 6)
    table = g.place("table", nn.Parameter(torch.randn(20)))
    cut = g.call(operator.getitem, table, slice(0, 6))
    column = g.call(operator.getitem, cut, (slice(None), None))
    assert g.roles(column, g.call(operator.mul, g.x, column)) == ["L 1", "B L 6"]


@pytest.mark.parametrize("start, stop", [(-3, None), (2, None), (None, -2), (1, -1), (None, 4)])
def test_literal_slices_make_a_symbol(start, stop):
    g = Hand(3, 7)
    part = g.call(operator.getitem, g.x, (slice(None), slice(start, stop)))
    assert g.roles(part) == ["B K0 6"]


def test_a_long_slice_as_long_as_the_model_is_wide():
    """The 1,024 columns of a completion, and the 1,024 of a key's heads."""
    g = Hand(3, 1100, hidden=1024)
    part = g.call(operator.getitem, g.x, (slice(None), slice(-1024, None)))
    heads = g.method("view", g.x, 3, 1100, -1, 128)
    assert g.roles(part, g.x, heads) == ["B K0 1024", "B L 1024", "B L 8 128"]


def test_a_slice_of_everything_is_no_new_symbol():
    g = Hand(3, 7)
    part = g.call(operator.getitem, g.x, (slice(None), slice(None, 1024)))
    last = g.call(operator.getitem, g.x, (slice(None), slice(-7, None)))
    assert g.roles(part, last) == ["B L 6", "B L 6"]


def test_equal_slices_are_one_symbol_and_others_are_joined():
    g = Hand(3, 7)
    ends = (slice(None), slice(-3, None))
    a, b = g.call(operator.getitem, g.x, ends), g.call(operator.getitem, g.x, ends)
    assert g.roles(g.call(operator.add, a, b)) == ["B K0 6"]
    g = Hand(3, 7)
    a = g.call(operator.getitem, g.x, (slice(None), slice(1, None)))
    b = g.call(operator.getitem, g.x, (slice(None), slice(None, -1)))
    joined = g.call(operator.sub, a, b)
    read = g.read(joined)
    roles = find_roles(read)
    proof = prove(read, roles, live_nodes(read, roles, []), [])
    name = proof.layouts[joined][1][0]
    assert set(proof.columns[name].parts) == {proof.cuts[a], proof.cuts[b]}


def test_sizes_asked_from_the_tensor():
    g = Hand(3, 6)
    rows, length = g.method("size", g.x, 0), g.method("size", g.x, 1)
    zeros = g.call(torch.zeros, rows, length, 6)
    shape = g.call(getattr, g.x, "shape")
    last = g.call(operator.getitem, shape, -1)
    again = g.method("view", g.x, rows, -1, last)
    assert g.roles(zeros, again) == ["B L 6", "B L 6"]


def test_fill_values_are_no_sizes():
    g = Hand(3, 6)
    fill = g.call(torch.full, (1,), 6)
    also = g.method("new_full", g.x, (3, 1, 1), 3)
    read = g.read(fill, also)
    roles = find_roles(read)
    assert roles.args[fill][0] == ((Size(1),), 6)
    assert roles.args[also][0][-1] == 3 and type(roles.args[also][0][-1]) is int


def test_a_scrambling_view_has_no_reading():
    g = Hand(3, 5)
    with pytest.raises(Refused, match="Tensor.view"):
        g.roles(g.method("view", g.x, 5, 3, 6))


def test_numbers_made_from_sizes_are_known_to_vary():
    g = Hand(3, 6)
    length = g.method("size", g.x, 1)
    less = g.call(operator.sub, length, 1)
    twice = g.call(operator.mul, length, 2)
    hidden = g.method("size", g.x, 2)
    out = g.call(operator.mul, g.x, 2)
    roles = find_roles(g.read(out))
    assert {length, less, twice} <= roles.varying and hidden not in roles.varying
    assert [roles.exact(n) for n in (length, less, twice, hidden)] == [True, False, True, True]


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_analysis_of_28_layers_is_quick(family):
    model = tiny.build(family, num_hidden_layers=28)
    ids, mask = tiny.batch("left")
    seconds = []

    def backend(gm, example_inputs):
        start = time.process_time()
        passes.analyse(capture.read(gm, example_inputs))
        seconds.append(time.process_time() - start)
        return gm

    with torch.no_grad():
        torch.compile(model, backend=backend)(ids, attention_mask=mask, use_cache=False)
    assert len(seconds) == 1 and seconds[0] < 10, seconds
