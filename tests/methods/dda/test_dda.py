"""DDA: its prediction by hand, images independent of their batch, denoisers, folders, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import acclimate
from acclimate import cli
from acclimate.core.method import Method
from acclimate.core.registry import find_method
from acclimate.data import bundled
from acclimate.data.corruptions import Corruption
from acclimate.data.disk import Files
from acclimate.data.domains import Corrupted, Subset
from acclimate.data.preprocess import Preprocess
from acclimate.errors import ConfigError, InputError, StateError
from acclimate.evaluation.grid import Execution
from acclimate.methods.dda import unet
from acclimate.methods.dda.denoisers import Gaussian, open_denoiser
from acclimate.methods.dda.folder import PairedDomain, generate_folder
from acclimate.methods.dda.method import DDA, combined
from acclimate.methods.dda.process import Schedule, regenerated, resized
from acclimate.testing.check import tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model

pytestmark = pytest.mark.numerics
HOW = dict(denoiser="gaussian", steps=10, start=3, mean=0.5, std=0.5)


def generated(model):
    """What the method is going to generate, from 0 to 1."""
    seen, make = [], model.method.generate
    model.method.generate = lambda *a: seen.append(make(*a)) or seen[-1]
    return seen


def test_the_prediction_is_the_mean_of_two():
    batches, model = double_batches(), acclimate.adapt(double_model(), "dda", **HOW)
    seen = generated(model)
    probabilities = model(batches[0]).softmax(-1)
    with torch.no_grad():
        original, other = (double_model()(x).softmax(-1) for x in (batches[0], 2 * seen[0].clamp(0, 1) - 1))
    assert_exact(probabilities, (original + other) / 2)
    assert model.record.used == 0 and model.record.drift == 0


def test_other_ensembles():
    sure, unsure = torch.tensor([[[5.0, 0.0, 0.0]], [[0.0, 1.0, 0.5]]], dtype=torch.float64)
    for name in ("entropy", "confidence"):
        assert_exact(combined(name, sure, unsure), sure.log_softmax(-1))
        assert_exact(combined(name, unsure, sure), sure.log_softmax(-1))
    assert_exact(combined("none", sure, unsure), unsure.log_softmax(-1))
    far = torch.tensor([[0.0, -2000.0]])
    assert combined("sum", far, far).isfinite().all()


def test_neither_batches_nor_micro_batches_matter(batches):
    whole = acclimate.adapt(double_model(), "dda", **HOW)(batches[0])
    for micro_batch in (None, 2):
        other = acclimate.adapt(double_model(), "dda", micro_batch=micro_batch, **HOW)
        parts = torch.cat([other(part) for part in batches[0].split([1, 3, 2])])
        assert_exact(parts, whole)


def test_the_reference_couples_a_batch_and_can_be_cut(batches):
    how = {**HOW, "reference": True, "scale": 60.0}
    whole = acclimate.adapt(double_model(), "dda", **how)(batches[0])
    cut = acclimate.adapt(double_model(), "dda", micro_batch=2, **how)(batches[0])
    assert_exact(cut, whole)
    other = acclimate.adapt(double_model(), "dda", **how)
    alone = torch.cat([other(image[None]) for image in batches[0]])
    assert not torch.allclose(alone, whole, atol=1e-3)


def test_the_reference_shows_the_centre_of_both():
    batches, model = double_batches(), acclimate.adapt(double_model(), "dda", reference=True, **HOW)
    seen = generated(model)
    probabilities = model(batches[0]).softmax(-1)
    pixels = torch.stack([(batches[0] + 1) / 2, seen[0]])
    shown = resized(pixels.flatten(0, 1), (37, 37))[..., 2:34, 2:34].unflatten(0, (2, -1))
    with torch.no_grad():
        first, second = (double_model()(x).softmax(-1) for x in (2 * shown[0] - 1, 2 * shown[1].clamp(0, 1) - 1))
    assert_exact(probabilities, (first + second) / 2)


def test_a_frozen_call_is_the_next_step(batches):
    model = acclimate.adapt(tiny_model(), "dda", **HOW)
    with model.frozen():
        first = model(batches[0])
    assert torch.equal(model(batches[0]), first)
    assert not torch.equal(model(batches[0]), first)  # other noise


class Pool(nn.Module):
    """Sees but a coarse image, of another size than the model's."""

    size, channels = 20, 3

    def __init__(self):
        super().__init__()
        self.seen = []
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x, steps):
        self.seen.append((x.dtype, tuple(x.shape[1:]), int(steps[0])))
        return self.scale * x


def test_a_denoiser_of_ones_own(batches, tmp_path):
    class Mine(DDA):
        def open_denoiser(self):
            self.net = (Pool(),)
            return self.net[0]

    model = acclimate.adapt(tiny_model().double(), Mine, steps=100, start=2, mean=0.5, std=0.5)
    assert model(batches[0]).dtype is torch.float64
    assert set(model.method.net[0].seen) == {(torch.float32, (3, 20, 20), 10), (torch.float32, (3, 20, 20), 0)}
    assert not list(model.method.parameters()) and not any("scale" in name for name in model.state.constants())


def test_precision_is_the_denoisers_too(batches):
    class Mine(DDA):
        def open_denoiser(self):
            class Net(nn.Conv2d):
                size = channels = None

                def forward(self, x, steps):
                    out = super().forward(x)
                    self.kind = out.dtype
                    return out

            self.net = (Net(3, 3, 1),)
            return self.net[0]

    model = acclimate.adapt(tiny_model(), Mine, steps=10, start=2, mean=0.5, std=0.5, precision="bfloat16")
    assert model(batches[0][:2]).isfinite().all()
    assert model.method.net[0].kind is torch.bfloat16


def test_a_subset_of_classes():
    model = acclimate.adapt(double_model(), "dda", classes=[1, 4, 7], **HOW)
    logits = model(tiny_batches(1, 2)[0])
    assert logits.shape == (2, 3)
    assert_exact(logits.exp().sum(-1), [1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"denoiser": None}, 'DDA needs a diffusion model: give denoiser=.*"bundled"'),
        ({"denoiser": Pool()}, "override open_denoiser"),
        ({"start": 11}, "start"),
        ({"start": 10, "reference": True}, "start"),
        ({"start": 0}, "start"),
        ({"steps": 2000}, "steps"),
        ({"factor": 1.5}, "factor"),
        ({"scale": -1}, "scale"),
        ({"ensemble": "product"}, "ensemble"),
        ({"mean": None, "std": None}, "normalised"),
    ],
)
def test_bad_options(options, message):
    model = tiny_model()
    model.pretrained_cfg = {}
    with pytest.raises(ConfigError, match=message):
        acclimate.adapt(model, "dda", **{**HOW, **options})


def test_a_file_that_is_not_there():
    model = tiny_model()
    with pytest.raises(StateError, match="no file"):
        acclimate.adapt(model, "dda", **{**HOW, "denoiser": "gone.pt"})
    acclimate.adapt(model, "source")  # it was given back


def test_other_channels_are_refused():
    class Grey(DDA):
        def open_denoiser(self):
            net = Pool()
            net.channels = 1
            return net

    with pytest.raises(ConfigError, match="1 channels, the model's 3"):
        acclimate.adapt(tiny_model(), Grey, mean=0.5, std=0.5)


def test_what_it_says_of_itself():
    assert issubclass(find_method("dda"), Method) and find_method("dda").info.adapts == "nothing (the input)"
    assert math.isclose(find_method("dda")().scale, 6)


# ---- folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in (("cat/a.JPEG", (24, 40)), ("cat/b.png", (20, 20)), ("dog/c.jpg", (40, 24))):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(file)
    net = unet.UNet(unet.Architecture(size=16, width=8, multipliers=(1,), blocks=1, attention=(), head_width=4, groups=4))
    unet.write(tmp_path / "net.safetensors", net, {})
    return tmp_path


def tree(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


QUICK = dict(steps=10, start=2)


def test_a_folder_keeps_its_shape_and_can_be_taken_up(photos):
    report = generate_folder(photos / "in", photos / "out", photos / "net.safetensors", **QUICK)
    made = tree(photos / "out")
    assert set(made) == {"generated.json", "cat/a.png", "cat/b.png", "dog/c.png"} and report.written == 3
    assert {Image.open(photos / "out" / name).size for name in made if name.endswith("png")} == {(16, 16)}
    (photos / "out/cat/b.png").unlink()
    report = generate_folder(photos / "in", photos / "out", photos / "net.safetensors", batch_size=1, **QUICK)
    assert str(report) == "1 files written; 2 were there already." and tree(photos / "out") == made
    with pytest.raises(StateError, match="start 2, now 3"):
        generate_folder(photos / "in", photos / "out", photos / "net.safetensors", steps=10, start=3)
    with pytest.raises(ConfigError, match="lies in"):
        generate_folder(photos / "in", photos / "in/out", "gaussian", **QUICK)
    with pytest.raises(ConfigError, match="scale"):
        generate_folder(photos / "in", photos / "new", "gaussian", scale=-1)


def test_a_generated_image_is_what_the_method_makes(photos):
    generate_folder(photos / "in", photos / "out", "gaussian", **QUICK)
    seed = int(torch.randint(2**62, (3,), generator=torch.Generator().manual_seed(0))[1])
    image = torch.tensor(np.array(Image.open(photos / "in/cat/b.png"))).permute(2, 0, 1)[None] / 127.5 - 1
    expected = (regenerated(Gaussian(), image, [seed], **QUICK).clamp(-1, 1) + 1) * 127.5
    shown = torch.tensor(np.array(Image.open(photos / "out/cat/b.png"))).permute(2, 0, 1)
    assert (shown - expected[0]).abs().max() <= 0.51


def test_damaged_images(photos, capsys):
    (photos / "in/cat/z.png").write_bytes(b"no image")
    command = ["dda", str(photos / "in"), str(photos / "out"), "--denoiser", "gaussian", "--steps", "10", "--start", "2"]
    assert cli.main(command) == 2
    assert "z.png cannot be read" in capsys.readouterr().err
    assert cli.main([*command, "--skip-unreadable"]) == 0
    assert "1 unreadable images skipped: cat/z.png" in capsys.readouterr().out


# ---- images generated before --------------------------------------------------------------------------------


def test_images_that_were_generated_before():
    batches, made = double_batches(), acclimate.adapt(double_model(), "dda", **HOW)
    seen = generated(made)
    expected = made(batches[0])
    stored = acclimate.adapt(double_model(), "dda", generated="somewhere", mean=0.5, std=0.5)
    pairs = torch.stack([batches[0], 2 * seen[0].clamp(0, 1) - 1], dim=1)
    assert_exact(stored(pairs), expected)
    with stored.frozen():
        assert_exact(stored(pairs), expected)
    for wrong in (batches[0], pairs[:, :1], pairs.tolist()):
        with pytest.raises(InputError, match=r"2 images for a sample here, as \(batch, 2, channels"):
            stored(wrong)
    with pytest.raises(InputError, match="NaN or Inf in image 1 "):
        stored(pairs.index_put((torch.tensor(1), torch.tensor(1)), pairs.new_tensor(math.nan)))


@pytest.fixture
def trees(tmp_path):
    """Images as ImageNet-C has them, and what was made of them, with a value that tells which is which."""
    for i, name in enumerate(("fog/5/cat/a", "fog/5/dog/b", "snow/5/cat/c", "snow/5/dog/d")):
        for tree, suffix, size, value in (("in", "JPEG", 16, 10 * i), ("out", "png", 24, 100 + 10 * i)):
            file = tmp_path / tree / f"{name}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (size, size), (value,) * 3).save(file)
    return tmp_path


def files(trees, **how):
    plain = Preprocess(None, 16, (0.0,) * 3, (1 / 255,) * 3)
    return Files(trees / "in/fog/5", ["cat/a.JPEG", "dog/b.JPEG"], [0, 1], how.pop("preprocess", plain), name="fog", **how)


def test_a_generated_image_stands_beside_its_own(trees):
    for folder in ("out", "out/fog", "out/fog/5"):  # the tree may have been made of any folder above
        pair = PairedDomain(files(trees), trees / folder).load(np.array([1, 0]))
        assert pair.shape == (2, 2, 3, 16, 16)
        assert pair.flatten(2).mean(2).round().tolist() == [[10, 110], [0, 100]]
    sample = PairedDomain(Subset.sample(files(trees), 1), trees / "out")
    (shown,) = sample.load(np.array([0])).flatten(2).mean(2).round().tolist()
    assert shown[1] == shown[0] + 100 and len(sample.labels) == 1


def test_what_generated_images_show(trees):
    framed = np.pad(np.full((16, 16, 3), 255, np.uint8), ((4, 4), (4, 4), (0, 0)))
    Image.fromarray(framed).save(trees / "out/fog/5/cat/a.png")
    whole = PairedDomain(files(trees), trees / "out").load(np.array([0]))[0, 1]
    assert whole[:, 0, 0].max() < 10 and whole[:, 8, 8].min() > 250  # stored squares were enlarged as a whole
    cut = Preprocess(24, 16, (0.0,) * 3, (1 / 255,) * 3)
    centre = PairedDomain(files(trees, preprocess=cut), trees / "out").load(np.array([0]))[0, 1]
    assert centre.min() > 250  # of photographs, the denoiser saw what is resized and then cut


def test_generated_images_that_are_not_there(trees):
    (trees / "out/fog/5/dog/b.png").unlink()
    with pytest.raises(InputError, match=r"lacks 1 of 2 images \(fog/5/dog/b.png\): `acclimate dda`"):
        PairedDomain(files(trees), trees / "out")
    with pytest.raises(InputError, match=r"nowhere lacks what was made of .*a\.png"):
        PairedDomain(files(trees), trees / "nowhere")
    with pytest.raises(ConfigError, match="`acclimate corrupt`"):
        PairedDomain(files(trees, corruption=Corruption("fog", 5)), trees / "out")
    with pytest.raises(ConfigError, match="not a folder of image files"):
        PairedDomain(Corrupted(bundled.images(), mean=bundled.MEAN, std=bundled.STD), trees / "out")


def test_the_bench_shows_dda_the_generated_images_and_others_the_originals(trees):
    model, data = double_model(), files(trees, preprocess=Preprocess(32, 32, (0.5,) * 3, (0.5,) * 3))
    for ensemble in ("none", "sum"):
        source, dda = results = acclimate.bench(
            model, [data], methods=["source", ("dda", {"generated": str(trees / "out"), "ensemble": ensemble})],
            out=trees / "runs", execution=Execution(threads=1),
        )  # fmt: skip
        assert source.spec.order == dda.spec.order and source.spec.data == dda.spec.data
        assert "shown" in dda.spec.config and "shown" not in source.spec.config
        assert "dda" in results.table()  # both met the same images
        images = PairedDomain(data, trees / "out").load(np.array([0, 1]))
        with torch.no_grad():
            each = [model(images[:, i].double()).softmax(-1) for i in (0, 1)]
        shown = each[1] if ensemble == "none" else (each[0] + each[1]) / 2
        assert_exact(source.result.nll, -each[0].diagonal().log().mean())
        assert_exact(dda.result.nll, -shown.diagonal().log().mean())


# ---- the bundled denoiser -------------------------------------------------------------------------------------


def test_the_bundled_denoiser_takes_noise_away():
    net = open_denoiser("bundled")
    assert bundled.DENOISER.stat().st_size < 2**20
    clean = Corrupted(bundled.images(), mean=bundled.MEAN, std=bundled.STD).load(np.arange(16))
    noise, step = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)), 200
    seen = Schedule().image((noisy := Schedule().noised(clean, step, noise)), step, net(noisy, torch.full((16,), step)))
    assert (seen - clean).square().mean() < 0.1 * (noisy - clean).square().mean()


def test_the_bench_knows_the_bundled_denoiser():
    quick = dict(steps=10, start=1)
    (outcome,) = acclimate.bench(methods=[("dda", quick)], corruptions=["fog"], images=4, out=None)
    assert outcome.spec.config["denoiser"] == "bundled" and outcome.result.top1 >= 0


def test_a_run_is_another_one_with_other_weights_in_the_same_file(photos):
    def run():
        how = {"denoiser": str(photos / "net.safetensors"), "steps": 10, "start": 1}
        (outcome,) = acclimate.bench(methods=[("dda", how)], corruptions=["fog"], images=2, out=photos / "runs")
        return outcome

    first = run()
    assert not first.found and run().found
    net = open_denoiser(photos / "net.safetensors")
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    unet.write(photos / "net.safetensors", net, {})
    assert not run().found
