"""Every registered method passes the conformance suite on every family, and the suite finds what is wrong."""

from __future__ import annotations

import random
from collections import deque
from typing import ClassVar

import pytest
import torch

import acclimate
from acclimate.core.method import Info
from acclimate.core.registry import _REGISTRY, find_method, fitting_methods
from acclimate.errors import ConformanceError
from acclimate.models.families import view_of
from acclimate.testing import check as suite
from acclimate.testing.check import CHECKS, Case
from support import vit_methods


@pytest.fixture
def only_timm(monkeypatch):
    """Let a wrong method be checked on one family alone: what is wrong with it does not depend on the family."""
    timm = {"timm": suite.families()["timm"]}
    monkeypatch.setattr(suite, "families", lambda: timm)


THREADED = "caller_without_gradients", "micro_batches_do_not_matter", "same_seed_same_run"  # what threads could spoil


@pytest.fixture
def threads(check):
    before = torch.get_num_threads()
    torch.set_num_threads(2 if check in THREADED else before)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", vit_methods())
def test_method_conforms(name, family, check):
    cls = find_method(name)
    if check in cls.info.exceptions:
        pytest.xfail(cls.info.exceptions[check])
    CHECKS[check](Case(cls, family))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", fitting_methods(view_of(suite.tiny_model("resnet"))))
def test_method_conforms_with_batch_norm(name, check):
    """Most methods need no more than norms, features or logits, and so they suit a ResNet."""
    cls = find_method(name)
    if check in cls.info.exceptions:
        pytest.xfail(cls.info.exceptions[check])
    CHECKS[check](Case(cls, "resnet"))


@pytest.mark.parametrize(
    "options",
    [
        {"reference": True},
        {"generator": False},
        {"init": "zero"},
        {"conditioners": "kv"},
        {"conditioners": "v"},
        {"blocks": [0, 3]},
        {"margin": 1.5, "recovery": 0.6},
    ],
    ids=str,
)
@pytest.mark.parametrize("check", CHECKS)
def test_dct_conforms_with_options(check, options):
    CHECKS[check](Case(find_method("dct"), "timm", options))


@pytest.fixture
def forget_methods():
    known = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(known)


def test_check_method_reports_every_outcome():
    outcomes = acclimate.check_method("source")
    assert set(outcomes.values()) == {"passed"}
    assert len(outcomes) == 4 * len(CHECKS)


@pytest.mark.usefixtures("forget_methods", "only_timm")
def test_check_method_finds_state_outside_of_torch():
    @acclimate.register("forgetful")
    class Forgetful(find_method("tent")):
        """Counts its steps in a place that reset, snapshot and save do not know of."""

        calls = 0

        def step(self, images, engine):
            self.calls += 1
            step = super().step(images, engine)
            step.logits = step.logits + self.calls
            return step

    with pytest.raises(ConformanceError) as error:
        acclimate.check_method("forgetful")
    for check in ("reset_equals_freshly_wrapped", "save_load_continue", "snapshot_and_rollback"):
        assert f"timm: {check}" in str(error.value)
    assert "batch_of_one" not in str(error.value)


@pytest.mark.usefixtures("forget_methods", "only_timm")
def test_check_method_finds_a_counter_whose_effect_it_does_not_see():
    """After an even number of steps the method acts as at the beginning."""

    @acclimate.register("alternating")
    class Alternating(find_method("tent")):
        def attach(self, view, setup):
            self.count = 0
            return super().attach(view, setup)

        def step(self, images, engine):
            self.count += 1
            step = super().step(images, engine)
            step.logits = step.logits + self.count % 2
            return step

    with pytest.raises(ConformanceError, match="state_is_torch_state: AssertionError: a step changed count: keep"):
        acclimate.check_method("alternating")


class Holds(find_method("tent")):
    """Has attributes of many kinds, set when it is attached."""

    shared: ClassVar = {"steps": []}

    def attach(self, view, setup):
        self.numbers, self.names, self.seen = [1, [2]], {"a": [1]}, {1}
        self.plain = torch.zeros(3)
        self.inner = torch.nn.Identity()
        self.inner.note = "as it was"
        self.queue, self.random = deque([1, 2]), random.Random(0)
        self.drawn = torch.Generator().manual_seed(0)
        self.constant = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("kept", torch.zeros(2))
        self.both = (self.kept, view)  # torch state, and the model
        return super().attach(view, setup)

    def step(self, images, engine):
        self.kept += 1
        self.numbers = [1, [2]]  # equal to what it was
        self.change()
        return super().step(images, engine)

    def change(self):
        pass


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("numbers", lambda self: self.numbers[1].append(3)),
        ("names", lambda self: self.names["a"].append(2)),
        ("seen", lambda self: self.seen.add(2)),
        ("plain", lambda self: self.plain.add_(1)),
        ("inner.note", lambda self: setattr(self.inner, "note", "changed")),
        ("queue", lambda self: self.queue.rotate()),
        ("random", lambda self: self.random.random()),
        ("drawn", lambda self: torch.rand(1, generator=self.drawn)),
        ("new", lambda self: setattr(self, "new", 1)),
        ("seen", lambda self: vars(self).pop("seen", None)),
        ("Holds.shared", lambda self: self.shared["steps"].append(1)),
        ("method/constant", lambda self: self.constant.data.add_(1)),
    ],
    ids=["list", "dict", "set", "tensor", "module", "queue", "random", "generator", "new", "gone", "class", "parameter"],
)
def test_what_a_step_changes_outside_of_torch_state_is_named(name, change, monkeypatch):
    CHECKS["state_is_torch_state"](Case(Holds))
    monkeypatch.setattr(Holds, "change", change)
    with pytest.raises(AssertionError, match=f"a step changed {name}: keep"):
        CHECKS["state_is_torch_state"](Case(Holds))


@pytest.mark.usefixtures("forget_methods", "only_timm")
def test_check_method_finds_an_undeclared_change():
    @acclimate.register("sneaky")
    class Sneaky(find_method("tent")):
        def step(self, images, engine):
            with torch.no_grad():
                engine.view.head.bias.add_(0.1)
            return super().step(images, engine)

    with pytest.raises(ConformanceError, match="only_declared_parameters_change"):
        acclimate.check_method("sneaky")


@pytest.mark.usefixtures("forget_methods", "only_timm")
def test_declared_exceptions_are_excused_with_their_reason():
    @acclimate.register("honest")
    class Honest(find_method("source")):
        info = Info(exceptions={"batch_of_one": "needs neighbours"})

    assert acclimate.check_method("honest")["timm: batch_of_one"] == "excused: needs neighbours"
    Honest.info = Info(exceptions={"no_such_check": "typo"})
    with pytest.raises(ConformanceError, match="no_such_check"):
        acclimate.check_method("honest")
