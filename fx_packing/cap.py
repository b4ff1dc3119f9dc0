"""The token cap: how many tokens one flat forward may have, and the guards that keep it in view."""

from __future__ import annotations

from typing import Any

from .errors import dotted
from .options import Options
from .passes import Analysis


def token_cap(options: Options, columns: int) -> tuple[int | None, str]:
    """The most tokens of one flat forward for batches of that many columns, and the option's name."""
    if options.mini_batch_rows is not None:
        return options.mini_batch_rows * columns, f"mini_batch_rows={options.mini_batch_rows}"
    return options.max_tokens, f"max_tokens={options.max_tokens}"


def guard(analysis: Analysis, options: Options) -> list[str]:
    """What holds a packed run back, in words. Where Dynamo has made B or L symbolic, the token cap
    becomes a guard of the captured graph, so that its recompile reasons name it."""
    found = ["fx_packing.switch.ENABLED is True"]
    rows, columns = analysis.capture.symbolic_shape
    if options.max_tokens is not None:
        inside = padded_tokens_within_cap(rows * columns, options.max_tokens)
        found.append(_text(f"max_tokens={options.max_tokens}", "B * L", inside, options.max_tokens))
    if options.mini_batch_rows is not None:
        inside = padded_tokens_within_cap(rows, options.mini_batch_rows)
        found.append(
            _text(f"mini_batch_rows={options.mini_batch_rows}", "B", inside, options.mini_batch_rows)
        )
    for node, value in analysis.roles.pinned.items():
        source = analysis.capture.by_node[analysis.capture.resolve(node.args[0])].source
        found.append(f"{dotted(source)} == {value}")
    return found


def padded_tokens_within_cap(size: Any, cap: int) -> bool:
    """Whether even a batch without any padding needs no split. The comparison of a symbolic size is a
    Dynamo guard, and its line below is what ``TORCH_LOGS=recompiles`` shows."""
    return bool(size <= cap)


def _text(option: str, size: str, inside: bool, cap: int) -> str:
    if inside:
        return f"token cap {option}: {size} <= {cap}, one flat forward"
    return f"token cap {option}: {size} > {cap}, flat forwards of at most the cap"
