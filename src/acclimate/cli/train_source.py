"""The command `acclimate train-source`."""

from __future__ import annotations

import argparse

from ._arguments import Commands, add_device, add_labels, add_workers, make_folder_of, new_command
from ._parser import input_file, number, output_file, seed, whole

POSITION = 70
MODEL = "vit_base_patch16_224.augreg_in21k_ft_in1k"
EPILOG = """\
examples:
  acclimate train-source --data office-home --root /data/OfficeHome --domains Art --out art.safetensors
  acclimate train-source --data folder --root photos/ --weights vit.safetensors --out photos.safetensors
  acclimate bench --data office-home --root /data/OfficeHome --domains Clipart --model art.safetensors

The recipe is acclimate's own: papers on test-time adaptation do not say how they fine-tune for Office-Home, so the accuracy
of a model from here is not that of their Source rows. It has not been tuned. All weights are trained: SGD with momentum 0.9,
a head that starts at zero, a tenth of its learning rate for the rest, a short warm-up and a cosine down to zero, labels
smoothed by 0.1, gradients clipped at norm 1, random crops and flips. A tenth of every class is held out and scored, and
does not influence the training: the weights are those at the end.

After Ctrl-C or kill -9, the same command continues after the last complete epoch. On the same machine with the same number
of threads it ends with the same weights to the last bit.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    train = new_command(
        commands,
        "train-source",
        help="fine-tune a ViT on Office-Home or on a folder of images",
        description="Fine-tune a vision transformer of timm's, with a new head, on one domain: a source model for data that "
        "has none.",
        epilog=EPILOG,
    )
    what = train.add_argument_group("what")
    what.add_argument("--data", required=True, choices=["office-home", "folder"], help="folder: one for each class")
    what.add_argument("--root", required=True, metavar="DIR", help="where it is")
    what.add_argument(
        "--domains", metavar="NAME", help="of office-home: Art, Clipart, Product or Real World; of a folder: a sub-folder"
    )
    add_labels(what)
    what.add_argument("--partial", action="store_true", help="take a data set that is not complete")
    what.add_argument("--model", default=MODEL, metavar="NAME", help="timm's name with its tag; default: %(default)s")
    what.add_argument(
        "--weights",
        type=input_file,
        metavar="FILE",
        help="start from local weights (.safetensors, .pth), not from a download",
    )
    what.add_argument("--no-pretrained", action="store_true", help="start from random weights")
    what.add_argument(
        "--out",
        required=True,
        type=output_file,
        metavar="FILE",
        help="*.safetensors; until finished, *.unfinished is beside it",
    )
    what.add_argument("--fresh", action="store_true", help="train again what is finished or begun")

    how = train.add_argument_group("how")
    how.add_argument(
        "--epochs",
        type=whole(1),
        metavar="N",
        help="default: 20, some 700 to 1300 steps for a domain of office-home; take more for fewer images",
    )
    how.add_argument("--batch-size", type=whole(1), metavar="N", help="default: 64")
    how.add_argument("--head-lr", type=number(0), metavar="X", help="highest learning rate of the new head; default: 0.01")
    how.add_argument(
        "--backbone-lr", type=number(0), metavar="X", help="highest learning rate of all other weights; default: 0.001"
    )
    how.add_argument("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")
    how.add_argument("--autocast", action="store_true", help="compute in bfloat16: faster on a GPU, other weights")

    where = train.add_argument_group("where")
    add_device(where)
    add_workers(where)
    train.set_defaults(run=_train)


def _train(given: argparse.Namespace) -> None:
    import os

    from ..core.console import PlainConsole
    from ..data.catalog import Selection, open_data
    from ..data.preprocess import Preprocess
    from ..errors import ConfigError
    from ..models.loading import create_timm
    from ..training.loop import say
    from ..training.source_model import Recipe, train_source

    if given.data == "office-home" and given.domains is None:
        raise ConfigError("office-home has four domains: name one with --domains.")
    make_folder_of(given.out)
    numbers = {name: getattr(given, name) for name in ("epochs", "batch_size", "head_lr", "backbone_lr")}
    recipe = Recipe(**{name: value for name, value in numbers.items() if value is not None})
    prepare = Preprocess.for_model(create_timm(given.model, pretrained=False))
    chosen = Selection(domains=given.domains and [given.domains], partial=given.partial, labels=given.labels)
    data = open_data(given.data, given.root, prepare, chosen)
    if len(data.domains) > 1:
        raise ConfigError(f"{given.root} has several domains, {data.domains[0].key} and others: give the images of one.")
    console = PlainConsole()
    done = train_source(
        data.domains[0],
        data.class_names,
        given.out,
        model=given.model,
        weights=given.weights,
        pretrained=not given.no_pretrained,
        recipe=recipe,
        seed=given.seed,
        device=given.device,
        autocast=given.autocast,
        workers=min(4, os.cpu_count() or 1) if given.workers is None else given.workers,
        fresh=given.fresh,
        console=console,
    )
    again = " It was finished before; --fresh trains it again." if done.found else ""
    text = f"{given.out}: right for {done.accuracy:.1%} of {done.held_out} images held out.{again}"
    say(console, text)
