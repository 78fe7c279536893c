"""Data sets as people have them on disk: labels, preprocessing and identities that can be trusted, errors that help."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from timm.models.vision_transformer import VisionTransformer
from torchvision import datasets, transforms

from acclimate import cli
from acclimate.data import layouts
from acclimate.data.catalog import Selection, check_data, open_data
from acclimate.data.corruptions import CORRUPTIONS, Corruption, corrupt
from acclimate.data.disk import Arrays, Files
from acclimate.data.layouts import LAYOUTS, synsets
from acclimate.data.preprocess import Input, Preprocess, input_of
from acclimate.data.streams import SAR_DIGESTS, Stream
from acclimate.errors import ConfigError, InputError, ModelError, UnreadableError
from acclimate.testing.check import tiny_model

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
AS_IT_IS = Preprocess(None, 8, MEAN, STD)
WNIDS = synsets()


def view(classes=1000, size=32, **config):
    model = VisionTransformer(img_size=size, patch_size=8, embed_dim=8, depth=1, num_heads=1, num_classes=classes)
    model.pretrained_cfg = dict(mean=MEAN, std=STD, input_size=(3, 224, 224), crop_pct=0.9) | config
    return model


def noise(height=8, width=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write(root, *paths, size=(8, 8)):
    """Images, no two alike; PNG whatever their name, so that they are read as they were written."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(*size, seed=sum(map(ord, path)))).save(root / path, "PNG")
    return root


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))


def shown(domain, index):
    """One image of a domain as pixels again."""
    values = domain.load(np.array([index]))[0].permute(1, 2, 0).numpy()
    return np.rint((values * STD + MEAN) * 255).astype(np.uint8)


@pytest.fixture
def photos(tmp_path):
    return write(tmp_path / "photos", "cat/a.png", "cat/b.png", "dog/a.png", "dog/sub/c.png", "emu/z.jpg", size=(40, 50))


# Preprocessing


@pytest.mark.parametrize("resize", [None, 32, 47, (48, 48), (40, 64)])
@pytest.mark.parametrize("crop", [None, 27, 32])
@pytest.mark.parametrize("size", [(57, 41), (41, 58), (40, 40), (100, 33)])
def test_preprocessing_is_torchvisions(tmp_path, resize, crop, size):
    write(tmp_path, "a.png", size=size)
    steps = [transforms.Resize(resize)] if resize is not None else []
    steps += [transforms.CenterCrop(crop)] if crop is not None else []
    expected = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    domain = Files(tmp_path, ["a.png"], [0], Preprocess(resize, crop, MEAN, STD))
    loaded = domain.load(np.array([0]))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded[0], expected(Image.open(tmp_path / "a.png")))


def test_every_kind_of_image_is_read_as_imagefolder_reads_it(tmp_path):
    rgb = Image.fromarray(noise(30, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    (tmp_path / "c").mkdir()
    rgb.convert("L").save(tmp_path / "c/grey.png")
    rgb.quantize(16).save(tmp_path / "c/palette.png")
    rgb.convert("CMYK").save(tmp_path / "c/cmyk.jpg")
    rgb.save(tmp_path / "c/turned.jpg", exif=exif)
    alpha = rgb.convert("RGBA")
    alpha.putalpha(100)
    alpha.save(tmp_path / "c/alpha.png")
    reference = datasets.ImageFolder(tmp_path, transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))
    (domain,) = open_data("folder", tmp_path, Preprocess(None, None, MEAN, STD)).domains
    assert len(reference) == len(domain.labels) == 5
    for i, (image, label) in enumerate(reference):
        assert torch.equal(domain.load(np.array([i]))[0], image)
        assert domain.labels[i] == label


def test_a_models_input_is_its_own():
    plain = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1)
    assert input_of(plain) == Input(224, (0.5,) * 3, (0.5,) * 3, 0.9, 1000)
    assert Preprocess.for_model(plain) == Preprocess(256, 224, (0.5,) * 3, (0.5,) * 3)
    deit = timm.create_model("deit_tiny_patch16_224.fb_in1k", depth=1, num_classes=7)
    assert input_of(deit).mean == (0.485, 0.456, 0.406) and input_of(deit).classes == 7
    # timm's configuration still says 224
    other = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1, img_size=96)
    assert input_of(other).size == 96
    assert Preprocess.for_model(other).resize == 106  # 96 / 0.9


def test_a_layouts_preprocessing():
    usual, small = (Input(size, MEAN, STD, 0.9, 1000) for size in (224, 112))

    def sizes(name, model):
        made = LAYOUTS[name].preprocess(model)
        return made.resize, made.crop

    assert sizes("imagenet-c", usual) == (None, 224) and sizes("imagenet-c", small) == (112, 112)
    for name in ("imagenet", "imagenet-r", "imagenet-a", "imagenet-v2", "imagenet-sketch", "office-home", "folder"):
        assert sizes(name, usual) == (256, 224) and sizes(name, small) == (124, 112)
    assert sizes("visda-2021", usual) == ((256, 256), 224) and sizes("visda-2021", small) == ((128, 128), 112)
    assert sizes("cifar-10-c", usual) == (224, 224) and sizes("cifar-100-c", usual._replace(size=32)) == (None, 32)


@pytest.mark.parametrize("family", ["hf", "torchvision", "timm"])
def test_normalisation_is_never_assumed(family):
    pytest.importorskip({"hf": "transformers"}.get(family, family))
    model = tiny_model(family)  # the timm one was not made by create_model: it has no configuration
    with pytest.raises(ConfigError, match=r"does not say how its images are normalised: give mean= and std="):
        input_of(model)
    with pytest.raises(ConfigError, match="give both, or neither"):
        input_of(model, mean=MEAN)
    assert input_of(model, mean=MEAN, std=STD) == Input(32, MEAN, STD, 0.875, 10)


def test_given_normalisation_is_taken(photos):
    (domain,) = open_data("folder", photos, view(3), mean=(0, 0, 0), std=(1, 1, 1)).domains
    assert domain.preprocess == Preprocess(35, 32, (0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, MEAN, (1, 0, 1)), "a deviation above 0"),
        ((None, None, (0.5,), STD), "three numbers each"),
        (((1, 2, 3), None, MEAN, STD), "the shorter side, or"),
        ((0, None, MEAN, STD), "resize=0"),
        (((8, 0.5), None, MEAN, STD), r"resize=0\.5"),
        ((None, -1, MEAN, STD), "crop=-1"),
    ],
)
def test_preprocessing_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Preprocess(*arguments)


def test_models_that_cannot_be_prepared_for():
    with pytest.raises(ModelError):
        input_of(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"no squares of one size \(32 x 48\): give a Preprocess"):
        input_of(view(size=(32, 48)))


# Image files


def test_a_image_too_small_is_no_frame_of_black(photos):
    domain = Files(photos, ["cat/a.png"], [0], Preprocess(None, 224, MEAN, STD))
    with pytest.raises(InputError, match=r"cat/a.png: it has 50 x 40 pixels, too few to cut out 224 x 224"):
        domain.load(np.array([0]))


def test_damaged_images_are_named(photos):
    (photos / "cat/b.png").write_bytes((photos / "cat/b.png").read_bytes()[:200])
    (domain,) = open_data("folder", photos, view(3)).domains
    with pytest.raises(UnreadableError, match=r"cat/b.png cannot be read as an image"):
        domain.load(np.array([0, 1]))
    (photos / "dog/a.png").unlink()
    with pytest.raises(UnreadableError, match=r"dog/a.png"):
        domain.load(np.array([2]))
    with pytest.raises(InputError, match=r"dog/a.png cannot be read \(No such file"):
        _ = domain.identity


def test_images_of_several_sizes_need_a_crop(photos):
    write(photos, "emu/y.png", size=(20, 20))
    (domain,) = open_data("folder", photos, Preprocess(None, None, MEAN, STD)).domains
    with pytest.raises(InputError, match="several sizes"):
        domain.load(np.arange(6))


def test_files_that_do_not_fit():
    with pytest.raises(InputError, match="2 images have 1 labels"):
        Files(".", ["a", "b"], [0], AS_IT_IS)
    with pytest.raises(InputError, match="no images"):
        Files(".", [], [], AS_IT_IS)


def test_identity(photos, tmp_path):
    def identity(root=photos, model=AS_IT_IS, **options):
        return open_data("folder", root, model, Selection(**options)).domains[0].identity

    mine = identity()
    assert isinstance(mine, str)
    shutil.copytree(photos, tmp_path / "another machine")
    assert identity(tmp_path / "another machine") == mine
    assert identity(model=replace(AS_IT_IS, crop=7)) != mine
    assert identity(model=replace(AS_IT_IS, mean=(0, 0, 0))) != mine
    fog = [identity(corruptions=["fog"], severities=[s], seed=seed) for s in (1, 2) for seed in (0, 1)]
    assert len({mine, *fog}) == 5
    paths = ["cat/a.png", "cat/b.png", "dog/a.png", "dog/sub/c.png", "emu/z.jpg"]
    same, other = (Files(photos, paths, labels, AS_IT_IS, name="folder") for labels in ([0, 0, 1, 1, 2], [0, 0, 1, 1, 1]))
    assert same.identity == mine != other.identity
    write(photos, "cat/b.png", size=(41, 50))
    changed = identity()
    assert changed != mine
    write(photos, "cat/c.png")
    assert identity() not in (mine, changed)


def test_identity_opens_no_image(photos, monkeypatch):
    (domain,) = open_data("folder", photos, AS_IT_IS).domains
    monkeypatch.setattr(Image, "open", None)
    assert domain.identity


def test_identity_knows_the_ice(photos, tmp_path):
    write(tmp_path, "ice/frost1.png", size=(60, 60))

    def identity(name="frost", ice=None):
        chosen = Selection(corruptions=[name], frost=ice)
        return open_data("folder", photos, AS_IT_IS, chosen).domains[0].corruption.description()

    assert identity()["frost"] == "procedural" and identity("fog")["frost"] is None
    before = identity(ice=tmp_path / "ice")
    assert list(before["frost"]) == ["frost1.png"] and json.dumps(before)
    with pytest.raises(ConfigError, match=r"there is no frost1.png"):
        identity(ice=photos)


def test_pickling_is_cheap(photos):
    (domain,) = open_data("folder", photos, view(3), Selection(corruptions=["snow"])).domains
    again = pickle.loads(pickle.dumps(domain))
    assert torch.equal(again.load(np.arange(5)), domain.load(np.arange(5)))
    assert again.identity == domain.identity
    many = Files("/data", [f"n01440764/ILSVRC2012_val_{i:08}.JPEG" for i in range(50_000)], [0] * 50_000, AS_IT_IS)
    assert len(pickle.dumps(many)) < 50_000 * 60


def test_workers_change_nothing(photos):
    domains = open_data("folder", photos, view(3), Selection(corruptions=["fog", "snow", "gaussian_noise"])).domains
    streams = [Stream(domains, "mixed", batch_size=4, workers=workers) for workers in (0, 2)]
    for one, other in zip(*streams, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


# Corruptions on the fly


def test_corruptions_are_made_after_the_crop_and_by_the_place_in_the_sorted_list(photos):
    domains = open_data(
        "folder", photos, view(3), Selection(corruptions=["gaussian_noise", "fog"], severities=[2, 3], seed=4)
    ).domains
    assert [domain.key for domain in domains] == [(n, s) for n in ("gaussian_noise", "fog") for s in (2, 3)]
    crop = transforms.Compose([transforms.Resize(35), transforms.CenterCrop(32)])
    clean = [np.asarray(crop(Image.open(photos / p))) for p in ("cat/a.png", "cat/b.png", "dog/a.png", "dog/sub/c.png")]
    for i in (3, 1):
        expected = corrupt(clean[i], "gaussian_noise", 3, seed=4, indices=[i])
        assert np.array_equal(shown(domains[1], i), expected)
        listed = Files(
            photos, ["dog/sub/c.png", "cat/b.png"], [0, 0], domains[1].preprocess, corruption=domains[1].corruption
        )
        expected = corrupt(clean[i], "gaussian_noise", 3, seed=4, indices=[i // 2])  # sorted, cat comes before dog
        assert np.array_equal(shown(listed, 0 if i == 3 else 1), expected)


def test_constants_of_a_corruption(photos):
    domains = [
        open_data("folder", photos, view(3), Selection(corruptions=["fog"], constants=constants)).domains[0]
        for constants in (None, "cifar-10-c", "imagenet-c")
    ]
    mild, same, strong = (domain.load(np.arange(5)) for domain in domains)
    assert torch.equal(mild, same) and not torch.equal(mild, strong)
    assert Corruption("fog", 1).description()["constants"] == "by size"


# Labels


def test_imagenet_c(tmp_path):
    few = [WNIDS[i] for i in (0, 7, 999)]
    for name in ("fog", "blur/zoom_blur"):  # the archives may be unpacked into folders of their own
        write(tmp_path, *(f"{name}/{s}/{wnid}/ILSVRC2012_val_{k}.JPEG" for s in (3, 5) for wnid in few for k in (2, 1)))
    data = open_data(
        "imagenet-c", tmp_path, view(), Selection(corruptions=["zoom_blur", "fog"], severities=[5, 3], partial=True)
    )
    assert [d.key for d in data.domains] == [("zoom_blur", 5), ("zoom_blur", 3), ("fog", 5), ("fog", 3)]
    assert data.domains[0].labels.tolist() == [0, 0, 7, 7, 999, 999]  # by the list of all, not by the folders that are there
    assert data.domains[0].path(2) == str(tmp_path / "blur/zoom_blur/5" / WNIDS[7] / "ILSVRC2012_val_1.JPEG")
    assert (data.classes, data.num_classes, data.unknown) == (None, 1000, None)
    assert repr(data) == "<Data imagenet-c: zoom_blur/5, zoom_blur/3, fog/5, fog/3; 24 images; 1000 classes>"
    assert data.domains[0].load(np.array([0])).shape == (1, 3, 32, 32)  # resized for this model
    # and left alone for one of the size of the images
    (domain,) = open_data("imagenet-c", tmp_path, AS_IT_IS, Selection(corruptions=["fog"], partial=True)).domains
    assert np.array_equal(shown(domain, 5), pixels(domain.path(5)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All of ImageNet-C's fog/5, each file the same one."""
    root = tmp_path_factory.mktemp("whole")
    write(root, "image")
    for label, wnid in enumerate(WNIDS):
        (root / "fog/5" / wnid).mkdir(parents=True)
        for k in range(50):
            os.link(root / "image", root / "fog/5" / wnid / f"ILSVRC2012_val_{50 * label + k:08}.JPEG")
    return root


def test_a_whole_imagenet_c_has_the_authors_order(whole):
    (domain,) = open_data("imagenet-c", whole, AS_IT_IS, Selection(corruptions=["fog"])).domains
    assert np.array_equal(domain.labels, np.repeat(np.arange(1000), 50))
    assert SAR_DIGESTS[Stream(domain, "label-shift", seed=2022).digest] == 2022
    assert len(domain.labels) == 50_000


def test_one_image_less_is_noticed(whole):
    gone = whole / "fog/5" / WNIDS[3] / "ILSVRC2012_val_00000170.JPEG"
    gone.unlink()
    try:
        with pytest.raises(InputError, match=rf"1 classes do not have 50 images \({WNIDS[3]} 49\).*partial=True"):
            open_data("imagenet-c", whole, AS_IT_IS, Selection(corruptions=["fog"]))
        (domain,) = open_data("imagenet-c", whole, AS_IT_IS, Selection(corruptions=["fog"], partial=True)).domains
        assert len(domain.labels) == 49_999
    finally:
        os.link(whole / "image", gone)


@pytest.mark.parametrize("name", ["imagenet-r", "imagenet-a"])
def test_a_part_of_imagenets_classes(tmp_path, name):
    wnids = synsets(name.replace("-", "_"))
    write(tmp_path, *(f"{wnids[i]}/x.jpg" for i in (0, 3, 199)))
    data = open_data(name, tmp_path, view(), Selection(partial=True))
    assert data.domains[0].labels.tolist() == [0, 3, 199]
    assert len(data.classes) == data.num_classes == 200 and data.classes == sorted(data.classes)
    assert [WNIDS[data.classes[i]] for i in (0, 3, 199)] == [wnids[i] for i in (0, 3, 199)]
    assert [domain.key.name for domain in data.domains] == [name]
    assert "200 classes, a part of the model's" in repr(data)
    assert open_data(name, tmp_path, view(200), Selection(partial=True)).classes is None
    assert open_data(name, tmp_path, AS_IT_IS, Selection(partial=True)).classes == data.classes
    with pytest.raises(ConfigError, match=f"head of the model has 10 classes, and {name} has 200"):
        open_data(name, tmp_path, view(10), Selection(partial=True))


def test_numbered_folders_are_sorted_by_number(tmp_path):
    write(tmp_path, *(f"{i}/x.jpeg" for i in (10, 2, 999, 0)))
    data = open_data("imagenet-v2", tmp_path, view(), Selection(partial=True))
    assert data.domains[0].labels.tolist() == [0, 2, 10, 999]
    assert [os.path.basename(os.path.dirname(data.domains[0].path(i))) for i in range(4)] == ["0", "2", "10", "999"]
    assert data.classes is None and data.num_classes == 1000


@pytest.mark.parametrize(("name", "below"), [("imagenet", ""), ("imagenet", "val/"), ("imagenet-sketch", "")])
def test_imagenet_and_sketches(tmp_path, name, below):
    write(tmp_path, f"{below}{WNIDS[5]}/x.JPEG", f"{below}{WNIDS[2]}/x.JPEG")
    data = open_data(name, tmp_path, view(), Selection(partial=True))
    assert data.domains[0].labels.tolist() == [2, 5] and data.domains[0].key.name == name
    corrupted = open_data(name, tmp_path, view(), Selection(partial=True, corruptions=["fog", "snow"]))
    assert [d.key for d in corrupted.domains] == [("fog", 5), ("snow", 5)]


def test_complete_data_need_no_permission(tmp_path, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "imagenet-v2", replace(LAYOUTS["imagenet-v2"], each=1, classes=lambda: ("0", "1", "2")))
    monkeypatch.setitem(
        LAYOUTS, "office-home", replace(LAYOUTS["office-home"], count=2, total=dict.fromkeys(layouts.OFFICE, 2))
    )
    write(tmp_path / "v2", "0/x.jpeg", "1/x.jpeg", "2/x.jpeg")
    (tmp_path / "v2" / "__MACOSX").mkdir()
    (tmp_path / "v2" / "1" / "._x.jpeg").write_bytes(b"left behind by a Mac")
    (tmp_path / "v2" / "readme.txt").write_text("")
    assert len(open_data("imagenet-v2", tmp_path / "v2", AS_IT_IS).domains[0].labels) == 3
    write(tmp_path / "office", *(f"{domain}/{thing}/1.jpg" for domain in layouts.OFFICE for thing in ("Bed", "Fan")))
    assert check_data("office-home", tmp_path / "office").usable


def test_visda(tmp_path):
    write(tmp_path, "val_data/a b.JPEG", "val_data/c.JPEG", "val_data/d.JPEG", size=(20, 60))
    (tmp_path / "val_filelists").mkdir()
    (tmp_path / "val_filelists/imagenet_c_r.txt").write_text("val_data/c.JPEG 7\n./val_data/a b.JPEG 999\n\n")
    (tmp_path / "open.txt").write_text("val_data/c.JPEG 1000\nval_data/a b.JPEG 1234\nval_data/d.JPEG 3\n")
    model = view()
    data = open_data("visda-2021", tmp_path, model)
    (domain,) = data.domains
    assert domain.labels.tolist() == [7, 999] and (data.num_classes, data.unknown, data.classes) == (1000, 1000, None)
    squash = transforms.Compose([transforms.Resize((36, 36)), transforms.CenterCrop(32)])
    assert np.array_equal(shown(domain, 1), np.asarray(squash(Image.open(tmp_path / "val_data/a b.JPEG"))))
    assert open_data("visda-2021", tmp_path, model, Selection(file_list="open.txt")).domains[0].labels.tolist() == [
        1000,
        1000,
        3,
    ]
    assert (
        open_data("visda-2021", tmp_path, model, Selection(file_list=tmp_path / "open.txt")).domains[0].identity
        != domain.identity
    )


def test_visda_lists_that_do_not_fit(tmp_path):
    write(tmp_path, "a.JPEG")
    for text, message in (
        ("a.JPEG 1\nb.JPEG 2\n", r"1 of the 2 images in .*list.txt are not there \(b.JPEG\).*partial=True"),
        ("a.JPEG one\n", r"has the line 'a.JPEG one': expected a path from"),
        (f"{tmp_path}/a.JPEG 1\n", "expected a path from"),
        ("../a.JPEG 1\n", "expected a path from"),
        ("a.JPEG -1\n", "expected a path from"),
        ("", "0 of the 0 images"),
    ):
        (tmp_path / "list.txt").write_text(text)
        with pytest.raises(InputError, match=message):
            open_data("visda-2021", tmp_path, AS_IT_IS, Selection(file_list="list.txt"))
    (tmp_path / "list.txt").write_text("a.JPEG 1\nb.JPEG 2\n")
    (domain,) = open_data("visda-2021", tmp_path, AS_IT_IS, Selection(file_list="list.txt", partial=True)).domains
    assert domain.labels.tolist() == [1]
    with pytest.raises(InputError, match=r"lists.txt is missing. Did you mean 'list.txt'\?.*given with file_list="):
        open_data("visda-2021", tmp_path, AS_IT_IS, Selection(file_list="lists.txt"))


@pytest.mark.parametrize("spelling", ["Real World", "Real_World", "RealWorld"])
def test_office_home(tmp_path, spelling):
    things = ("TV", "Table", "Alarm_Clock")  # sorted as ImageFolder does: capitals first
    for domain in ("Art", "Clipart", "Product", spelling):
        write(tmp_path, *(f"{domain}/{thing}/00001.jpg" for thing in things if (domain, thing) != ("Art", "TV")))
    data = open_data("office-home", tmp_path, view(3), Selection(partial=True))
    assert data.class_names == ["Alarm_Clock", "TV", "Table"]
    assert [domain.key.name for domain in data.domains] == ["Art", "Clipart", "Product", "Real World"]
    assert data.domains[0].labels.tolist() == [0, 2] and data.domains[3].labels.tolist() == [0, 1, 2]
    pairs = [(source.key.name, target.key.name) for source, target in data.pairs()]
    assert len(pairs) == 12 and pairs[:4] == [
        ("Art", "Clipart"),
        ("Art", "Product"),
        ("Art", "Real World"),
        ("Clipart", "Art"),
    ]
    two = open_data("office-home", tmp_path, view(3), Selection(domains=["Real World", "Art"], partial=True))
    assert [domain.key.name for domain in two.domains] == ["Real World", "Art"]
    with pytest.raises(InputError, match="3 classes instead of 65"):
        open_data("office-home", tmp_path, view(3))


def test_a_folder_of_any_classes(photos):
    data = open_data("folder", photos, view(3))
    reference = datasets.ImageFolder(photos)
    assert data.domains[0].labels.tolist() == reference.targets and data.class_names == reference.classes
    assert [data.domains[0].path(i) for i in range(5)] == [path for path, _ in reference.samples]
    assert data.classes is None and open_data("folder", photos, AS_IT_IS).classes is None
    with pytest.raises(
        ConfigError, match=rf"has 1000 classes, and folder has 3: .* like {WNIDS[0]} \(not so: cat, dog, emu\)"
    ):
        open_data("folder", photos, view())
    (photos / "eel").mkdir()
    with pytest.raises(InputError, match=r"1 of 4 classes have no images \(eel\)"):
        open_data("folder", photos, view(4))
    assert open_data("folder", photos, view(4), Selection(partial=True)).domains[0].labels.tolist() == [0, 0, 1, 1, 3]


def test_a_folder_of_imagenets_classes(tmp_path):
    write(tmp_path, *(f"{WNIDS[i]}/x.JPEG" for i in (500, 20, 3)))
    data = open_data("folder", tmp_path, view())
    assert data.domains[0].labels.tolist() == [0, 1, 2] and data.classes == [3, 20, 500]
    assert open_data("folder", tmp_path, view(3)).classes is None  # a head for just these


# Arrays


@pytest.fixture
def cifar(tmp_path):
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    for i, name in enumerate(CORRUPTIONS):
        np.save(root / f"{name}.npy", np.random.default_rng(i).integers(0, 256, (20, 32, 32, 3), np.uint8))
    np.save(root / "labels.npy", np.tile([3, 9, 0, 1], 5).astype(np.uint8))
    return root


def test_cifar(cifar):
    data = open_data("cifar-10-c", cifar, view(10), Selection(severities=[1, 5], partial=True))
    assert [d.key for d in data.domains] == [(name, s) for name in CORRUPTIONS for s in (1, 5)]
    assert "gaussian_noise/1 ... jpeg_compression/5 (30 domains); 120 images; 10 classes" in repr(data)
    stored = np.load(cifar / "shot_noise.npy")
    for domain, start in ((data.domains[2], 0), (data.domains[3], 16)):
        assert domain.labels.tolist() == [3, 9, 0, 1]
        assert np.array_equal(shown(domain, 2), stored[start + 2])
    one = data.domains[3].load(np.array([2, 0, 2]))
    assert one.shape == (3, 3, 32, 32) and torch.equal(one[0], one[2])
    large = open_data("cifar-10-c", cifar, view(10, size=48), Selection(partial=True)).domains[1]
    expected = Image.fromarray(stored[17]).resize((48, 48), Image.Resampling.BILINEAR)
    assert np.array_equal(shown(large, 1), np.asarray(expected))
    with pytest.raises(ConfigError, match="head of the model has 7 classes, and cifar-10-c has 10"):
        open_data("cifar-10-c", cifar, view(7), Selection(partial=True))


def test_an_array_is_never_read_whole(cifar):
    domain = open_data("cifar-10-c", cifar, view(10), Selection(partial=True)).domains[1]
    assert isinstance(domain._array, np.memmap)
    assert len(pickle.dumps(domain)) < 2000  # not the array
    again = pickle.loads(pickle.dumps(domain))
    assert torch.equal(again.load(np.arange(4)), domain.load(np.arange(4))) and again.identity == domain.identity
    batches = [list(Stream(domain, batch_size=3, workers=workers)) for workers in (0, 2)]
    assert all(torch.equal(a.images, b.images) for a, b in zip(*batches, strict=True))


def test_the_identity_of_arrays(cifar, tmp_path):
    def identities(root):
        data = open_data("cifar-10-c", root, view(10), Selection(severities=[4, 5], partial=True))
        return [domain.identity for domain in data.domains]

    mine = identities(cifar)
    assert len(set(mine)) == 30
    shutil.copytree(cifar, tmp_path / "elsewhere")
    assert identities(tmp_path / "elsewhere") == mine
    stored = np.load(cifar / "fog.npy")
    stored[19] += 1
    np.save(cifar / "fog.npy", stored)
    where = 2 * CORRUPTIONS.index("fog") + 1
    assert [i for i, (a, b) in enumerate(zip(mine, identities(cifar))) if a != b] == [where]
    np.save(cifar / "labels.npy", np.tile([3, 9, 0, 2], 5))
    assert all(a != b for a, b in zip(mine, identities(cifar)))


def test_arrays_that_do_not_fit(cifar):
    def refuses(message, name="cifar-10-c"):
        with pytest.raises(InputError, match=message):
            open_data(name, cifar, AS_IT_IS, Selection(corruptions=["fog"], partial=True))

    with pytest.raises(InputError, match=r"4 images of each severity instead of 10000.*partial=True"):
        open_data("cifar-10-c", cifar, AS_IT_IS, Selection(corruptions=["fog"]))
    with pytest.raises(InputError, match="20 images: too few for 4 from 18"):
        Arrays(cifar / "fog.npy", [0] * 4, AS_IT_IS, name="fog", start=18)
    whole = (cifar / "fog.npy").read_bytes()
    (cifar / "fog.npy").write_bytes(whole[: len(whole) // 2])
    refuses("fog.npy cannot be read as a numpy array")
    np.save(cifar / "fog.npy", np.zeros((20, 32, 32, 3)))
    refuses(r"fog.npy is float64 \(20, 32, 32, 3\): expected uint8")
    np.save(cifar / "fog.npy", np.zeros((21, 32, 32, 3), np.uint8))
    refuses(r"fog.npy has 21 images, and labels.npy is uint8 \(20,\)")
    (cifar / "fog.npy").rename(cifar / "foq.npy")
    refuses(r"fog.npy is missing. Did you mean 'foq.npy'\?")
    (cifar / "fog.npy").write_bytes(whole)
    np.save(cifar / "labels.npy", np.full(20, 10))
    refuses("labels.npy goes from 10 to 10: expected 0 to 9")
    (cifar / "labels.npy").unlink()
    refuses(r"labels.npy is missing\..*zenodo.org/records/3555552", "cifar-100-c")


# Data that cannot be used


def test_what_is_missing_is_said(tmp_path):
    root = tmp_path / "ImageNet-C"
    with pytest.raises(
        InputError, match=r"There is no folder .*ImageNet-C\. Expected: <corruption>/<severity>.*zenodo.org/records"
    ):
        open_data("imagenet-c", root, AS_IT_IS)
    write(root, f"fogg/5/{WNIDS[0]}/x.JPEG", f"snow/1/{WNIDS[0]}/x.JPEG")
    with pytest.raises(InputError, match=r"There is no folder .*imageNet-c \(Did you mean 'ImageNet-C'\?\)\. Expected"):
        open_data("imagenet-c", tmp_path / "imageNet-c", AS_IT_IS)
    with pytest.raises(InputError, match=r"fog is missing. Did you mean 'fogg'\? Found there: fogg, snow"):
        open_data("imagenet-c", root, AS_IT_IS, Selection(corruptions=["fog"], partial=True))
    with pytest.raises(InputError, match=r"snow/5 is missing\. Found there: 1\."):
        open_data("imagenet-c", root, AS_IT_IS, Selection(corruptions=["snow"], partial=True))
    with pytest.raises(InputError, match=r"gaussian_noise/5: .*; and 10 more\. Expected"):
        open_data("imagenet-c", root, AS_IT_IS)


def test_misnamed_classes_are_said(tmp_path):
    write(tmp_path, f"{WNIDS[0]}/x.jpeg", f"{WNIDS[1]}x/x.jpeg")
    with pytest.raises(InputError) as caught:
        open_data("imagenet", tmp_path, AS_IT_IS)
    assert f"999 of 1000 classes have no images ({WNIDS[1]}," in str(caught.value)
    assert f"1 folders are none of its classes ('{WNIDS[1]}x' Did you mean {WNIDS[1]!r}?)" in str(caught.value)
    assert "image-net.org after registration" in str(caught.value)
    write(tmp_path / "v2", "10/x.jpeg")
    with pytest.raises(InputError, match=r"no images in folders like n01440764, n01443537\. Found there: 10\."):
        open_data("imagenet", tmp_path / "v2", AS_IT_IS, Selection(partial=True))


def test_unsorted_images(tmp_path):
    write(tmp_path / "val", "ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG")
    with pytest.raises(InputError, match=r"2 images unsorted in one folder.*torchvision.datasets.ImageNet"):
        open_data("imagenet", tmp_path, AS_IT_IS, Selection(partial=True))
    write(tmp_path / "flat", "a.png")
    with pytest.raises(InputError, match="1 images in no folder: each class needs one"):
        open_data("folder", tmp_path / "flat", AS_IT_IS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no images in folders of classes\. Found there: nothing"):
        open_data("folder", tmp_path / "empty", AS_IT_IS)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imagnet-c", {}, "Unknown data set 'imagnet-c'. Did you mean 'imagenet-c'"),
        ("imagenet-c", dict(corruptions=["frg"]), "Did you mean 'fog'"),
        ("imagenet-c", dict(corruptions=[]), "No corruption or no severity"),
        ("imagenet-c", dict(severities=[6]), "severity=6"),
        ("imagenet-c", dict(domains=["fog"]), "domains= does not go with imagenet-c"),
        ("imagenet-c", dict(constants="imagenet-c"), "made on the fly"),
        ("imagenet-c", dict(file_list="x.txt"), "file_list= does not go with imagenet-c"),
        ("folder", dict(severities=[3]), "without corruptions="),
        ("folder", dict(corruptions=["fog"], constants="cifar"), "constants='cifar'"),
        ("folder", dict(corruptions=[]), "No corruption"),
        ("folder", dict(frost="ice"), "made on the fly"),
        ("folder", dict(mean=MEAN, std=STD), "a Preprocess has its own"),
        ("office-home", dict(domains=["Arts"]), "no domain 'Arts'. Did you mean 'Art'"),
        ("office-home", dict(corruptions=["fog"]), "no corruptions on disk"),
    ],
)
def test_wrong_options(tmp_path, name, options, message):
    options = dict(options)
    with pytest.raises(ConfigError, match=message):
        normalised = {key: options.pop(key) for key in ("mean", "std") if key in options}
        open_data(name, tmp_path, AS_IT_IS, Selection(**options), **normalised)


# The check, and the command


def test_check(whole):
    report = check_data("imagenet-c", whole, corruptions=["fog"])
    assert report.usable and not report.absent and len(report.rows[0].labels) == report.rows[0].expected == 50_000
    report = check_data("imagenet-c", whole)
    assert not report.usable and len(report.problems) == 14 and len(report.absent) == 19 * 5 - 15
    assert [str(row.key) for row in report.rows] == [f"{name}/5" for name in CORRUPTIONS]


def test_check_looks_at_what_nobody_asked_for_if_it_is_there(tmp_path):
    write(
        tmp_path,
        *(f"{name}/5/{WNIDS[0]}/x.JPEG" for name in CORRUPTIONS),
        f"fog/2/{WNIDS[0]}/x.JPEG",
        f"spatter/1/{WNIDS[0]}/x.JPEG",
    )
    report = check_data("imagenet-c", tmp_path)
    assert len(report.rows) == 17 and {"fog/2", "spatter/1"} < {str(row.key) for row in report.rows}
    assert not report.usable and any("999 of 1000 classes have no images" in problem for problem in report.problems)


def test_check_never_raises_for_bad_data(tmp_path, cifar):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (cifar / "fog.npy").write_bytes(b"nothing")
    for name in LAYOUTS:
        for root in ("gone", "empty", "file"):
            report = check_data(name, tmp_path / root)
            assert not report.usable and str(tmp_path / root) in str(report.error())
    assert "fog/1, fog/2, fog/3, fog/4, fog/5: " in "".join(check_data("cifar-10-c", cifar).problems)


def test_check_opens_images(photos):
    assert check_data("folder", photos, open_images=True).usable
    (photos / "dog/a.png").write_text("no image")
    assert check_data("folder", photos).usable
    shown = io.StringIO()
    report = check_data("folder", photos, open_images=True, console=Console(file=shown, force_terminal=True))
    assert report.problems == ["1 images cannot be read (dog/a.png)"] and "reading" in shown.getvalue()


def test_command(photos, capsys):
    assert cli.main(["data", "check", "--data", "folder", "--root", str(photos), "--open-images"]) == 0
    out = capsys.readouterr().out
    assert "complete" in out and f"{photos} can be used as folder." in out
    (photos / "dog/a.png").write_text("no image")
    assert cli.main(["data", "check", "--data", "folder", "--root", str(photos), "--open-images"]) == 2
    out, err = capsys.readouterr()
    assert "not complete" in out and "1 images cannot be read (dog/a.png)" in err


def test_command_on_corruptions(whole, capsys):
    arguments = ["data", "check", "--data", "imagenet-c", "--root", str(whole), "--corruptions", "fog"]
    assert cli.main(arguments) == 0
    assert "fog/5" in capsys.readouterr().out
    assert cli.main([*arguments, "--severities", "5,4"]) == 2
    out, err = capsys.readouterr()
    assert f"fog/4: {whole}/fog/4 is missing" in out and f"{whole}/fog/4 is missing" in err
    for severities, message in (("five", "'five' is not"), ("7", "from 1 to 5"), ("5,5", "each once")):
        assert cli.main([*arguments, "--severities", severities]) == 2
        assert message in capsys.readouterr().err


def test_command_errors(tmp_path, capsys):
    assert cli.main(["data", "check", "--data", "imagenet-c", "--root", str(tmp_path / "gone")]) == 2
    out, err = capsys.readouterr()
    assert not out and "There is no folder" in err and "zenodo.org/records/2235448" in err
    assert cli.main(["data", "check", "--data", "imagenet-x", "--root", str(tmp_path)]) == 2
    assert "Did you mean" in capsys.readouterr().err


def test_command_lists_all(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in LAYOUTS) and "<corruption>/<severity>/<wnid>/*.JPEG" in out
