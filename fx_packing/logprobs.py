"""What GRPO needs of a model: the log-probability of each completion token, in plain PyTorch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


def per_token_logps(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    logits_to_keep: int,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probabilities of the last `logits_to_keep` tokens of each row, in nats, under a causal LM.

    ``[B, logits_to_keep]`` float32 (float64 for a float64 model), 0 where `attention_mask`
    (``[B, L]``, 1 at real tokens; None if all are) is 0. Column j is
    ``log softmax(logits[:, c - 1] / temperature)[ids[:, c]]`` with ``c = L - logits_to_keep + j``. With
    `entropy`, also the entropy of the same distributions, ``[B, logits_to_keep]``, in nats:
    ``H(p) = logsumexp(z) - sum(softmax(z) * z)``.

    Works on any causal LM of transformers as it is. To run on real tokens only and without a
    ``[tokens, vocabulary]`` tensor, compile it whole:
    ``torch.compile(fx_packing.per_token_logps, backend="grpo_pack")``.

    Raises ValueError where `logits_to_keep` is not in ``1 .. L - 1``.
    """
    if not 1 <= logits_to_keep < input_ids.shape[1]:
        raise ValueError(
            f"logits_to_keep is {logits_to_keep}, expected 1 to {input_ids.shape[1] - 1}: the first of "
            f"{input_ids.shape[1]} columns has no token before it"
        )
    kept = {"logits_to_keep": logits_to_keep + 1} if _takes_logits_to_keep(model) else {}
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **kept)
    logits = outputs.logits[:, -logits_to_keep - 1 : -1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    targets = input_ids[:, -logits_to_keep:]
    normaliser = logits.logsumexp(-1)
    logps = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    spread = normaliser - (logits.softmax(-1) * logits).sum(-1) if entropy else None
    if attention_mask is not None:
        real = attention_mask[:, -logits_to_keep:] != 0
        logps = torch.where(real, logps, 0.0)
        spread = torch.where(real, spread, 0.0) if entropy else None
    return (logps, spread) if entropy else logps


def _takes_logits_to_keep(model: Any) -> bool:
    """Whether the model can spare the logits that nobody reads; a compiled or wrapped one is asked by
    what it wraps."""
    for _ in range(4):
        if _names_logits_to_keep(type(model)):
            return True
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        inner = inner or getattr(model, "base_model", None)
        if inner is None or inner is model:
            return False
        model = inner
    return False


@torch.compiler.assume_constant_result  # of a class: a module is no constant for Dynamo of torch 2.11
def _names_logits_to_keep(kind: type) -> bool:
    forward = getattr(kind, "forward", None)
    return forward is not None and "logits_to_keep" in inspect.signature(forward).parameters
