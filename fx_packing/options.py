"""The options of ``torch.compile(..., backend="grpo_pack", options={...})``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import OptionError


def _one_of(*names: str) -> tuple[str, Callable[[Any], bool]]:
    return "one of " + ", ".join(map(repr, names)), lambda v: isinstance(v, str) and v in names


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


_COUNT = ("None or a positive int", _is_count)
_BOOL = ("True or False", lambda v: isinstance(v, bool))
_FACTOR = (
    "a number >= 1",
    lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and v >= 1,
)
_BACKEND = ("the name of a torch.compile backend", lambda v: isinstance(v, str) and bool(v))

_VALID: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "layout": _one_of("auto", "varlen", "prefix", "padded"),
    "min_sharing": _FACTOR,
    "mini_batch_rows": _COUNT,
    "max_tokens": _COUNT,
    "positions": _one_of("row", "captured"),
    "verify": _one_of("first", "always", "never"),
    "attention": _one_of("auto", "flex", "varlen", "segments"),
    "inner": _BACKEND,
    "on_refuse": _one_of("fallback", "raise"),
    "enabled": _BOOL,
}


@dataclass(frozen=True)
class Options:
    """Parsed options; the README's table says what each means."""

    layout: str = "auto"
    min_sharing: float = 1.15
    mini_batch_rows: int | None = None
    max_tokens: int | None = None
    positions: str = "row"
    verify: str = "first"
    attention: str = "auto"
    inner: str = "inductor"
    on_refuse: str = "fallback"
    enabled: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Validate a mapping of options.

        Raises ``ValueError`` on an unknown name (naming the valid ones and the nearest match), on
        a value of the wrong type, on an unknown inner backend, or where both caps are given.
        """
        options = dict(options or {})
        for name, value in options.items():
            if name not in _VALID:
                near = difflib.get_close_matches(str(name), _VALID, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(
                    f"grpo_pack: unknown option {name!r}.{hint} Valid options: {', '.join(_VALID)}."
                )
            text, valid = _VALID[name]
            if not valid(value):
                near = difflib.get_close_matches(str(value), text.replace("'", "").split(", "), n=1)
                hint = f" Did you mean {near[0].removeprefix('one of ')!r}?" if near else ""
                raise OptionError(
                    f"grpo_pack: option {name!r} must be {text}, got {value!r}.{hint}"
                )
        parsed = cls(**options)
        if parsed.mini_batch_rows is not None and parsed.max_tokens is not None:
            raise OptionError(
                "grpo_pack: give either 'mini_batch_rows' or 'max_tokens', not both "
                f"(got {parsed.mini_batch_rows} and {parsed.max_tokens})."
            )
        _check_inner(parsed.inner)
        return parsed

    def as_dict(self) -> dict[str, Any]:
        """The options by name."""
        return dataclasses.asdict(self)


def _check_inner(name: str) -> None:
    from torch._dynamo.exc import InvalidBackend

    from .compat import lookup_backend

    if name == "grpo_pack":
        raise OptionError("grpo_pack: option 'inner' must be another backend than 'grpo_pack'.")
    try:
        lookup_backend(name)
    except InvalidBackend:
        import torch

        known = sorted(torch._dynamo.list_backends(exclude_tags=()))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(
            f"grpo_pack: option 'inner' names no backend: {name!r}.{hint} Known: {', '.join(known)}."
        ) from None
