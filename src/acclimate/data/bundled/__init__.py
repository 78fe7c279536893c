"""The bundled data and model: Fashion-MNIST's test images and a small ViT trained for them.

The images are the 10 000 test images of Fashion-MNIST (Xiao, Rasul and Vollgraf 2017; the MIT licence is beside this file).
The model is our own: a timm `VisionTransformer` of 12 blocks, trained by `tools/train_bundled.py` on the 60 000 training
images. The denoiser is a small U-Net, trained by `tools/train_denoiser.py` on the same images.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load_file
from timm.layers import HybridEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..corruptions import Pixels
from ..domains import Images
from ..preprocess import Preprocess

if TYPE_CHECKING:
    from ...core.statistics import SourceStatistics

NAME = "bundled"
HERE = Path(__file__).parent
WEIGHTS = HERE / "vit.safetensors"
TUNED = HERE / "tuned.json"
STATISTICS = HERE / "statistics.safetensors"
LOGITS = HERE / "logits.safetensors"
PROMPTS = HERE / "prompts.safetensors"
DENOISER = HERE / "denoiser.safetensors"
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIZE = 28
MEAN = STD = (0.5, 0.5, 0.5)
PREPROCESS = Preprocess(None, None, MEAN, STD)
IMAGES = 512  # of each domain by default
ASSETS = {"dda": {"denoiser": "bundled"}}  # options that methods require, by method
FOR_TUNING = 2000  # images for tuning: the last ones that `Subset.sample` draws


def model() -> VisionTransformer:
    """Return the bundled ViT.

    It takes 28 x 28 RGB images and has patches of 4 pixels after two convolutions, 12 blocks of width 64, and ten classes of
    clothing.
    """
    view = architecture()
    view.load_state_dict(load_file(WEIGHTS))
    return view.eval()


def architecture(*, patch_drop_rate: float = 0.0) -> VisionTransformer:
    """Return the network without its weights. Dropping patches saves time in training and changes no parameter."""

    def embed(**options: object) -> HybridEmbed:
        stem = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU())
        return HybridEmbed(stem, **{**options, "patch_size": 2})  # in the output of the stem, which has half the resolution

    view = VisionTransformer(
        img_size=SIZE,
        patch_size=4,
        embed_dim=64,
        depth=12,
        num_heads=4,
        num_classes=len(CLASSES),
        embed_layer=embed,
        weight_init="jax",  # timm's default weights are too small for a width of 64: learning takes twice as long
        patch_drop_rate=patch_drop_rate,
    )
    view.pretrained_cfg = dict(
        tag="acclimate_bundled",
        input_size=(3, SIZE, SIZE),
        num_classes=len(CLASSES),
        mean=MEAN,
        std=STD,
        crop_pct=1.0,
        interpolation="bilinear",
        label_names=CLASSES,
    )
    return view


def images() -> Images:
    """Return Fashion-MNIST's 10 000 test images, as RGB, with their labels."""
    return read(HERE, "t10k")


def tuned_options(batch_size: int = 64) -> dict[str, dict[str, Any]]:
    """Return the options that were tuned for each method and this model.

    `tools/tune_bundled.py` chose them on the four extra corruptions for batches of 64. A learning rate that the method
    scales with the batch size is scaled here in the same way.
    """
    from ...core.registry import find_method

    chosen: dict[str, dict[str, Any]] = json.loads(TUNED.read_text())["chosen"]
    for method, options in chosen.items():
        if "lr" in options and find_method(method).options()["lr"].default is None:
            options["lr"] *= batch_size / 64
    return chosen


def options(batch_size: int = 64, tuned: bool = True) -> dict[str, dict[str, Any]]:
    """Return the options of each method: those that it requires, and those that were tuned if `tuned` is set."""
    chosen = tuned_options(batch_size) if tuned else {}
    return {method: {**ASSETS.get(method, {}), **chosen.get(method, {})} for method in {**ASSETS, **chosen}}


def statistics() -> SourceStatistics:
    """Return the statistics of 2000 training images under this model, made by `tools/bundled_statistics.py`."""
    from ...core.statistics import SourceStatistics

    return SourceStatistics.load(STATISTICS)


def logits() -> SourceStatistics:
    """Return the logits of the 2000 clean images for tuning under this model, made by `tools/bundled_statistics.py`."""
    from ...core.statistics import SourceStatistics

    return SourceStatistics.load(LOGITS)


def prompts() -> SourceStatistics:
    """Return the prompts for DePT-G that `tools/bundled_prompts.py` trained for this model."""
    from ...core.statistics import SourceStatistics

    return SourceStatistics.load(PROMPTS)


def source_statistics(needed: Collection[str] | None = None) -> list[SourceStatistics]:
    """Return the statistics, the logits and the prompts, or those of them that contain a needed kind."""
    if needed is not None and not needed:
        return []
    every = [statistics(), logits(), prompts()]
    return every if needed is None else [found for found in every if {*needed} & {*found.kinds}]


def read(folder: Path, part: str) -> Images:
    """Return Fashion-MNIST's images from its original files. `part` is `"train"` or `"t10k"`."""
    grey = _idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz")
    return Images(np.repeat(grey[..., None], 3, axis=-1), labels.astype(np.int64), np.arange(len(labels)))


def _idx(path: Path) -> Pixels:
    content = gzip.decompress(path.read_bytes())
    dimensions = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(dimensions)
