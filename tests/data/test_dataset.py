"""A user's own datasets and loaders as domains of the bench."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import acclimate
from acclimate.data.dataset import OwnDataset
from acclimate.errors import InputError
from acclimate.testing.check import tiny_batches, tiny_model


def own(count=12, seed=2):
    return TensorDataset(torch.cat(tiny_batches(2, 6, seed=seed))[:count], torch.arange(count) % 10)


def test_items_are_images_and_labels():
    domain = OwnDataset(own(), "day")
    assert domain.labels.tolist() == [i % 10 for i in range(12)] and str(domain.key) == "day"
    assert torch.equal(domain.load(np.array([3, 1])), own().tensors[0][[3, 1]])
    assert domain.identity == OwnDataset(own(), "day").identity
    others = OwnDataset(own(seed=3), "day"), OwnDataset(own(), "night"), OwnDataset(own(11), "day")
    assert domain.identity not in [other.identity for other in others]


def test_a_folder_that_torchvision_opens(tmp_path):
    datasets, transforms = pytest.importorskip("torchvision.datasets"), pytest.importorskip("torchvision.transforms")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((32, 32, 3), 99, np.uint8)).save(tmp_path / name / "0.png")
    folder = datasets.ImageFolder(tmp_path, transforms.ToTensor())
    assert OwnDataset(folder).labels.tolist() == [0, 1]
    with pytest.raises(InputError, match="image 0 is a Image: give the dataset a transform"):
        OwnDataset(datasets.ImageFolder(tmp_path)).load(np.array([0]))


@pytest.mark.parametrize("data", [own(), DataLoader(own(), batch_size=5), {"day": own(), "night": DataLoader(own(seed=4))}])
def test_the_bench_takes_own_data(data, tmp_path):
    results = acclimate.bench(tiny_model("resnet"), data, methods=["source", "tent", "norm"], batch_size=6, out=tmp_path)
    names = ["day", "night"] if isinstance(data, dict) else ["own data"]
    assert len(results.frame()) == 3 * len(names) and {*results.frame()["domain"]} == {*names}


class Labelled(Dataset):
    """Two images with the same label."""

    def __init__(self, label):
        self.label = label

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.zeros(3, 32, 32), self.label


def test_what_is_no_dataset_is_named():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.zeros(3, 32, 32), 0

    for data, message in (
        (Endless(), "no order and no length"),
        (TensorDataset(torch.zeros(2, 3, 32, 32)), "no pair of an image and a label"),
        (TensorDataset(torch.zeros(0, 3, 32, 32), torch.zeros(0)), "there are no images"),
        ({"day": [1, 2]}, "dictionary of datasets or loaders"),
        ([(torch.zeros(3, 32, 32), 1)], "data= is a list: give a dataset or loader of torch"),
        (Labelled("cat"), "its labels begin with 'cat': give columns of the model's head, as whole numbers"),
        (Labelled(None), "its labels begin with None"),
        (Labelled(1.5), "its labels begin with 1.5"),
        (Labelled(torch.eye(10)[1]), "its labels begin with tensor"),
    ):
        with pytest.raises(InputError, match=message):
            acclimate.bench(tiny_model(), data, methods=["source"])
