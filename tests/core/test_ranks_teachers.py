"""Methods with teachers, memories and views: ranks that share the batches of a stream adapt as one process does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import acclimate
from acclimate.core.registry import find_method
from acclimate.testing.check import assert_identical, tiny_batches
from support import assert_exact, child_environment, double_model

pytestmark = pytest.mark.numerics
CUTS = (4, 1, 6, 3)  # rank 0 takes so many of a batch of six, rank 1 the rest
METHODS = {
    "cotta": dict(threshold=0.95, views=2, restore=0.1, lr=0.01, teacher_momentum=0.8),
    "memo": dict(lr=1e-3, views=3),
    "roid": dict(lr=0.01),
    "cmf": dict(lr=0.01, q=1.0),
    "rotta": dict(memory=8, every=8, lr=0.01, nu=0.3),
    "adacontrast": dict(lr=0.01, queue=16, neighbours=3, refine_after=8),
    "dept-g": dict(find_method("dept-g").info.quick, steps=2),
    "dda": dict(denoiser="gaussian", steps=10, start=3, scale=60.0, reference=True),
}


def play(name, rank=None):
    """Logits, state and the last record of a short stream."""
    group = None if rank is None else dist.group.WORLD
    model = acclimate.adapt(double_model(), name, group=group, mean=0.5, std=0.5, **METHODS[name])
    logits = []
    for images, cut in zip(tiny_batches(), CUTS):
        logits.append(model(images if rank is None else images[cut:] if rank else images[:cut]))
    return logits, dict(model.state.capture()), (model.record.used, model.record.loss)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    commands = [[sys.executable, __file__, str(folder), str(rank)] for rank in (0, 1)]
    started = [subprocess.Popen(command, env=child_environment()) for command in commands]
    try:
        assert [process.wait(timeout=300) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", METHODS)
def test_two_ranks_are_one_process(pair, name):
    torch.manual_seed(0)
    logits, state, (used, loss) = play(name)
    (first, mine, record), (second, theirs, _) = (results[name] for results in pair)
    for a, b, expected in zip(first, second, logits):
        assert_exact(torch.cat([a, b]), expected, "logits")
    assert record[0] == used and (record[1] is None) == (loss is None)
    if loss is not None:
        assert_exact(record[1], loss, "loss")
    assert_identical(mine, theirs, "ranks")
    for key, value in state.items():
        assert_exact(mine[key], value, key)


if __name__ == "__main__":
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save({name: play(name, rank) for name in METHODS}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
