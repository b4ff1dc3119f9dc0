"""What can go wrong, as values.

A `Refused` carries the reason why a captured graph is not rewritten. Passes raise it, `backend.py`
catches it in one place and turns it into `GraphReport.reason`.
"""

from __future__ import annotations

import re

from torch.fx import Node

from .compat import LeavesDynamo


class Refused(Exception):
    """A captured graph cannot be proven packable; ``str()`` is the reason, for people."""


class PackingError(LeavesDynamo):
    """Raised to the caller instead of a fallback when ``on_refuse="raise"``. A RuntimeError."""


class OptionError(LeavesDynamo, ValueError):
    """A ValueError about options."""


def where(node: Node) -> str:
    """The place of `node` in the user's code: module path, class and source line, as far as known."""
    parts = []
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        path = dotted(str(path))
        parts.append(f"in {path or 'the model'} ({kind.rsplit('.', 1)[-1]})")
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', node.meta.get("stack_trace") or "")
    if frames:
        file, line, code = frames[-1]
        parts.append(f"at {file}:{line}: {code.strip()}")
    return ", ".join(parts) or f"at node {node.name}"


def dotted(source: str) -> str:
    """``model.layers.0.mlp.weight`` for Dynamo's ``L['self']._modules['model']...``, and ``temperature`` for
    ``L['temperature']`` or ``L['kwargs']['temperature']``; nothing for a ``self``."""
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    frame, _, path = re.sub(r"\['(\w+)'\]", r".\1", path).partition(".")
    if frame not in ("L", "G"):
        return ".".join(filter(None, (frame, path)))
    within = re.sub(r"^\w+(\[\d+\])?\.", "", path) if frame == "L" else path
    return "" if within == "self" else within


def describe(node: Node) -> str:
    """The operation of `node` by the name a user knows it by."""
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    target = node.target
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{name}" if module and not module.startswith("_") else name
