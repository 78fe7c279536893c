"""The command `acclimate dda`."""

from __future__ import annotations

import argparse

from ._arguments import Commands, add_device, new_command
from ._parser import input_file, input_folder, number, output_folder, seed, whole

POSITION = 150
EPILOG = """\
examples:
  acclimate dda imagenet-c/ generated/ --denoiser 256x256_diffusion_uncond.pt
  acclimate bench --data imagenet-c --root imagenet-c/ --methods dda:generated=generated --model NAME
                                          DDA: each image together with the generated one
  acclimate bench --data imagenet-c --root imagenet-c/ --methods dda:denoiser=256x256_diffusion_uncond.pt --model NAME
                                          the same, but each run generates its images

To continue an interrupted run, give the same command again.
"""


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    dda = new_command(
        commands,
        "dda",
        help="regenerate a folder of images with a diffusion model",
        description="Regenerate every image below a folder with a diffusion model, as in DDA, and write a tree of "
        "the same shape.",
        epilog=EPILOG,
    )
    dda.add_argument("source", type=input_folder, metavar="IN", help="a folder of images, in sub-folders or not")
    dda.add_argument("target", type=output_folder, metavar="OUT", help="where to write: OUT/<as in IN>.png")
    dda.add_argument(
        "--denoiser",
        required=True,
        type=_denoiser,
        metavar="FILE",
        help='weights of the diffusion model, *.pt or *.safetensors; "bundled" for images like the bundled ones',
    )
    dda.add_argument("--steps", type=whole(1), default=100, metavar="N", help="steps of the schedule; default: %(default)s")
    dda.add_argument("--start", type=whole(1), default=50, metavar="N", help="steps of noise; default: %(default)s")
    dda.add_argument(
        "--factor", type=whole(1), default=4, metavar="N", help="factor of the low-pass filter; default: %(default)s"
    )
    dda.add_argument("--scale", type=number(0), default=6.0, metavar="X", help="scale of the guidance; default: %(default)s")
    dda.add_argument("--seed", type=seed, default=0, metavar="N", help="default: %(default)s")
    dda.add_argument("--batch-size", type=whole(1), default=4, metavar="N", help="images at a time; default: %(default)s")
    dda.add_argument("--skip-unreadable", action="store_true", help="leave out damaged images instead of stopping")
    add_device(dda)
    dda.set_defaults(run=_generate)


def _denoiser(text: str) -> str:
    """Return the name of a denoiser, or the path of a file that exists."""
    return text if text in ("bundled", "gaussian") else input_file(text)


def _generate(given: argparse.Namespace) -> None:
    from ..core.console import PlainConsole
    from ..errors import printable
    from ..methods.dda.folder import generate_folder
    from ..models.loading import pick_device

    report = generate_folder(
        given.source,
        given.target,
        given.denoiser,
        steps=given.steps,
        start=given.start,
        factor=given.factor,
        scale=given.scale,
        seed=given.seed,
        batch_size=given.batch_size,
        skip_unreadable=given.skip_unreadable,
        device=pick_device(given.device),
        console=PlainConsole(),
    )
    print(f"{printable(given.target)}: {report}")
