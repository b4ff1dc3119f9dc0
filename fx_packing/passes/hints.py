"""What would help where an operation keeps a graph from being packed."""

from __future__ import annotations

from torch.fx import Node

_LAYERS = {
    ("mamba", "rwkv", "recurrent", "linear_attn", "deltanet", "conv", "ssm", "mixer"): (
        "recurrent, convolutional and linear-attention layers are not supported"
    ),
    ("moe", "expert", "router"): "mixture-of-experts routing across tokens is not supported",
}
_CODE = {
    ("last_non_pad",): "compile the model below the score (model.model.compile): the score itself is cheap",
    ("labels", "loss"): "pass no labels, and compute the loss outside the compiled model",
    ("cumsum",): "compute positions before the call and pass them as position_ids [B, L]",
}
_ELSE = "to pack the rest of the model, keep it outside the compiled function"


def hint(node: Node) -> str:
    """A half sentence, by the kind of layer that `node` stands in, or by its line."""
    stack = " ".join(map(str, (node.meta.get("nn_module_stack") or {}).values())).lower()
    code = (node.meta.get("stack_trace") or "").lower()
    for words, text in _LAYERS.items():
        if any(word in stack for word in words):
            return f"; {text}"
    for words, text in _CODE.items():
        if any(word in code for word in words):
            return f"; {text}"
    return f"; {_ELSE}"
