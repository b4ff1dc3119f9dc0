"""A healthy model under ``grpo_pack``, into which faults are put: compiled once a setting, run often."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tiny
import torch
import torch.nn.functional as F
from packing import compiled, forget_runs, messages
from torch import Tensor, nn

import fx_packing
from fx_packing import runtime
from fx_packing.report import GraphReport

# -- batches ---------------------------------------------------------------------------------------

ROWS, COMPLETION = 16, 8
PROMPTS = (5, 9, 3, 12)


def groups(padding: str = "trainer", seed: int = 0) -> tiny.Batch:
    """Four prompts with four completions each. In every group the first completion is the beginning
    of the second and of the third, which part there; the fourth begins with a token that differs from
    theirs in its last bit only.

    "trainer" pads as trainers do, prompts on the left and completions on the right; else "left" or
    "right".
    """
    made = tiny.group_batch(PROMPTS, 4, COMPLETION, seed=seed)
    ids, mask = made.ids.clone(), made.mask.clone()
    first = max(PROMPTS)
    # Drawn for every place, so that completions made longer below do not end in pad ids.
    drawn = torch.randint(0, tiny.VOCAB, ids.shape, generator=tiny.generator(seed + 1))
    for group in range(0, ROWS, 4):
        n = 2 + group // 4
        ids[group : group + 4, first:] = drawn[group : group + 4, first:]
        ids[group + 1 : group + 3, first : first + n] = ids[group, first : first + n]
        ids[group + 3, first] = ids[group, first] ^ 1
        for row, length in enumerate((n, n + 3, n + 2)):
            mask[group + row, first:] = torch.arange(COMPLETION) < length
    ids = ids.where(mask.bool(), tiny.PAD)
    if padding != "trainer":
        order = (mask if padding == "left" else 1 - mask).argsort(dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    return tiny.Batch(ids, mask)


def longer() -> tiny.Batch:
    """Twice the rows and longer completions: T, the longest row and the rows all grow."""
    made = tiny.group_batch((5, 9, 3, 12, 7, 8, 4, 6), 4, 24, seed=3)
    return tiny.Batch(made.ids, made.mask)


# -- the models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a fault is put into."""

    family: str = "plain"
    layout: str = "prefix"
    training: bool = False
    dtype: torch.dtype = torch.float32
    padding: str = "trainer"
    keep: int = 0  # the columns at the end whose logits are wanted; 0: all
    options: tuple[tuple[str, object], ...] = ()
    inputs: str = "ids"  # or "positions", their own in every other row, or "embeddings" for ids
    # or "hidden", with those of each layer; "logps", of the tokens kept; "weighted", those times their
    # probabilities, which have no gradient, and these
    outputs: str = "logits"
    dynamic: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        parts = [self.family, self.layout, "training" if self.training else "scoring"]
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        parts += [self.padding] if self.padding != "trainer" else []
        parts += [f"keep {self.keep}"] if self.keep else []
        parts += [f"{k}={v}" for k, v in self.options]
        parts += [self.inputs] if self.inputs != "ids" else []
        parts += [self.outputs] if self.outputs != "logits" else []
        return "-".join(parts + (["dynamic"] if self.dynamic else []))


@dataclass
class Result:
    """Outputs, zero where there is no token, and every parameter's gradient of a projection of them."""

    values: list[Tensor]
    gradients: dict[str, Tensor] | None

    def equals(self, other: Result) -> bool:
        """Whether two results are the same numbers, to the last bit."""
        same = all(map(torch.equal, self.values, other.values))
        return same and (
            self.gradients is None
            or all(torch.equal(g, other.gradients[name]) for name, g in self.gradients.items())
        )

    def distance(self, other: Result) -> tuple[float, float]:
        """The largest difference of values, and of gradients, each relative to the largest entry of
        the output or of the parameter that it is in. Infinite where a number is none."""
        values = max(map(_relative, self.values, other.values))
        if other.gradients is None:
            return values, 0.0
        least = 1e-3 * max(float(g.abs().max()) for g in other.gradients.values())
        gradients = [_relative(self.gradients[n], g, least) for n, g in other.gradients.items()]
        return values, max(gradients)


def _relative(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """`least` is what the largest entry of `want` is taken for at least: some gradients are zero."""
    scale = max(float(want.abs().max()), least)
    difference = float((got.float() - want.float()).abs().max()) / scale
    return difference if difference == difference else float("inf")


class Subject:
    """A model of a setting, compiled; it ran packed once, healthy, and that run passed its check."""

    def __init__(self, setting: Setting, batch: tiny.Batch | None = None) -> None:
        self.setting = setting
        self.models = [_model(setting, seed).to(setting.device) for seed in (0, 1)]
        self.model = self.models[0]
        batch = batch or groups(setting.padding)
        self.batch = tiny.Batch(*(t.to(setting.device) for t in batch))
        self._results: dict[tuple, Result] = {}

        # Called with the model: one captured graph serves both models.
        self._compiled = compiled(layout=setting.layout, dynamic=setting.dynamic, **dict(setting.options))
        if setting.outputs == "hidden":
            self.padded()  # transformers installs its hooks at the first run, which must be plain
        forget_runs()
        with messages() as told:
            self.healthy = self.run()
        assert not told, told
        (graph,) = fx_packing.report().graphs
        self.graph = copy.deepcopy(graph)  # of that run alone

    # What is right

    def right(self, model=None, batch: tiny.Batch | None = None) -> Result:
        """Each row alone; the padded batch where the positions are those of the captured graph."""
        if dict(self.setting.options).get("positions") == "captured":
            return self.padded(model, batch)
        model, batch = model or self.model, batch or self.batch
        return self._kept("right", model, batch, self._alone)

    def padded(self, model=None, batch: tiny.Batch | None = None) -> Result:
        """What the model itself makes of the padded batch."""
        model, batch = model or self.model, batch or self.batch
        return self._kept("padded", model, batch, lambda *of: self._run(model, *of))

    def _kept(self, what: str, model, batch: tiny.Batch, make) -> Result:
        if batch is not self.batch:
            return make(model, batch)
        key = (what, self.models.index(model))
        if key not in self._results:
            self._results[key] = make(model, batch)
        return self._results[key]

    def _alone(self, model, batch: tiny.Batch) -> Result:
        kwargs = self._kwargs(batch)
        keep = kwargs.pop("logits_to_keep", 0)
        kwargs.pop("attention_mask")

        def output(index):
            def forward(given, attention_mask, **kw):
                mask = torch.ones(given.shape[:2], dtype=torch.int64, device=given.device)
                return self._outputs(model(given, attention_mask=mask, **kw))[index]

            return forward

        given = self._given(model, batch)
        if self.setting.outputs in ("logps", "weighted"):
            with torch.set_grad_enabled(self.setting.training):
                output = _logps_alone(model, batch, keep)
                output = _weighted(output) if self.setting.outputs == "weighted" else output
                return self._result(model, batch, self._outputs(output), given)
        count = len(self._outputs(model(given, attention_mask=batch.mask, **kwargs)))
        with torch.set_grad_enabled(self.setting.training):
            values = [tiny.per_row(output(i), given, batch.mask, **kwargs) for i in range(count)]
        values[0] = values[0][:, -keep:] if keep else values[0]  # hidden states are never cut
        return self._result(model, batch, values, given)

    # What runs

    def run(self, batch: tiny.Batch | None = None, model=None) -> Result:
        """The compiled model on a batch."""
        model = model or self.model
        return self._run(functools.partial(self._compiled, model), model, batch or self.batch)

    def _run(self, function, model, batch: tiny.Batch) -> Result:
        given = self._given(model, batch)
        with torch.set_grad_enabled(self.setting.training):
            values = self._outputs(function(given, **self._kwargs(batch)))
        return self._result(model, batch, values, given)

    def scored(self, batch: tiny.Batch) -> None:
        """A run without gradients, of a model that trains otherwise."""
        with torch.no_grad():
            self._compiled(self.model, batch.ids, **self._kwargs(batch))

    def _given(self, model, batch: tiny.Batch) -> Tensor:
        if self.setting.inputs != "embeddings":
            return batch.ids
        return model.embed(batch.ids).detach().requires_grad_(self.setting.training)

    def _kwargs(self, batch: tiny.Batch) -> dict:
        kwargs = {"attention_mask": batch.mask}
        if self.setting.keep:
            kwargs["logits_to_keep"] = self.setting.keep
        if self.setting.family != "plain":
            kwargs |= {"use_cache": False}
        if self.setting.outputs == "hidden":
            kwargs |= {"output_hidden_states": True}
        if self.setting.inputs == "positions":
            steps = 1 + torch.arange(len(batch.ids))[:, None] % 2
            kwargs["position_ids"] = (batch.mask.cumsum(1) - 1).clamp_min(0) * steps
        return kwargs

    def _outputs(self, output) -> list[Tensor]:
        if self.setting.outputs == "weighted":
            return list(output)
        hidden = output.hidden_states if self.setting.outputs == "hidden" else ()
        return [tiny.logits_of(output), *hidden]

    def _result(self, model, batch: tiny.Batch, values: list[Tensor], given: Tensor) -> Result:
        values = [v * batch.mask[:, -v.shape[1] :].view(v.shape[:2] + (1,) * (v.dim() - 2)) for v in values]
        if not self.setting.training:
            return Result(values, None)
        g = tiny.generator(5)
        loss = sum((v * torch.randn(v.shape, generator=g).to(v)).sum() for v in values)
        names, parameters = zip(*model.named_parameters(), strict=True)
        if given.requires_grad:
            names, parameters = (*names, "the embeddings passed in"), (*parameters, given)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        found = [torch.zeros_like(p) if f is None else f for p, f in zip(parameters, found, strict=True)]
        return Result([v.detach() for v in values], dict(zip(names, found, strict=True)))


class _LogProbs(nn.Module):
    """The log-probabilities of the last tokens under a model, all that is wanted of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, attention_mask: Tensor, logits_to_keep: int, use_cache: bool) -> Tensor:
        return fx_packing.per_token_logps(self.model, ids, attention_mask, logits_to_keep)


class _Weighted(_LogProbs):
    """These times their probabilities, which are weights without a gradient, and the weights."""

    def forward(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return _weighted(super().forward(*args, **kwargs))


def _weighted(logps: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        weights = logps.exp()
    return logps * weights, weights


def _logps_alone(model: _LogProbs, batch: tiny.Batch, keep: int) -> Tensor:
    """The same of each row by itself; the token before the first one kept must be real."""
    logits = tiny.per_row(model.model, *batch)[:, -keep - 1 : -1]
    targets = batch.ids[:, -keep:, None]
    return logits.log_softmax(-1).gather(-1, targets)[..., 0] * batch.mask[:, -keep:]


class _FromEmbeddings(tiny.PlainDecoder):
    """Takes embeddings in the place of ids."""

    def forward(self, embeddings: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        length = embeddings.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        x, rotary = embeddings, [self.cos[:length].to(embeddings), self.sin[:length].to(embeddings)]
        for layer in self.layers:
            x = layer(x, rotary, allowed)
        return F.linear(self.norm(x), self.embed.weight)


def _model(setting: Setting, seed: int):
    if setting.family == "plain":
        model = (_FromEmbeddings if setting.inputs == "embeddings" else tiny.PlainDecoder)(
            kv_heads=2, seed=seed
        )
    else:
        # Soft caps that the scores of so small a model reach.
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
        own = caps if setting.family == "gemma2" else {}
        if setting.dtype == torch.bfloat16:
            own["initializer_range"] = 0.05
        model = tiny.build(setting.family, seed=seed, **own)
    if setting.outputs in ("logps", "weighted"):
        model = (_LogProbs if setting.outputs == "logps" else _Weighted)(model)
    return model.to(setting.dtype)


@functools.cache
def subject(setting: Setting) -> Subject:
    """The compiled model of a setting."""
    return Subject(setting)


# -- the product's state ---------------------------------------------------------------------------


def packed() -> list[runtime.Packed]:
    """All captured graphs that can run packed."""
    return [p for p in runtime._alive if isinstance(p, runtime.Packed)]


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, all runs are as with the option ``verify="never"``."""
    kept = [(p, p.options) for p in packed()]
    for graph, options in kept:
        graph.options = dataclasses.replace(options, verify="never")
    try:
        yield
    finally:
        for graph, options in kept:
            graph.options = options


def ran() -> list[GraphReport]:
    """The graphs that ran since all runs were forgotten, in the order of their first runs."""
    return fx_packing.report().graphs
