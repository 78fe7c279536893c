"""Streams: orders that can be reproduced, and every setting's shape."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate.data.domains import Domain, DomainKey
from acclimate.data.streams import SAR_DIGESTS, Stream, label_shift
from acclimate.errors import ConfigError, InputError


class Numbers(Domain):
    """A domain whose images say which they are."""

    def __init__(self, name: str = "fog", severity: int | None = 5, classes: int = 4, each: int = 6) -> None:
        self.key = DomainKey(name, severity)
        self.labels = np.repeat(np.arange(classes), each)

    def load(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices).float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()


def new_images(stream: Stream) -> list[int]:
    return [int(number) for batch in stream for number in batch.images[:, 0, 0, 0]]


IMAGENET = np.repeat(np.arange(1000), 50)


@pytest.mark.parametrize("seed", [2022, 2023])
def test_label_shift_is_the_authors_file(seed):
    indices = label_shift(IMAGENET, seed=seed)
    assert indices.shape == (100_000,)
    assert SAR_DIGESTS[hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()] == seed


def test_a_label_shift_stream_has_the_authors_digest():
    assert SAR_DIGESTS[Stream(Numbers(classes=1000, each=50), "label-shift", seed=2022).digest] == 2022


def test_seed_2021_says_that_it_is_not_the_authors_order():
    domain = Numbers(classes=1000, each=50)
    assert "not SAR's order" in Stream(domain, "label-shift", seed=2021).description
    assert "not SAR's" not in Stream(domain, "label-shift", seed=2022).description
    assert "not SAR's" not in Stream(domain, "normal", seed=2021).description


def test_the_users_index_file_is_taken(tmp_path):
    order = label_shift(IMAGENET, seed=2023)
    np.save(tmp_path / "order.npy", order)
    stream = Stream(Numbers(classes=1000, each=50), "label-shift", seed=2021, order=tmp_path / "order.npy")
    assert np.array_equal(stream.order, order)
    assert "SAR's of seed 2023" in stream.description


@pytest.mark.parametrize(
    "order", [np.array([0, 24]), np.array([-1]), np.array([[0]]), np.array([0.5]), np.array([], np.int64)]
)
def test_an_index_file_that_does_not_fit_is_refused(order):
    with pytest.raises(InputError, match="0 to 23"):
        Stream(Numbers(), "label-shift", order=order)


def test_an_index_list_is_as_good_as_an_array():
    assert Stream(Numbers(), "label-shift", order=[3, 1, 3]).order.tolist() == [3, 1, 3]


def test_sars_file_is_refused_for_images_in_another_order():
    domain = Numbers(classes=1000, each=50)
    domain.labels = domain.labels[::-1]
    with pytest.raises(InputError, match="sorted by class"):
        Stream(domain, "label-shift", order=label_shift(IMAGENET, seed=2023))


def test_a_file_that_is_no_array_is_refused(tmp_path):
    for content in (b"not numpy", b"PK\x03\x04 a zip file", b""):
        (tmp_path / "order.npy").write_bytes(content)
        with pytest.raises(InputError, match=r"order\.npy"):
            Stream(Numbers(), "label-shift", order=tmp_path / "order.npy")
    with pytest.raises(InputError, match=r"missing\.npy"):
        Stream(Numbers(), "label-shift", order=tmp_path / "missing.npy")
    with pytest.raises(ConfigError, match="label-shift"):
        Stream(Numbers(), "normal", order=np.array([0]))


@given(st.integers(2, 8), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1, 7, 500_000]))
@settings(max_examples=30, deadline=None)
def test_label_shift_for_any_size(classes, each, seed, ratio):
    labels = np.repeat(np.arange(classes), each)
    indices = label_shift(labels, seed=seed, ratio=ratio)
    assert len(indices) == 2 * len(labels)
    assert indices.min() >= 0 and indices.max() < len(labels)
    if ratio == 500_000:
        turns = labels[indices].reshape(classes, -1)
        dominating = [Counter(turn).most_common(1)[0][0] for turn in turns.tolist()]
        assert sorted(dominating) == list(range(classes))


def test_label_shift_at_ratio_one_is_uniform():
    counts = np.bincount(np.repeat(np.arange(5), 400)[label_shift(np.repeat(np.arange(5), 400), seed=0, ratio=1)])
    assert counts.sum() == 4000
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800)


def test_label_shift_keeps_to_the_labels_that_exist():
    labels = np.array([3, 9, 3, 9, 9])
    assert set(labels[label_shift(labels, seed=0)]) == {3, 9}


def test_normal_shows_every_image_once_in_batches():
    stream = Stream(Numbers(), batch_size=10)
    sizes = [len(batch.labels) for batch in stream]
    assert sizes == [10, 10, 4]
    assert len(stream) == 3
    assert stream.samples == 24
    assert sorted(new_images(stream)) == list(range(24))
    assert new_images(stream) != list(range(24))


def test_labels_belong_to_their_images():
    domains = [Numbers("fog", s) for s in range(1, 6)]
    for setting in ("mixed", "continual", "gradual", "mixed+label-shift"):
        for images, labels, domain in Stream(domains, setting, batch_size=7):
            assert torch.equal(labels, images[:, 0, 0, 0].long() // 6)
            assert domain.shape == labels.shape


def test_bs1_is_one_at_a_time():
    stream = Stream(Numbers(), "bs1", batch_size=64)
    assert [len(batch.labels) for batch in stream] == [1] * 24


def test_mixed_mixes_within_batches():
    stream = Stream([Numbers("fog"), Numbers("snow")], "mixed", batch_size=16)
    assert [len(batch.labels) for batch in stream] == [16, 16, 16]
    assert all(len(batch.domain.unique()) == 2 for batch in stream)


def test_continual_goes_through_the_domains_in_turn():
    stream = Stream([Numbers("fog"), Numbers("snow")], "continual", batch_size=16)
    assert [(len(b.labels), b.domain.unique().tolist()) for b in stream] == [(16, [0]), (8, [0]), (16, [1]), (8, [1])]
    fog, snow = new_images(stream)[:24], new_images(stream)[24:]
    assert sorted(fog) == sorted(snow) == list(range(24))
    assert fog != snow


def test_gradual_rises_and_falls():
    domains = [Numbers(name, s) for s in (3, 1, 2, 5, 4) for name in ("fog", "snow")]
    stream = Stream(domains, "gradual", batch_size=24)
    met = [str(domains[int(batch.domain[0])].key) for batch in stream]
    assert met == [f"{name}/{s}" for name in ("fog", "snow") for s in (1, 2, 3, 4, 5, 4, 3, 2, 1)]
    rising, falling = (new_images(stream)[i * 24 : (i + 1) * 24] for i in (0, 8))
    assert sorted(rising) == sorted(falling) and rising != falling
    with pytest.raises(ConfigError, match=r"fog/2.* missing"):
        Stream([Numbers("fog", s) for s in (1, 3, 4, 5)], "gradual")


@pytest.mark.parametrize("arrangement", ["continual", "gradual", "mixed"])
def test_label_shift_goes_with_each_arrangement(arrangement):
    domains = [Numbers("fog", s) for s in range(1, 6)]
    plain, shifted = (Stream(domains, setting, batch_size=8) for setting in (arrangement, f"{arrangement}+label-shift"))
    assert shifted.samples == 2 * plain.samples

    def changes(stream: Stream) -> int:
        labels = np.concatenate([batch.labels.numpy() for batch in stream])
        return int((labels[1:] != labels[:-1]).sum()) * 1000 // len(labels)

    assert changes(shifted) < changes(plain) / 4
    assert Stream(domains, f"{arrangement}+label-shift+bs1").batch_size == 1


def test_the_order_depends_on_seed_domain_and_setting_alone():
    base = Stream(Numbers(), seed=1)
    assert base.digest == Stream((Numbers() for _ in range(1)), seed=np.int64(1), batch_size=5, workers=2).digest
    others = [Stream(Numbers(), seed=2), Stream(Numbers("snow"), seed=1), Stream(Numbers("fog", 3), seed=1)]
    others.append(Stream(Numbers(), "bs1", seed=1))
    assert len({base.digest, *(stream.digest for stream in others)}) == 5


def test_workers_and_global_randomness_change_nothing():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    alone = new_images(Stream(Numbers(), batch_size=5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert new_images(Stream(Numbers(), batch_size=5, workers=2)) == alone


def test_a_stream_can_be_walked_again():
    stream = Stream(Numbers(), batch_size=5)
    assert new_images(stream) == new_images(stream)


def test_names_of_a_setting_may_come_in_any_order():
    domains = [Numbers("fog"), Numbers("snow")]
    assert Stream(domains, "label-shift+continual").setting == Stream(domains, "continual+label-shift").setting


@pytest.mark.parametrize("setting", ["Normal", "mixed+continual", "normal+bs1", "bs1+bs1", ""])
def test_a_setting_that_does_not_exist_is_refused(setting):
    with pytest.raises(ConfigError, match="setting"):
        Stream([Numbers(), Numbers("snow")], setting)


def test_bad_input_is_refused_by_name():
    with pytest.raises(ConfigError, match="batch_size=0"):
        Stream(Numbers(), batch_size=0)
    with pytest.raises(ConfigError, match="ratio"):
        Stream(Numbers(), "label-shift", ratio=0.5)
    with pytest.raises(ConfigError, match="one domain, 2 were given"):
        Stream([Numbers(), Numbers("snow")])
    with pytest.raises(ConfigError, match="at least one"):
        Stream([])
    with pytest.raises(ConfigError, match="same name"):
        Stream([Numbers(), Numbers()], "mixed")
    with pytest.raises(ConfigError, match="ratio"):
        Stream(Numbers(), "label-shift", ratio=float("inf"))
    for labels in (np.array([0, -1]), np.array([0.5]), np.zeros((2, 2), int), np.array([], int)):
        domain = Numbers()
        domain.labels = labels
        with pytest.raises(InputError, match="fog/5"):
            Stream(domain)


def test_the_description_names_the_protocol():
    text = repr(Stream([Numbers("fog"), Numbers("snow")], "continual+label-shift", seed=2022, batch_size=16))
    for part in ("continual+label-shift", "fog/5, snow/5", "96 images in 6 batches of up to 16", "500000", "seed 2022"):
        assert part in text
