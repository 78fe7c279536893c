"""One page with all corruptions of one image."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .corruptions import CORRUPTIONS, EXTRA, SEVERITIES, Pixels, constants_for, corrupt
from .imagefile import AnyPath

TILE = 224  # approximate longer side of a tile, in pixels
GAP, LABEL, HEADER = 6, 170, 34


def contact_sheet(
    image: Pixels, *, seed: int = 0, constants: str | None = None, frost: AnyPath | None = None
) -> Image.Image:
    """Draw one image with all corruptions (rows) at all severities (columns), and the clean image in the corner.

    A large image is first reduced to the size of ImageNet-C's images, for which the corruptions are made. A small image is
    corrupted at its own size, and its pixels are shown as squares.

    Args:
        image: uint8 RGB (height, width, 3).
        seed: The seed of all random numbers.
        constants: The strengths of the severities: "imagenet-c" or "cifar-10-c". Default: chosen by the size of the image.
        frost: A folder with the photographs of ice that ImageNet-C used (frost1.png, ...). Default: generated ice.
    """
    height, width = image.shape[:2]
    if max(height, width) > TILE:
        factor = TILE / max(height, width)
        size = (max(1, round(width * factor)), max(1, round(height * factor)))
        image = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
    constants = constants or constants_for(height, width)
    height, width = image.shape[:2]
    times = max(1, TILE // 2 // max(height, width))
    tile_height, tile_width = height * times, width * times
    names = (*CORRUPTIONS, *EXTRA)
    left, top = max(LABEL, tile_width + 2 * GAP), max(HEADER, tile_height + 2 * GAP)
    page = Image.new("RGB", (left + len(SEVERITIES) * (tile_width + GAP), top + len(names) * (tile_height + GAP)), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=18)

    def place(pixels: Pixels, x: int, y: int) -> None:
        page.paste(Image.fromarray(pixels).resize((tile_width, tile_height), Image.Resampling.NEAREST), (x, y))

    place(image, (left - tile_width) // 2, (top - tile_height) // 2)
    for column, severity in enumerate(SEVERITIES):
        x = left + column * (tile_width + GAP)
        draw.text((x + tile_width // 2, top - GAP), str(severity), "black", font, anchor="mb")
        for row, name in enumerate(names):
            place(
                corrupt(image, name, severity, seed=seed, constants=constants, frost=frost),
                x,
                top + row * (tile_height + GAP),
            )
    for row, name in enumerate(names):
        y = top + row * (tile_height + GAP) + tile_height // 2
        draw.text((left - GAP, y), name.replace("_", " "), "black", font, anchor="rm")
    return page
