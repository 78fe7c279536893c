"""Folders with anything in them: each bad entry is named in one line, and no result depends on it."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, PngImagePlugin
from torchvision import transforms

import acclimate
from acclimate import cli
from acclimate.data import imagefile
from acclimate.data.catalog import Selection, check_data, open_data
from acclimate.data.corruptions import LONGEST_SIDE, corrupt
from acclimate.data.disk import Files, read_rgb
from acclimate.data.domains import Domain, DomainKey
from acclimate.data.folder import IMAGENET_C, corrupt_folder, find_images, identify_images, read_image
from acclimate.data.imagefile import open_image
from acclimate.data.preprocess import Preprocess
from acclimate.data.streams import Stream
from acclimate.errors import AcclimateError, ConfigError, InputError, UnreadableError, printable
from acclimate.evaluation.grid import Execution
from acclimate.methods.dda import folder as dda
from acclimate.testing.check import SIZES, tiny_model
from support import child_environment, trials

# Pillow warns of what it then refuses, or reads in part
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
SMALL = Preprocess(18, 16, MEAN, STD)
ODD_NAMES = [
    b"line\nbreak.png",
    b"\xff\xfe.png",
    b"[red]markup.png",
    b"\x1b[31mescape.png",
    b"%s{0}.png",
    "\u202egnp.png".encode(),
]


def noise(height=20, width=24, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(kind, content):
    """A PNG with one more chunk in front of its pixels."""
    whole = encoded(noise())
    return whole[:33] + chunk(kind, content) + whole[33:]  # behind the signature and the header


BAD_FILES = {
    "zero.png": (b"", "it is empty"),
    "text.jpg": (b"no image", "it is none of JPEG, PNG"),
    "cut.png": (encoded(noise())[:300], "cannot be read"),
    "half.jpg": (encoded(noise(), "JPEG")[:700], "truncated"),
    "vector.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "it is none of"),
    "script.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "it is none of"),
    "icon.png": (encoded(noise(), "ICO"), "it is none of"),
    "bomb.png": (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)) + chunk(b"IDAT", b""),
        "exceeds limit",
    ),
    "warned.png": (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 10000, 9000, 8, 2, 0, 0, 0)) + chunk(b"IDAT", b""),
        "it has 10000 x 9000 pixels, more than 89478485",
    ),
    "packed-text.png": (with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**22))), "too large"),
    "float.tif": (encoded(Image.fromarray(np.zeros((20, 20), np.float32)), "TIFF"), "32-bit"),
    "whole.tif": (encoded(Image.fromarray(np.zeros((20, 20), np.int32)), "TIFF"), "32-bit"),
}
NO_FILES = ("pipe.png", "socket.jpg", "folder.jpg", "gone.png", "itself.png", "null.png")
LINKS = ("again", "loop", "up")
GOOD = 5


@pytest.fixture
def hostile(tmp_path):
    """Two classes with three and two images, and everything else that a folder can have."""
    root = tmp_path / "photos"
    for path in ("cat/a.png", "cat/b.jpg", "cat/sub/c.webp", "dog/a.png", "dog/b.bmp"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        noise(seed=sum(map(ord, path))).save(root / path)
    cat = root / "cat"
    for name, (content, _) in BAD_FILES.items():
        (cat / name).write_bytes(content)
    os.mkfifo(cat / "pipe.png")
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.getcwd()
        os.chdir(cat)  # a socket's path is at most about 100 characters
        bound.bind("socket.jpg")
        os.chdir(here)
    (cat / "folder.jpg").mkdir()
    noise().save(cat / "folder.jpg" / "within.png")
    (cat / "gone.png").symlink_to("nowhere.png")
    (cat / "itself.png").symlink_to("itself.png")
    (cat / "null.png").symlink_to("/dev/null")
    (cat / "again").symlink_to("../dog")
    (cat / "loop").symlink_to(".")
    (cat / "sub" / "up").symlink_to("../..")
    (root / "self").symlink_to("self")
    return root


def remove(root, *paths):
    for path in paths:
        if (root / path).is_dir() and not (root / path).is_symlink():
            shutil.rmtree(root / path)
        else:
            (root / path).unlink()


def without_bad_files(root):
    remove(root, *(f"cat/{name}" for name in BAD_FILES))
    return root


def one_line(error):
    text = str(error)
    assert text == printable(text), "one line that any terminal can print"
    text.encode()
    return text


# Listing


def test_nothing_but_files_is_listed_and_no_folder_twice(hostile):
    report = check_data("folder", hostile)
    (row,) = report.rows
    assert len(row.paths) == len(set(row.paths)) == GOOD + len(BAD_FILES)
    expected = [0 if path.startswith("cat/") else 1 for path in row.paths]
    assert row.labels == expected and expected.count(1) == 2, "no link gives a dog the label of a cat"
    no_files, links = report.problems
    assert no_files.startswith(f"{len(NO_FILES)} entries with names of images are no files (")
    assert "cat/folder.jpg" in no_files and "cat/pipe.png" not in row.paths
    assert links == "3 links lead to folders that are read already (cat/again, cat/loop, cat/sub/up)"
    with pytest.raises(InputError, match=r"are no files.*links lead to.*partial=True"):
        open_data("folder", hostile, SMALL)
    (domain,) = open_data("folder", hostile, SMALL, Selection(partial=True)).domains
    assert len(domain.labels) == GOOD + len(BAD_FILES)


def test_links_between_many_folders_end(tmp_path):
    """Each folder of class a links to all others: 12! paths without a cycle."""
    for name in "abcdefghijkl":
        (tmp_path / "a" / name).mkdir(parents=True)
        noise().save(tmp_path / "a" / name / "x.png")
        for other in "abcdefghijkl":
            (tmp_path / "a" / name / f"to-{other}").symlink_to(f"../{other}")
    report = check_data("folder", tmp_path)
    assert len(report.rows[0].paths) == 12
    assert report.problems[0].startswith("144 links lead to folders that are read already")
    with pytest.raises(InputError, match=r"144 links lead to folders that are read already .*Remove"):
        find_images(tmp_path)


def test_two_classes_in_one_folder_are_refused(hostile):
    (hostile / "wolf").symlink_to("dog")
    (hostile / "world").symlink_to(".")
    report = check_data("folder", hostile)
    assert 2 not in report.rows[0].labels and 3 not in report.rows[0].labels
    assert any("(cat/again, cat/loop, cat/sub/up, wolf, world)" in problem for problem in report.problems)


def test_a_folder_is_read_where_it_lies(tmp_path):
    for path in ("b/sub/x.png", "b/z/y.png", "b/y.png", "c/x.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        noise().save(tmp_path / path)
    (tmp_path / "a").symlink_to("c")
    (tmp_path / "b" / "link").symlink_to("sub")
    (tmp_path / "c" / "link").symlink_to("../b/z")
    (row,) = check_data("folder", tmp_path).rows
    assert row.paths == ["b/y.png", "b/sub/x.png", "b/z/y.png", "c/x.png"] and row.labels == [1, 1, 1, 2]
    assert row.problems[0] == "3 links lead to folders that are read already (a, b/link, c/link)"
    with pytest.raises(InputError, match=r"\(a, b/link, c/link\)"):
        find_images(tmp_path)


def test_links_to_folders_elsewhere_are_followed(tmp_path):
    noise().save(tmp_path / "x.png")
    for name in ("one", "two"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "x.png", tmp_path / "elsewhere" / name)
    (tmp_path / "root" / "b").mkdir(parents=True)
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere" / "one")
    (tmp_path / "root" / "b" / "sub").symlink_to(tmp_path / "elsewhere" / "two")
    report = check_data("folder", tmp_path / "root")
    assert report.usable and report.rows[0].paths == ["a/x.png", "b/sub/x.png"]


def test_folders_that_cannot_be_read_are_named(hostile, monkeypatch):
    scan = os.scandir

    def refused(path):  # root may read everything
        if os.fspath(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert "1 folders cannot be read (cat/sub: Permission denied)" in check_data("folder", hostile).problems
    remove(hostile, "cat/again", "cat/loop", "self")
    with pytest.raises(InputError, match=r"1 folders cannot be read \(cat/sub: Permission denied\)"):
        find_images(hostile)


def test_an_odd_file_list(hostile):
    names = [name for name in ODD_NAMES if b"\n" not in name]
    for name in names:
        shutil.copy(hostile / "dog/a.png", os.path.join(os.fsencode(hostile), b"dog", name))
    lines = [b"dog/%b %d" % (name, i) for i, name in enumerate(names)]
    (hostile / "list.txt").write_bytes(
        b"\r\n".join([*lines, b"cat/pipe.png 1", b"cat/gone.png 2", b"x" * 5000 + b".png 3", b""])
    )
    (row,) = check_data("visda-2021", hostile, file_list="list.txt").rows
    assert [os.fsencode(path) for path in row.paths] == [b"dog/" + name for name in names]
    assert row.labels == list(range(len(names)))
    assert (
        row.problems[0].startswith(f"3 of the {len(names) + 3} images in ")
        and "(cat/pipe.png, cat/gone.png, xxx" in row.problems[0]
    )
    (hostile / "list.txt").write_bytes(b"dog/a.png " + b"9" * 5000)
    assert "expected a path from" in check_data("visda-2021", hostile, file_list="list.txt").problems[0]
    assert "pipe.png is missing" in check_data("visda-2021", hostile, file_list="cat/pipe.png").problems[0]


# Reading


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_in_one_line(hostile, name):
    path = hostile / "cat" / name
    for read in (read_rgb, read_image):
        with pytest.raises(UnreadableError) as caught:
            read(path)
        text = one_line(caught.value)
        assert text.startswith(f"{path} cannot be read as an image (") and BAD_FILES[name][1] in text
        assert text.count(str(path)) == 1


@pytest.mark.parametrize("name", NO_FILES)
def test_nothing_but_a_file_is_opened(hostile, name, monkeypatch):
    monkeypatch.setattr(os, "open", None)
    with pytest.raises(UnreadableError, match=rf"{name} cannot be read as an image \("):
        read_rgb(hostile / "cat" / name)


def test_a_pipe_that_takes_the_place_of_a_file_does_not_block(hostile, monkeypatch):
    regular = os.stat(hostile / "dog/a.png")
    monkeypatch.setattr(imagefile.os, "stat", lambda path: regular)
    with pytest.raises(UnreadableError, match=r"pipe.png cannot be read as an image \(it is no file\)"):
        read_rgb(hostile / "cat/pipe.png")


def test_files_that_may_not_be_read_are_named(hostile, monkeypatch):
    def refused(path, flags):  # root may read everything
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(imagefile, "_at_once", refused)
    with pytest.raises(UnreadableError, match=r"dog/a.png cannot be read as an image \(Permission denied\)$"):
        read_rgb(hostile / "dog/a.png")


def test_no_external_program_is_started(hostile, monkeypatch):
    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **options: started.append(arguments))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: started.append(arguments))
    with pytest.raises(UnreadableError):
        read_rgb(hostile / "cat/script.jpg")
    assert not started


def test_images_of_all_kinds_are_read(tmp_path):
    grey = np.linspace(0, 65535, 20 * 24).reshape(20, 24).astype(np.uint16)
    rgb, exif = noise(), Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    frames = [noise(seed=i).quantize(16) for i in range(3)]
    alpha = rgb.convert("RGBA")
    alpha.putalpha(100)
    kinds = {
        "deep.png": encoded(Image.fromarray(grey)),
        "deep.tif": encoded(Image.fromarray(grey), "TIFF"),
        "deep.ppm": b"P5\n24 20\n65535\n" + grey.astype(">u2").tobytes(),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "palette.png": encoded(rgb.quantize(16)),
        "alpha.png": encoded(alpha),
        "turned.jpg": encoded(rgb, "JPEG", exif=exif),
        "black.bmp": encoded(rgb.convert("1"), "BMP"),
    }
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
        shown = np.asarray(read_rgb(tmp_path / name))
        assert shown.shape == (20, 24, 3), name
        assert read_image(tmp_path / name).shape == ((24, 20, 3) if "turned" in name else (20, 24, 3))
        if "deep" in name:
            np.testing.assert_array_equal(shown, np.repeat((grey // 257).astype(np.uint8)[..., None], 3, axis=-1))
    np.testing.assert_array_equal(read_rgb(tmp_path / "animated.gif"), frames[0].convert("RGB"))


def test_pillows_limit_is_ours(tmp_path, monkeypatch):
    noise(20, 24).save(tmp_path / "x.png")
    for limit, reason in ((479, "it has 24 x 20 pixels, more than 479"), (200, "exceeds limit")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        for read in (read_rgb, read_image):
            with pytest.raises(UnreadableError, match=reason):
                read(tmp_path / "x.png")
    for limit in (480, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert read_rgb(tmp_path / "x.png").size == (24, 20)


def test_the_memory_of_text_in_an_image_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_MEMORY", 2**10)  # of 64 MiB
    (tmp_path / "text.png").write_bytes(with_chunk(b"tEXt", b"a\0" + bytes(2**11)))
    with pytest.raises(UnreadableError, match=r"text.png cannot be read as an image \(Too much memory"):
        read_rgb(tmp_path / "text.png")


def test_ice_is_read_as_carefully(tmp_path):
    (tmp_path / "ice").mkdir()
    os.mkfifo(tmp_path / "ice/frost1.png")
    with pytest.raises(ConfigError, match=r"frost1.png cannot be read as an image \(it is no file\)"):
        corrupt(np.asarray(noise()), "frost", 1, frost=tmp_path / "ice")


# Very long images


@pytest.fixture
def sizes(monkeypatch):
    """The largest number of pixels that anything was resized to."""
    seen, resize, interpolated = [0], Image.Image.resize, dda.resized

    def recorded(image, size, *arguments, **options):
        seen.append(size[0] * size[1])
        return resize(image, size, *arguments, **options)

    def also(images, size):
        seen.append(size[0] * size[1])
        return interpolated(images, size)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    monkeypatch.setattr(dda, "resized", also)
    return seen


@pytest.mark.parametrize("size", [(60000, 1), (1, 60000), (60000, 3), (7, 30001)])
def test_a_very_long_image_is_not_resized_whole(tmp_path, sizes, size):
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "long.png")
    shown = Preprocess(256, 224, MEAN, STD)(read_rgb(tmp_path / "long.png"))
    also = read_image(tmp_path / "long.png", IMAGENET_C)
    square = dda._square(read_image(tmp_path / "long.png"), 64)
    assert shown.shape == also.shape == (224, 224, 3) and (shown == (10, 20, 30)).all() and (also == (10, 20, 30)).all()
    assert square.shape == (3, 64, 64)
    assert max(sizes) <= 17 * 256 * 256 < 2**21


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux says the peak of a process alone")
def test_the_memory_of_a_very_long_image(tmp_path):
    """It was 15 GiB when it was resized whole. numpy and Pillow need about 60 MiB."""
    Image.new("RGB", (60000, 1)).save(tmp_path / "long.png")
    code = (
        "from acclimate.data.folder import IMAGENET_C, read_image; "
        f"print(read_image({str(tmp_path / 'long.png')!r}, IMAGENET_C).shape); "
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    child = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True)
    shape, kib = child.stdout.splitlines()
    assert shape == "(224, 224, 3)" and int(kib) < 300 * 1024


@pytest.mark.parametrize("size", [(20, 320), (320, 20), (21, 336), (33, 500)])
def test_images_up_to_16_to_1_are_as_torchvision_makes_them(size):
    expected = transforms.Compose([transforms.Resize(32), transforms.CenterCrop(28)])
    image = noise(*size)
    assert np.array_equal(Preprocess(32, 28, MEAN, STD)(image), np.asarray(expected(image)))


@pytest.mark.parametrize("length", [400, 401, 777, 1500])
@pytest.mark.parametrize("width", [19, 20])
def test_longer_images_show_the_same_square(length, width):
    """Both have a level for each pixel along the image: a shift by half a pixel is half a level, or a level once rounded."""
    levels = np.clip(np.arange(length) - length // 2 + 128, 0, 255).astype(np.uint8)
    expected = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(36)])
    for pixels in (np.tile(levels, (width, 1)), np.tile(levels[:, None], (1, width))):
        image = Image.fromarray(np.repeat(pixels[..., None], 3, axis=-1))
        difference = np.asarray(expected(image)).astype(int) - Preprocess(40, 36, MEAN, STD)(image)
        assert abs(difference).max() <= 1


def test_what_cannot_be_cropped_is_refused_at_its_size(tmp_path):
    Image.new("RGB", (60000, 1)).save(tmp_path / "long.png")
    domain = Files(tmp_path, ["long.png"], [0], Preprocess(256, None, MEAN, STD))
    with pytest.raises(InputError, match=r"long.png: it would have 15360000 x 256 pixels when resized: give a crop"):
        domain.load(np.array([0]))
    assert Preprocess((8, 9), 8, MEAN, STD)(read_rgb(tmp_path / "long.png")).shape == (8, 8, 3)
    with pytest.raises(InputError, match=f"sides of {LONGEST_SIDE} pixels at most"):
        corrupt(np.zeros((1, 60000, 3), np.uint8), "fog", 1)
    with pytest.raises(UnreadableError, match=r"long.png is too large to be corrupted \(60000 x 1 pixels, at most 16384"):
        corrupt_folder(tmp_path, tmp_path.parent / "out", ["fog"], [1])


# Copies of folders


def test_corrupt_names_and_skips_what_is_no_image(hostile, tmp_path, capsys):
    command = ["corrupt", str(hostile), str(tmp_path / "out"), "--corruptions", "contrast", "--severities", "1"]
    assert cli.main(command) == 2
    assert one_line(capsys.readouterr().err.rstrip("\n")).count("links lead to folders that are read already") == 1
    remove(hostile, "cat/again", "cat/loop", "cat/sub/up")
    assert cli.main(command) == 2
    err = one_line(capsys.readouterr().err.rstrip("\n"))
    assert "cat/bomb.png cannot be read as an image" in err and "Nothing was written" in err
    assert not (tmp_path / "out").exists()
    assert cli.main([*command, "--skip-unreadable"]) == 0
    bad = len(BAD_FILES) + len(NO_FILES)
    assert (
        f"{GOOD} files written" in (out := capsys.readouterr().out)
        and f"{bad} unreadable images skipped: cat/bomb.png" in out
    )
    assert len(list((tmp_path / "out").rglob("*.JPEG"))) == GOOD


def test_dda_names_and_skips_what_is_no_image(hostile, tmp_path, capsys):
    remove(hostile, "cat/again", "cat/loop", "cat/sub/up")
    command = ["dda", str(hostile), str(tmp_path / "out"), "--denoiser", "gaussian", "--steps", "10", "--start", "1"]
    assert cli.main([*command, "--device", "cpu"]) == 2
    assert "cat/bomb.png cannot be read as an image" in one_line(capsys.readouterr().err.rstrip("\n"))
    assert cli.main([*command, "--device", "cpu", "--skip-unreadable"]) == 0
    assert f"{GOOD} files written; {len(BAD_FILES) + len(NO_FILES)} unreadable" in capsys.readouterr().out


@pytest.fixture
def oddly_named(tmp_path):
    root = os.path.join(os.fsencode(tmp_path), b"in\xff\n[b]")
    for folder in (b"a\xff", b"b\n[red]"):
        os.makedirs(os.path.join(root, folder))
        for i, name in enumerate(ODD_NAMES):
            noise(seed=i).save(os.path.join(root, folder, name))
    return os.fsdecode(root)


def test_odd_names_are_names(oddly_named, tmp_path, capsys):
    count = 2 * len(ODD_NAMES)
    out = str(tmp_path / "out")
    assert cli.main(["corrupt", oddly_named, out, "--corruptions", "contrast", "--severities", "1"]) == 0
    assert f"{count} files written" in capsys.readouterr().out
    check = ["data", "check", "--data", "folder", "--root", oddly_named, "--open-images"]
    assert cli.main(check) == 0
    capsys.readouterr()
    bad = os.path.join(os.fsencode(oddly_named), b"b\n[red]", ODD_NAMES[1])
    with open(bad, "wb") as file:
        file.write(b"no image")
    assert cli.main(check) == 2
    shown, err = capsys.readouterr()
    assert f"{printable(os.fsdecode(bad))} cannot be read as an image (it is none of" in shown
    assert r"1 images cannot be read (b\n[red]/\udcff\udcfe.png)" in shown and one_line(err.rstrip("\n"))
    (domain,) = open_data("folder", oddly_named, SMALL).domains
    assert len(domain.labels) == count and domain.identity
    index = [os.fsencode(domain.path(i)) for i in range(count)].index(bad)
    with pytest.raises(UnreadableError) as caught:
        domain.load(np.array([index]))
    assert r"b\n[red]/\udcff\udcfe.png cannot be read" in one_line(caught.value)


def test_lists_with_line_breaks_in_names_differ():
    assert identify_images(["a\nb.png", "c.png"]) != identify_images(["a.png", "b\nc.png"])
    assert identify_images(["a\nb", "c"])["images_digest"] != identify_images(["a", "b\nc"])["images_digest"]
    assert identify_images(["a.png", "b.png"])["images_digest"] == "1baca9d47fd86b4a"  # as ever


# The check, and runs


def test_the_check_names_each_image_in_one_line(hostile, capsys):
    assert cli.main(["data", "check", "--data", "folder", "--root", str(hostile), "--open-images"]) == 2
    out, err = capsys.readouterr()
    for name in BAD_FILES:
        lines = [line for line in out.splitlines() if line.startswith(f"{hostile}/cat/{name} cannot be read as an image (")]
        assert len(lines) == 1 and lines[0].endswith(")")
    assert f"{len(BAD_FILES)} images cannot be read (" in out and "Traceback" not in out + err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_worker_is_our_own(hostile, workers):
    (domain,) = open_data("folder", hostile, SMALL, Selection(partial=True)).domains
    with pytest.raises(UnreadableError) as caught:
        list(Stream(domain, batch_size=4, workers=workers))
    text = one_line(caught.value)
    assert f"{hostile}/cat/" in text and "cannot be read as an image (" in text and "data check --open-images" in text
    small = Files(hostile, ["dog/a.png"], [0], Preprocess(None, 100, MEAN, STD))
    with pytest.raises(InputError, match="too few to cut out 100 x 100") as caught:
        list(Stream(small, workers=workers))
    one_line(caught.value)


class Deadly(Domain):
    """A domain whose images kill the process that loads them."""

    key = DomainKey("deadly")
    labels = np.zeros(4, np.int64)
    identity = "deadly"

    def load(self, indices):
        os.kill(os.getpid(), signal.SIGKILL)


class Faulty(Deadly):
    """A domain with a defect."""

    def load(self, indices):
        raise RuntimeError("a defect")


def test_a_worker_that_is_killed_is_said():
    with pytest.raises(AcclimateError, match=r"A process that loads images was killed\. .* give fewer workers") as caught:
        list(Stream(Deadly(), workers=1))
    one_line(caught.value)
    for workers in (0, 1):
        with pytest.raises(RuntimeError, match="a defect"):  # which keeps its traceback
            list(Stream(Faulty(), workers=workers))


def test_files_replaced_or_removed_during_a_run_are_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    for i in range(4):
        noise(seed=i).save(tmp_path / f"cat/{i}.bmp")  # all of one size

    def opened():
        return open_data("folder", tmp_path, SMALL).domains[0]

    domain = opened()
    before = domain.identity
    stream = iter(Stream(domain, batch_size=1))
    next(stream)
    assert domain.load(np.arange(4)).shape == (4, 3, 16, 16)
    content = (tmp_path / "cat/1.bmp").read_bytes()
    (tmp_path / "cat/1.bmp").write_bytes(content[:-1] + b"x")
    os.utime(tmp_path / "cat/1.bmp", ns=(0, 2**63))  # of the year 2262
    noise(30, 30).save(tmp_path / "cat/2.bmp")
    remove(tmp_path, "cat/3.bmp")
    for index, reason in ((1, "it has changed since it was listed"), (2, "it has changed"), (3, "No such file")):
        with pytest.raises(UnreadableError, match=rf"cat/{index}.bmp cannot be read as an image \({reason}"):
            domain.load(np.array([0, index]))
    with pytest.raises(UnreadableError):
        list(stream)
    assert domain.identity == before != opened().identity
    assert len(opened().load(np.arange(3))) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_counts_the_images_that_it_used(hostile, tmp_path, workers):
    for label in range(SIZES.classes - 2):
        (hostile / f"z{label}").mkdir()
        shutil.copy(hostile / "dog/a.png", hostile / f"z{label}")

    def run(root, out, **options):
        how = dict(
            mean=MEAN, std=STD, methods=["source", "tent"], batch_size=4, out=out, execution=Execution(workers=workers)
        )
        return acclimate.bench(tiny_model(), "folder", root, **how | options)

    with pytest.raises(InputError, match="are no files"):
        run(hostile, tmp_path / "runs")
    with pytest.raises(UnreadableError, match=r"cannot be read as an image \(") as caught:
        run(hostile, tmp_path / "runs", partial=True)
    one_line(caught.value)
    assert not list((tmp_path / "runs").rglob("result.json"))
    without_bad_files(hostile)
    ours = run(hostile, tmp_path / "runs", partial=True)
    clean = tmp_path / "clean"
    shutil.copytree(hostile, clean, symlinks=True, ignore=shutil.ignore_patterns(*NO_FILES, *LINKS, "self"))
    expected = run(clean, None)
    for mine, other in zip(ours, expected, strict=True):
        assert mine.result.samples == other.result.samples == GOOD + SIZES.classes - 2
        assert mine.result.digest == other.result.digest and mine.spec.id == other.spec.id


# Fuzz


def mutated(content, rng):
    """Flip, cut, insert or repeat some bytes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(content)) if content else 0
        what = rng.randrange(5)
        if what == 0 and content:
            content[at] ^= 1 << rng.randrange(8)
        elif what == 1 and content:
            content[at] = rng.choice((0, 1, 127, 128, 255))
        elif what == 2:
            content[at:at] = rng.randbytes(rng.randint(1, 9))
        elif what == 3:
            content[at:at] = content[at : at + rng.randint(1, 40)]
        else:
            del content[at : at + (rng.randint(1, 9) if rng.random() < 0.8 else len(content))]
    return bytes(content)


def test_damaged_files_are_read_or_refused(tmp_path):
    """Most mutations of a PNG are found by its checksums: half of these files get new ones."""
    rng = random.Random(0)
    rgb, exif = noise(), Image.Exif()
    exif[0x0112] = 6
    originals = [
        encoded(rgb, "JPEG", exif=exif),
        encoded(rgb, "JPEG", progressive=True),
        encoded(rgb),
        encoded(rgb.quantize(16), transparency=0),
        encoded(rgb, "GIF"),
        encoded(rgb, "WEBP"),
        encoded(rgb, "TIFF", compression="tiff_lzw"),
        encoded(rgb, "BMP"),
        encoded(rgb, "PPM"),
    ]
    path, refused, decoded = tmp_path / "fuzzed.jpg", [], 0
    for trial in range(trials(450)):
        content = mutated(originals[trial % len(originals)], rng)
        path.write_bytes(mended(content) if rng.random() < 0.5 else content)
        for read in (lambda path: SMALL(read_rgb(path)), read_image):
            try:
                shown = read(path)
            except UnreadableError as error:
                refused.append(one_line(error))
            else:
                assert shown.dtype == np.uint8 and shown.ndim == 3 and shown.shape[2] == 3
                decoded += 1
    assert all(text.startswith(f"{path} cannot be read as an image (") for text in refused)
    assert min(decoded, len(refused)) > trials(450) // 10


def mended(content):
    """A PNG with the checksums of its chunks, as far as they are still in order. Other files stay as they are."""
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        return content
    out, at = content[:8], 8
    while at + 12 <= len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        if at + 12 + length > len(content):
            break
        out += chunk(content[at + 4 : at + 8], content[at + 8 : at + 8 + length])
        at += 12 + length
    return out + content[at:]


def test_torch_is_not_seeded_by_a_stream_that_fails(hostile):
    before = torch.get_rng_state()
    (domain,) = open_data("folder", hostile, SMALL, Selection(partial=True)).domains
    with pytest.raises(UnreadableError):
        list(Stream(domain))
    assert torch.equal(before, torch.get_rng_state())
    with open_image(hostile / "dog/a.png") as image:
        assert image.size == (24, 20)
