"""REM: which patches are removed, a whole run against the form one would write first, and its loss by hand."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

import acclimate
from acclimate.core.engine import entropy
from acclimate.errors import ConfigError
from acclimate.methods.rem import REM
from acclimate.models.families import view_of
from acclimate.models.surgery import capture
from acclimate.testing.check import tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics


def plain_attention(model, images):
    """Return the class token's attention to the patches in the last block of a timm model, by its definition."""
    block = model.blocks[-1]
    with capture([block.norm1]) as seen:
        model(images)
    qkv = block.attn.qkv(seen[block.norm1].outputs).unflatten(-1, (3, 2, 16))
    q, k = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    return (q @ k.transpose(-2, -1) / 4).softmax(-1).mean(1)[:, 0, 1:]


def without(model, images, kept):
    """Return the logits of a timm model for the patches `kept`, (batch, count), of each image."""
    x = model._pos_embed(model.patch_embed(images))
    rows = [torch.cat([tokens[:1], tokens[1:][patches]]) for tokens, patches in zip(x, kept)]
    x = torch.stack(rows)
    for block in model.blocks:
        x = block(x)
    return model.forward_head(model.norm(x))


def test_the_attention_is_that_of_the_class_token(family):
    images = double_batches(1)[0]
    short = acclimate.adapt(
        double_model(family), "rem"
    ).engine.view  # which computes the last block for the class token only
    attention, logits = zip(*(view.class_attention(images) for view in (view_of(double_model(family)), short)))
    assert attention[0].shape == (6, 16) and not attention[0].requires_grad
    assert_exact(attention[0], attention[1])
    with torch.no_grad():
        expected = double_model(family)(images)
    assert_exact(logits[1], getattr(expected, "logits", expected))
    assert ((attention[0].sum(1) > 0) & (attention[0].sum(1) < 1)).all()  # the rest is on the class token itself
    if family == "timm":
        assert_exact(attention[0], plain_attention(double_model(), images))


def test_removed_patches_have_no_effect(family):
    view, images = view_of(double_model(family)), double_batches(1)[0]
    kept = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :11]
    changed = images.unflatten(-2, (4, 8)).unflatten(-1, (4, 8)).clone()  # (batch, channels, row, 8, column, 8)
    for image, patches in zip(changed, kept.tolist()):
        for patch in set(range(16)) - set(patches):
            image[:, patch // 4, :, patch % 4] = 9.0
    changed = changed.flatten(-2).flatten(-3, -2)
    with torch.no_grad():
        a, b = view.logits_of_patches(images, kept), view.logits_of_patches(changed, kept)
        whole = view.logits_of_patches(images, torch.arange(16).expand(6, -1))
        plain = view.logits(images)
        if family == "timm":
            assert_exact(a, without(double_model(), images, kept))
    assert_exact(a, b)
    assert_exact(whole, plain)
    assert float((a - plain).abs().max()) > 1e-3
    assert not view.layers[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("patches", "views", "removed", "counts"),
    [(196, 3, 0.1, [176, 156]), (16, 4, 0.1, [14, 12, 11]), (16, 3, 0.25, [12, 8]), (4, 2, 0.9, [1])],
)
def test_how_many_patches_stay_and_which(patches, views, removed, counts):
    order = torch.rand(2, patches, generator=torch.Generator().manual_seed(0)).argsort(-1)
    kept = REM(views=views, removed=removed).kept(order)
    assert [each.shape[1] for each in kept] == counts
    for each, count in zip(kept, counts):
        assert {*each[1].tolist()} == {*order[1, :count].tolist()}  # those of the lowest attention


def test_the_loss_of_two_classes_by_hand():
    """Predictions (1/2, 1/2), (3/4, 1/4) and (1/2, 1/2): the second one is too sure for a harder view."""
    views = [torch.tensor([p, 1 - p]).log()[None].double().requires_grad_() for p in (0.5, 0.75, 0.5)]
    h = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    cross = -0.5 * (math.log(0.75) + math.log(0.25)) + math.log(2) + math.log(2)
    losses, kept = REM(ranking=2.0, margin=0.3).ranked(*views)
    expected = cross + 2.0 * (math.log(2) - h + 0.3) + 2.0 * 0.3 + 2.0 * max(0, h - math.log(2) + 0.3)
    assert float(losses.detach()) == pytest.approx(expected) and kept.all()


def test_entropies_that_are_equal_are_in_order():
    """Two views have the same patches if they should differ by less than one. The ranking then has no gradient."""
    easy, hard = (torch.tensor([[0.5, 0.3, 0.2]]).double().log().requires_grad_() for _ in range(2))
    REM(ranking=2.0).ranked(easy, hard)[0].sum().backward()
    assert easy.grad is None or not easy.grad.any()


@pytest.mark.parametrize("options", [{}, {"views": 4, "margin": 0.2, "ranking": 0.5, "removed": 0.2}], ids=str)
def test_a_run_is_the_one_of_the_paper(options):
    how = {"views": 3, "margin": 0.0, "ranking": 1.0, "removed": 0.1} | options
    plain = double_model()
    norms = [p for block in plain.blocks[:3] for n, p in block.named_parameters() if "norm" in n]
    optimizer = torch.optim.Adam(norms, lr=0.003)
    model = acclimate.adapt(double_model(), "rem", lr=0.003, micro_batch=4, **options)
    for images in double_batches(3):
        order = plain_attention(plain, images).argsort(-1)
        counts = [int(16 * (1 - i * how["removed"])) for i in range(1, how["views"])]
        views = [plain(images), *(without(plain, images, order[:, :count]) for count in counts)]
        loss = torch.zeros((), dtype=torch.float64)
        for easy, hard in combinations(views, 2):
            loss = loss + torch.nn.functional.cross_entropy(hard, easy.detach().softmax(-1))
            loss = loss + how["ranking"] * (entropy(easy) - entropy(hard).detach() + how["margin"]).relu().mean()
        assert_exact(model(images), views[0])
        assert_exact(model.record.loss, loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(model.engine.adapted.tensors, norms):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=0)  # Adam magnifies the rounding of small gradients


def test_a_frozen_model_is_asked_once(batches):
    model = acclimate.adapt(tiny_model(), "rem")
    with model.frozen():
        model(batches[0])
    assert model.engine.passes.forward == len(batches[0])


@pytest.mark.parametrize(
    "options", [{"views": 1}, {"removed": 0.5}, {"removed": -0.1}, {"momentum": 1}, {"margin": -1}, {"lr": None}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        acclimate.adapt(tiny_model(), "rem", **options)
