"""Folders of other shapes: labels in a CSV file, numbers of classes, own domains, and trees of corruptions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from test_catalog import AS_IT_IS, WNIDS, view, write

import acclimate
from acclimate import cli
from acclimate.data.catalog import Selection, check_data, open_data
from acclimate.data.folder import corrupt_folder
from acclimate.errors import ConfigError, InputError


@pytest.fixture
def flat(tmp_path):
    return write(tmp_path / "flat", "a.png", "b.png", "sub/c.png", size=(40, 50))


def table(root, text):
    """Write a CSV file beside a folder."""
    file = root.parent / "labels.csv"
    file.write_text(text)
    return file


def labels_of(root, text, model=AS_IT_IS, **options):
    data = open_data("folder", root, model, Selection(labels=table(root, text), **options))
    return data, data.domains[0].labels.tolist()


def named(*names):
    model = view(len(names))
    model.pretrained_cfg["label_names"] = list(names)
    return model


# Labels in a CSV file


@pytest.mark.parametrize(
    "text",
    [
        "file,label\nsub/c.png,dog\na.png,cat\nb.png,dog\n",  # the order of the lines does not matter
        "\ufeffLabel, split ,File\r\ncat,x,a.png\r\n\r\ndog,x,./b.png\r\ndog,x,sub/c.png\r\n",
        "image,class\na.png,cat\nb.png,dog\nsub/c.png,dog",
        'a.png,cat,5\nb.png,"dog"\nsub//c.png,dog\n',
    ],
)
def test_names_of_classes_in_a_table(flat, text):
    data, labels = labels_of(flat, text, view(2))
    assert labels == [0, 1, 1] and list(data.class_names) == ["cat", "dog"] and data.classes is None
    assert [data.domains[0].path(i) for i in range(3)] == [str(flat / path) for path in ("a.png", "b.png", "sub/c.png")]


def test_indices_of_classes_in_a_table_are_columns_of_the_head(flat):
    text = "file,label\na.png,10\nb.png,2\nsub/c.png,007\n"
    data, labels = labels_of(flat, text, view(12))
    assert labels == [10, 2, 7] and data.classes is None and data.num_classes == 12
    data, labels = labels_of(flat, text)  # no model: as many classes as needed
    assert labels == [10, 2, 7] and data.num_classes == 11
    with pytest.raises(InputError, match=r"labels.csv: The label 10 is out of range. The classes of the model are 0 to 9\."):
        labels_of(flat, text, view(10))


def test_a_models_own_names_are_known(flat):
    model = named("emu", "dog", "cat", "ant")
    data, labels = labels_of(flat, "a.png,cat\nb.png,dog\nsub/c.png,emu\n", model)
    assert labels == [2, 1, 0] and data.class_names == ["emu", "dog", "cat", "ant"] and data.classes is None
    with pytest.raises(
        InputError, match=r"1 labels are no classes of the model \('dogs' Did you mean 'dog'\?\)\. It has: emu,"
    ):
        labels_of(flat, "a.png,cat\nb.png,dogs\nsub/c.png,emu\n", model)
    # names that say nothing
    assert labels_of(flat, "a.png,cat\nb.png,dog\nsub/c.png,cat\n", named("LABEL_0", "LABEL_1"))[1] == [0, 1, 0]


def test_wnids_in_a_table(flat):
    data, labels = labels_of(flat, f"a.png,{WNIDS[7]}\nb.png,{WNIDS[3]}\nsub/c.png,{WNIDS[7]}\n", view())
    assert labels == [1, 0, 1] and data.classes == [3, 7]
    with pytest.raises(ConfigError, match=r"has 1000 classes, and folder has 2: .*\(not so: n0\)"):
        labels_of(flat, f"a.png,{WNIDS[7]}\nb.png,n0\nsub/c.png,n0\n", view())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no labels"),
        ("file,label\n", "has no labels"),
        ("file,label\na.png,cat\nb.png\n", "line 3: expected a file and a label, and found 'b.png'"),
        ("file,label\na.png,\n", "line 2: expected a file and a label, and found 'a.png,'"),
        ("a.png,cat\nb.png,dog\n./a.png,cat\n", "line 3: a.png has a label already"),
        ("a.png,cat\nx.png,dog\nb.png,dog\nsub/c.png,dog\n", r"1 of the 4 files with a label are not there \(x.png\)"),
        ("a.png,cat\nb.png,dog\n", r"1 images have no label \(sub/c.png\)\. Expected: images, and a CSV.*partial=True"),
        ("../flat/a.png,cat\n", "1 of the 1 files with a label are not there"),
        ("a.png,cat\n" + '"' + "x" * 200_000 + '",dog\n', r"cannot be read as a CSV file \(field larger"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit(flat, text, message):
    with pytest.raises(InputError, match=message):
        labels_of(flat, text)


def test_what_a_table_lacks_can_be_left_out(flat):
    assert labels_of(flat, "b.png,1\nx.png,0\n", view(2), partial=True)[1] == [1]


def test_files_that_are_no_tables(flat):
    file = flat.parent / "labels.csv"
    file.write_bytes(b"a.png,\xff\n")
    for labels, message in ((file, "cannot be read as a CSV file"), (flat / "no.csv", "There is no file .*no.csv")):
        with pytest.raises(InputError, match=message):
            open_data("folder", flat, AS_IT_IS, Selection(labels=labels))
    with pytest.raises(ConfigError, match="labels= and frost= do not go with the bundled images"):
        open_data("bundled", None, AS_IT_IS, Selection(labels=file))
    for name, domains in (("imagenet", None), ("folder", ["sub"])):
        with pytest.raises(ConfigError, match="labels= goes with data='folder', and not with domains="):
            open_data(name, flat, AS_IT_IS, Selection(labels=file, domains=domains))


def test_images_of_a_table_can_be_corrupted(flat):
    data, labels = labels_of(flat, "a.png,0\nb.png,1\nsub/c.png,1\n", view(2), corruptions=["clean", "fog"])
    assert [domain.key for domain in data.domains] == [("clean", None), ("fog", 5)] and labels == [0, 1, 1]
    assert data.domain("snow", 1).labels.tolist() == [0, 1, 1]


def test_check_with_a_table(flat, capsys):
    arguments = ["data", "check", "--data", "folder", "--root", str(flat), "--labels"]
    assert cli.main([*arguments, str(table(flat, "a.png,0\nb.png,1\nsub/c.png,1\n"))]) == 0
    assert "can be used as folder" in capsys.readouterr().out
    assert cli.main([*arguments, str(table(flat, "a.png,0\n"))]) == 2
    assert "2 images have no label" in capsys.readouterr().err


# Numbers of classes


@pytest.mark.parametrize("spelling", ["{}", "{:03}"])
def test_folders_with_numbers_are_in_numerical_order(tmp_path, spelling):
    folders = [spelling.format(number) for number in range(12)]
    write(tmp_path, *(f"{folder}/x.png" for folder in folders))
    data = open_data("folder", tmp_path, view(12))
    assert data.class_names == folders and data.domains[0].labels.tolist() == list(range(12)) and data.classes is None
    assert data.domains[0].path(10) == str(tmp_path / folders[10] / "x.png")


def test_gaps_between_numbers(tmp_path):
    write(tmp_path, "10/x.png", "2/x.png", "007/x.png")
    data = open_data("folder", tmp_path, view(12))
    assert data.class_names == ["2", "007", "10"] and data.domains[0].labels.tolist() == [0, 1, 2]
    assert data.classes == [2, 7, 10]  # columns of the head
    assert open_data("folder", tmp_path, view(3)).classes is None  # a head for just these
    with pytest.raises(
        ConfigError, match=r"head of the model has 10 classes, and folder has 3: .* from 0 to 9 \(there is 10\)"
    ):
        open_data("folder", tmp_path, view(10))
    write(tmp_path, "cat/x.png")
    assert open_data("folder", tmp_path, view(4)).class_names == ["007", "10", "2", "cat"]  # names, not numbers


@pytest.mark.parametrize("partial", [False, True])
def test_two_folders_of_one_number(tmp_path, partial):
    write(tmp_path, "1/x.png", "01/x.png", "0/x.png")
    with pytest.raises(InputError, match=r"folders have the number of one class \(01 and 1\)"):
        open_data("folder", tmp_path, view(3), Selection(partial=partial))


# Own domains


@pytest.fixture
def street(tmp_path):
    return write(
        tmp_path / "street",
        *(f"{domain}/{thing}/{i}.png" for domain in ("day", "night", "rain") for thing in ("bus", "car") for i in (1, 2)),
        size=(40, 50),
    )


def test_own_domains(street):
    data = open_data("folder", street, view(2), Selection(domains=["night", "day"]))
    assert [domain.key for domain in data.domains] == [("night", None), ("day", None)]
    assert data.class_names == ["bus", "car"] and all(domain.labels.tolist() == [0, 0, 1, 1] for domain in data.domains)
    assert data.domains[0].path(0) == str(street / "night/bus/1.png")
    assert data.domains[0].identity != data.domains[1].identity
    (domain,) = open_data("folder", street, view(2), Selection(domains=["day"], corruptions=["fog"])).domains
    assert domain.key == ("fog", 5) and domain.path(0) == str(street / "day/bus/1.png")


def test_a_class_that_one_domain_lacks(street):
    write(street, "day/ant/1.png")
    with pytest.raises(InputError, match=r"night: 1 of 3 classes have no images \(ant\).*Expected: <domain>/<class>/\*"):
        open_data("folder", street, view(3), Selection(domains=["day", "night"]))
    data = open_data("folder", street, view(3), Selection(domains=["day", "night"], partial=True))
    assert [domain.labels.tolist() for domain in data.domains] == [[0, 1, 1, 2, 2], [1, 1, 2, 2]]


def test_domains_that_do_not_fit(street):
    with pytest.raises(InputError, match=r"nights is missing. Did you mean 'night'\? Found there: day, night, rain"):
        open_data("folder", street, view(2), Selection(domains=["day", "nights"]))
    for domains in ([], ["../street"], [".."], ["day/bus"]):
        with pytest.raises(ConfigError, match="give names of sub-folders"):
            open_data("folder", street, view(2), Selection(domains=domains))
    with pytest.raises(ConfigError, match="no corruptions on disk"):
        open_data("folder", street, view(2), Selection(domains=["day", "night"], corruptions=["fog"]))


@pytest.mark.parametrize("setting", ["normal", "continual", "mixed"])
def test_a_bench_of_own_domains(street, setting):
    results = acclimate.bench(
        view(2), "folder", street, domains=["day", "night"], methods=["source"], settings=setting, out=None
    )
    assert len(results) == (2 if setting == "normal" else 1)
    seen = [domain for outcome in results for domain in outcome.spec.domains]
    assert "day" in str(seen) and "night" in str(seen) and "fog" not in str(seen)


# Trees of corruptions


@pytest.fixture
def tree(street, tmp_path):
    corrupt_folder(street / "day", tmp_path / "tree", ["snow", "fog"], [2, 4], workers=1)
    return tmp_path / "tree"


def test_a_tree_of_corruptions_is_not_corrupted_again(tree):
    data = open_data("folder", tree, view(2))
    assert [domain.key for domain in data.domains] == [("snow", 2), ("snow", 4), ("fog", 2), ("fog", 4)]
    assert data.class_names == ["bus", "car"] and all(domain.labels.tolist() == [0, 0, 1, 1] for domain in data.domains)
    assert all(domain.corruption is None for domain in data.domains)
    assert data.domains[1].path(3) == str(tree / "snow/4/car/2.JPEG")
    (one,) = open_data("folder", tree, view(2), Selection(corruptions=["fog"], severities=[4])).domains
    assert one.key == ("fog", 4) and one.preprocess.resize == 35  # images of any size, as in a folder
    assert check_data("folder", tree).usable


def test_the_classes_of_a_tree_stay_the_same(tree):
    for file in (tree / "fog/2/bus").iterdir():
        file.unlink()
    (tree / "fog/2/bus").rmdir()
    data = open_data("folder", tree, view(2), Selection(corruptions=["snow"], partial=True))
    assert data.domain("fog", 2).labels.tolist() == [1, 1]


def test_squares_of_a_tree_are_not_resized(street, tmp_path):
    corrupt_folder(street / "day", tmp_path / "tree", ["fog"], [1], resize_crop=(36, 32), workers=1)
    (domain,) = open_data("folder", tmp_path / "tree", view(2)).domains
    assert (domain.preprocess.resize, domain.preprocess.crop) == (None, 32)
    (tmp_path / "tree/corruptions.json").write_text(json.dumps({"resize_crop": [32]}))
    with pytest.raises(InputError, match=r"corruptions.json is damaged"):
        open_data("folder", tmp_path / "tree", view(2))


def test_trees_that_do_not_fit(tree):
    with pytest.raises(
        InputError, match=r"frost is missing\. Found there: fog, snow, corruptions.json\. Expected: <corruption>/<s"
    ):
        open_data("folder", tree, view(2), Selection(corruptions=["frost"]))
    with pytest.raises(ConfigError, match="is a tree of corruptions: choose with corruptions="):
        open_data("folder", tree, view(2), Selection(domains=["fog"]))
    with pytest.raises(ConfigError, match="made on the fly"):
        open_data("folder", tree, view(2), Selection(constants="imagenet-c"))


def test_a_source_model_is_trained_on_one_domain(tree, tmp_path, capsys):
    arguments = ["--data", "folder", "--root", str(tree), "--model", "test_vit", "--no-pretrained"]
    assert cli.main(["train-source", *arguments, "--out", str(tmp_path / "model.safetensors")]) == 2
    assert "has several domains, snow/2 and others" in capsys.readouterr().err


@pytest.mark.parametrize(
    "paths", [["fog/1/x.png", "snow/x.png"], ["fog/1/x.png", "sun/1/x.png"], ["fog/a/x.png"], ["fog/1/x.png", "x.png"]]
)
def test_classes_with_names_of_corruptions_are_no_tree(tmp_path, paths):
    write(tmp_path, *paths)
    data = open_data("folder", tmp_path, AS_IT_IS)
    assert data.domains[0].key.name == "folder" and data.class_names[0] == "fog"


def test_the_command_benches_what_the_command_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for i in range(len(acclimate.bundled.CLASSES)):
        (tmp_path / "in" / str(i)).mkdir(parents=True)
        Image.fromarray(np.full((28, 28, 3), 20 * i, np.uint8)).save(tmp_path / "in" / str(i) / "x.png")
    assert (
        cli.main(["corrupt", str(tmp_path / "in"), str(tmp_path / "tree"), "--corruptions", "fog", "--severities", "3"]) == 0
    )
    arguments = ["bench", "--data", "folder", "--methods", "source", "--out", str(tmp_path / "runs"), "--device", "cpu"]
    assert cli.main([*arguments, "--root", str(tmp_path / "tree")]) == 0
    out = capsys.readouterr().out
    assert "fog" in out and "snow" not in out and "every second" not in out
    lines = [f"{i}/x.png,{name}" for i, name in enumerate(acclimate.bundled.CLASSES)]
    csv = table(tmp_path / "in", "\n".join(["file,label", *lines]))
    assert cli.main([*arguments, "--root", str(tmp_path / "in"), "--labels", str(csv), "--corruptions", "clean"]) == 0
    assert cli.main([*arguments, "--root", str(tmp_path / "in"), "--labels", str(tmp_path / "no.csv")]) == 2
    assert "does not exist" in capsys.readouterr().err
