"""The guard convicts a collapse, lets a homogeneous stream pass, and is exact about what it brings back."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.testing.check import assert_identical, tiny_batches, tiny_vit

TINTS = 2 * torch.randn(40, 16, 3, 1, 1, generator=torch.Generator().manual_seed(0))
BATCHES = [images + tint for images, tint in zip(tiny_batches(40, 16, seed=11), TINTS)]  # predicted as all kinds of classes


def collapse(model):
    """What a collapse looks like: an adapted parameter makes one class win everywhere."""
    with torch.no_grad():
        model.model.norm.bias.copy_(40 * model.engine.vit.head.weight[3])


def guarded(**options):
    return acclimate.adapt(tiny_vit(), "tent", lr=1e-6, guard=acclimate.Guard(window=64, drift=1e9, **options))


def events(model, batches):
    out = []
    for images in batches:
        model(images)
        if model.record.event:
            out.append(model.record.event)
    return out


def test_a_collapse_is_rolled_back_to_the_last_good_snapshot():
    model = guarded()
    assert events(model, BATCHES[:10]) == []
    good = model._good
    assert good is not None and int(good["steps"]) == 8  # one per window of 64
    collapse(model)
    step = next(i for i in range(10, 20) if events(model, [BATCHES[i]]))
    assert model.record.event == "rolled back: the predictions collapsed"
    now = model.state.capture()
    for name in good:  # momentum and learning state included
        if not name.startswith("guard/") and name not in ("steps", "kept_share"):
            assert torch.equal(now[name], good[name]), name
    assert int(model.steps) == step + 1
    assert events(model, BATCHES[step + 1 : step + 14]) == []


def test_without_a_good_snapshot_the_source_comes_back():
    model = guarded()
    collapse(model)
    assert events(model, BATCHES[:8]) == ["rolled back: the predictions collapsed"]
    assert model.engine.adapted.drift() < 1e-3


def test_a_homogeneous_stream_is_no_collapse():
    """One class for hundreds of images, and the source model agrees."""
    model = guarded()
    with model.frozen():
        images = torch.cat(BATCHES)
        classes = model(images).argmax(-1)
    chosen = images[classes == classes.mode().values]
    stream = chosen.repeat(320 // len(chosen) + 1, 1, 1, 1).split(16)
    assert events(model, stream) == []
    assert model.guard.effective_classes() < 1.5


def test_freeze_stops_adaptation_until_reset():
    """What is frozen is the last good state, not the collapsed one."""
    model = guarded(action="freeze")
    collapse(model)
    assert events(model, BATCHES[:6])[-1].startswith("frozen")
    assert model.engine.adapted.drift() < 1e-3
    before = model.state.capture()
    model(BATCHES[7])
    assert model.record.event == "frozen: the guard stopped adaptation" and model.record.used == 0
    after = model.state.capture()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "steps")
    model.reset()
    model(BATCHES[0])
    assert model.record.event is None and model.record.used == 16


def test_drift_beyond_the_limit_is_rolled_back():
    model = acclimate.adapt(tiny_vit(), "tent", lr=1.0, guard=acclimate.Guard(drift=0.2))
    found = events(model, BATCHES[:6])
    assert found and all(event.startswith("rolled back: drift of") for event in found)


@pytest.mark.parametrize("method", ["tent", "sar", "dct"])
def test_an_update_that_is_not_finite_is_skipped_or_raised(method):
    for guard in ("default", None):
        model = acclimate.adapt(tiny_vit(), method, guard=guard)
        model(BATCHES[0])
        before = model.state.capture()
        with torch.no_grad():
            model.engine.vit.head.bias[0] = torch.inf
        if guard is None:
            with pytest.raises(NonFiniteError):
                model(BATCHES[1])
        else:
            model(BATCHES[1])
            assert model.record.event.startswith("skipped") and model.record.used == 0
        after = model.state.capture()
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(("model/", "optimizer/")))


def test_the_good_snapshot_is_saved_and_loaded(tmp_path):
    model = guarded()
    events(model, BATCHES[:10])
    model.save(tmp_path / "s.safetensors")
    loaded = acclimate.load(tmp_path / "s.safetensors", tiny_vit())
    assert_identical(loaded._good, model._good, "good snapshot")
    for run in (model, loaded):
        collapse(run)
        assert events(run, BATCHES[10:20]) == ["rolled back: the predictions collapsed"]
    assert_identical(loaded.state.capture(), model.state.capture(), "after the rollback")


def test_batches_of_one_gather_answers_before_a_verdict():
    model = guarded()
    collapse(model)
    images = torch.cat(BATCHES)
    found = [i for i, image in enumerate(images[:120]) if events(model, [image[None]])]
    assert found[0] == 64 + 32 - 2  # a full window, then 32 answers, the first of them with the window's last image


def test_one_guard_may_be_given_to_two_adapters():
    guard = acclimate.Guard(window=64)
    one, other = (acclimate.adapt(tiny_vit(), "tent", guard=guard) for _ in range(2))
    events(one, BATCHES[:3])
    assert (int(one.guard.seen), int(other.guard.seen), int(guard.seen)) == (48, 0, 0)


def test_logits_that_are_not_finite_are_an_event_for_source_too():
    model = tiny_vit()
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    model = acclimate.adapt(model, "source")
    model(BATCHES[0])
    assert model.record.event == "the logits are not finite"


@pytest.mark.parametrize(
    ("num_classes", "spread", "suspect", "good"),
    [
        (1000, 3, True, False),
        (1000, 9, True, False),
        (1000, 15, False, False),
        (1000, 40, False, True),
        (10, 1, True, False),
        (10, 3, False, False),
        (10, 8, False, True),
        (2, 1, True, False),
        (2, 2, False, True),
    ],
)
def test_few_classes_are_suspect_and_many_are_good(num_classes, spread, suspect, good):
    guard = acclimate.Guard(window=256)
    guard.observe(torch.nn.functional.one_hot(torch.arange(256) % spread, num_classes).float())
    assert guard.effective_classes() == pytest.approx(spread, rel=0.1)
    assert guard.suspects(num_classes) is suspect
    assert guard.snapshot_due(num_classes) is good


def test_a_window_that_ends_in_a_collapse_is_not_good():
    guard = acclimate.Guard(window=256)
    classes = torch.cat([torch.arange(192) % 10, torch.zeros(64, dtype=torch.long)])
    guard.observe(torch.nn.functional.one_hot(classes).float())
    assert not guard.suspects(10)
    assert not guard.snapshot_due(10)


def test_a_rollback_by_the_guard_keeps_the_learning_rate():
    model = acclimate.adapt(tiny_vit(), "tent", guard=acclimate.Guard(window=64, drift=1e9))
    model(BATCHES[0])
    collapse(model)
    assert events(model, BATCHES[1:8]) == ["rolled back: the predictions collapsed"]
    model(BATCHES[8])
    assert model.engine.adapted.optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * 16 / 64)


def test_a_rollback_by_the_user_forgets_a_later_good_snapshot():
    model = guarded()
    start = model.snapshot()
    events(model, BATCHES[:10])
    assert model._good is not None
    model.rollback(start)
    assert model._good is None


@pytest.mark.parametrize("options", [{"window": 0}, {"drift": "far"}, {"diversity": 2}, {"agreement": None}], ids=str)
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.Guard(**options)


def test_something_else_is_no_guard():
    with pytest.raises(ConfigError, match="guard=False"):
        acclimate.adapt(tiny_vit(), "tent", guard=False)


def test_an_unknown_action_is_refused():
    with pytest.raises(ConfigError, match="shrug"):
        acclimate.Guard(action="shrug")
