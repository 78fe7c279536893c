"""The guard finds harm, lets a homogeneous stream pass, lowers the rate of learning, and is exact about what it restores."""

from __future__ import annotations

import pytest
import torch

import acclimate
from acclimate.core import guard as guards
from acclimate.core.engine import Unadapted
from acclimate.core.guard import LEVELS, NEW, NEW_PERIOD, SUSPECT_PERIOD, Guard, Harm, _drawn
from acclimate.errors import ConfigError, NonFiniteError
from acclimate.testing.check import assert_identical, tiny_batches, tiny_model

TINTS = 2 * torch.randn(80, 16, 3, 1, 1, generator=torch.Generator().manual_seed(0))
BATCHES = [images + tint for images, tint in zip(tiny_batches(80, 16, seed=11), TINTS)]  # predicted as all kinds of classes


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(guards, "TRIAL", 64)
    monkeypatch.setattr(guards, "FEWEST", 0)


def collapse(model):
    """What a collapse looks like: an adapted parameter makes one class win everywhere."""
    with torch.no_grad():
        model.model.norm.bias.copy_(40 * model.engine.view.head.weight[3])


def guarded(method="tent", *, reply="last", budget=None, **options):
    guard = acclimate.Guard(**{"drift": 1e9, "patience": 64, "share": 0.25, **options})
    return acclimate.adapt(tiny_model(), method, lr=1e-6, guard=guard, reply=reply, budget=budget)


def events(model, batches):
    out = []
    for images in batches:
        model(images)
        if model.record.event:
            out.append(model.record.event)
    return out


def kinds(found):
    return [event.partition(":")[0] for event in found]


def without_guard(state):
    return {
        name: tensor
        for name, tensor in state.items()
        if not name.startswith("guard/") and name not in ("steps", "kept_share")
    }


def test_a_healthy_run_has_no_event_and_no_harm():
    model = guarded()
    assert events(model, BATCHES[:20]) == []
    assert model.record.harm.estimate == pytest.approx(0, abs=1e-3)
    assert model.record.harm.low <= 0 <= model.record.harm.high
    assert 0 < model.record.estimated_accuracy <= 1


def test_a_collapse_returns_to_the_last_good_state_and_replies_with_the_source():
    model = guarded(patience=256)
    with model.frozen():
        expected = [model(images) for images in BATCHES]
    assert events(model, BATCHES[:21]) == []
    good = model._good
    assert good is not None and int(good["steps"]) == 16
    collapse(model)
    tried = False
    for i in range(21, 40):
        reply = model(BATCHES[i])
        tried = tried or (model.record.event or "").startswith("on trial: the predictions are less diverse")
        if tried:  # the unadapted model replies
            torch.testing.assert_close(reply, expected[i], rtol=1e-3, atol=1e-3)
        if (model.record.event or "").startswith("slower"):
            break
    assert model.record.event.startswith("slower: the predictions are less diverse than those of the unadapted model")
    assert "entropy of the classes" in model.record.event and "estimated harm +" in model.record.event
    assert_identical(without_guard(model.state.capture()), without_guard(good), "after the alarm")  # momentum included
    assert int(model.steps) == i + 1
    assert kinds(events(model, BATCHES[40:50])) == ["trusted again"]


def test_without_a_good_state_the_source_comes_back():
    model = guarded(patience=10**6)
    collapse(model)
    assert kinds(events(model, BATCHES[:6])) == ["on trial", "slower"]
    assert model.engine.adapted.drift() < 1e-3


def test_a_run_that_gets_better_on_trial_is_trusted_again():
    """The collapsed state is replaced by the source while the run is on trial, and so no alarm undoes anything."""
    model = guarded()
    collapse(model)
    assert kinds(events(model, BATCHES[:1])) == ["on trial"]
    model.guard.peak.fill_(1.0)
    with torch.no_grad():
        model.model.norm.bias.copy_(model.state.initial["model/norm.bias"])
    assert kinds(events(model, BATCHES[1:8])) == ["trusted again"]
    assert int(model.guard.alarms) == 0 and not model.guard.on_trial


@pytest.mark.parametrize("where", ["on trial", "resting"])
def test_the_unadapted_model_also_predicts_frozen_and_skipped_batches(where):
    model = guarded(reply="first", budget=0.5)
    model(BATCHES[0])
    model.wait()
    collapse(model)
    if where == "on trial":
        model.guard.try_run(1.0)
    else:
        model.guard.level.fill_(LEVELS)
    with torch.no_grad():
        expected = tiny_model()(BATCHES[1])
    skipped = model(BATCHES[1])
    assert model.skipped == 1
    with model.frozen():
        frozen = model(BATCHES[1])
    for logits in (skipped, frozen):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    model.close()


def test_a_trial_ends_early_if_the_judge_prefers_the_adapted_model_for_long(monkeypatch):
    monkeypatch.setattr(guards, "TRIAL", 10**6)
    monkeypatch.setattr(Guard, "harm", property(lambda guard: Harm(-0.2, -0.3, -0.1)))
    model = guarded()
    model.guard.try_run(1.0)
    found = [kinds(events(model, [images])) for images in BATCHES[:9]]
    assert found == [[]] * 7 + [["trusted again"], []]


def test_a_homogeneous_stream_is_no_collapse():
    """One class for hundreds of images, and the unadapted model agrees."""
    model = guarded()
    with model.frozen():
        images = torch.cat(BATCHES)
        classes = model(images).argmax(-1)
    chosen = images[classes == classes.mode().values]
    stream = chosen.repeat(320 // len(chosen) + 1, 1, 1, 1).split(16)
    assert events(model, stream) == []


def test_contradictions_of_sure_predictions_are_harm_too():
    """A model that names all classes in turn is as diverse as can be, and useless."""
    guard = Guard()
    guard.attach(acclimate.core.wrapping.view_of(tiny_model()), 10)
    features = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    source = 10 * features @ rows.T
    for other in (source, source.roll(1, dims=1)):
        guard.compare(other, Unadapted(source, features, rows))
        found = guard.verdict(0.0)
        assert (found is not None) is (other is not source)
    assert found[0] == "trial"
    assert found[1].startswith("it contradicts predictions of which the unadapted model is sure (wealth")


def test_few_images_are_no_reason_for_a_trial(monkeypatch):
    monkeypatch.setattr(guards, "FEWEST", 24)
    guard = Guard()
    guard.attach(acclimate.core.wrapping.view_of(tiny_model()), 10)
    generator = torch.Generator().manual_seed(0)
    features, rows = torch.randn(16, 32, generator=generator), torch.randn(10, 32, generator=generator)
    source = 10 * features @ rows.T
    found = []
    for _ in range(3):
        guard.compare(source.roll(1, dims=1), Unadapted(source, features, rows))
        found.append(guard.verdict(0.0) is not None)
    assert found == [False, True, True]


def test_a_loss_of_diversity_that_the_judge_prefers_is_no_harm():
    """The images are of one class. The adapted model names it, and the unadapted one names others."""
    guard = Guard()
    guard.attach(acclimate.core.wrapping.view_of(tiny_model()), 10)
    rows = torch.eye(10, 32)
    features = torch.zeros(256, 32)
    features[:, 0] = 3.0
    drawn = torch.randint(1, 10, (256,), generator=torch.Generator().manual_seed(0))
    source = torch.nn.functional.one_hot(drawn, 10).float()  # not sure
    guard.judge = None
    guard.compare(10 * torch.eye(10)[[0] * 256], Unadapted(source, features, rows))
    assert guard.verdict(0.0)[0] == "trial"
    guard.right_adapted.fill_(100.0)
    guard.judge = torch.nn.Identity()
    guard.right_source.fill_(50.0)
    assert guard.verdict(0.0) is None
    assert guard.diversity.mean == 1  # the evidence is forgotten


def test_learning_is_slower_after_each_alarm_and_faster_after_patience():
    model = guarded(patience=10**6)
    for alarm in range(LEVELS):
        assert model.guard.scale == pytest.approx(0.1**alarm)
        collapse(model)
        found = kinds(events(model, BATCHES[:6]))
        assert found == [*["on trial"] * (not alarm), "resting" if alarm == LEVELS - 1 else "slower"]
        model.guard.since_alarm.fill_(NEW)
    model.guard.since_alarm.zero_()
    assert model.guard.is_resting
    model.guard.patience = 64
    plain = acclimate.adapt(tiny_model(), "source")
    torch.testing.assert_close(model(BATCHES[0]), plain(BATCHES[0]), rtol=1e-5, atol=1e-5)  # the unadapted model predicts
    assert model.record.used == 0
    assert kinds(events(model, BATCHES + BATCHES)) == [
        "adaptation begins again",
        "trusted again",
        "no harm was seen",
        "trusted again",
        "no harm was seen",
        "trusted again",
    ]
    assert model.guard.scale == 1 and int(model.guard.alarms) == 0


def test_a_second_alarm_soon_after_the_first_stops_learning():
    model = guarded(patience=10**6)
    for expected in (["on trial", "slower"], ["resting"]):
        collapse(model)
        assert kinds(events(model, BATCHES[:6])) == expected


def test_a_shorter_step_is_a_share_of_the_whole_step():
    whole, part = (acclimate.adapt(tiny_model(), "tent", lr=0.1) for _ in range(2))
    part.guard.level.fill_(1)
    whole(BATCHES[0]), part(BATCHES[0])
    for name, p in whole.engine.adapted.named.items():
        source = whole.state.initial[name]
        torch.testing.assert_close(part.engine.adapted.named[name] - source, 0.1 * (p - source), rtol=1e-3, atol=1e-6)


def test_a_method_without_steps_rests_at_once():
    model = acclimate.adapt(tiny_model(), "neo", guard=acclimate.Guard(patience=64))
    events(model, BATCHES[:4])
    model.guard.diversity.stakes.fill_(1e3)
    model.guard.right_source.fill_(1e3)
    model.guard.try_run(1e3)
    model.guard.tried.fill_(63)
    assert kinds(events(model, BATCHES[4:5])) == ["resting"]
    assert events(model, BATCHES[5:9]) == ["adaptation begins again: steps have 0.01 of their length"]


def test_freeze_stops_adaptation_until_reset():
    model = guarded(action="freeze", patience=10**6)
    collapse(model)
    found = events(model, BATCHES[:6])
    assert found[1].startswith("frozen: the predictions are less diverse")
    assert model.engine.adapted.drift() < 1e-3
    before = model.state.capture()
    model(BATCHES[7])
    assert model.record.event == "frozen: the guard stopped adaptation" and model.record.used == 0
    after = model.state.capture()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "steps")
    model.reset()
    model(BATCHES[0])
    assert model.record.event is None and model.record.used == 16


def test_rollback_keeps_the_rate_of_learning():
    model = guarded(action="rollback")
    collapse(model)
    assert kinds(events(model, BATCHES[:5])) == ["on trial", "rolled back"]
    assert model.guard.scale == 1
    assert model.engine.adapted.optimizer.param_groups[0]["lr"] == 1e-6


def test_drift_beyond_the_limit_is_an_alarm():
    model = acclimate.adapt(tiny_model(), "tent", lr=1.0, guard=acclimate.Guard(drift=0.2))
    found = events(model, BATCHES[:6])
    assert "slower" in kinds(found)
    assert all(event.startswith(("slower: drift of", "resting: drift of", "on trial")) for event in found)


@pytest.mark.parametrize("method", ["tent", "sar", "dct"])
def test_an_update_that_is_not_finite_is_skipped_or_raised(method):
    for guard in ("default", None):
        model = acclimate.adapt(tiny_model(), method, guard=guard)
        model(BATCHES[0])
        before = model.state.capture()
        with torch.no_grad():
            model.engine.view.head.bias[0] = torch.inf
        if guard is None:
            with pytest.raises(NonFiniteError):
                model(BATCHES[1])
        else:
            model(BATCHES[1])
            assert model.record.event.startswith("skipped") and model.record.used == 0
        after = model.state.capture()
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith(("model/", "optimizer/")))


def test_an_interrupted_run_decides_as_if_it_had_never_stopped(tmp_path):
    model = guarded()
    events(model, BATCHES[:10])
    model.save(tmp_path / "s.safetensors")
    loaded = acclimate.load(tmp_path / "s.safetensors", tiny_model())
    assert_identical(loaded._good, model._good, "good state")
    found = []
    for run in (model, loaded):
        collapse(run)
        found.append(events(run, BATCHES[10:30]))
    assert found[0] and found[0] == found[1]
    assert_identical(loaded.state.capture(), model.state.capture(), "after the alarm")


def test_single_images_are_compared_too():
    model = guarded()
    collapse(model)
    found = [i for i, image in enumerate(torch.cat(BATCHES)[:120]) if events(model, [image[None]])]
    assert found and found[0] < 64


@pytest.mark.parametrize("method", ["dct", "vpt", "moetta", "dept-g", "keel", "rem", "spa"])
def test_the_comparison_is_with_the_unadapted_model(method):
    """Without conditioners, prompts, experts, predictors and centre, and without any change of the state."""
    from acclimate.core.registry import find_method
    from acclimate.testing.check import Case

    if method == "dept-g":
        pytest.importorskip("acclimate.methods.dept")
    kind = find_method(method)
    if any(need == "prompts" for need in kind.info.needs):
        pytest.skip("its prompts are trained, which takes long")
    model = Case(kind).run()
    before = model.state.capture()
    plain = tiny_model()
    with torch.no_grad():
        expected = plain(BATCHES[0])
    torch.testing.assert_close(model.engine.unadapted(BATCHES[0]).logits, expected, rtol=1e-5, atol=1e-5)
    assert_identical(model.state.capture(), before, "the state")
    with model.frozen():
        first = model(BATCHES[1])
        model.engine.unadapted(BATCHES[0])
        assert torch.equal(model(BATCHES[1]), first)


def test_one_guard_may_be_given_to_two_adapters():
    guard = acclimate.Guard()
    one, other = (acclimate.adapt(tiny_model(), "tent", guard=guard) for _ in range(2))
    events(one, BATCHES[:3])
    assert (int(one.guard.seen), int(other.guard.seen), int(guard.seen)) == (48, 0, 0)


def test_logits_that_are_not_finite_are_an_event_for_source_too():
    model = tiny_model()
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    model = acclimate.adapt(model, "source")
    model(BATCHES[0])
    assert model.record.event == "the logits are not finite"
    assert model.record.harm is None  # nothing adapts, so nothing is compared


@pytest.mark.parametrize("sizes", [[64] * 4, [1] * 256, [7] * 36 + [4]], ids=lambda sizes: f"batches of {sizes[0]}")
def test_the_compared_images_do_not_depend_on_the_batches(sizes):
    chosen, first = [], 0
    for size in sizes:
        chosen += [first + i for i in _drawn(first, size, 16)]
        first += size
    assert chosen == _drawn(0, 256, 16) and len(chosen) == 16
    assert [i // 16 for i in chosen] == list(range(16))  # one of each 16


def test_more_images_are_compared_when_there_is_suspicion():
    guard = Guard(share=1 / 16)
    assert sum(map(len, guard.selections(64))) == 64 // NEW_PERIOD
    guard.met.fill_(NEW)
    assert sum(map(len, guard.selections(64))) == 4
    guard.diversity.stakes.fill_(8.0)
    assert sum(map(len, guard.selections(64))) == 64 // SUSPECT_PERIOD
    guard.try_run(8.0)
    assert sum(map(len, guard.selections(64))) == 64


def test_a_method_with_more_passes_is_compared_more():
    guard = Guard(share=1 / 16)
    guard.met.fill_(NEW)
    assert sum(map(len, guard.selections(1024, 4.0))) == 1024 // 4
    assert sum(map(len, guard.selections(1024, 1.0))) == 1024 // 16
    for passes in NEW * (1.0, 1.0, 1.0, 17.0):  # as with windows of single images
        list(guard.selections(1, passes))
    assert float(guard.passes) == pytest.approx(5, rel=0.1)
    guard = Guard(share=0.5)
    guard.met.fill_(NEW)
    assert sum(map(len, guard.selections(64, 100.0))) == 64


def test_little_of_what_was_known_counts_after_a_change_of_domain():
    model = acclimate.adapt(tiny_model(), "neo", recentre=True)
    shifted = [images + 4 for images in BATCHES]
    for images in BATCHES[:20]:
        model(images)
    guard = model.guard
    known, judged = float(guard.compared), float(guard.judge.images)
    assert int(guard.met) == 320 and known > 40
    kept = 1.0
    while kept == 1:
        model(shifted.pop())
        kept = model.recentring.kept
    assert kept < 0.5
    assert int(guard.met) == 16 and int(guard.seen) > 320
    assert float(guard.compared) < kept * (known + 8) + 16 and float(guard.judge.images) < kept * (judged + 8) + 16
    assert len(next(guard.selections(16))) >= 16 // NEW_PERIOD  # and more is compared


def test_a_domain_that_goes_on_forgets_nothing():
    guard = guarded().guard
    guard.met.fill_(7)
    before = {name: buffer.clone() for name, buffer in guard.named_buffers()}
    guard.forget_domain(1.0)
    assert_identical(dict(guard.named_buffers()), before, "the guard")


def test_the_guard_knows_the_passes_of_a_step():
    def passes(method, **options):
        model = acclimate.adapt(tiny_model(), method, **options)
        model(BATCHES[0])
        return float(model.guard.passes)

    assert passes("neo") == 1
    assert passes("tent") == 2
    assert passes("sar", margin=100.0) == 4
    assert passes("sar", margin=1e-6) == passes("eta", margin=1e-6) == 1


def test_the_interval_of_the_harm_gets_narrower():
    guard = Guard()
    guard.attach(acclimate.core.wrapping.view_of(tiny_model()), 10)
    features = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(10, 32, generator=torch.Generator().manual_seed(1))
    widths = []
    for part in features.split(8):
        guard.compare(part @ rows.roll(1, 0).T, Unadapted(part @ rows.T, part, rows))
        widths.append(guard.harm.high - guard.harm.low)
    assert widths[-1] < widths[0] / 2
    assert guard.harm.low > 0  # the adapted model is another one, and worse
    assert str(Harm(0.021, -0.01, 0.05)) == "+2.1 points (-1.0 to +5.0)"


def test_a_state_that_is_followed_by_an_alarm_was_not_good():
    model = guarded(patience=256)
    events(model, BATCHES[:16])
    assert model._good is not None
    collapse(model)
    assert kinds(events(model, BATCHES[16:23])) == ["on trial", "slower"]
    assert model._good is None and model.engine.adapted.drift() < 1e-3


def test_a_rollback_by_the_user_forgets_a_later_good_state():
    model = guarded()
    start = model.snapshot()
    events(model, BATCHES[:10])
    assert model._good is not None
    model.rollback(start)
    assert model._good is None


@pytest.mark.parametrize(
    "options", [{"share": 0}, {"drift": "far"}, {"alarm": 2}, {"tolerance": None}, {"patience": 0.5}], ids=str
)
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.Guard(**options)


def test_something_else_is_no_guard():
    with pytest.raises(ConfigError, match="guard=False"):
        acclimate.adapt(tiny_model(), "tent", guard=False)


def test_an_unknown_action_is_refused():
    with pytest.raises(ConfigError, match="shrug"):
        acclimate.Guard(action="shrug")


def test_the_guard_never_compares_the_authors_code(batches):
    """In a recorded run of LAME it replaced replies, because the corrected predictions are less diverse."""
    watched, reference = (acclimate.adapt(tiny_model(), "lame", reference=each) for each in (False, True))
    for images in batches:
        watched(images), reference(images)
    assert float(watched.guard.compared) > 0 and watched.record.estimated_accuracy is not None
    assert float(reference.guard.compared) == 0 and reference.record.estimated_accuracy is None


@pytest.mark.parametrize("method", ["tent", "keel", "cotta"])
def test_a_batch_of_images_of_a_single_colour_changes_nothing(method):
    """A covered camera shows such images. A method that learns from them forgets its classes."""
    black, grey = torch.zeros(16, 3, 32, 32), torch.full((16, 3, 32, 32), 0.5)
    model = acclimate.adapt(tiny_model(), method, mean=0.5, std=0.5)
    model(BATCHES[0])
    before = without_guard(model.state_dict())
    for images in (black, grey):
        assert model(images).shape == (16, tiny_model().num_classes)
        assert model.record.event == "skipped: every image is of a single colour" and model.record.used == 0
    assert_identical(without_guard(model.state_dict()), before, "state")
    grey[3, 0, 2, 5] = 1.0
    model(grey)
    assert model.record.event is None and int(model.state_dict()["steps"]) == 4


def test_without_a_guard_images_of_a_single_colour_are_learned_from():
    model = acclimate.adapt(tiny_model(), "tent", guard=None)
    model(torch.zeros(16, 3, 32, 32))
    assert model.record.event is None and model.record.used == 16
