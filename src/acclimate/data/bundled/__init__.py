"""Something real to run on in the first minute: Fashion-MNIST's test images and a small ViT trained for them.

The images are the 10 000 test images of Fashion-MNIST (Xiao, Rasul and Vollgraf 2017, MIT licence, beside this file). The
model is ours: a timm `VisionTransformer` of 12 blocks, trained by `tools/train_bundled.py` on the 60 000 training images. So
is the denoiser, a small U-Net that `tools/train_denoiser.py` trained on the same images.
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
PROMPTS = HERE / "prompts.safetensors"
DENOISER = HERE / "denoiser.safetensors"
CLASSES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIZE = 28
MEAN = STD = (0.5, 0.5, 0.5)
PREPROCESS = Preprocess(None, None, MEAN, STD)
SHOWN = ("impulse_noise", "glass_blur", "brightness", "elastic_transform")  # one corruption of each family
SEVERITY, CONSTANTS = 2, "imagenet-c"  # here the source model is right about 6 times in 10; CIFAR-10-C's hardly harm it
ASSETS = {"dda": {"denoiser": "bundled"}}  # what methods need beside the model, by method and option
FOR_TUNING = 2000  # images on which `tuned` was chosen: the last ones that `Subset.sample` draws


def model() -> VisionTransformer:
    """The bundled ViT: 28 x 28 RGB, patches of 4 behind two convolutions, 12 blocks of width 64, ten classes of clothing."""
    vit = architecture()
    vit.load_state_dict(load_file(WEIGHTS))
    return vit.eval()


def architecture(*, patch_drop_rate: float = 0.0) -> VisionTransformer:
    """The network without its weights. Training drops patches to save time; the parameters are the same."""

    def embed(**options: object) -> HybridEmbed:
        stem = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, padding=1), nn.GELU())
        return HybridEmbed(stem, **{**options, "patch_size": 2})  # of the stem's map, which has half the resolution

    vit = VisionTransformer(
        img_size=SIZE,
        patch_size=4,
        embed_dim=64,
        depth=12,
        num_heads=4,
        num_classes=len(CLASSES),
        embed_layer=embed,
        weight_init="jax",  # timm's default is too small for a width of 64: it learns at half the speed
        patch_drop_rate=patch_drop_rate,
    )
    vit.pretrained_cfg = dict(
        tag="acclimate_bundled",
        input_size=(3, SIZE, SIZE),
        num_classes=len(CLASSES),
        mean=MEAN,
        std=STD,
        crop_pct=1.0,
        interpolation="bilinear",
        label_names=CLASSES,
    )
    return vit


def images() -> Images:
    """Fashion-MNIST's 10 000 test images, as RGB, with their labels."""
    return read(HERE, "t10k")


def tuned_options(batch_size: int = 64) -> dict[str, dict[str, Any]]:
    """For each method, the options that `tools/tune_bundled.py` chose for this model on the four extra corruptions.

    They were chosen for batches of 64. A learning rate that the method would scale with the batch is scaled so here, too.
    """
    from ...core.registry import find

    chosen: dict[str, dict[str, Any]] = json.loads(TUNED.read_text())["chosen"]
    for method, options in chosen.items():
        if "lr" in options and find(method).options()["lr"].default is None:
            options["lr"] *= batch_size / 64
    return chosen


def options(batch_size: int = 64, tuned: bool = True) -> dict[str, dict[str, Any]]:
    """Return for each method what it cannot do without, and what was tuned for it."""
    chosen = tuned_options(batch_size) if tuned else {}
    return {method: {**ASSETS.get(method, {}), **chosen.get(method, {})} for method in {**ASSETS, **chosen}}


def statistics() -> SourceStatistics:
    """Statistics of 2000 training images under this model (`tools/bundled_statistics.py`), for methods that need some."""
    from ...core.statistics import SourceStatistics

    return SourceStatistics.load(STATISTICS)


def prompts() -> SourceStatistics:
    """What DePT-G begins with, trained for this model on some training images (`tools/bundled_prompts.py`)."""
    from ...core.statistics import SourceStatistics

    return SourceStatistics.load(PROMPTS)


def source_statistics(needed: Collection[str] | None = None) -> list[SourceStatistics]:
    """Return both of these, or those that have something of the kinds that are needed."""
    if needed is not None and not needed:
        return []
    both = [statistics(), prompts()]
    return both if needed is None else [found for found in both if {*needed} & {*found.kinds}]


def read(folder: Path, part: str) -> Images:
    """Fashion-MNIST's files as they are distributed: `part` is `"train"` or `"t10k"`."""
    grey = _idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz")
    return Images(np.repeat(grey[..., None], 3, axis=-1), labels.astype(np.int64), np.arange(len(labels)))


def _idx(path: Path) -> Pixels:
    content = gzip.decompress(path.read_bytes())
    dimensions = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(dimensions)
