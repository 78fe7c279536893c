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
from ...models.view import ModelView
from .denoisers import open_denoiser
from .folder import PairedDomain
from .process import Denoiser, regenerated, resized

ENSEMBLES = ("sum", "entropy", "confidence", "none")
PIXELS_AT_ONCE = 4 * 256**2  # pixels in a pass of the denoiser; the authors pass four images at a time
ZOOM = 256 / 224  # the authors' classifier takes the central 224 pixels of an image that was resized to 256


@register("dda")
class DDA(Method):
    """Change the images and not the model: a diffusion model of the source domain regenerates each image.

    An image gets the noise of `start` steps, which hides a corruption. Then the diffusion model removes the noise step by
    step. At each step the low frequencies of the denoised image are moved towards those of the original image, so that its
    content stays. The predictions for the original and the generated image are averaged. Nothing is learned, and every image
    is processed on its own, so the order of the stream and its batches do not matter. A frozen call uses the noise that the
    next step would draw, and does not advance the generator.

        x_N = sqrt(a_N) x + sqrt(1 - a_N) noise,  where N = start and a_i is the share of the variance that is left
        for i = N, ..., 1:
            y = image that the diffusion model sees in x_i,  s = its sample before step i
            x_(i-1) = s - scale gradient for x_i of |low(y) - low(x)|,  where low() keeps the low frequencies
        prediction = (softmax(z(x)) + softmax(z(x_0))) / 2

    The method needs a diffusion model of the source domain, and the normalisation of the model (`adapt(..., mean=, std=)`).
    An image costs `start` forward and backward passes of the diffusion model. To use a diffusion model that is not in a
    file, write a subclass:

        @acclimate.register("my-dda")
        class MyDDA(DDA):
            def open_denoiser(self):
                return net  # an nn.Module as acclimate.methods.dda.process.Denoiser describes it

    The denoiser is not part of a state file, which has only its name. Its passes follow `precision` and, if given,
    `micro_batch`. Images that were generated before (`acclimate dda`) need no pass of the diffusion model: see `generated`.

    Ours: how the low-pass filter and the resizing treat the borders of an image (as torch does), that the guidance uses the
    denoised image after it was limited to -1 ... 1, and that the result is not rounded to 8 bits before it is classified.
    The network for the weights of the paper was written anew, and has not been run with the real file.

    Args:
        denoiser: The diffusion model: a file of weights ("256x256_diffusion_uncond.pt", which is the paper's; or
            *.safetensors), "bundled" for images like the bundled ones (tiny; it is trained for the first 600 of the 1000
            steps), or "gaussian", a formula for tests. Images are resized to the size of the denoiser and back.
        generated: A folder that `acclimate dda` wrote. Then no denoiser is opened. The bench passes each image together with
            its generated image; your own batches need the same shape, (batch, 2, channels, height, width).
        steps: Number of steps, evenly spaced in the schedule of 1000.
        start: Number of these steps whose noise an image gets.
        factor: Factor by which the low-pass filter reduces an image before it enlarges it again.
        scale: Strength of the guidance.
        ensemble: "sum" averages the two predictions; "entropy" takes the one of lower entropy; "confidence" takes the one
            with the higher largest probability; "none" takes that for the generated image.
        reference: Behave as the authors' released code: the guidance is the gradient of one distance between batches, so
            that it is weaker for each image in a larger batch (by default each image has its own distance, which is the same
            for a batch of 1); noise is added one time more than it is removed; and the classifier gets the central 7/8 of
            both images, enlarged.
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
        """Return the diffusion model."""
        return open_denoiser(self.denoiser)

    def present(self, domain: Domain) -> Domain:
        """Return a domain as the bench passes it to this method: with the generated image beside each original."""
        return domain if self.generated is None else PairedDomain(domain, self.generated)

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Open the diffusion model, and adapt no parameter."""
        if self.generated is not None:
            return []
        denoiser = self.open_denoiser()
        if denoiser.channels not in (None, view.channels):
            raise ConfigError(f"The denoiser's images have {denoiser.channels} channels, the model's {view.channels}.")
        self._held = (denoiser,)  # a module in a tuple is not part of the state
        return []

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Generate an image for each image of the batch, and combine the predictions of both."""
        if self.generated is not None:
            return Step(self._together(images, engine))
        rng = _copy(engine.rng)
        positions, total = engine.ranks.positions(images)
        seeds = _drawn(total, rng)
        logits = self._logits(images, [seeds[i] for i in positions.tolist()], engine, engine.ranks.gather)
        engine.rng.set_state(rng.get_state())
        return Step(logits)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Predict as the next step would, without advancing the random generator."""
        if self.generated is not None:
            return self._together(images, engine)
        return self._logits(images, _drawn(len(images), _copy(engine.rng)), engine, lambda rows: rows)

    def _logits(self, images: Tensor, seeds: Sequence[int], engine: Engine, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the combined logits of images and the images that are generated from them with these seeds."""
        generated = self.generate(engine.to_pixels(images), seeds, engine, gather)
        size = images.shape[-2:]
        if self.reference:
            images = engine.from_pixels(_zoomed(engine.to_pixels(images), size))
            generated = _zoomed(generated, size)
        generated = engine.from_pixels(resized(generated, size).clamp(0, 1).to(images))
        return combined(self.ensemble, engine.predict(images), engine.predict(generated))

    def _together(self, pairs: Tensor, engine: Engine) -> Tensor:
        """Return the combined logits of images that come with their generated images."""
        if self.reference:
            shape = pairs.shape
            pairs = engine.from_pixels(_zoomed(engine.to_pixels(pairs.flatten(0, 1)), shape[-2:])).view(shape)
        return combined(self.ensemble, *map(engine.predict, pairs.unbind(1)))

    def generate(self, pixels: Tensor, seeds: Sequence[int], engine: Engine, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the generated images of the source domain, at the size of the denoiser.

        Pixels are from 0 to 1, both in the input and in the output.
        """
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
    """Return the logarithms of the probabilities that result from the ensemble of two predictions."""
    one, other = original.log_softmax(-1), generated.log_softmax(-1)
    if ensemble == "sum":
        return torch.logaddexp(one, other) - math.log(2)
    if ensemble == "none":
        return other
    better = entropy(one) < entropy(other) if ensemble == "entropy" else one.amax(-1) > other.amax(-1)
    return torch.where(better[:, None], one, other)


def _zoomed(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Return the central part of the images, enlarged to the size that the model takes."""
    height, width = (round(side * ZOOM) for side in size)
    top, left = round((height - size[0]) / 2), round((width - size[1]) / 2)
    return resized(pixels, (height, width))[..., top : top + size[0], left : left + size[1]]


def _copy(rng: torch.Generator) -> torch.Generator:
    """Return a copy of the generator, in the same state."""
    twin = torch.Generator()
    twin.set_state(rng.get_state())
    return twin


def _drawn(count: int, rng: torch.Generator) -> list[int]:
    """Draw one seed for each image of a batch, one after another."""
    return [int(torch.randint(2**62, (), generator=rng)) for _ in range(count)]
