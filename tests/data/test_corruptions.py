"""Corruptions look like the originals, depend on nothing but their arguments, and refuse what they cannot use."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from acclimate.data import _filters as filters
from acclimate.data import _formulas as formulas
from acclimate.data.corruptions import CONSTANTS, CORRUPTIONS, EXTRA, GROUPS, SEVERITIES, constants_for, corrupt
from acclimate.data.sheet import contact_sheet
from acclimate.errors import ConfigError, InputError
from acclimate.testing import replay
from support import GOLDEN, shared_golden

ALL = (*CORRUPTIONS, *EXTRA)
RECORDING = GOLDEN / "corruptions_64.safetensors"


@pytest.fixture(scope="module")
def recorded():
    return load_file(RECORDING)


def new_images(count, height, width, seed=0):
    """Smooth coloured blobs with an edge, different from image to image."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    phase = rng.uniform(0, 6, (count, 1, 1, 3))
    waves = np.sin(7 * x[None, ..., None] + phase) + np.sin(5 * y[None, ..., None] - 2 * phase)
    return np.clip(128 + 60 * waves + 40 * (x > y)[None, ..., None], 0, 255).astype(np.uint8)


def test_names():
    assert len(CORRUPTIONS) == 15 and CORRUPTIONS[0] == "gaussian_noise" and CORRUPTIONS[-1] == "jpeg_compression"
    assert [len(names) for names in GROUPS.values()] == [3, 4, 4, 4]
    for table in CONSTANTS.values():
        assert set(table) == set(ALL) and all(len(row) == len(SEVERITIES) for row in table.values())


# The originals


def test_recorded_images_are_met_within_a_level():
    result = replay.replay(RECORDING)
    assert not result.problems, str(result)
    assert set(result.levels) == set(ALL)
    assert all(levels.split()[0] in ("0", "1") for levels in result.levels.values()), str(result)


def test_recorded_photographs_are_met_within_a_level():
    files = [path for path in shared_golden() if path.stem == "corruptions_224"]
    if not files:
        pytest.skip("no folder of further recordings beside the project (set ACCLIMATE_GOLDEN)")
    result = replay.replay(files[0])
    assert not result.problems and len(result.levels) == 19, str(result)


@pytest.mark.parametrize(
    ("formula", "wrong"),
    [
        ("contrast", lambda images, rngs, factor: images * np.float32(factor)),
        ("glass_blur", lambda images, rngs, sigma, reach, rounds: filters.gaussian(images.astype(np.float32), sigma)),
        ("jpeg_compression", lambda images, rngs, quality: images),
        ("spatter", lambda images, rngs, *constants: images),
    ],
)
def test_a_wrong_formula_fails_the_replay(monkeypatch, formula, wrong):
    monkeypatch.setattr(formulas, formula, wrong)
    assert f"{formula}: off by" in str(replay.replay(RECORDING))


def altered(tmp_path, tensors, **metadata):
    with safe_open(str(RECORDING), "np") as file:
        metadata = {**file.metadata(), **metadata}
    save_file(tensors, tmp_path / "altered.safetensors", metadata)
    return replay.replay(tmp_path / "altered.safetensors")


def test_other_random_numbers_fail_the_replay(tmp_path, recorded):
    hyper = replay.Recording(RECORDING).hyper | {"numpy_seed": 1}
    problems = str(altered(tmp_path, recorded, hyper=json.dumps(hyper)).problems)
    assert "gaussian_noise: off by" in problems and "fog: off by" in problems
    assert "contrast" not in problems and "impulse_noise" not in problems  # the one draws nothing, the other elsewhere


def test_a_recording_that_lacks_images_fails_the_replay(tmp_path, recorded):
    some = {name: tensor for name, tensor in recorded.items() if not name.startswith("final/fog/")}
    assert "not those that the header lists" in str(altered(tmp_path, some).problems)


# The random numbers that are used outside of recordings


@pytest.mark.parametrize("name", [name for name in ALL if name != "frost"])
def test_own_random_numbers_give_images_like_the_recorded(recorded, name):
    """Over many draws, the distance to the clean image is distributed around the recorded one."""
    clean = recorded["x/image"]
    batch = np.repeat(clean[None], 24, axis=0)
    for severity in (1, 3, 5):
        shown = corrupt(batch, name, severity, constants="imagenet-c").astype(int)
        distance = abs(shown - clean).mean((1, 2, 3))
        expected = abs(recorded[f"final/{name}/{severity}"].astype(int) - clean).mean()
        spread = max(4 * distance.std(), 0.02 * expected)
        assert abs(distance.mean() - expected) <= spread


def test_noise_has_its_moments():
    grey = np.full((4, 96, 96, 3), 128, np.uint8)
    for severity, scale in zip(SEVERITIES, CONSTANTS["imagenet-c"]["gaussian_noise"][:2]):
        noise = corrupt(grey, "gaussian_noise", severity, constants="imagenet-c").astype(float) - 128
        assert noise.mean() == pytest.approx(-0.5, abs=0.5)  # fractions are cut off
        assert noise.std() == pytest.approx(255 * scale, rel=0.02)
    speckle = corrupt(grey, "speckle_noise", 1, constants="imagenet-c").astype(float)
    assert speckle.std() == pytest.approx(128 * 0.15, rel=0.02)
    shot = corrupt(grey, "shot_noise", 1, constants="imagenet-c").astype(float)
    assert shot.mean() == pytest.approx(127.6, abs=0.6)
    assert shot.std() == pytest.approx(255 * math.sqrt(128 / 255 / 60), rel=0.02)
    impulse = corrupt(grey, "impulse_noise", 5, constants="imagenet-c")
    assert (impulse == 0).mean() == pytest.approx(0.135, rel=0.05)
    assert (impulse == 255).mean() == pytest.approx(0.135, rel=0.05)


def test_the_three_channels_and_all_pixels_have_noise_of_their_own():
    grey = np.full((64, 64, 3), 128, np.uint8)
    noise = corrupt(grey, "gaussian_noise", 3, constants="imagenet-c").astype(float).reshape(-1, 3)
    correlation = np.corrcoef(noise.T)
    assert abs(correlation - np.eye(3)).max() < 0.06
    assert abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.06


# What an image's result depends on


@pytest.mark.parametrize("constants", list(CONSTANTS))
@pytest.mark.parametrize("name", ALL)
def test_a_image_does_not_depend_on_its_batch(monkeypatch, name, constants):
    images = new_images(7, 29, 22)
    indices = [3, 100, 5, 0, 7, 2, 10**9]
    together = corrupt(images, name, 4, seed=9, indices=indices, constants=constants)
    alone = [corrupt(x, name, 4, seed=9, indices=[i], constants=constants) for x, i in zip(images, indices)]
    np.testing.assert_array_equal(together, np.stack(alone))
    order = [4, 0, 6, 2, 1, 5, 3]
    shuffled = corrupt(images[order], name, 4, seed=9, indices=np.array(indices)[order], constants=constants)
    np.testing.assert_array_equal(together[order], shuffled)
    monkeypatch.setattr("acclimate.data.corruptions.CHUNK", 2 * images[0].size)
    np.testing.assert_array_equal(together, corrupt(images, name, 4, seed=9, indices=indices, constants=constants))


@pytest.mark.parametrize("name", ["gaussian_noise", "glass_blur", "frost", "spatter"])
def test_threads_change_nothing(name):
    images = new_images(8, 40, 40)
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(lambda i: corrupt(images[i], name, 2, indices=[i]), range(8)))
    np.testing.assert_array_equal(np.stack(threaded), corrupt(images, name, 2))


FIXED = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur", "saturate"}


@pytest.mark.parametrize("name", ALL)
def test_seed_and_index_draw_anew(name):
    image = new_images(1, 48, 48)[0]
    base = corrupt(image, name, 5)
    np.testing.assert_array_equal(base, corrupt(image, name, 5, seed=0, indices=[0]))
    for other in (corrupt(image, name, 5, seed=1), corrupt(image, name, 5, indices=[1])):
        assert np.array_equal(base, other) == (name in FIXED)


@given(
    name=st.sampled_from(ALL),
    severity=st.sampled_from(SEVERITIES),
    height=st.integers(16, 80),
    width=st.integers(16, 80),
    seed=st.sampled_from([0, 1, 12345, 2**32, 2**63 - 1]),
)
def test_any_size(name, severity, height, width, seed):
    images = new_images(2, height, width)
    before = images.copy()
    images.setflags(write=False)
    shown = corrupt(images, name, severity, seed=seed)
    assert shown.shape == images.shape and shown.dtype == np.uint8 and not np.shares_memory(shown, images)
    np.testing.assert_array_equal(images, before)
    np.testing.assert_array_equal(shown, corrupt(images, name, severity, seed=seed))
    one = corrupt(images[0], name, severity, seed=seed)
    np.testing.assert_array_equal(one, shown[0])


@pytest.mark.parametrize("constants", list(CONSTANTS))
@pytest.mark.parametrize("name", ALL)
def test_very_small_black_and_white_images(name, constants):
    for shape in ((1, 1, 3), (2, 5, 3), (9, 1, 3)):
        for level in (0, 255):
            for severity in (1, 5):
                assert corrupt(np.full(shape, level, np.uint8), name, severity, constants=constants).shape == shape


# Severity

# For some, the distance to the clean image does not grow with every step, as the constants stand: glass_blur trades reach
# for rounds, snow the size of flakes for their number, saturate fades before it glows, spatter turns from water to mud, and
# frost hides the image rather than lightening it further.
UNEVEN = {
    "imagenet-c": {"glass_blur", "snow", "frost", "saturate"},
    "cifar-10-c": {"glass_blur", "frost", "saturate", "spatter"},
}


@pytest.mark.parametrize(("constants", "side"), [("imagenet-c", 64), ("cifar-10-c", 32)])
@pytest.mark.parametrize("name", ALL)
def test_severity_grows(recorded, name, constants, side):
    clean = np.asarray(Image.fromarray(recorded["x/image"]).resize((side, side)))
    distances = [_distance(clean, name, severity, constants) for severity in SEVERITIES]
    assert distances[0] > 1
    if (name, constants) == ("elastic_transform", "cifar-10-c"):  # from shearing the whole to rippling the parts
        assert distances == sorted(distances, reverse=True)
    elif name in UNEVEN[constants]:
        assert distances[4] > 1.1 * distances[0]
    else:
        assert distances == sorted(distances) and distances[4] > 1.1 * distances[0]


def _distance(clean, name, severity, constants):
    batch = np.repeat(clean[None], 16, axis=0)
    return float(abs(corrupt(batch, name, severity, constants=constants).astype(int) - clean).mean())


def test_constants_by_size():
    assert constants_for(28, 28) == constants_for(64, 200) == "cifar-10-c"
    assert constants_for(65, 65) == constants_for(224, 224) == "imagenet-c"
    for side, whose in ((64, "cifar-10-c"), (65, "imagenet-c")):
        image = new_images(1, side, side)[0]
        np.testing.assert_array_equal(corrupt(image, "contrast", 3), corrupt(image, "contrast", 3, constants=whose))


# Frost


def test_frost_from_photographs(tmp_path):
    for i in range(1, 7):
        colour = (40 * i, 0, 250 - 40 * i)
        Image.new("RGB", (90, 70), colour).save(tmp_path / f"frost{i}.{'png' if i < 4 else 'jpg'}", quality=100)
    (tmp_path / "readme.txt").write_text("not an image")
    black = np.zeros((40, 80, 80, 3), np.uint8)  # wider than the photographs
    shown = corrupt(black, "frost", 1, frost=tmp_path, constants="imagenet-c")
    reds = sorted({int(red) for red in np.unique(shown[..., 0])})
    assert len(reds) == 5  # the sixth is never drawn
    np.testing.assert_allclose(reds, [0.4 * 40 * i for i in range(1, 6)], atol=1.5)


def test_our_frost_is_light_and_varied():
    black = np.zeros((30, 224, 224, 3), np.uint8)
    ice = corrupt(black, "frost", 5).astype(float) / 0.75
    assert 120 < ice.mean() < 200
    assert ice[..., 2].mean() > ice[..., 0].mean()  # bluish
    assert ice.mean(-1).std((1, 2)).min() > 10  # structure in every crop
    assert ice.mean((1, 2, 3)).std() > 10  # and from crop to crop


@pytest.mark.parametrize("broken", [False, True])
def test_a_folder_without_photographs(tmp_path, broken):
    if broken:
        (tmp_path / "frost1.png").write_bytes(b"noise")
    with pytest.raises(ConfigError, match="frost="):
        corrupt(new_images(1, 20, 20), "frost", 1, frost=tmp_path)


# Filters against plain definitions


def test_chamfer_distance():
    points = np.zeros((1, 31, 33), bool)
    points[0, 4, 7] = points[0, 22, 25] = True
    rows, columns = np.indices(points.shape[1:])

    def walk(row, column):
        long, short = np.maximum(abs(rows - row), abs(columns - column)), np.minimum(abs(rows - row), abs(columns - column))
        flat = long - 2 * short + 2.1969 * short
        return np.where(2 * short <= long, flat, 2.1969 * (long - short) + 1.4 * (2 * short - long))

    expected = np.minimum(np.minimum(walk(4, 7), walk(22, 25)), 20)
    np.testing.assert_allclose(filters.chamfer_distance(points, 20)[0], expected, atol=2e-3)


def test_glass_copies_pixel_after_pixel():
    """Against the loop that the formula describes."""
    image = new_images(1, 13, 17)[0]
    sigma, reach, rounds = 0.05, 2, 2  # so little blur that it does nothing
    offsets = np.random.default_rng(3).integers(-reach, reach, (rounds, 13 - 2 * reach, 17 - 2 * reach, 2))
    expected = image.copy()
    for each in offsets:
        for i, row in enumerate(range(13 - reach, reach, -1)):
            for j, column in enumerate(range(17 - reach, reach, -1)):
                along, down = each[i, j]
                expected[row, column] = expected[row + down, column + along]
    shown = formulas.glass_blur(image[None], [np.random.default_rng(3)], sigma, reach, rounds)[0]
    assert not np.array_equal(shown, image)
    np.testing.assert_array_equal(shown, expected)


# What is refused


@pytest.mark.parametrize("severity", [0, 6, True, "3", 2.5, None])
def test_wrong_severities(severity):
    with pytest.raises(ConfigError, match=r"severity=.*from 1 to 5"):
        corrupt(new_images(1, 20, 20), "fog", severity)


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"unknown corruption 'gausian_noise'. Did you mean 'gaussian_noise'\?.* saturate"):
        corrupt(new_images(1, 20, 20), "gausian_noise", 1)
    with pytest.raises(ConfigError, match="unknown corruption None"):
        corrupt(new_images(1, 20, 20), None, 1)


@pytest.mark.parametrize("options", [dict(seed=-1), dict(seed=True), dict(seed="0"), dict(constants="cifar")])
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        corrupt(new_images(1, 20, 20), "fog", 1, **options)


@pytest.mark.parametrize("indices", [[0], [0, -1], [0.0, 1.0], [[0, 1]]])
def test_wrong_indices(indices):
    with pytest.raises(InputError, match="one whole number of 0 or more per image"):
        corrupt(new_images(2, 20, 20), "fog", 1, indices=indices)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((20, 20, 3)), "float64.*uint8"),
        (np.zeros((20, 20), np.uint8), r"\(20, 20\).*RGB"),
        (np.zeros((20, 20, 4), np.uint8), "convert"),
        (np.zeros((3, 20, 20), np.uint8), r"height, width, 3"),
        (np.zeros((0, 20, 20, 3), np.uint8), "nothing to corrupt"),
        ([[1, 2, 3]], "list"),
    ],
)
def test_wrong_images(images, message):
    with pytest.raises(InputError, match=message):
        corrupt(images, "fog", 1)


# The sheet


@pytest.mark.parametrize("shape", [(28, 28, 3), (400, 300, 3)])
def test_contact_sheet(shape):
    image = new_images(1, *shape[:2])[0]
    page = contact_sheet(image)
    height, width = (112, 112) if shape[0] == 28 else (224, 168)
    assert page.width > 5 * width and page.height > 19 * height
    rows = np.asarray(page)[-height - 6 : -6, -width - 6 : -6]  # the last tile: saturate at severity 5
    if shape[0] == 28:
        np.testing.assert_array_equal(rows[::4, ::4], corrupt(image, "saturate", 5))
    else:
        assert len(np.unique(rows.reshape(-1, 3), axis=0)) > 1000
