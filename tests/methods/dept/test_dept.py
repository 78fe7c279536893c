"""DePT-G: a step by hand, its losses, where it begins, what it remembers, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import acclimate
from acclimate.core.registry import find_method
from acclimate.core.statistics import SourceStatistics
from acclimate.errors import ConfigError, StateError
from acclimate.methods.dept.network import (
    Prompted,
    Regulariser,
    Sizes,
    followed,
    mean_distance,
    named_prompts,
    sharpened,
    stage_distance,
)
from acclimate.models.families import view_of
from acclimate.models.fingerprint import fingerprint
from acclimate.testing.check import CHECKS, Case, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(mean=0.5, std=0.5)
SIZES = Sizes(stages=2, prompts=3, hidden=16, bottleneck=8, outputs=12)
SMALL = dict(bank=16, neighbours=3, refine_after=8, random_prompts=True, prompts=3, hidden=16, bottleneck=8, outputs=12)


def trained(model, seed=7):
    """As if prompts had been trained: random ones, and another classifier than the model's."""
    view = view_of(model)
    learned = Prompted(view, SIZES, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        learned.head.bias += torch.randn(10, generator=torch.Generator().manual_seed(seed))
    about = {"samples": 5, "batch_size": 2, "labels": "given", **vars(SIZES)}
    mine = {"class": type(model).__name__, **fingerprint(view, model.state_dict())}
    return SourceStatistics(named_prompts(learned), mine, about)


def prompted(model, learned, images):
    """The tiny timm model with prompts behind the class token: logits, features, and each stage's mean prompt at its end."""
    x = model._pos_embed(model.patch_embed(images))
    count, ends, means = learned.sizes.prompts, [*learned.starts[1:], len(model.blocks)], []
    for i, block in enumerate(model.blocks):
        if i in learned.starts:
            rest = x[:, 1 + (count if i else 0) :]
            x = torch.cat([x[:, :1], learned.prompts[learned.starts.index(i)].expand(len(x), -1, -1), rest], 1)
        x = block(x)
        if i + 1 in ends:
            means.append(x[:, 1 : 1 + count].mean(1))
    features = model.norm(x)[:, 0]
    return learned.head(features), features, means


def projected(learned, features, means):
    return learned.dino[-1](features), torch.stack([head(mean) for head, mean in zip(learned.dino, means)], 1)


def first_step(images, **options):
    """An adapter after its first batch, with the views that it saw."""
    model = acclimate.adapt(double_model(), "dept-g", **{**SMALL, **HOW, "steps": 1, **options})
    seen, draw = [], model.method.views
    model.method.views = lambda *a: seen.append(draw(*a)) or seen[-1]
    return model, seen, model(images)


@pytest.mark.parametrize("reference", [False, True])
def test_the_first_step_by_hand(reference):
    """On the whole batch at once, with autograd through the mean prediction."""
    images = double_batches()[0]
    weights = dict(dino_weight=0.3, prompt_weight=0.7, diversity=0.5, prompt_diversity=0.2)
    model, ((weak, first, second),), logits = first_step(images, lr=0.05, clip=0.1, reference=reference, **weights)

    plain = double_model()
    learned = Prompted(
        view_of(plain), Sizes(prompts=3, hidden=16, bottleneck=8, outputs=12), torch.Generator().manual_seed(0)
    )
    with torch.no_grad():  # the average is still the student
        labels = prompted(plain, learned, weak)[0].argmax(-1)
        token, stages = projected(learned, *prompted(plain, learned, first)[1:])
    z, features, means = prompted(plain, learned, second)
    mine, mine_stages = projected(learned, features, means)
    q = z.softmax(-1).mean(0)
    loss = F.cross_entropy(z, labels) + 0.5 * (q * q.log()).sum()
    loss = loss + 0.3 * F.cross_entropy(mine / 0.1, (token / 0.07).softmax(-1))
    e = torch.arange(4.0, dtype=torch.float64).exp()
    loss = loss + 0.7 * ((1 - F.cosine_similarity(mine_stages, stages, dim=-1)) @ (e / e.sum())).mean()
    for p in learned.prompts:
        pairs = [1 - F.cosine_similarity(p[i], p[j], dim=0) for i in range(3) for j in range(3) if i != j]
        loss = loss - 0.2 * torch.stack(pairs).mean() / 4
    optimizer = torch.optim.SGD(learned.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    loss.backward()
    for p in learned.parameters():
        torch.nn.utils.clip_grad_norm_([p], 0.1)
    optimizer.step()
    assert_exact(model.record.loss, loss)
    for name, p in learned.named_parameters():
        assert_exact(model.engine.adapted.named[f"method/learned.{name}"], p, name)
    with torch.no_grad():
        assert_exact(logits, prompted(plain, learned, images)[0])  # after the update
    centre = 0.1 * (token.sum(0) if reference else token.mean(0))
    assert_exact(model.method.centre, centre)


def test_the_teacher_moves_at_the_start_of_a_step(batches):
    model, seen, _ = first_step(batches[0], lr=0.05, steps=3, teacher_momentum=0.6)
    assert len(seen) == 3 and int(model.method.memory.seen) == 6  # new views for every step, one entry for every image
    begin = [model.state.initial[name] for name in model.engine.adapted.named]
    student = [p.detach() for p in model.engine.adapted.tensors]
    assert all(torch.equal(a, model.state.initial[f"method/teacher.{i}"]) for i, a in enumerate(begin))
    moved = [i for i, (t, b, s) in enumerate(zip(model.method.teacher.weights, begin, student)) if not torch.equal(t, b)]
    assert moved and not any(torch.equal(model.method.teacher.weights[i], student[i]) for i in moved)
    one, _, _ = first_step(batches[0], lr=0.05, teacher_momentum=0.6)
    for i, b in enumerate(begin):  # at the start of the first step it is where the student is
        assert_exact(one.method.teacher.weights[i], b)


def test_losses_in_closed_form():
    def of(*values):
        return torch.tensor(values, dtype=torch.float64)

    assert_exact(mean_distance(torch.eye(4, dtype=torch.float64)), 1.0)
    for count in (1, 3):
        assert_exact(mean_distance(torch.ones(count, 5, dtype=torch.float64)), 0.0)
    assert_exact(mean_distance(of([1.0, 0.0], [-2.0, 0.0])), 2.0)
    x, late = of([[1.0, 0.0], [1.0, 0.0]]), of([[2.0, 0.0], [0.0, 3.0]])
    assert_exact(stage_distance(x, late), [math.e / (1 + math.e)])
    assert sharpened(of(1.0, 0.0), of(1.0, 0.0), 0.05).tolist() == [0.5, 0.5]
    assert_exact(followed(of(1.0), of(3.0)), [1.2])
    only_dino = Regulariser(2.0, 0.0, 0.0, 0.5)
    loss = only_dino(of([0.0, 0.0]), x, of([0.25, 0.75]), late, [torch.eye(2, dtype=torch.float64)])
    assert_exact(loss, [2 * math.log(2)])


def test_stages_divide_the_blocks():
    for stages, starts in ((1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])):
        model = acclimate.adapt(tiny_model(), "dept-g", stages=stages, **SMALL, **HOW)
        assert model.method.learned.starts == starts
        assert {n for n in model.engine.adapted.named if ".prompts." in n} == {
            f"method/learned.prompts.{i}" for i in range(stages)
        }
    with pytest.raises(ConfigError, match="stages=5: this model has 4 blocks"):
        acclimate.adapt(tiny_model(), "dept-g", stages=5, **SMALL, **HOW)


def test_it_begins_with_what_was_trained(family, batches):
    model = double_model(family)
    source = trained(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    adapter = acclimate.adapt(model, "dept-g", source_statistics=source, bank=16, lr=0.01, **HOW)
    for name, tensor in source.of("prompts").items():
        assert torch.equal(adapter.engine.adapted.named[f"method/learned.{name}"], tensor)
    assert set(adapter.engine.adapted.named) == {f"method/learned.{name}" for name in source.of("prompts")}
    if family == "timm":
        learned = Prompted(view_of(double_model()), SIZES, torch.Generator())
        learned.load_state_dict(source.of("prompts"))
        with torch.no_grad(), adapter.frozen():
            expected = prompted(double_model(), learned, batches[0].double())[0]
            assert_exact(adapter(batches[0]), expected)
    for images in batches:
        adapter(images)
    assert adapter.unwrap() is model
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_state_file_knows_where_it_began(tmp_path, batches):
    source = trained(tiny_model())
    model = acclimate.adapt(tiny_model(), "dept-g", source_statistics=source, bank=16, lr=0.05, **HOW)
    begin = dict(model.state.capture())
    for images in batches:
        model(images)
    model.save(tmp_path / "state.safetensors")
    again = acclimate.load(tmp_path / "state.safetensors", tiny_model())
    assert again.engine.adapted.drift() == pytest.approx(model.engine.adapted.drift())
    assert torch.equal(again(batches[0]), model(batches[0]))
    again.reset()
    after = again.state.capture()
    assert after.keys() == begin.keys() and all(torch.equal(t, begin[name]) for name, t in after.items())


@pytest.mark.parametrize("check", ["save_load_continue", "reset_equals_freshly_wrapped", "micro_batches_do_not_matter"])
def test_it_conforms_with_trained_prompts(check):
    """And with several steps for each batch."""

    class Trained(Case):
        def wrap(self, model=None, **more):
            model = tiny_model() if model is None else model
            options = dict(source_statistics=trained(model), bank=16, neighbours=3, refine_after=8, steps=2)
            return acclimate.adapt(model, self.method, **HOW, **options, **more)

    CHECKS[check](Trained(find_method("dept-g")))


def test_without_prompts_it_says_how_to_get_them(tmp_path):
    with pytest.raises(ConfigError, match=r"acclimate train-prompts .*random_prompts=True"):
        acclimate.adapt(tiny_model(), "dept-g", **HOW)
    statistics = acclimate.source_statistics(tiny_model(), tiny_batches(1)[0])
    with pytest.raises(ConfigError, match=r"has fisher, features, class_tokens, logits, not prompts.* train-prompts"):
        acclimate.adapt(tiny_model(), "dept-g", source_statistics=statistics, **HOW)
    source = trained(tiny_model())
    with pytest.raises(ConfigError, match="prompts=50: source_statistics= has 3"):
        acclimate.adapt(tiny_model(), "dept-g", source_statistics=source, prompts=50, **HOW)
    other = tiny_model()
    with torch.no_grad():
        other.norm.bias.add_(1)
    with pytest.raises(StateError, match="of another model"):
        acclimate.adapt(other, "dept-g", source_statistics=source, **HOW)
    assert acclimate.adapt(tiny_model(), "dept-g", source_statistics=source, prompts=3, **HOW).method.learned.sizes == SIZES


def test_class_subsets_single_images_and_a_small_bank():
    model = acclimate.adapt(tiny_model(), "dept-g", classes=[2, 5, 8], **{**SMALL, "bank": 4, "neighbours": 9}, **HOW)
    for images in (*tiny_batches(2), *tiny_batches(2, size=1)):
        assert model(images).shape == (len(images), 3)
    assert int(model.method.memory.seen) == 14 and not model.method.memory.probabilities[:, 3:].any()


def test_a_failed_step_leaves_no_trace(batches):
    """Also if earlier steps of the same batch were fine."""
    model = acclimate.adapt(tiny_model(), "dept-g", steps=3, guard=None, **SMALL, **HOW)
    model(batches[0])
    before, learn, calls = model.state.capture(), model.method.learn, []

    def failing(*given):
        calls.append(given)
        if len(calls) == 2:
            raise acclimate.errors.NonFiniteError("here")
        return learn(*given)

    model.method.learn = failing
    with pytest.raises(acclimate.errors.NonFiniteError):
        model(batches[1])
    after = model.state.capture()
    assert all(torch.equal(t, before[name]) for name, t in after.items())


@pytest.mark.parametrize(
    "options",
    [{"steps": 0}, {"nesterov": True, "momentum": 0}, {"neighbours": 1.5}, {"teacher_temperature": 0}, {"bank": 0},
     {"diversity": -1}, {"lr": None}, {"prompts": 0}, {"outputs": 2.5}, {"clip": -1}, {"teacher_momentum": 2}],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "dept-g", **{**SMALL, **options}, **HOW)
