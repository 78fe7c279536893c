"""The diffusion process against its equations, a case known in closed form, and the U-Net's parameters in files."""

from __future__ import annotations

import math

import pytest
import torch

from acclimate.errors import ConfigError, StateError
from acclimate.methods.dda import unet
from acclimate.methods.dda.denoisers import Gaussian, open_denoiser
from acclimate.methods.dda.process import Schedule, low_pass, regenerated, step_back
from support import assert_exact

pytestmark = pytest.mark.numerics
TINY = unet.Architecture(size=8, width=8, multipliers=(1, 2), blocks=1, attention=(4,), head_width=4, groups=4)


def random_unet(architecture=TINY):
    torch.manual_seed(0)
    net = unet.UNet(architecture)
    with torch.no_grad():
        for p in net.parameters():  # also those that begin at zero
            p.add_(0.1 * torch.randn_like(p))
    return net.eval().requires_grad_(False)


# ---- schedule -------------------------------------------------------------------------------------------------


def test_the_whole_schedule_is_linear():
    schedule = Schedule()
    assert schedule.steps == list(range(1000))
    assert schedule.betas[0] == pytest.approx(1e-4) and schedule.betas[-1] == pytest.approx(0.02)
    assert schedule.betas[500] == pytest.approx(1e-4 + 500 / 999 * 0.0199)
    assert schedule.kept[2] == pytest.approx(math.prod(1 - beta for beta in schedule.betas[:3]))


def test_a_thinned_out_schedule_has_the_same_images():
    whole, thin = Schedule(), Schedule(100)
    assert (thin.steps[0], thin.steps[1], thin.steps[50], thin.steps[-1]) == (0, 10, 505, 999)
    assert thin.kept == [whole.kept[step] for step in thin.steps]
    # one of its steps does what those between two of its images do
    assert 1 - thin.betas[7] == pytest.approx(math.prod(1 - b for b in whole.betas[thin.steps[6] + 1 : thin.steps[7] + 1]))


@pytest.mark.parametrize("count", [0, 1001, 2.5])
def test_a_schedule_of_a_wrong_length(count):
    with pytest.raises(ConfigError, match="steps"):
        Schedule(count)


def test_noise_and_image_are_inverse():
    schedule, (x, noise) = Schedule(20), torch.randn(2, 2, 1, 3, 3).double()
    noisy = schedule.noised(x, 11, noise)
    assert_exact(noisy, schedule.kept[11] ** 0.5 * x + (1 - schedule.kept[11]) ** 0.5 * noise)
    assert_exact(schedule.image(noisy, 11, noise), x)


def test_the_step_back_is_bayes_rule():
    """Of two Gaussians, what an image becomes before a step and what a step makes of that, the product is the posterior."""
    schedule, i = Schedule(20), 9
    before, beta = schedule.kept[i - 1], schedule.betas[i]
    precision = 1 / (1 - before) + (1 - beta) / beta
    image, x = torch.tensor([0.3, -0.8], dtype=torch.float64)
    mean = (before**0.5 * image / (1 - before) + (1 - beta) ** 0.5 * x / beta) / precision
    assert_exact(schedule.mean_before(x, i, image), mean)
    assert_exact(schedule.variances[i], 1 / precision)
    assert_exact(schedule.deviation(i, None), precision**-0.5)


def test_a_learned_variance_lies_between_its_bounds():
    schedule, i = Schedule(20), 9
    low, high = schedule.variances[i], schedule.betas[i]
    found = schedule.deviation(i, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    assert_exact(found**2, [low, math.sqrt(low * high), high])
    assert schedule.deviation(0, torch.ones(3)) == 0.0


# ---- guidance -------------------------------------------------------------------------------------------------


def test_the_low_pass_filter():
    flat = torch.full((1, 2, 9, 12), 0.4, dtype=torch.float64)
    assert_exact(low_pass(flat, 4), flat)
    board = (torch.arange(16)[:, None] + torch.arange(16)).remainder(2).float()[None, None] - 0.5
    assert low_pass(board, 4)[..., 4:-4, 4:-4].abs().max() < 0.02
    assert torch.equal(low_pass(board, 1), board)


def test_the_gradient_of_the_guidance_against_finite_differences():
    schedule, i = Schedule(100), 30
    net = random_unet().double()
    generator = torch.Generator().manual_seed(1)
    x, noise, towards, way = (torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    x, towards = 0.2 * x, low_pass(0.2 * towards, 4)

    def half(x):
        return step_back(net, schedule, x, i, noise, towards, 4).square / 2

    moved = step_back(net, schedule, x, i, noise, towards, 4)
    numeric = (half(x + 1e-5 * way) - half(x - 1e-5 * way)) / 2e-5
    torch.testing.assert_close((moved.gradient * way).flatten(1).sum(1, keepdim=True), numeric, rtol=1e-4, atol=1e-6)


def test_the_distance_is_of_each_image_or_of_the_batch():
    images = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double() - 0.5
    how = dict(steps=10, start=3)
    each = regenerated(Gaussian(), images, [1, 2, 3], **how)
    alone = torch.cat([regenerated(Gaussian(), p[None], [seed], **how) for p, seed in zip(images, [1, 2, 3])])
    assert_exact(each, alone)
    batch = regenerated(Gaussian(), images, [1, 2, 3], reference=True, **how)
    alone = torch.cat(
        [regenerated(Gaussian(), p[None], [seed], reference=True, **how) for p, seed in zip(images, [1, 2, 3])]
    )
    assert not torch.allclose(batch, alone, atol=1e-2)


def test_one_guided_step_by_hand():
    """As autograd has it of the distance itself, for the whole batch and from the step above."""
    schedule, seeds = Schedule(10), [4, 5]
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double() - 0.5
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    first, second = (torch.stack([torch.randn(1, 8, 8, generator=g) for g in generators]).double() for _ in range(2))
    for reference in (False, True):
        x = schedule.noised(images, 1 if reference else 0, first).requires_grad_()
        seen = schedule.image(x, 0, Gaussian()(x, torch.zeros(2, dtype=torch.long))).clamp(-1, 1)
        difference = low_pass(images, 2) - low_pass(seen, 2)
        distance = difference.norm() if reference else difference.flatten(1).norm(dim=1).sum()
        (gradient,) = torch.autograd.grad(distance, x)
        expected = schedule.mean_before(x, 0, seen) + 0 * second - 0.7 * gradient
        made = regenerated(Gaussian(), images, seeds, steps=10, start=1, factor=2, scale=0.7, reference=reference)
        assert_exact(made, expected)


def test_no_distance_has_no_gradient():
    white = torch.ones(1, 1, 8, 8)
    made = regenerated(lambda x, steps: -1e6 * torch.ones_like(x) + 0 * x, white, [0], steps=10, start=3)
    assert torch.equal(made, white)  # limited to white at every step


def test_gaussian_images_in_closed_form():
    """The chain of the best denoiser for Gaussian images is linear: its mean and variance follow a recursion."""
    m, s, schedule = 0.1, 0.15, Schedule(20)
    image, start = 0.4, 12
    mean, variance = schedule.kept[start - 1] ** 0.5 * image, 1 - schedule.kept[start - 1]
    for i in reversed(range(start)):
        kept = schedule.kept[i]
        slope = kept**0.5 * s**2 / (kept * s**2 + 1 - kept)  # of the expected image in x
        offset = m - slope * kept**0.5 * m
        a, b, c = (float(schedule.mean_before(torch.tensor(x), i, torch.tensor(p))) for x, p in ((1, 0), (0, 1), (0, 0)))
        assert c == 0
        mean = a * mean + b * (slope * mean + offset)
        variance = (a + b * slope) ** 2 * variance + float(schedule.deviation(i, None)) ** 2
    made = regenerated(Gaussian(m, s), torch.full((4, 1, 64, 64), image), [1, 2, 3, 4], steps=20, start=start, scale=0)
    assert float(made.mean()) == pytest.approx(mean, abs=4 * (variance / made.numel()) ** 0.5)
    assert float(made.var()) == pytest.approx(variance, rel=0.06)


def test_guidance_brings_the_low_frequencies_nearer():
    images = low_pass(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) - 0.5, 4)
    near, far = (regenerated(Gaussian(), images, [1, 2], steps=100, start=50, scale=scale) for scale in (6.0, 0.0))
    assert (low_pass(near - images, 4)).norm() < 0.7 * (low_pass(far - images, 4)).norm()


def test_a_denoiser_of_a_wrong_shape():
    with pytest.raises(ConfigError, match=r"The denoiser made \(1, 3"):
        regenerated(lambda x, steps: x.repeat(1, 3, 1, 1), torch.zeros(1, 1, 8, 8), [0], steps=2, start=1)


# ---- the network ----------------------------------------------------------------------------------------------


def test_the_default_architecture_has_the_layout_that_is_written_down():
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in unet.UNet(unet.Architecture()).state_dict().items()}
    assert (
        sum(math.prod(shape) for shape in shapes.values()) == 552_814_086
    )  # plus 1000 x 1024 for classes: the 554 M in print
    assert shapes["time_embed.2.weight"] == (1024, 1024)
    assert shapes["input_blocks.0.0.weight"] == (256, 3, 3, 3)
    assert shapes["input_blocks.17.0.emb_layers.1.weight"] == (2048, 1024)
    assert shapes["input_blocks.10.1.qkv.weight"] == (1536, 512, 1) and "input_blocks.8.1.qkv.weight" not in shapes
    assert shapes["middle_block.1.proj_out.weight"] == (1024, 1024, 1)
    assert shapes["output_blocks.2.2.out_layers.3.weight"] == (1024, 1024, 3, 3)
    assert shapes["output_blocks.17.0.skip_connection.weight"] == (256, 512, 1, 1)
    assert shapes["out.2.weight"] == (6, 256, 3, 3)


def test_images_and_steps_pass_on_their_own():
    net = random_unet().double()
    x, steps = torch.randn(3, 3, 8, 8).double(), torch.tensor([0, 500, 999])
    out = net(x, steps)
    assert out.shape == (3, 6, 8, 8)
    assert_exact(out, torch.cat([net(x[i : i + 1], steps[i : i + 1]) for i in range(3)]))
    assert not torch.allclose(out[0], net(x[:1], torch.tensor([100]))[0], atol=1e-3)


def test_the_embedding_of_a_step():
    row = unet.embedding(torch.tensor([3]), 4)[0]
    torch.testing.assert_close(row, torch.tensor([math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]))


def test_heads_of_attention_stand_one_after_another():
    layer = unet._Attention(8, 4, 4).double()
    torch.nn.init.normal_(layer.proj_out.weight)
    x = torch.randn(1, 8, 2, 3).double()
    rows = layer.qkv(layer.norm(x.flatten(2)))[0]  # three times four rows for each head
    heads = []
    for head in rows.split(12):
        q, k, v = head.split(4)
        heads.append(v @ (q.T @ k / 2).softmax(-1).T)
    assert_exact(layer(x)[0].flatten(1), x[0].flatten(1) + layer.proj_out(torch.cat(heads)[None])[0])


def test_a_network_comes_back_from_its_files(tmp_path, monkeypatch):
    net, x, steps = random_unet(), torch.randn(2, 3, 8, 8), torch.tensor([3, 700])
    unet.write(tmp_path / "net.safetensors", net, {"data": "none"})
    again = open_denoiser(tmp_path / "net.safetensors")
    assert again.architecture == TINY and not any(p.requires_grad for p in again.parameters())
    torch.testing.assert_close(again(x, steps), net(x, steps), atol=1e-2, rtol=1e-2)  # in half precision
    torch.save(net.state_dict(), tmp_path / "net.pt")
    monkeypatch.setattr(unet, "Architecture", lambda: TINY)  # a plain state dict is taken to be of the published network
    torch.testing.assert_close(open_denoiser(tmp_path / "net.pt")(x, steps), net(x, steps), atol=0, rtol=0)


def test_wrong_files(tmp_path):
    weights = random_unet().state_dict()
    path = tmp_path / "net.pt"
    torch.save(weights, path)
    with pytest.raises(StateError, match=r"net\.pt does not hold .* time_embed\.0\.weight is \(32, 8\) in the file"):
        unet.read(path)
    net = unet.UNet(TINY)
    for change, message in (
        ({k: v for k, v in weights.items() if k != "out.2.bias"}, "out.2.bias is missing"),
        ({**weights, "label_emb.weight": torch.zeros(1)}, "label_emb.weight is unknown"),
    ):
        with pytest.raises(StateError, match=message):
            unet.fill(net, change, path)
    with pytest.raises(StateError, match="no file"):
        unet.read(tmp_path / "gone.pt")
    torch.save([1, 2], path)
    with pytest.raises(StateError, match="not a state dict"):
        unet.read(path)
    path.write_bytes(b"half a file")
    with pytest.raises(StateError, match="cannot be read"):
        unet.read(path)
    (tmp_path / "x.safetensors").write_bytes(b"half a file")
    with pytest.raises(StateError, match="cannot be read"):
        unet.read(tmp_path / "x.safetensors")
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "x.safetensors")
    with pytest.raises(StateError, match="what architecture"):
        unet.read(tmp_path / "x.safetensors")


@pytest.mark.parametrize("options", [{"size": 9}, {"width": 6}, {"blocks": 0}, {"head_width": 3}])
def test_an_architecture_that_does_not_fit(options):
    with pytest.raises(ConfigError, match=next(iter(options)) if "head_width" not in options else "width"):
        unet.Architecture(**{**unet.asdict(TINY), **options})
