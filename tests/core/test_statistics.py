"""Statistics of the source data: their values, their files, and who accepts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import acclimate
from acclimate import cli
from acclimate.core import statefile
from acclimate.core.registry import find_method
from acclimate.core.statistics import SourceStatistics, source_statistics
from acclimate.data import bundled
from acclimate.errors import ConfigError, InputError, ModelError, StateError
from acclimate.models.families import view_of
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_model

IMAGES = torch.cat(tiny_batches(2, size=7, seed=3))
DOUBLE = IMAGES.double()


@pytest.fixture(scope="module")
def statistics():
    return source_statistics(tiny_model(), IMAGES, batch_size=5)


@pytest.fixture(scope="module")
def exact():
    return source_statistics(double_model(), IMAGES, batch_size=5)


@pytest.mark.numerics
def test_fisher_is_the_mean_of_squared_gradients_of_batch_means(exact):
    model = double_model()
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    expected = {name: torch.zeros_like(p) for name, p in norms.items()}
    for batch in DOUBLE.split(5):
        logits = model(batch)
        gradients = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(-1)), list(norms.values()))
        for name, gradient in zip(norms, gradients):
            expected[name] += gradient**2 / 3
    assert exact.of("fisher").keys() == expected.keys()
    for name, values in exact.of("fisher").items():
        assert_exact(values, expected[name], name)


@pytest.mark.numerics
def test_moments_and_class_means_of_squashed_features():
    model = double_model()
    labels = torch.arange(14) % 3
    found = source_statistics(model, IMAGES, labels=labels, kinds=["features"], batch_size=4).of("features")
    with torch.no_grad():
        features = model.forward_head(model.forward_features(DOUBLE), pre_logits=True)
        hidden = F.layer_norm(features, (32,), eps=1e-5).tanh()
    centred = hidden - hidden.mean(0)
    assert_exact(found["mean"], hidden.mean(0))
    assert_exact(found["moment2"], (centred**2).mean(0))
    assert_exact(found["moment3"], (centred**3).mean(0))
    assert found["class_counts"].tolist() == [5, 5, 4, *[0] * 7]
    assert_exact(found["class_means"][1], hidden[labels == 1].mean(0))
    assert not found["class_means"][3:].any()


@pytest.mark.numerics
def test_class_tokens_are_those_of_the_next_norm(family):
    model = double_model(family)
    found = source_statistics(model, IMAGES, kinds=["class_tokens"], batch_size=5).of("class_tokens")
    view = view_of(model)
    entered = []
    hooks = [b.module.register_forward_pre_hook(lambda m, args: entered.append(args[0][:, 0])) for b in view.blocks]
    with torch.no_grad():
        last, _ = view.features(DOUBLE)
        tokens = torch.cat([*(block.norm1(x) for block, x in zip(view.blocks[1:], entered[1:])), last], dim=1)
    for hook in hooks:
        hook.remove()
    assert_exact(found["mean"], tokens.mean(0))
    assert_exact(found["std"], tokens.std(0))
    one = source_statistics(model, IMAGES[:1], kinds=["class_tokens"]).of("class_tokens")
    assert not one["std"].any() and one["mean"].isfinite().all()


@pytest.mark.numerics
def test_a_loader_is_grouped_anew_and_cut(exact):
    """Whatever its batches, with or without labels, and whatever else its tuples hold."""
    loader = [(IMAGES[:3], torch.zeros(3, dtype=torch.int64), "more"), IMAGES[3:], IMAGES]
    again = source_statistics(double_model(), loader, batch_size=5, samples=14)
    assert again.about == exact.about == {"samples": 14, "batch_size": 5, "labels": "predicted"}
    for name, tensor in exact.tensors.items():
        assert_exact(again.tensors[name], tensor, name)


def test_the_model_is_left_as_it_was(family):
    model = tiny_model(family).train()
    next(iter(model.parameters())).requires_grad_(False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    source_statistics(model, IMAGES)
    assert flags == ([p.requires_grad for p in model.parameters()], [m.training for m in model.modules()])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_file_comes_back(tmp_path, statistics):
    statistics.save(tmp_path / "s.safetensors")
    again = SourceStatistics.load(tmp_path / "s.safetensors")
    assert again.about == statistics.about and again.model == statistics.model
    assert all(torch.equal(t, statistics.tensors[name]) for name, t in again.tensors.items())
    assert "batch_size 5" in repr(again) and sorted(again.kinds) == ["class_tokens", "features", "fisher", "logits"]


def test_statistics_of_another_model_are_refused(tmp_path, statistics):
    statistics.save(tmp_path / "s.safetensors")
    other = tiny_model()
    with torch.no_grad():
        other.head.bias.add_(1)
    before = other.head.bias.clone()
    with pytest.raises(StateError, match=r"s.safetensors holds the source statistics of another model.*other weights"):
        acclimate.adapt(other, "eata", source_statistics=tmp_path / "s.safetensors")
    assert torch.equal(other.head.bias, before) and all(p.requires_grad for p in other.parameters())
    acclimate.adapt(other, "eta")  # it was not left wrapped


def test_other_files_are_refused(tmp_path, batches, statistics):
    adapter = acclimate.adapt(tiny_model(), "tent")
    adapter(batches[0])
    adapter.save(tmp_path / "state.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "plain.safetensors")
    for name, message in (("state", "does not hold source statistics"), ("plain", "not a state file"), ("gone", "exist")):
        with pytest.raises(StateError, match=message):
            acclimate.adapt(tiny_model(), "eata", source_statistics=str(tmp_path / f"{name}.safetensors"))
    statistics.save(tmp_path / "s.safetensors")
    with pytest.raises(StateError, match="not the state of an adapter"):
        acclimate.load(tmp_path / "s.safetensors", tiny_model())


def test_a_method_without_its_statistics_says_how_to_get_them():
    with pytest.raises(ConfigError, match=r"eata needs .*source_statistics\(.*acclimate source-statistics --model"):
        acclimate.adapt(tiny_model(), "eata")
    features = source_statistics(tiny_model(), IMAGES, kinds=["features"])
    with pytest.raises(ConfigError, match=r"eata needs .*\(fisher\); source_statistics= has features, not fisher"):
        acclimate.adapt(tiny_model(), "eata", source_statistics=features)


def test_a_state_file_is_enough_to_go_on(tmp_path, batches, statistics):
    adapter = acclimate.adapt(tiny_model(), "eata", source_statistics=statistics, margin=5.0, redundancy=2.0)
    for images in batches:
        adapter(images)
    adapter.save(tmp_path / "state.safetensors")
    assert statefile.read(tmp_path / "state.safetensors")[1]["source"] == statistics.about
    loaded = acclimate.load(tmp_path / "state.safetensors", tiny_model())
    assert all(torch.equal(a, b) and a.any() for a, b in zip(loaded.method.fisher, adapter.method.fisher))
    loaded.reset()
    assert all(torch.equal(a, b) for a, b in zip(loaded.method.fisher, adapter.method.fisher))
    loaded.save(tmp_path / "again.safetensors")
    assert statefile.read(tmp_path / "again.safetensors")[1]["source"] == statistics.about


def test_methods_that_need_no_statistics_leave_them_alone(statistics):
    assert acclimate.adapt(tiny_model(), "tent", source_statistics=statistics).method.info.needs == ()


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="no source images"):
        source_statistics(tiny_model(), [])
    with pytest.raises(InputError, match="NaN"):
        source_statistics(tiny_model(), torch.full((2, 3, 32, 32), torch.nan))
    for labels in (torch.full((14,), 10), torch.zeros(3, dtype=torch.int64), torch.zeros(14)):
        with pytest.raises(InputError, match="from 0 to 9"):
            source_statistics(tiny_model(), IMAGES, labels=labels)
    with pytest.raises(ConfigError, match="loader"):
        source_statistics(tiny_model(), [IMAGES], labels=torch.zeros(14, dtype=torch.int64))
    for options in ({"samples": 0}, {"batch_size": 1.5}, {"kinds": ["fischer"]}, {"kinds": []}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            source_statistics(tiny_model(), IMAGES, **options)
    adapter = acclimate.adapt(tiny_model(), "tent")
    for model in (adapter, adapter.model):
        with pytest.raises(ModelError, match="before adapt"):
            source_statistics(model, IMAGES)


def test_command(tmp_path, capsys):
    out = tmp_path / "s.safetensors"
    assert cli.main(["source-statistics", "--images", "20", "--batch-size", "8", "--out", str(out)]) == 0
    assert "fisher, features, class_tokens, logits; samples 20, batch_size 8, labels given" in capsys.readouterr().out
    model = acclimate.adapt(acclimate.bundled.model(), "eata", source_statistics=out)
    assert all(f.isfinite().all() and f.any() for f in model.method.fisher)
    for wrong, message in (
        (["--data", "imagenet"], "--root"),
        (["--root", "x"], "leave out root="),
        (["--kinds", "fischer"], "'fisher'"),
        (["--data", "office-home", "--root", str(tmp_path)], "cannot be used"),
    ):
        assert cli.main(["source-statistics", "--out", str(out), *wrong]) == 2
        assert message in capsys.readouterr().err


def test_command_on_a_folder_with_a_part_of_the_classes(tmp_path, capsys):
    """The labels become the columns that the folders' names stand for."""
    from PIL import Image

    for wnid in ("n01443537", "n01440764"):
        (tmp_path / "images" / wnid).mkdir(parents=True)
        Image.new("RGB", (40, 40), "gray").save(tmp_path / "images" / wnid / "1.png")
    out = tmp_path / "s.safetensors"
    weights = _save_thousand_classes(tmp_path)
    arguments = ["--model", "test_vit", "--weights", str(weights), "--data", "folder", "--root", str(tmp_path / "images")]
    code = cli.main(["source-statistics", *arguments, "--kinds", "features", "--out", str(out)])
    assert code == 0, capsys.readouterr().err
    counts = SourceStatistics.load(out).of("features")["class_counts"]
    assert counts.nonzero().flatten().tolist() == [0, 1] and counts.sum() == 2


def _save_thousand_classes(folder):
    import timm

    model = timm.create_model("test_vit")
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def test_bench_gives_the_statistics_to_methods_that_need_them(tmp_path):
    out = tmp_path / "s.safetensors"
    assert cli.main(["source-statistics", "--images", "20", "--batch-size", "8", "--out", str(out)]) == 0
    common = dict(methods=["eata", "tent"], corruptions=["fog"], images=12, out=tmp_path / "runs")
    with pytest.raises(ConfigError, match="eata needs"):
        acclimate.bench(bundled.model(), **common)
    own, _ = acclimate.bench(**common)
    assert "2000 images in batches of 64" in own.spec.config["source statistics"], (
        "the bundled model has statistics of its own"
    )
    first, tent = acclimate.bench(**common, source_statistics=out)
    assert (
        "20 images in batches of 8" in first.spec.config["source statistics"] and "source statistics" not in tent.spec.config
    )
    assert cli.main(["source-statistics", "--images", "24", "--batch-size", "8", "--out", str(out)]) == 0
    second, again = acclimate.bench(**common, source_statistics=out)
    assert second.spec.id != first.spec.id and not second.found and again.found


def test_the_paper_leaves_out_what_has_no_statistics(monkeypatch, tmp_path):
    from acclimate.papers.dct import experiments as paper

    experiment = paper.find("table-normal")
    assert experiment.needing == ["dda", "cfa", "dept-g", "eata"]
    asked = []
    monkeypatch.setattr(paper, "bench", lambda *where, methods, **grid: asked.append(methods))
    chosen = replace(experiment, grid={**experiment.grid, "methods": ["source", "eata", "dept-g", "dda"]})
    both = [bundled.STATISTICS, bundled.PROMPTS]
    folder = str(tmp_path)
    denoisers = {"denoiser": "file.pt"}, {"denoiser": folder}
    for options in (
        {},
        {"source_statistics": bundled.STATISTICS},
        {"source_statistics": both},
        *denoisers,
        {"scale": "small"},
    ):
        list(paper.run(chosen, "somewhere", **options))
    small = [
        ("source", {}),
        ("eata", {}),
        ("dept-g", dict(find_method("dept-g").info.quick)),
        ("dda", dict(find_method("dda").info.quick)),
    ]
    with_dda = [["source", ("dda", how)] for how in ({"denoiser": "file.pt"}, {"generated": folder})]
    assert asked == [["source"], ["source", "eata"], ["source", "eata", "dept-g"], *with_dda, small]


def test_kinds_are_those_that_suit_the_model():
    model = tiny_model("resnet")
    found = acclimate.source_statistics(model, tiny_batches(1))
    assert found.kinds == ["fisher", "features", "logits"]
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(ModelError, match="'class_tokens' statistics need the blocks of a vision transformer"):
        acclimate.source_statistics(model, tiny_batches(1), kinds=["class_tokens"])
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    assert acclimate.source_statistics(plain, tiny_batches(1)).kinds == ["features", "logits"]
