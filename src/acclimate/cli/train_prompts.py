"""The command `acclimate train-prompts`."""

from __future__ import annotations

import argparse

from ._arguments import (
    Commands,
    add_data,
    add_device,
    add_model,
    add_workers,
    clean_source,
    make_folder_of,
    new_command,
    open_given,
)
from ._parser import number, output_file, seed, whole, words

RECIPE = ("epochs", "batch_size", "lr")
SIZES = ("stages", "prompts", "hidden", "bottleneck", "outputs")
POSITION = 90
EPILOG = """\
examples:
  acclimate train-prompts --model vit_base_patch16_224.augreg_in21k_ft_in1k --data imagenet --root /data/imagenet/train \\
      --out prompts.safetensors
  acclimate train-prompts --model photos.safetensors --data folder --root photos/ --out prompts.safetensors
  acclimate bench --data folder --root foggy/ --model photos.safetensors --methods source,dept-g \\
      --source-statistics prompts.safetensors

in Python:
  model = acclimate.adapt(model, "dept-g", source_statistics="prompts.safetensors")

The losses and the schedule are those of the paper's source phase. Only prompts, classifier and DINO heads are trained, where
the authors train the backbone as well. A tenth of every class is held out and scored. It does not influence the training.

After Ctrl-C or kill -9, the same command continues after the last complete epoch. On the same machine with the same number
of threads it ends with the same weights to the last bit.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    train = new_command(
        commands,
        "train-prompts",
        help="train the prompts that DePT-G begins with, on labelled source images",
        description="Train prompts, classifier and DINO heads for a model on the data that it was trained on: what DePT-G "
        "adapts to a target.",
        epilog=EPILOG,
    )
    what = train.add_argument_group("what")
    add_model(what)
    add_data(what)
    what.add_argument(
        "--domains", type=words, metavar="NAME", help="of office-home or a folder: the one that the model was trained on"
    )
    what.add_argument(
        "--out",
        required=True,
        type=output_file,
        metavar="FILE",
        help="*.safetensors; until finished, *.unfinished is beside it",
    )
    what.add_argument("--fresh", action="store_true", help="train again what is finished or begun")

    how = train.add_argument_group("how")
    how.add_argument("--epochs", type=whole(1), metavar="N", help="default: 5")
    how.add_argument("--batch-size", type=whole(1), metavar="N", help="default: 128")
    how.add_argument("--lr", type=number(0), metavar="X", help="highest learning rate; default: 0.005")
    how.add_argument("--stages", type=whole(1), metavar="N", help="groups of the model's blocks; default: 4")
    how.add_argument("--prompts", type=whole(1), metavar="N", help="prompts of each stage; default: 50")
    how.add_argument("--hidden", type=whole(1), metavar="N", help="width of the hidden layer of a DINO head; default: 2048")
    how.add_argument("--bottleneck", type=whole(1), metavar="N", help="width of its second layer; default: 256")
    how.add_argument("--outputs", type=whole(1), metavar="N", help="outputs of a DINO head; default: 2048")
    how.add_argument("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")

    where = train.add_argument_group("where")
    add_device(where)
    add_workers(where)
    train.set_defaults(run=_train)


def _train(given: argparse.Namespace) -> None:
    import os

    from ..core.console import PlainConsole
    from ..errors import ConfigError
    from ..methods.dept.network import Sizes
    from ..methods.dept.training import PromptRecipe, train_prompts
    from ..training.loop import say

    def chosen(names: tuple[str, ...]) -> dict[str, int]:
        return {name: value for name in names if (value := getattr(given, name)) is not None}

    make_folder_of(given.out)
    recipe, sizes = PromptRecipe(**chosen(RECIPE)), Sizes(**chosen(SIZES))
    testbed = open_given(given, needed=())
    data, domain = testbed.data, clean_source(testbed)
    if data.classes is not None:
        raise ConfigError(
            f"{given.data} has {len(data.classes)} of the model's classes: prompts are trained on all of them."
        )
    console = PlainConsole()
    made = train_prompts(
        testbed.model,
        domain,
        data.class_names,
        given.out,
        sizes=sizes,
        recipe=recipe,
        seed=given.seed,
        device=given.device,
        workers=min(4, os.cpu_count() or 1) if given.workers is None else given.workers,
        fresh=given.fresh,
        console=console,
    )
    about = made.about
    say(console, f"{given.out}: right for {about['accuracy']:.1%} of {about['held_out']} images held out.")
