"""DDA: Back to the Source, Diffusion-Driven Adaptation to Test-Time Corruption (Gao et al., CVPR 2023)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...core.engine import Engine, entropy
from ...core.method import Info, Method, Setup, Step
from ...core.registry import register
from ...data.domains import Domain
from ...errors import ConfigError, require_between, require_whole
from ...models.view import ViT
from .denoisers import open_denoiser
from .folder import PairedDomain
from .process import Denoiser, regenerated, resized

ENSEMBLES = ("sum", "entropy", "confidence", "none")
PIXELS_AT_ONCE = 4 * 256**2  # in a pass of the denoiser; the authors take four images at a time
ZOOM = 256 / 224  # of what the authors' classifier sees: resized to 256, the central 224 cut out


@register("dda")
class DDA(Method):
    """Change the images, not the model: a diffusion model of the source domain makes each image look like its own.

    An image gets the noise of `start` steps, which hides a corruption; then the diffusion model takes the noise away step by
    step, while the low frequencies of what it sees are drawn to those of the image, so that its content stays. The
    predictions for the image and for the generated one are averaged. Nothing is learned, no image sees another one, and the
    stream's order and batches do not matter. A frozen call draws the noise that the next step would draw, and leaves it.

    Needs a diffusion model of the source domain, and the model's normalisation (`adapt(..., mean=, std=)`). An image costs
    `start` forward and backward passes of the diffusion model. To give one that is not in a file, subclass:

        @acclimate.register("my-dda")
        class MyDDA(DDA):
            def open_denoiser(self):
                return net  # an nn.Module as acclimate.methods.dda.process.Denoiser describes it

    The denoiser is no part of a state file, which only names it. Its passes follow `precision` and, if given, `micro_batch`.
    Images that were generated before (`acclimate dda`) cost nothing more: see `generated`.

    Ours is how the low-pass filter and resizing treat the borders of an image (as torch does), that the guidance looks at
    the denoiser's image after it was limited to -1 ... 1, and that the result is not rounded to 8 bits before it is
    classified. The network of the paper's weights was written anew, and has not been run with the real file.

    Args:
        denoiser: The diffusion model: a file of weights ("256x256_diffusion_uncond.pt", which is the paper's; or
            *.safetensors), "bundled" for images like the bundled ones (tiny; it knows the first 600 of the 1000 steps), or
            "gaussian", a formula for tests. Images are resized to its size and back.
        generated: A folder that `acclimate dda` wrote; then no denoiser is opened. The bench shows each image together with
            what was generated of it; batches of your own have to be so, (batch, 2, channels, height, width).
        steps: Steps to which the schedule of 1000 is thinned out.
        start: Steps of noise that an image gets, of these.
        factor: By how much the low-pass filter shrinks an image, and enlarges it again.
        scale: Strength of the guidance.
        ensemble: "sum" averages the two predictions; "entropy" takes the one of lower entropy, "confidence" that with the
            higher largest probability; "none" takes that for the generated image.
        reference: Behave as the authors' released code: the guidance is the gradient of one distance between batches, so
            that it becomes weaker for each image the larger the batch is (by default each image has a distance of its own,
            which is the same at a batch of 1); noise is added once more often than it is taken away; and the classifier
            sees the central 7/8 of both images, enlarged.
    """

    info = Info(
        paper="Gao et al., CVPR 2023",
        adapts="nothing (the input)",
        remembers="the denoiser",
        augments=True,
        quick={"denoiser": "gaussian", "steps": 10, "start": 3},
        passes=(2, 0),
    )

    def __init__(
        self,
        *,
        denoiser: str | None = None,
        generated: str | None = None,
        steps: int = 100,
        start: int = 50,
        factor: int = 4,
        scale: float = 6.0,
        ensemble: str = "sum",
        reference: bool = False,
    ) -> None:
        super().__init__()
        require_whole(1, steps=steps, start=start, factor=factor)
        require_between(0, math.inf, scale=scale)
        most = steps - 1 if reference else steps
        if steps > 1000 or start > most:
            raise ConfigError(f"steps={steps}, start={start}: give at most 1000 steps, and a start of at most {most}.")
        if ensemble not in ENSEMBLES:
            raise ConfigError(f"ensemble={ensemble!r}: choose one of {', '.join(ENSEMBLES)}.")
        if denoiser is not None and not isinstance(denoiser, (str, os.PathLike)):
            raise ConfigError(
                f"denoiser: give a file or a name, not a {type(denoiser).__name__}. For a network of your own, subclass "
                "DDA and override open_denoiser()."
            )
        self.denoiser = None if denoiser is None else os.fspath(denoiser)
        self.generated = None if generated is None else os.fspath(generated)
        self.info = replace(self.info, views=1 if generated is None else 2)
        self.steps = steps
        self.start = start
        self.factor = factor
        self.scale = scale
        self.ensemble = ensemble
        self.reference = reference

    def open_denoiser(self) -> Denoiser:
        """The diffusion model."""
        return open_denoiser(self.denoiser)

    def present(self, domain: Domain) -> Domain:
        """Return a domain as the bench shows it to this method: with the generated image beside each original."""
        return domain if self.generated is None else PairedDomain(domain, self.generated)

    def attach(self, vit: ViT, setup: Setup) -> Iterable[nn.Parameter]:
        if self.generated is not None:
            return []
        denoiser = self.open_denoiser()
        if denoiser.channels not in (None, vit.channels):
            raise ConfigError(f"The denoiser's images have {denoiser.channels} channels, the model's {vit.channels}.")
        self._held = (denoiser,)  # in a tuple it does not become a part of the state
        return []

    def step(self, images: Tensor, engine: Engine) -> Step:
        if self.generated is not None:
            return Step(self._together(images, engine))
        rng = _copy(engine.rng)
        places, total = engine.ranks.positions(images)
        seeds = _drawn(total, rng)
        logits = self._logits(images, [seeds[i] for i in places.tolist()], engine, engine.ranks.gather)
        engine.rng.set_state(rng.get_state())
        return Step(logits)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        if self.generated is not None:
            return self._together(images, engine)
        return self._logits(images, _drawn(len(images), _copy(engine.rng)), engine, lambda rows: rows)

    def _logits(self, images: Tensor, seeds: Sequence[int], engine: Engine, gather: Callable[[Tensor], Tensor]) -> Tensor:
        generated = self.generate(engine.to_pixels(images), seeds, engine, gather)
        size = images.shape[-2:]
        if self.reference:
            images = engine.from_pixels(_zoomed(engine.to_pixels(images), size))
            generated = _zoomed(generated, size)
        generated = engine.from_pixels(resized(generated, size).clamp(0, 1).to(images))
        return combined(self.ensemble, engine.predict(images), engine.predict(generated))

    def _together(self, pairs: Tensor, engine: Engine) -> Tensor:
        """Logits of images that come with what was generated of them."""
        if self.reference:
            shape = pairs.shape
            pairs = engine.from_pixels(_zoomed(engine.to_pixels(pairs.flatten(0, 1)), shape[-2:])).view(shape)
        return combined(self.ensemble, *map(engine.predict, pairs.unbind(1)))

    def generate(self, pixels: Tensor, seeds: Sequence[int], engine: Engine, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Images of the source domain in the place of these, of the denoiser's size; all are from 0 to 1."""
        (denoiser,) = self._held
        if isinstance(denoiser, nn.Module):
            denoiser.to(pixels.device)
        size = pixels.shape[-2:] if denoiser.size is None else (denoiser.size, denoiser.size)
        weights = next(denoiser.parameters(), pixels) if isinstance(denoiser, nn.Module) else pixels
        pixels = pixels.to(torch.promote_types(weights.dtype, torch.float32))
        images = (2 * resized(pixels, size) - 1).clamp(-1, 1)

        def denoise(x: Tensor, steps: Tensor) -> Tensor:
            with engine.autocast():
                return denoiser(x, steps)

        made = regenerated(
            denoise,
            images,
            seeds,
            steps=self.steps,
            start=self.start,
            factor=self.factor,
            scale=self.scale,
            reference=self.reference,
            each=lambda work, batch: engine.map(work, batch, size=max(1, PIXELS_AT_ONCE // math.prod(size))),
            gather=gather,
        )
        return (made + 1) / 2


def combined(ensemble: str, original: Tensor, generated: Tensor) -> Tensor:
    """Logarithms of the probabilities that two predictions make together."""
    one, other = original.log_softmax(-1), generated.log_softmax(-1)
    if ensemble == "sum":
        return torch.logaddexp(one, other) - math.log(2)
    if ensemble == "none":
        return other
    better = entropy(one) < entropy(other) if ensemble == "entropy" else one.amax(-1) > other.amax(-1)
    return torch.where(better[:, None], one, other)


def _zoomed(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """The central part, at the size that the model takes."""
    height, width = (round(side * ZOOM) for side in size)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return resized(pixels, (height, width))[..., top : top + size[0], left : left + size[1]]


def _copy(rng: torch.Generator) -> torch.Generator:
    """With the same numbers to come."""
    twin = torch.Generator()
    twin.set_state(rng.get_state())
    return twin


def _drawn(count: int, rng: torch.Generator) -> list[int]:
    """A seed for each image of a batch, whatever the others are."""
    return [int(torch.randint(2**62, (), generator=rng)) for _ in range(count)]
