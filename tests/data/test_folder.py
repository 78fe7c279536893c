"""A folder of images becomes a tree of corrupted ones: whole, resumable, and the same however it is made."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from acclimate import cli
from acclimate.data import folder
from acclimate.data.corruptions import corrupt
from acclimate.data.folder import IMAGENET_C, corrupt_folder, read_image
from acclimate.errors import AcclimateError, ConfigError, InputError, StateError, UnreadableError


def new_image(height=40, width=50, seed=0):
    y, x = np.mgrid[:height, :width] / max(height, width)
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    return np.clip(128 + 100 * np.sin(8 * x[..., None] + 3 * y[..., None] + phase), 0, 255).astype(np.uint8)


@pytest.fixture
def photos(tmp_path):
    """Two classes of two images each, and something else."""
    root = tmp_path / "photos"
    for i, path in enumerate(("cat/a.png", "cat/b.jpg", "dog/a.png", "dog/sub/c.bmp")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(new_image(seed=i)).save(root / path)
    (root / "labels.csv").write_text("a,b")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    return root


def tree(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_the_tree_has_imagenet_cs_shape(photos, tmp_path):
    report = corrupt_folder(photos, tmp_path / "out", ["fog", "frost"], [1, 5], seed=4)
    files = [f"{n}/{s}/{f}.JPEG" for n in ("fog", "frost") for s in (1, 5) for f in ("cat/a", "cat/b", "dog/a", "dog/sub/c")]
    assert list(tree(tmp_path / "out")) == ["corruptions.json", *files]
    assert report.written == 16 and report.existing == 0 and report.constants == {"cifar-10-c": 16}
    assert "16 files written (16 with the constants of cifar-10-c)." in str(report)


def test_the_files_hold_the_corrupted_images(photos, tmp_path):
    corrupt_folder(photos, tmp_path / "out", ["gaussian_noise"], [3], seed=4)
    for index, (clean, file) in enumerate((("cat/a.png", "cat/a"), ("cat/b.jpg", "cat/b"), ("dog/a.png", "dog/a"))):
        expected = corrupt(read_image(photos / clean), "gaussian_noise", 3, seed=4, indices=[index])
        encoded = io.BytesIO()
        Image.fromarray(expected).save(encoded, "JPEG", quality=85, optimize=True)
        assert (tmp_path / "out" / "gaussian_noise" / "3" / f"{file}.JPEG").read_bytes() == encoded.getvalue()


def test_a_flat_folder_has_no_class_level(tmp_path):
    (tmp_path / "in").mkdir()
    Image.fromarray(new_image()).save(tmp_path / "in" / "x.png")
    corrupt_folder(tmp_path / "in", tmp_path / "out", ["contrast"], [2])
    assert set(tree(tmp_path / "out")) == {"corruptions.json", "contrast/2/x.JPEG"}


def test_workers_change_nothing(photos, tmp_path):
    for workers in (1, 3):
        corrupt_folder(photos, tmp_path / str(workers), ["glass_blur", "frost"], [2, 3], workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_imagenet_cs_crop(tmp_path):
    (tmp_path / "in").mkdir()
    wide = np.zeros((300, 600, 3), np.uint8)
    wide[:, 150:450] = 255  # the central half: columns 128 to 383 of 512, once resized
    Image.fromarray(wide).save(tmp_path / "in" / "wide.png")
    shown = read_image(tmp_path / "in" / "wide.png", IMAGENET_C)
    assert shown.shape == (224, 224, 3)
    assert shown.min() == 255  # columns 144 to 367
    report = corrupt_folder(tmp_path / "in", tmp_path / "out", ["contrast"], [1], resize_crop=IMAGENET_C)
    assert report.constants == {"imagenet-c": 1}
    with Image.open(tmp_path / "out" / "contrast" / "1" / "wide.JPEG") as image:
        assert image.size == (224, 224)


# Kinds of images


def test_every_kind_becomes_rgb(tmp_path):
    grey = new_image()[..., 0]
    rgb = new_image()

    def read(image, name, **options):
        image.save(tmp_path / name, **options)
        return read_image(tmp_path / name)

    np.testing.assert_array_equal(read(Image.fromarray(grey), "grey.png"), np.repeat(grey[..., None], 3, axis=-1))
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    np.testing.assert_array_equal(read(deep, "deep.png"), np.repeat(grey[..., None], 3, axis=-1))
    few = Image.fromarray(rgb).quantize(16)
    np.testing.assert_array_equal(read(few, "palette.png"), np.asarray(few.convert("RGB")))
    cmyk = Image.fromarray(rgb).convert("CMYK")
    assert abs(read(cmyk, "cmyk.tif").astype(int) - rgb).mean() < 2
    alpha = np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])
    alpha[:10, :, 3] = 0
    shown = read(Image.fromarray(alpha), "alpha.png")
    assert shown[:10].min() == 255  # white shines through
    np.testing.assert_array_equal(shown[10:], rgb[10:])
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    turned = read(Image.fromarray(rgb), "turned.png", exif=exif)
    np.testing.assert_array_equal(turned, np.rot90(rgb, -1))


# Damaged images


@pytest.fixture
def damaged(photos):
    whole = (photos / "cat" / "b.jpg").read_bytes()
    (photos / "cat" / "broken.jpg").write_bytes(whole[: len(whole) // 2])
    (photos / "dog" / "text.png").write_text("no image")
    return photos


def test_damaged_images_are_named_before_anything_is_written(damaged, tmp_path):
    with pytest.raises(UnreadableError, match=r"broken.jpg.*text.png.*Nothing was written.*skip_unreadable"):
        corrupt_folder(damaged, tmp_path / "out", ["fog"], [1])
    assert not (tmp_path / "out").exists()


def test_damaged_images_are_skipped_on_demand(damaged, tmp_path):
    report = corrupt_folder(damaged, tmp_path / "out", ["fog"], [1], skip_unreadable=True)
    assert report.written == 4 and report.unreadable == ["cat/broken.jpg", "dog/text.png"]
    assert "2 unreadable images skipped: cat/broken.jpg, dog/text.png" in str(report)
    # they keep their numbers, so that the others do not change when they are mended
    expected = corrupt(read_image(damaged / "dog/a.png"), "fog", 1, indices=[3])
    with Image.open(tmp_path / "out/fog/1/dog/a.JPEG") as image:
        assert abs(np.asarray(image).astype(int) - expected).mean() < 3


# Interruptions


def interrupt_after(monkeypatch, count):
    """Ctrl-C during a corruption."""
    calls = iter(range(count))
    lock = threading.Lock()

    def interrupted(*arguments, **options):
        with lock:
            if next(calls, None) is None:
                raise KeyboardInterrupt
        return corrupt(*arguments, **options)

    monkeypatch.setattr(folder, "corrupt", interrupted)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_is_taken_up(photos, tmp_path, monkeypatch, workers):
    corrupt_folder(photos, tmp_path / "whole", ["snow", "spatter"], [1, 2])
    interrupt_after(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        corrupt_folder(photos, tmp_path / "out", ["snow", "spatter"], [1, 2], workers=workers)
    half = tree(tmp_path / "out")
    whole = tree(tmp_path / "whole")
    assert 2 < len(half) <= 8 and half.items() <= whole.items()
    monkeypatch.undo()
    report = corrupt_folder(photos, tmp_path / "out", ["snow", "spatter"], [1, 2])
    assert report.existing == len(half) - 1 and report.written == 17 - len(half)
    assert tree(tmp_path / "out") == whole


def test_a_failed_write_leaves_nothing(photos, tmp_path, monkeypatch):
    real = os.replace

    def full(source, target):
        if "fog" in str(target):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StateError, match=r"Cannot write .*No space left"):
        corrupt_folder(photos, tmp_path / "out", ["fog"], [1])
    assert set(tree(tmp_path / "out")) == {"corruptions.json"}


def test_more_corruptions_can_be_added(photos, tmp_path):
    corrupt_folder(photos, tmp_path / "out", ["fog"], [1])
    report = corrupt_folder(photos, tmp_path / "out", ["fog", "snow"], [1])
    assert (report.written, report.existing) == (4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seed=1), "seed 0, now 1"),
        (dict(quality=90), "quality 85, now 90"),
        (dict(constants="imagenet-c"), "constants 'by size', now 'imagenet-c'"),
        (dict(resize_crop=(32, 28)), "resize_crop None"),
    ],
)
def test_other_settings_are_refused(photos, tmp_path, options, message):
    corrupt_folder(photos, tmp_path / "out", ["fog"], [1])
    before = tree(tmp_path / "out")
    with pytest.raises(StateError, match=message):
        corrupt_folder(photos, tmp_path / "out", ["snow"], [1], **options)
    assert tree(tmp_path / "out") == before


def test_other_images_or_ice_are_refused(photos, tmp_path):
    ice = tmp_path / "ice"
    ice.mkdir()
    Image.fromarray(new_image(200, 200)).save(ice / "frost1.png")
    corrupt_folder(photos, tmp_path / "out", ["frost"], [1], frost=ice)
    Image.fromarray(new_image(200, 200, seed=1)).save(ice / "frost1.png")
    with pytest.raises(StateError, match="frost"):
        corrupt_folder(photos, tmp_path / "out", ["frost"], [2], frost=ice)
    corrupt_folder(photos, tmp_path / "other", ["fog"], [1])
    Image.fromarray(new_image()).save(photos / "aaa.png")  # all others would get other numbers
    with pytest.raises(StateError, match="images 4, now 5"):
        corrupt_folder(photos, tmp_path / "other", ["fog"], [2])


def test_a_folder_of_something_else_is_left_alone(photos, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("...")
    with pytest.raises(StateError, match="not empty"):
        corrupt_folder(photos, tmp_path / "out", ["fog"], [1])
    (tmp_path / "out" / "corruptions.json").write_text("{half")
    with pytest.raises(StateError, match="damaged"):
        corrupt_folder(photos, tmp_path / "out", ["fog"], [1])
    assert set(tree(tmp_path / "out")) == {"corruptions.json", "thesis.tex"}


def test_folders_that_cannot_be_used(photos, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(InputError, match="not a folder"):
        corrupt_folder(tmp_path / "gone", out, ["fog"], [1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no images"):
        corrupt_folder(tmp_path / "empty", out, ["fog"], [1])
    with pytest.raises(ConfigError, match="lies in"):
        corrupt_folder(photos, photos / "out", ["fog"], [1])
    Image.fromarray(new_image()).save(photos / "cat" / "a.jpg")
    with pytest.raises(InputError, match=r"cat/a.jpg and cat/a.png would be written to one file"):
        corrupt_folder(photos, out, ["fog"], [1])
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    [
        dict(names=["fogg"]),
        dict(names=[]),
        dict(severities=[6]),
        dict(seed=-1),
        dict(constants="cifar"),
        dict(quality=0),
        dict(workers=0),
        dict(resize_crop=(224, 256)),
    ],
)
def test_wrong_options_write_nothing(photos, tmp_path, options):
    arguments = {"names": ["fog"], "severities": [1], **options}
    with pytest.raises(ConfigError):
        corrupt_folder(photos, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


# The command


def test_command(photos, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert cli.main(["corrupt", str(photos), out, "--corruptions", "fog,snow", "--severities", "1,3", "--seed", "2"]) == 0
    assert "16 files written (16 with the constants of cifar-10-c)." in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "corruptions.json").read_text())["seed"] == 2
    assert cli.main(["corrupt", str(photos), out, "--corruptions", "all", "--severities", "1", "--seed", "2"]) == 0
    assert "68 files written" in capsys.readouterr().out  # 19 names, of which two were there
    assert cli.main(["corrupt", str(photos), str(tmp_path / "c"), "--imagenet-c", "--severities", "1"]) == 0
    assert "60 files written (60 with the constants of imagenet-c)." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["IN"], "give the folder to write to"),
        (["IN", "OUT", "--corruptions", "frg"], "Did you mean 'fog'?"),
        (["IN", "OUT", "--severities", "high"], "'high' is not"),
        (["IN", "OUT", "--severities", "7"], "from 1 to 5"),
        (["IN", "--sheet", "OUT.png"], "cannot be read as an image"),
        (["IN/cat/a.png", "--sheet", "OUT.strange"], "--sheet"),
    ],
)
def test_command_errors(photos, tmp_path, capsys, arguments, message):
    given = [word.replace("IN", str(photos)).replace("OUT", str(tmp_path / "out")) for word in arguments]
    assert cli.main(["corrupt", *given]) == 2
    assert message in capsys.readouterr().err


def test_command_skips_damaged_images(damaged, tmp_path, capsys):
    arguments = ["corrupt", str(damaged), str(tmp_path / "out"), "--corruptions", "fog", "--severities", "1"]
    assert cli.main(arguments) == 2
    assert "--skip-unreadable" in capsys.readouterr().err
    assert cli.main([*arguments, "--skip-unreadable"]) == 0
    assert "2 unreadable images skipped" in capsys.readouterr().out


def test_command_says_how_to_continue(photos, tmp_path, capsys, monkeypatch):
    interrupt_after(monkeypatch, 2)
    assert cli.main(["corrupt", str(photos), str(tmp_path / "out"), "--corruptions", "fog"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_command_writes_a_sheet(photos, tmp_path, capsys):
    sheet = tmp_path / "sheet.png"
    assert cli.main(["corrupt", "--sheet", str(sheet), str(photos / "cat" / "a.png")]) == 0
    with Image.open(sheet) as page:
        assert f"{page.width} x {page.height} pixels" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_only(photos, tmp_path):
    for terminal in (True, False):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=terminal)
        corrupt_folder(photos, tmp_path / str(terminal), ["fog"], [1], console=console)
        assert ("writing" in shown.getvalue()) == terminal


def test_images_can_be_corrupted_without_torch(photos, tmp_path):
    code = (
        "import sys; from acclimate.cli import main; "
        f"given = [{str(photos)!r}, {str(tmp_path / 'out')!r}, '--corruptions', 'fog', '--severities', '1']; "
        "assert main(['corrupt', *given]) == 0; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unreadable_is_one_of_our_errors():
    assert issubclass(UnreadableError, AcclimateError)
