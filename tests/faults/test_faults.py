"""A fault in any part of the packed way is caught at its first execution: the catalogue, one by one."""

from __future__ import annotations

import dataclasses

import bench
import packing
import pytest
import tiny
import torch
from bench import Setting, subject
from catalogue import FAULTS, LAST
from seams import Fault, in_function, in_plan

from fx_packing.runtime import Packed

#: How far from the truth a fault must lead, relative to the largest result (or gradient): a thousand
#: times what a healthy run shows.
NOTICEABLE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
SETTINGS = list(dict.fromkeys(fault.setting for fault in FAULTS))

killed: dict[str, bool] = {}


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_without_a_fault_the_check_passes(setting: Setting):
    healthy = subject(setting)
    checks = healthy.graph.verifications
    assert all(check.passed and check.layout == setting.layout for check in checks), checks
    assert [check.gradients for check in checks] == ([False, True] if setting.training else [False])
    assert healthy.graph.runs == {setting.layout: 1}
    # Far below what counts as a fault: so a fault is seen for what it is.
    assert max(healthy.healthy.distance(healthy.right())) < NOTICEABLE[setting.dtype] / 4
    packing.forget_runs()
    with packing.messages() as told:
        assert healthy.run().equals(healthy.healthy)
    assert not told
    (graph,) = bench.ran()
    assert graph.runs == {setting.layout: 1} and graph.verifications == checks


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_at_its_first_execution(fault: Fault, monkeypatch):
    healthy = subject(fault.setting)
    layout, batch = fault.setting.layout, fault.batch() if fault.batch else healthy.batch
    model = healthy.models[fault.model]
    killed[fault.name] = False

    # Without it, the same calls are right and their checks pass.
    right, padded = healthy.right(model, batch), healthy.padded(model, batch)
    if fault.before:
        fault.before(healthy)
        assert max(healthy.run(batch, model).distance(right)) < NOTICEABLE[fault.setting.dtype] / 4
        assert all(set(g.runs) == {layout} for g in bench.ran())
        assert all(check.passed for g in bench.ran() for check in g.verifications)

    # It is one: unchecked, the result is wrong, or right with wrong gradients.
    fault.inject(monkeypatch, healthy)
    packing.forget_runs()
    with bench.unchecked():
        if fault.before:
            fault.before(healthy)
        faulty = healthy.run(batch, model)
    assert all(set(g.runs) == {fault.runs or layout} for g in bench.ran()), bench.ran()[-1].last
    values, gradients = faulty.distance(right)
    noticeable = NOTICEABLE[fault.setting.dtype]
    assert (gradients if fault.gradient else values) > noticeable, (values, gradients)
    if fault.gradient:
        assert values < noticeable / 4

    # It is caught: the padded result, one verdict, one warning.
    packing.forget_runs()
    if fault.before:
        with packing.messages() as told:
            fault.before(healthy)
        assert not told and all(set(g.runs) == {layout} for g in bench.ran())
    with packing.messages() as told:
        got = healthy.run(batch, model)
    graph = bench.ran()[-1]
    assert got.equals(padded), (got.distance(padded), graph.verifications)
    check = graph.verifications[-1]
    assert check.passed is False and check.max_error > check.tolerance
    assert check.layout == (fault.runs or layout) and check.gradients == fault.gradient
    assert graph.last.layout == "padded" and check.why in graph.last.reason
    assert len(told) == 1 and "differ from those of the captured graph" in told[0]

    # It stays caught.
    checks = len(graph.verifications)
    with packing.messages() as told:
        assert healthy.run(batch, model).equals(padded)
    assert not told and len(graph.verifications) == checks
    assert bench.ran()[-1].last.layout == "padded"
    killed[fault.name] = True


def test_what_is_returned_is_what_was_checked(monkeypatch):
    """In training the check runs before the call, which must not go wrong by what the check left."""
    healthy = subject(Setting("llama", training=True, keep=LAST))

    def spoils(real):
        def positions(self, plan):
            kept = plan.remember("spoilt", lambda: real(self, plan).clone())
            found = kept.clone()
            kept.view(-1)[32:] *= 2  # the second use finds other positions than the first
            return found

        return positions

    in_function(Packed, "_positions", spoils)(monkeypatch, healthy)
    packing.forget_runs()
    with packing.messages() as told:
        got = healthy.run()
    assert min(max(got.distance(want)) for want in (healthy.right(), healthy.padded())) < 1e-5
    assert bench.ran()[-1].last.layout == "padded" and len(told) == 1


def test_more_columns_read_than_were_checked(monkeypatch):
    """The tokens that a slice of the sequence reads are a size like any other."""
    growing = packing.compiled(layout="prefix", dynamic=True)
    model, batch = tiny.PlainDecoder(), bench.groups()

    def beyond(plan):
        if not plan.reads:
            return {}
        index = plan.reads[0].index.clone()
        index[33:] = plan.reads[0].index[32:-1]
        return {"reads": (dataclasses.replace(plan.reads[0], index=index),)}

    def score(keep: int):
        return growing(model, batch.ids, attention_mask=batch.mask, logits_to_keep=keep)

    in_plan(beyond)(monkeypatch, None)
    with torch.no_grad():
        score(2)  # 32 tokens are read at most
        assert [check.passed for check in bench.ran()[-1].verifications] == [True]
        with packing.messages() as told:
            got = score(12)
        want = model(batch.ids, attention_mask=batch.mask, logits_to_keep=12)
    real = batch.mask[:, -12:].bool()
    assert float((got - want)[real].abs().max()) < 1e-3
    assert bench.ran()[-1].last.layout == "padded" and len(told) == 1


def test_all_faults_were_caught(record_property):
    """Runs last, and tells the kill rate; of those that ran, where some were deselected."""
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
    alive = [name for name, dead in killed.items() if not dead]
    record_property("told", f"faults: {len(killed) - len(alive)} of {len(killed)} caught at first execution")
    for name in alive:
        record_property("told", f"  survived: {name}")
    assert killed and not alive
