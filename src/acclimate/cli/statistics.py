"""`acclimate source-statistics`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ._words import Commands, listed

if TYPE_CHECKING:
    from torch import Tensor

EPILOG = """\
examples:
  acclimate source-statistics --model vit_base_patch16_224.augreg_in21k_ft_in1k --data imagenet --root /data/imagenet/val \\
      --out stats.safetensors
  acclimate source-statistics --model photos.safetensors --data folder --root photos/ --out stats.safetensors
  acclimate source-statistics --out stats.safetensors    the bundled model on bundled images that no bench shows

in Python:
  model = acclimate.adapt(model, "eata", source_statistics="stats.safetensors")
"""


def add(commands: Commands) -> None:
    statistics = commands.add_parser(
        "source-statistics",
        help="compute what EATA, CFA and FOA need to know of the source data",
        description="Pass clean source images through a model and keep the statistics that some methods need: the Fisher "
        "information of the norms, moments and class means of the features, and how the class tokens are spread.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = statistics.add_argument_group("what")
    what.add_argument("--model", default="bundled", metavar="NAME", help="as for bench; default: %(default)s")
    what.add_argument("--weights", metavar="FILE", help="local weights of a timm model, instead of a download")
    what.add_argument("--data", default="bundled", metavar="NAME", help="clean images: a name in: acclimate data list")
    what.add_argument("--root", metavar="DIR", help="where they are")
    what.add_argument("--domain", metavar="NAME", help="of office-home: the one that the model was trained on")
    what.add_argument("--partial", action="store_true", help="take a data set that is not complete")
    what.add_argument("--out", required=True, metavar="FILE", help="*.safetensors")

    how = statistics.add_argument_group("how")
    how.add_argument("--kinds", default="fisher,features,class_tokens", metavar="LIST", help="default: %(default)s")
    how.add_argument("--samples", type=int, default=2000, metavar="N", help="images, drawn at random; default: %(default)s")
    how.add_argument(
        "--batch-size",
        type=int,
        default=64,
        metavar="N",
        help="that of the stream to come: the Fisher information depends on it; default: %(default)s",
    )
    how.add_argument("--device", metavar="NAME", help="default: a GPU if there is one")
    statistics.set_defaults(run=_compute)


def _compute(given: argparse.Namespace) -> None:
    from ..core.statistics import source_statistics
    from ..errors import require_whole
    from ..models.loading import load_model, pick_device

    require_whole(1, samples=given.samples, batch_size=given.batch_size)
    kinds = listed("kinds", given.kinds)
    model = load_model(given.model, weights=given.weights)
    batches = _batches(given, model)
    model = model.to(pick_device(given.device))
    made = source_statistics(model, batches, kinds=kinds, samples=given.samples, batch_size=given.batch_size)
    made.save(given.out)
    print(f"{given.out}: {made!r}")


def _batches(given: argparse.Namespace, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Images drawn at random, always the same ones, with the columns of the head that their labels stand for."""
    import torch

    from ..data import bundled
    from ..data.catalog import open_data
    from ..data.datasets import Corrupted, Domain, Subset
    from ..data.streams import Stream
    from ..errors import ConfigError

    domain: Domain
    classes = None
    if given.data == "bundled":
        if given.root or given.domain:
            raise ConfigError("--root and --domain go with --data; the bundled images are at hand.")
        everything = bundled.images()
        unseen = everything.sample(bundled.FOR_TUNING, skip=len(everything.labels) - bundled.FOR_TUNING)
        domain = Corrupted(unseen, mean=bundled.MEAN, std=bundled.STD)
    else:
        if given.root is None:
            raise ConfigError(f"--data {given.data}: say where it is with --root DIR.")
        data = open_data(given.data, given.root, model, domains=given.domain and [given.domain], partial=given.partial)
        if len(data.domains) > 1:
            raise ConfigError(f"{given.data} has several domains: take the clean source images alone (--domain NAME).")
        domain, classes = data.domains[0], data.classes
    chosen = Subset(domain, min(given.samples, len(domain.labels)))
    columns = None if classes is None else torch.tensor(classes)
    for images, labels, _ in Stream(chosen, batch_size=given.batch_size):
        yield images, labels if columns is None else columns[labels]
