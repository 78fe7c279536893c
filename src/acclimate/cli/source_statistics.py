"""The command `acclimate source-statistics`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._arguments import Commands, add_data, add_device, add_model, clean_source, make_folder_of, new_command, open_given
from ._parser import output_file, whole, words

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.testbed import Testbed

POSITION = 80
EPILOG = """\
examples:
  acclimate source-statistics --model vit_base_patch16_224.augreg_in21k_ft_in1k --data imagenet --root /data/imagenet/val \\
      --out stats.safetensors
  acclimate source-statistics --model photos.safetensors --data folder --root photos/ --out stats.safetensors
  acclimate source-statistics --out stats.safetensors    the bundled model on clean bundled images

in Python:
  model = acclimate.adapt(model, "eata", source_statistics="stats.safetensors")
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    statistics = new_command(
        commands,
        "source-statistics",
        help="compute what EATA, CFA, FOA, POEM, ReCAP and ActMAD need to know of the source data",
        description="Pass clean source images through a model and keep the statistics that some methods need: the Fisher "
        "information of the norms, moments and class means of the features, spreads of class tokens, and the logits.",
        epilog=EPILOG,
    )
    what = statistics.add_argument_group("what")
    add_model(what)
    add_data(what)
    what.add_argument(
        "--domains", type=words, metavar="NAME", help="of office-home or a folder: the one that the model was trained on"
    )
    what.add_argument("--out", required=True, type=output_file, metavar="FILE", help="*.safetensors")

    how = statistics.add_argument_group("how")
    how.add_argument(
        "--kinds",
        type=words,
        metavar="LIST",
        help="of fisher, features, class_tokens and logits; default: all that suit the model",
    )
    how.add_argument("--images", type=whole(1), default=2000, metavar="N", help="drawn at random; default: %(default)s")
    how.add_argument(
        "--batch-size",
        type=whole(1),
        default=64,
        metavar="N",
        help="that of the stream to come: the Fisher information depends on it; default: %(default)s",
    )
    add_device(how)
    statistics.set_defaults(run=_compute)


def _compute(given: argparse.Namespace) -> None:
    from ..core.statistics import source_statistics

    make_folder_of(given.out)
    images, given.images = given.images, None  # open all images: the limit applies to the random choice below
    testbed = open_given(given, needed=())
    batches = _batches(testbed, images, given.batch_size)
    made = source_statistics(testbed.model, batches, kinds=given.kinds, samples=images, batch_size=given.batch_size)
    made.save(given.out)
    print(f"{given.out}: {made!r}")


def _batches(testbed: Testbed, images: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images drawn at random, always the same ones, with the columns of the head that are their labels."""
    import torch

    from ..data.domains import Subset
    from ..data.streams import Stream

    data = testbed.data
    domain = clean_source(testbed)
    chosen = Subset.sample(domain, min(images, len(domain.labels)))
    columns = None if data.classes is None else torch.tensor(data.classes)
    for batch in Stream(chosen, batch_size=batch_size):
        yield batch.images, batch.labels if columns is None else columns[batch.labels]
