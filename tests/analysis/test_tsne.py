"""The maps of class tokens and conditioners: what is compared, what is shown, and what is said of it."""

from __future__ import annotations

import numpy as np
import pytest
from subjects import tiny_subject

from acclimate.analysis import clouds, tsne
from acclimate.analysis.embedding import Separability
from acclimate.analysis.intervals import Adaptation
from acclimate.analysis.scatter import look, most_frequent
from acclimate.analysis.subject import Subject
from acclimate.errors import ConfigError, InputError
from acclimate.testing.check import SIZES
from support import assert_exact

DOMAINS = ["gaussian_noise", "contrast"]


def subject(count: int = 24, *, classes: int = 3, labelled: bool = True) -> Subject:
    names = ("coat", "bag") if labelled else ()
    return tiny_subject(count, labels=np.arange(count) % classes, classes=names, severity=5)


def gathered(of: Subject, method: str) -> clouds.Cloud:
    return clouds.gather(of, DOMAINS, method, severity=5)


def test_every_image_is_seen_in_every_domain_by_every_model():
    cloud = gathered(subject(), "dct")
    assert cloud.domain.tolist() == [0] * 24 + [1] * 24 and cloud.image.tolist() == [*range(24)] * 2
    assert (cloud.label == cloud.image % 3).all()
    assert cloud.block == 1 and cloud.depth == SIZES.depth
    source, each, one = (cloud.embeddings[name] for name in ("source", "each", "one"))
    assert not source.conditioners and set(each.conditioners) == {(1, part) for part in ("input", "q", "k", "v")}
    for embedding in (source, each, one):
        assert {tokens.shape[0] for tokens in embedding.class_tokens.values()} == {48}
    # the one model went through the first domain before the second, from whose own model it differs therefore
    assert not np.allclose(each.conditioners[1, "k"][24:], one.conditioners[1, "k"][24:], atol=1e-6)


@pytest.mark.numerics
def test_a_model_that_does_not_adapt_is_the_source_in_all_three():
    of = subject()
    of.model.double()
    cloud = gathered(of, "source")
    for layer in range(1, SIZES.depth + 1):
        for model in ("each", "one"):
            expected = cloud.embeddings["source"].class_tokens[layer]
            assert_exact(cloud.embeddings[model].class_tokens[layer], expected, f"layer {layer}")
    assert cloud.block is None


def test_the_images_shown_are_few_and_of_all_classes(monkeypatch):
    monkeypatch.setattr(clouds, "SHOWN", 10)
    sorted_by_class = tiny_subject(40, labels=np.arange(40) // 20, classes=("coat", "bag"))
    cloud = gathered(sorted_by_class, "source")
    assert len(cloud.domain) == 20 and set(cloud.label) == {0, 1}


@pytest.mark.parametrize(
    ("method", "names"),
    [("dct", ["class-tokens", "separability", "conditioners"]), ("tent", ["class-tokens", "separability"])],
)
def test_figures_with_their_numbers_are_saved(method, names, tmp_path, monkeypatch):
    monkeypatch.setattr(tsne, "plane", lambda points, *, seed: points[:, :2])  # t-SNE takes its time
    figures = tsne.draw(subject(), corruptions=DOMAINS, method=method)
    assert [figure.name for figure in figures] == names
    for figure in figures:
        assert all(file.stat().st_size > 500 for file in figure.save(tmp_path))
        assert figure.findings and "severity 5" in figure.protocol["corruptions"]
        assert figure.protocol["method"].startswith(method) and figure.origin["model"] == "tiny"
    maps, lines = figures[0].rows, figures[1].rows
    panels = len(tsne.chosen_layers(SIZES.depth)) + 1
    assert len(maps) == panels * 48 and {row["model"] for row in maps} == {"each", "source"}
    assert len(lines) == 3 * SIZES.depth * 2
    assert {row["chance"] for row in lines if row["of"] == "domain"} == {0.5}
    if method == "dct":
        assert len(figures[2].rows) == 2 * 3 * 48


def test_without_classes_only_domains_are_measured(monkeypatch):
    monkeypatch.setattr(tsne, "plane", lambda points, *, seed: points[:, :2])
    figures = tsne.draw(subject(labelled=False), corruptions=DOMAINS, method="source")
    assert {row["of"] for row in figures[1].rows} == {"domain"}
    assert len(figures[0].canvas.axes) == len(tsne.chosen_layers(SIZES.depth)) + 1
    assert "classes are not known" in figures[1].caption


def test_classes_with_too_few_images_are_shown_and_not_measured():
    cloud = gathered(subject(classes=12), "source")
    assert cloud.measurable is None


def test_the_same_seed_gives_the_same_map():
    points = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
    first = clouds.plane(points, seed=3)
    assert first.shape == (30, 2) and (first == clouds.plane(points, seed=3)).all()
    assert not np.allclose(first, clouds.plane(points[::-1].copy(), seed=3))


def test_far_groups_stay_groups_on_the_map_and_one_point_stays_one():
    kinds = np.repeat([0, 1], 20)
    points = (np.random.default_rng(0).normal(size=(40, 5)) + 100 * kinds[:, None]).astype(np.float32)
    places = clouds.plane(points)
    gaps = np.linalg.norm(places[:, None] - places, axis=-1)
    np.fill_diagonal(gaps, np.inf)
    assert (kinds[gaps.argmin(1)] == kinds).all()
    assert not clouds.plane(np.full((10, 3), 0.1, np.float32)).any()


def test_layers_are_the_papers_or_at_their_share_of_the_depth():
    assert tsne.chosen_layers(12) == [1, 3, 6, 11, 12]
    assert tsne.chosen_layers(24) == [2, 6, 12, 22, 24]
    assert tsne.chosen_layers(4) == [1, 2, 4]


def test_frequent_classes_get_a_name_and_a_colour():
    labels = np.array([5, 5, 0, 0, 0, *range(20, 32)])
    kinds, legend = most_frequent(labels, ["shoe"])
    assert kinds[:5].tolist() == [1, 1, 0, 0, 0] and (kinds == -1).sum() == 4
    assert legend[0] == "shoe" and legend[1] == "class 5" and legend[-1] == "4 others"
    assert len({look(kind) for kind in range(20)}) == 20


def said(steps: int = 8, images: int = 100) -> list[str]:
    def value(accuracy: float, silhouette: float) -> Separability:
        return Separability((np.arange(images) < accuracy * images).astype(float), 0.2, silhouette)

    measured = {
        ("source", 1, "domain"): value(0.9, 0.3),
        ("source", 2, "domain"): value(0.6, 0.1),
        ("each", 2, "domain"): value(0.7, 0.2),
        ("one", 2, "domain"): value(0.61, 0.0),
    }
    return tsne.compared("domain", measured, "dct", 2, dict.fromkeys(("each", "one"), Adaptation(steps, 0.01)))


def test_findings_are_computed():
    accuracy, silhouette = said()
    assert "from 90.0 % after layer 1 to 60.0 % after layer 2 (chance 20.0 %)" in accuracy
    assert "70.0 % with one model per domain, +10.0 points (95 % interval +4.0 to +16.0), and" in accuracy
    assert "61.0 % with one for all, +1.0 points (95 % interval -1.0 to +3.0); a difference is not seen." in accuracy
    assert "source 0.100, one model per domain 0.200, one for all 0.000" in silhouette


def test_few_steps_are_no_verdict():
    assert said(steps=1)[0].count("too few images or steps to say") == 2


def test_bad_input_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(tsne, "gather", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(ConfigError, match="name two or more"):
        tsne.draw(subject(), corruptions=["fog"])
    with pytest.raises(InputError, match="4 images are too few"):
        tsne.draw(subject(4), corruptions=DOMAINS)
