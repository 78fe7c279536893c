"""Hostile streams show every image of the shift, in the order that their name says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from acclimate.data import bundled
from acclimate.data.domains import Corrupted, Subset
from acclimate.data.hostile import FIRST, TURN, Junk, hostile_streams
from acclimate.errors import ConfigError


@pytest.fixture(scope="module")
def domains():
    how = {"mean": bundled.MEAN, "std": bundled.STD}
    shown = [Corrupted(bundled.images(), **how), Corrupted(bundled.images(), "fog", 5, **how)]
    return [Subset.sample(domain, 320) for domain in shown]


@pytest.fixture(scope="module")
def streams(domains):
    return {stream.setting: stream for stream in hostile_streams(domains, batch_size=64)}


def labels(stream):
    return torch.cat([batch.labels for batch in stream])


def test_the_names_say_what_is_shown(streams):
    assert list(streams) == [
        *("shuffled clean", "shuffled fog/5", "sorted by class", "one class first", "noise first", "black first"),
        *("single images", "alternating", "adversarial mix"),
    ]
    assert streams["single images"].batch_size == 1


def test_sorted_is_sorted_and_complete(streams, domains):
    found = labels(streams["sorted by class"])
    assert (found.diff() >= 0).all()
    assert torch.equal(found, torch.from_numpy(np.sort(domains[1].labels)))


def test_one_class_lasts_and_others_follow(streams):
    found = labels(streams["one class first"])
    assert len(found[:FIRST].unique()) == 1
    assert len(found[FIRST:].unique()) == 10


@pytest.mark.parametrize("kind", ["noise", "black"])
def test_junk_comes_first_and_every_image_after_it(streams, kind):
    stream = streams[f"{kind} first"]
    order = stream.order
    assert order[:FIRST].tolist() == list(range(FIRST))
    assert sorted(order[FIRST:]) == list(range(FIRST, FIRST + 320))
    images = next(iter(stream)).images
    assert (images.std() > 0.3) if kind == "noise" else (images == images.min()).all()


def test_domains_take_turns(streams):
    domain = torch.cat([batch.domain for batch in streams["alternating"]])
    assert domain[: 4 * TURN].tolist() == [*[0] * TURN, *[1] * TURN] * 2


def test_the_mix_contains_junk_and_every_image(streams):
    order = streams["adversarial mix"].order
    assert sorted(order) == list(range(80 + 320))


def test_streams_are_the_same_at_every_call(streams, domains):
    again = {stream.setting: stream.digest for stream in hostile_streams(domains, batch_size=64)}
    assert again == {name: stream.digest for name, stream in streams.items()}


def test_without_a_shift_there_is_nothing_hostile(domains):
    with pytest.raises(ConfigError, match="at least one shift"):
        list(hostile_streams(domains[:1]))


def test_unknown_junk_is_refused():
    with pytest.raises(ConfigError, match="glitter"):
        Junk("glitter", 4, (3, 8, 8), None)
