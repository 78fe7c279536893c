"""The preprocessing of an image file into what a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor, nn

from ..errors import ConfigError, InputError, require_whole
from ..models.families import view_of
from ..models.normalisation import Normalisation, model_normalisation, unknown_normalisation
from .corruptions import Pixels
from .imagefile import most_pixels, trimmed


@dataclass(frozen=True)
class Preprocess:
    """The preprocessing of an image: resize, central crop, and normalisation. The results equal those of torchvision.

    Of an image that is more than 16 times as long as wide, only the central part is resized. This may move the crop by half
    a pixel.

    Args:
        resize: The length of the shorter side, or (height, width), which may change the aspect ratio. None keeps the size.
        crop: The side of the central square that is cropped. None keeps the whole image.
        mean: The mean of the model's normalisation, of pixels from 0 to 1, for red, green and blue.
        std: The standard deviation of the model's normalisation, for red, green and blue.
    """

    resize: int | tuple[int, int] | None
    crop: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # lists are accepted as well
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ConfigError(f"mean={self.mean}, std={self.std}: give three numbers each, and a deviation above 0.")
        if isinstance(self.resize, tuple) and len(self.resize) != 2:
            raise ConfigError(f"resize={self.resize}: give the shorter side, or (height, width).")
        resize = self.resize if isinstance(self.resize, tuple) else (self.resize,)
        for side in resize:
            require_whole(1, optional=True, resize=side)
        require_whole(1, optional=True, crop=self.crop)

    @classmethod
    def for_model(
        cls, model: nn.Module, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Preprocess:
        """Return the preprocessing of photographs of any size for a model, as `Input.photographs` explains."""
        return input_of(model, mean=mean, std=std).photographs()

    def __call__(self, image: Image.Image) -> Pixels:
        """Return an RGB image as uint8 (height, width, 3), ready for a corruption or for `normalised`."""
        if self.resize is not None:
            if self.crop is not None and not isinstance(self.resize, tuple):
                image = trimmed(image)
            width, height = image.size
            if isinstance(self.resize, tuple):
                height, width = self.resize
            elif width <= height:
                width, height = self.resize, int(self.resize * height / width)
            else:
                width, height = int(self.resize * width / height), self.resize
            if width * height > most_pixels():
                raise InputError(f"it would have {width} x {height} pixels when resized: give a crop, or (height, width)")
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self.crop is not None:
            width, height = image.size
            if self.crop > min(width, height):  # torchvision would add a black border
                raise InputError(f"it has {width} x {height} pixels, too few to cut out {self.crop} x {self.crop}")
            left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
            image = image.crop((left, top, left + self.crop, top + self.crop))
        return np.asarray(image)

    def normalised(self, pixels: Pixels) -> Tensor:
        """Convert uint8 (N, height, width, 3) to what the model takes, (N, 3, height, width)."""
        return Normalisation(self.mean, self.std).of_bytes(pixels)

    def description(self) -> dict[str, Any]:
        """Return the settings in the form in which JSON returns them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


class Input(NamedTuple):
    """The input of a model: normalised squares of `size` pixels. `classes` is the number of classes of its head."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    share: float  # share of the resized shorter side that is cropped: timm's crop_pct
    classes: int

    def photographs(self) -> Preprocess:
        """Return the preprocessing of images of any size. At 224 pixels the shorter side is 256, as in the papers."""
        return Preprocess(256 if self.size == 224 else int(self.size / self.share), self.size, self.mean, self.std)

    def stored(self, side: int) -> Preprocess:
        """Return the preprocessing of squares of `side` pixels: none, or a resize for a model of another size."""
        return Preprocess(None if self.size == side else self.size, self.size, self.mean, self.std)

    def squashed(self) -> Preprocess:
        """Return the preprocessing that resizes the whole image to a square and keeps the central 7/8 of each side.

        At 224 pixels the square is 256 x 256.
        """
        side = self.size * 256 // 224
        return Preprocess((side, side), self.size, self.mean, self.std)


def input_of(model: nn.Module, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Input:
    """Return the input of a model according to its configuration. Nothing else is assumed.

    Args:
        model: A model that acclimate can adapt.
        mean: The mean of the normalisation, which replaces that of a timm configuration. Any other model needs it.
        std: The standard deviation of the normalisation, which replaces that of a timm configuration.
    """
    view = view_of(model)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    known = model_normalisation(view, mean, std)
    if known is None:
        raise unknown_normalisation(type(model).__name__)
    # the input size in the configuration is not used: create_model(..., img_size=...) does not change it
    told = getattr(getattr(model, "config", None), "image_size", 0)  # of a model of transformers
    side = told if isinstance(told, int) else 0
    height, width = view.image_size or config.get("input_size", (3, side, side))[1:]
    if height != width or not height:
        raise ConfigError(
            f"This {type(model).__name__} takes no squares of one size ({height} x {width}): give a Preprocess instead."
        )
    return Input(height, known.mean, known.std, config.get("crop_pct") or 0.875, view.classes)
