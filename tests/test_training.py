"""What trainers do to a model: checkpointing, mixed precision, adapters, several processes, other heads."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from packing import assert_gradients, assert_packed, shared_batch
from trainers import packed_runs

import fx_packing
from fx_packing import forest, runtime

OPTIONS = {"inner": "aot_eager"}


def logps(model, batch, **kw):
    """The log-probability of each token after the first, ``[B, L - 1]``, in float32."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, **kw).logits
    return token_logps(logits, batch)


def token_logps(logits, batch):
    found = F.log_softmax(logits[:, :-1].float(), -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return found * (batch.mask[:, 1:] * batch.mask[:, :-1])


def reference(model, batch):
    return token_logps(tiny.per_row(model, *batch), batch)


def compiled(model, **options):
    model.compile(backend="grpo_pack", options=OPTIONS | options)
    return model


# -- activation checkpointing ----------------------------------------------------------------------


def saved_bytes(run):
    """How many bytes `run()` keeps for its backward, and what it returns."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(kept.values()), result


@pytest.mark.slow
@pytest.mark.parametrize("layout", ("varlen", "prefix"))
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing_saves_the_packed_share(reentrant, layout, monkeypatch):
    """Against the captured checkpointed graph: the same model with layout="padded"."""
    batch = tiny.Batch(*tiny.group_batch((40, 60), 4, 90)[:2])
    plans = []
    made = forest.make_plan
    monkeypatch.setattr(runtime, "make_plan", lambda *a, **k: plans.append(1) or made(*a, **k))
    kept = {}
    for name in ("padded", layout):
        model = tiny.build("llama", num_hidden_layers=4).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        weights = sum(p.numel() * 4 for p in model.parameters())
        compiled(model.model, layout=name, verify="never")
        kept[name], hidden = saved_bytes(
            lambda model=model: model.model(
                input_ids=batch.ids, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
        )
        kept[name] -= weights - model.lm_head.weight.numel() * 4
        before = len(plans)
        (hidden * batch.mask[..., None]).sin().sum().backward()
        assert len(plans) == before  # recomputation plans nothing
    (graph,) = [g for g in fx_packing.report().graphs if "padded" not in g.runs]
    assert len(graph.attention) == 4 and graph.runs == {layout: 1}
    assert len(plans) == 1
    share = graph.last.run_tokens / graph.last.padded_tokens
    assert share < 0.8
    assert kept[layout] <= share * kept["padded"], (kept, share)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed_training_is_right(reentrant):
    batch = shared_batch("left")
    model = tiny.build("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compiled(model)
    got = logps(model, batch)
    assert_packed("auto", *batch)
    plain = tiny.build("llama")
    want = reference(plain, batch)
    assert float((got - want).detach().abs().max()) < 1e-4
    got.sum().backward(), want.sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (model, plain)]
    assert_gradients(*grads, 5e-5)


# -- mixed precision -------------------------------------------------------------------------------


class InsideAutocast(torch.nn.Module):
    """Autocast inside what is compiled."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, **kw):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.model(**kw)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("place", ("around", "inside"))
def test_autocast_with_float32_weights(place, dtype):
    batch = shared_batch("left")
    model = tiny.build("llama", initializer_range=0.1).train()
    packed = model if place == "around" else InsideAutocast(model, dtype)
    compiled(packed)
    with torch.autocast("cpu", dtype=dtype, enabled=place == "around"):
        got = logps(packed, batch)
    graph = assert_packed("auto", *batch)
    assert [v.gradients for v in graph.verifications] == [False, True]
    plain = tiny.build("llama", initializer_range=0.1).train()
    with torch.autocast("cpu", dtype=dtype):
        alone = reference(plain, batch)
        padded = logps(plain, batch)
    error, noise = ((x - alone).detach().abs() for x in (got, padded))
    assert error.max() < 4 * noise.max() + 1e-3 and error.mean() < 3 * noise.mean() + 1e-4
    got.sum().backward(), alone.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32  # master weights
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.99


@pytest.mark.slow
def test_half_precision_with_a_gradient_scaler():
    """Ten steps in float16: the scaler's decisions and the curve are those of the padded run."""
    curves = []
    for packed in (False, True):
        model = tiny.build("llama", initializer_range=0.1).train()
        if packed:
            compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)  # overflows at first
        curve = []
        for step in range(10):
            batch = shared_batch("left", seed=step)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = -logps(model, batch).sum() / batch.mask.sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            curve.append((float(loss), scaler.get_scale()))
        curves.append(curve)
    assert [s for _, s in curves[0]] == [s for _, s in curves[1]]
    assert curves[0][0][1] < 2.0**24  # it did overflow
    assert all(abs(a - b) < 1e-2 for (a, _), (b, _) in zip(*curves, strict=True)), curves
    assert packed_runs() == {"prefix": 10}


def test_queries_and_values_of_unequal_dtype():
    """Rotary embeddings in float32 under autocast leave q and k wider than v."""

    class Wide(tiny.PlainDecoder):
        def _look_up(self, table, position_ids, length):
            return super()._look_up(table, position_ids, length).float()

    batch = shared_batch("left")
    model, plain = Wide(), Wide()
    compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_logps(model(*batch), batch)
        alone = reference(plain, batch)
        padded = token_logps(plain(*batch), batch)
    assert_packed("auto", *batch)
    noise = float((padded - alone).detach().abs().max())
    assert float((got - alone).detach().abs().max()) < 4 * noise + 1e-3


# -- adapters --------------------------------------------------------------------------------------


def lora(dropout=0.0, **settings):
    peft = pytest.importorskip("peft")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=dropout, **config)
        model = peft.get_peft_model(tiny.build("llama"), config)
        model.add_adapter("other", config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.slow
def test_adapters_switched_disabled_and_merged():
    """Each state has a verdict of its own and the right result; the states differ."""
    batch = shared_batch("left")
    model = lora()
    plain = copy.deepcopy(model)
    compiled(model.base_model.model)
    seen = []

    def compare():
        with torch.no_grad():
            got, want = logps(model, batch), reference(plain, batch)
            assert float((got - want).abs().max()) < 1e-4
            seen.append(got)

    for name in ("default", "other", "default"):
        model.set_adapter(name), plain.set_adapter(name)
        compare()
    with model.disable_adapter(), plain.disable_adapter():
        compare()
    compare()
    model.merge_adapter(), plain.merge_adapter()
    compare()
    default, other, again, off, on, merged = seen
    assert torch.equal(default, again) and torch.equal(default, on)
    assert float((default - other).abs().max()) > 0.1 and float((default - off).abs().max()) > 0.1
    assert float((default - merged).abs().max()) < 1e-4
    assert packed_runs() == {"prefix": 6}
    verdicts = [v for g in fx_packing.report().graphs for v in g.verifications]
    assert len(verdicts) >= 4 and all(v.passed for v in verdicts)


@pytest.mark.slow
def test_frozen_weights_get_no_gradients():
    batch = shared_batch("left")
    model, plain = lora(), lora()
    compiled(model.base_model.model)
    got, want = logps(model, batch), reference(plain, batch)
    assert_packed("auto", *batch)
    got.sum().backward(), want.sum().backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (model, plain)]
    used = {n for n in grads[0] if ".default." in n}
    assert_gradients(*({n: g[n] for n in used} for g in grads), 5e-5)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    frozen, _ = saved_bytes(lambda: logps(model, batch))
    full = lora().requires_grad_(True)
    compiled(full.base_model.model)
    everything, _ = saved_bytes(lambda: logps(full, batch))
    assert frozen < 0.5 * everything  # what only their gradients need is not kept


@pytest.mark.slow
def test_lora_dropout_is_packed_and_drops():
    batch = shared_batch("left")
    model = lora(dropout=0.5).train()
    compiled(model.base_model.model)
    torch.manual_seed(0)
    first, second = logps(model, batch), logps(model, batch)
    graph = assert_packed("auto", *batch)
    assert not torch.equal(first, second)
    assert graph.runs == {"prefix": 2}
    model.eval()
    plain = lora()
    assert float((logps(model, batch) - reference(plain, batch)).detach().abs().max()) < 1e-4
    assert packed_runs() == {"prefix": 3}


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", (False, True))
def test_lora_with_checkpointing_as_trainers_set_it_up(reentrant):
    """Five steps with gradients required of the embeddings' output, as reentrant checkpointing needs."""
    batch = shared_batch("left")
    model, plain = lora().train(), lora()
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compiled(model.base_model.model)
    for m in (model, plain):
        m.optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        losses = []
        for m, score in ((model, logps), (plain, reference)):
            loss = score(m, batch).sum() / batch.mask.sum()
            loss.backward()
            m.optimizer.step(), m.optimizer.zero_grad()
            losses.append(float(loss))
        assert abs(losses[0] - losses[1]) < 2e-5
    runs = packed_runs()
    assert sum(runs.values()) == 5 and set(runs) <= {"varlen", "prefix"}
    assert runs == {"varlen": 5} if reentrant else runs["prefix"] >= 4


# -- accelerate and transformers' Trainer ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("precision", ("no", "bf16"))
@pytest.mark.parametrize("when", ("before", "after", "wrapped"))
def test_accelerate_with_accumulation(when, precision):
    """Ten optimiser steps of two micro-batches each; compiled before or after `prepare`."""
    accelerate = pytest.importorskip("accelerate")
    curves = {}
    for packed in (False, True):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=2
        )
        model = tiny.build("llama").train()
        names = list(model.state_dict())
        if packed and when == "before":
            compiled(model)
        if packed and when == "wrapped":
            model = torch.compile(model, backend="grpo_pack", options=OPTIONS)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if packed and when == "after":
            compiled(model)
        curve = []
        for step in range(20):
            batch = shared_batch("left", seed=step % 4)
            with accelerator.accumulate(model):
                loss = -logps(model, batch).sum() / batch.mask.sum()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            curve.append(float(loss))
        curves[packed] = curve
        plain = accelerator.unwrap_model(model, keep_torch_compile=False)
        assert list(plain.state_dict()) == list(accelerator.get_state_dict(plain)) == names
    tolerance = 2e-5 if precision == "no" else 0.05
    assert all(abs(a - b) < tolerance for a, b in zip(*curves.values(), strict=True)), curves
    assert packed_runs() == {"prefix": 20}


@pytest.mark.slow
def test_trainer_saves_and_resumes(tmp_path):
    """transformers' Trainer on the padded batches of a collator: backbone compiled; a resumed run is the
    same run, and so is the padded one."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = []
    for seed in range(12):
        batch = shared_batch("right", seed=seed)
        rows += [{"input_ids": i, "attention_mask": m} for i, m in zip(*batch, strict=True)]

    def collate(some):
        made = {k: torch.stack([row[k] for row in some]) for k in some[0]}
        return made | {"labels": made["input_ids"].where(made["attention_mask"].bool(), -100)}

    def run(packed, folder, resume=None):
        model = tiny.build("llama")
        model.config.use_cache = False
        if packed:
            compiled(model.model)
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, max_steps=12, per_device_train_batch_size=7, save_steps=6,
            logging_steps=1, report_to=[], disable_tqdm=True, learning_rate=1e-3, seed=0, data_seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train(resume_from_checkpoint=resume)
        return {h["step"]: h["loss"] for h in trainer.state.log_history if "loss" in h}, model

    want, _ = run(False, tmp_path / "padded")
    got, model = run(True, tmp_path / "packed")
    assert set(packed_runs()) <= {"prefix", "varlen"} and sum(packed_runs().values()) == 12
    assert all(abs(got[step] - want[step]) < 1e-4 for step in want), (got, want)
    resumed, again = run(True, tmp_path / "packed", str(tmp_path / "packed" / "checkpoint-6"))
    assert all(abs(resumed[step] - got[step]) < 1e-5 for step in range(7, 13))
    assert sum(packed_runs().values()) == 18
    for name, value in model.state_dict().items():
        assert float((again.state_dict()[name] - value).abs().max()) < 1e-5
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "packed" / "checkpoint-12" / "model.safetensors")
    padded = load_file(tmp_path / "padded" / "checkpoint-12" / "model.safetensors")
    assert saved.keys() == padded.keys()


# -- other heads -----------------------------------------------------------------------------------


class Headed(torch.nn.Module):
    """A decoder with another head: a value for each token, or a score of each row's last token."""

    def __init__(self, kind):
        super().__init__()
        self.decoder, self.kind = tiny.PlainDecoder(), kind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.head = torch.nn.Linear(tiny.VOCAB, 1)

    def forward(self, ids, mask):
        logits = self.decoder(ids, mask)
        value = self.head(logits)[..., 0]
        if self.kind == "values":
            return logits, value
        return value[torch.arange(len(ids)), mask.sum(1) - 1]  # [B]


def test_a_value_head_is_packed():
    model, batch = Headed("values"), shared_batch("left")
    compiled(model)
    logits, values = model(*batch)
    assert_packed("auto", *batch)
    want = tiny.per_row(model.decoder, *batch)
    real = batch.mask.bool()
    assert float((logits - want)[real].detach().abs().max()) < 2e-5
    assert float((values - model.head(want)[..., 0])[real].detach().abs().max()) < 2e-5


def test_a_score_of_the_last_token_is_refused():
    model, batch = Headed("score"), shared_batch("right")
    compiled(model)
    got = model(*batch)
    (graph,) = fx_packing.report().graphs
    assert not graph.rewritten and graph.reason
    assert torch.allclose(got, Headed("score")(*batch), atol=1e-5)
