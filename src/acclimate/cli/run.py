"""The command `acclimate run`."""

from __future__ import annotations

import argparse

from ._arguments import Commands, add_device, add_model, make_folder_of, methods, new_command
from ._parser import input_file, input_folder, output_file, whole

POSITION = 28
EPILOG = """\
examples:
  acclimate run --model resnet50.a1_in1k --root unlabelled/ --predictions out.csv
  acclimate run --model photos.safetensors --method tent --root monday/ --predictions monday.csv --save state.safetensors
  acclimate run --model photos.safetensors --root tuesday/ --predictions tuesday.csv --load state.safetensors

No labels are needed. All images of the folder and of the folders below it are predicted, in the order of their names, and
the model adapts to each batch. --load continues with the method and the options that the state was saved with.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    run = new_command(
        commands,
        "run",
        help="adapt to a folder of images without labels, and predict them",
        description="Adapt a model to a folder of images without labels, and write a prediction for each of them.",
        epilog=EPILOG,
    )
    what = run.add_argument_group("what")
    add_model(what)
    what.add_argument("--root", required=True, type=input_folder, metavar="DIR", help="the folder of the images")
    what.add_argument("--method", metavar="NAME", help="such as tent, or tent:lr=0.001; default: keel")
    what.add_argument("--source-statistics", type=input_file, metavar="FILE", help="for a method that needs them")
    what.add_argument("--load", type=input_file, metavar="FILE", help="continue from this state file")
    what.add_argument("--predictions", required=True, type=output_file, metavar="FILE", help="*.csv")
    what.add_argument("--save", type=output_file, metavar="FILE", help="write the adapted state, *.safetensors")
    how = run.add_argument_group("how")
    how.add_argument("--batch-size", type=whole(1), default=64, metavar="N", help="default: %(default)s")
    add_device(how)
    run.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    from collections import Counter

    from ..core.adapt import adapt, load
    from ..data.preprocess import input_of
    from ..errors import ConfigError
    from ..evaluation.predictions import predictions, unlabelled, write_predictions
    from ..models.loading import pick_device, source_model

    if given.load and (given.method or given.source_statistics):
        raise ConfigError("--load continues with the method of the file: leave out --method and --source-statistics.")
    for file in filter(None, (given.predictions, given.save)):
        make_folder_of(file)
    model = source_model(given.model, weights=given.weights).load().to(pick_device(given.device))
    takes = input_of(model, mean=given.mean, std=given.std)
    images = unlabelled(given.root, takes.photographs())
    if given.load:
        adapter = load(given.load, model)
    else:
        (chosen,) = methods([given.method or "keel"])
        name, options = chosen if isinstance(chosen, tuple) else (chosen, {})
        how = {"mean": takes.mean, "std": takes.std, "source_statistics": given.source_statistics}
        adapter = adapt(model, name, **how, **options)
    rows = list(predictions(adapter, images, batch_size=given.batch_size))
    write_predictions(given.predictions, rows)
    if given.save:
        adapter.save(given.save)
    most = ", ".join(f"{name} {count}" for name, count in Counter(row.name or row.label for row in rows).most_common(5))
    print(f"{len(rows)} images predicted in {int(adapter.steps)} steps of {adapter.method.name}; most often: {most}.")
    print(f"Predictions: {given.predictions}" + (f"\nState: {given.save}" if given.save else ""))
