"""Ranks that share the batches of a stream adapt as one process does, and fail together.

Starting a process is slow, so one pair of them plays all scenes; each scene's result, per rank, is what the tests look at.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import acclimate
from acclimate.core import guard as guards
from acclimate.core import statefile
from acclimate.core.engine import entropy
from acclimate.testing.check import assert_identical, tiny_batches, tiny_model
from support import EXACT, SINGLE, assert_exact, child_environment, double_batches, double_model, rounding

pytestmark = pytest.mark.numerics
CUTS = (4, 1, 6, 3, 0)  # rank 0 takes so many of a batch of six, rank 1 the rest
OPTIONS = {
    "tent": {"lr": 0.02},
    "sar": {"lr": 0.02},
    "dct": {"lr": 0.02, "lr_generator": 0.02},
    "moetta": {"lr": 0.02},
    "spa": {"lr_noise": 0.05, "mean": 0.5, "std": 0.5},
}
TINTS = 2 * torch.randn(20, 16, 3, 1, 1, generator=torch.Generator().manual_seed(0))
VARIED = [images + tint for images, tint in zip(tiny_batches(20, 16, seed=11), TINTS)]  # predicted as all kinds of classes
SECONDS = 60  # a wait that lasts longer is a deadlock
SCENES = {}


def scene(play):
    SCENES[play.__name__] = play
    return play


def world():
    return dist.group.WORLD if dist.is_initialized() else None


def wrap(method="tent", model=None, **options):
    """In a process of the pair with the other one, elsewhere alone."""
    return acclimate.adapt(model or double_model(), method, group=world(), **{**OPTIONS.get(method, {}), **options})


def part(images, cut):
    if not dist.is_initialized():
        return images
    return images[cut:] if dist.get_rank() else images[:cut]


def go(model, batches, cuts=CUTS):
    """Adapt to batches; what a scene reports of that."""
    logits, records = [], []
    for images, cut in zip(batches, cuts):
        logits.append(model(part(images, cut)))
        record = {name: value for name, value in asdict(model.record).items() if name != "milliseconds"}
        harm = {f"harm {i}": value for i, value in enumerate(record.pop("harm") or ())}  # torch.load knows plain types only
        records.append({**record, **harm})
    return {"logits": logits, "records": records, "state": dict(model.state.capture())}


def attempt(call, *arguments, **options):
    """The error of a call, as its kind and its words."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def unchanged(model, before):
    return all(torch.equal(before[name].nan_to_num(7), now.nan_to_num(7)) for name, now in model.state.capture().items())


# ---- scenes, played by both ranks -------------------------------------------------------------------------------------


@scene
def tent(rank, folder):
    return go(wrap("tent"), tiny_batches(5))


@scene
def sar(rank, folder):
    return go(wrap("sar"), tiny_batches(5))


@scene
def dct(rank, folder):
    return go(wrap("dct"), tiny_batches(5))


@scene
def recentred(rank, folder):
    return go(wrap("tent", recentre=True), tiny_batches(5))


# methods that compare, remember or shuffle samples
BESIDE = ("t3a", "lame", "deyo", "zerosiam", "spa", "neo", "rem", "moetta")
SCENES |= {name: lambda rank, folder, name=name: go(wrap(name), tiny_batches(5)) for name in BESIDE}


@scene
def eata(rank, folder):
    source = acclimate.source_statistics(double_model(), tiny_batches(2, seed=3), kinds=["fisher"], batch_size=6)
    options = {"lr": 0.002, "margin": 1.5, "redundancy": 0.7, "fisher_weight": 5.0}
    return go(wrap("eata", source_statistics=source, **options), tiny_batches(5))


@scene
def cfa(rank, folder):
    source = acclimate.source_statistics(double_model(), tiny_batches(2, seed=3), kinds=["features"])
    return go(wrap("cfa", source_statistics=source, lr=0.005), tiny_batches(5))


@scene
def foa(rank, folder):
    source = acclimate.source_statistics(double_model(), tiny_batches(2, seed=3), kinds=["class_tokens"])
    return go(wrap("foa", source_statistics=source, population=4), tiny_batches(5))


def known(kind):
    return acclimate.source_statistics(double_model(), tiny_batches(2, seed=3), kinds=[kind])


@scene
def poem(rank, folder):
    return go(wrap("poem", source_statistics=known("logits"), lr=0.2, margin=1.5, delay=7), tiny_batches(5))


@scene
def recap(rank, folder):
    options = {"lr": 0.01, "tau": 0.02, "variant": "plpd", "threshold": -0.5}
    return go(wrap("recap", source_statistics=known("class_tokens"), **options), tiny_batches(5))


@scene
def actmad(rank, folder):
    return go(wrap("actmad", source_statistics=known("class_tokens")), tiny_batches(5))


@scene
def rdumb(rank, folder):
    return go(wrap("rdumb", period=2, lr=0.01, margin=1.5, redundancy=0.7), tiny_batches(5))


@scene
def delta(rank, folder):
    return go(wrap("delta", lr=0.01, entropy_weight=True), tiny_batches(5))


@scene
def after(rank, folder):
    return go(wrap("dct", predict="after"), tiny_batches(5))


@scene
def single_precision(rank, folder):
    return go(wrap("dct", tiny_model()), tiny_batches(5))


@scene
def default_rates(rank, folder):
    model = wrap("sar", lr=None)
    model(part(tiny_batches(1)[0], 5))
    return {"lr": model.engine.adapted.optimizer.param_groups[0]["lr"], "batch_size": int(model.state.batch_size)}


def sorted_by_entropy(model, images):
    with model.frozen():  # exchanges nothing: both ranks pass everything
        return images[entropy(model(images)).argsort()]


@scene
def one_side_reliable(rank, folder):
    """Rank 0 has the samples that are reliable, rank 1 has others only; then the other way round."""
    out = {}
    for method in ("sar", "dct"):
        model = wrap(method, recovery=0.0)
        images = sorted_by_entropy(model, tiny_batches(1, 10)[0])
        with model.frozen():
            reliable = int((entropy(model(images)) < 0.4 * torch.tensor(10.0).log()).sum())
        out[method] = {"reliable": reliable, **go(model, [images, images.flip(0)], [reliable, len(images) - reliable])}
    return out


@scene
def none_reliable(rank, folder):
    return go(wrap("dct", margin=0.0), tiny_batches(2))


@scene
def bad_images(rank, folder):
    model = wrap("dct")
    first, second, third = tiny_batches(3)
    out = {"before": go(model, [first])}
    before = model.state.capture()
    nan, small = third.clone(), third[..., :16, :16]
    nan[5, 0, 3, 3] = torch.nan
    out["errors"] = [
        attempt(model, part(nan, 4)),
        attempt(model, part(third, 4) if rank else part(small, 4)),
        attempt(model, [1.0] if rank else part(third, 4)),
        attempt(model, torch.zeros(0, 3, 32, 32)),
        attempt(model, torch.zeros(0, 3, 32, 16) if rank else third),
    ]
    out["unchanged"] = unchanged(model, before)
    out["after"] = go(model, [second, third])
    return out


@scene
def not_finite(rank, folder):
    """Images so bright on rank 1 that its logits are NaN."""
    first, second = double_batches(2)
    bright = second.clone()
    bright[4:] = 1e308 * bright[4:].sign()
    out = {}
    for guard in (None, "default"):
        model = wrap("sar", guard=guard)
        go(model, [first])
        before = model.state.capture()
        out[f"error, guard {guard}"] = attempt(model, part(bright, 3))
        out[f"event, guard {guard}"] = model.record.event
        names = [name for name in before if name.startswith(("model/", "optimizer/", "method/"))]
        out[f"unchanged, guard {guard}"] = all(torch.equal(before[n], model.state.capture()[n]) for n in names)
        out[f"after, guard {guard}"] = go(model, [second])
    return out


@scene
def overflow(rank, folder):
    model = wrap("tent", tiny_model(), precision="float16")
    go(model, tiny_batches(1))
    model.engine.loss_scale.fill_(2.0**120)
    go(model, tiny_batches(1))
    return {"event": model.record.event, "scale": float(model.engine.loss_scale)}


@scene
def guard(rank, folder):
    """The collapse of test_guard.py, with a good snapshot before it, and without one, in short trials."""
    out, usual = {}, (guards.TRIAL, guards.FEWEST)
    guards.TRIAL, guards.FEWEST = 64, 0
    for name, healthy, action in (("rollback", 10, "rollback"), ("freeze", 0, "freeze")):
        model = wrap("tent", lr=1e-6, guard=acclimate.Guard(share=0.25, patience=64, drift=1e9, action=action))
        go(model, VARIED[:healthy], [5, 16, 11] * 4)
        good = None if model._good is None else int(model._good["steps"])
        with torch.no_grad():
            model.model.norm.bias.copy_(40 * model.engine.view.head.weight[3])
        out[name] = {"good": good, **go(model, VARIED[10:20], [9, 0, 16, 7] * 3)}
    model = wrap("tent", lr=0.1, guard=acclimate.Guard(drift=0.02))
    out["drift"] = go(model, VARIED[:4], [9, 0, 16, 7])
    guards.TRIAL, guards.FEWEST = usual
    return out


@scene
def recovery(rank, folder):
    return go(wrap("sar", recovery=10.0), tiny_batches(2))


@scene
def refused(rank, folder):
    """What cannot be wrapped together is given back, and can be wrapped again."""
    model, other = tiny_model(), tiny_model()
    with torch.no_grad():
        other.blocks[1].mlp.fc1.bias[3] += 1e-6 * rank
    interacting = tiny_model()
    interacting.patch_embed.proj = nn.Sequential(interacting.patch_embed.proj, nn.BatchNorm2d(32, track_running_stats=False))
    flags = [p.requires_grad for p in model.parameters()]
    errors = [
        attempt(wrap, "dct", other),
        attempt(wrap, "dct", model, seed=rank),
        attempt(wrap, "dct", model, lr=0.1 + rank),
        attempt(wrap, "tend" if rank else "tent", model),
        attempt(wrap, "tent", interacting),
        attempt(wrap, "tent", interacting if rank else model),
        attempt(acclimate.adapt, model, "tent", group="world"),
    ]
    given_back = flags == [p.requires_grad for p in model.parameters()]
    again = wrap("dct", model, micro_batch=1 + rank)  # which changes the cost alone
    return {"errors": errors, "given back": given_back, "after": go(again, tiny_batches(1))}


@scene
def apart(rank, folder):
    """One rank alone does what changes the state, or calls something else."""
    model = wrap("tent")
    images = tiny_batches(1)[0]
    go(model, [images])
    if rank:
        model.reset()
    errors = [attempt(model, part(images, 2))]
    model.reset()
    with torch.no_grad():
        model.model.norm.bias += rank
    errors.append(attempt(model, part(images, 2)))
    model.reset()
    errors.append(attempt(model.engine.ranks.gather, images) if rank else attempt(model, images))
    errors.append(attempt(model.engine.ranks.gather, images[:, : 2 + rank]))
    if rank:  # predictions alone concern nobody else
        with model.frozen():
            model(images)
    return {"errors": errors, "after": go(model, tiny_batches(2))}


class Clumsy(acclimate.Method):
    """Fails on rank 1 at the third batch: between two sweeps, or after the update."""

    def __init__(self, *, late: bool = False):
        super().__init__()
        self.late = late
        self.register_buffer("count", torch.tensor(0))

    def attach(self, view, setup):
        self._norms = list(view.blocks[0].norm1.parameters())
        return self._norms

    def optimizer(self, batch_size):
        return torch.optim.Adam(self._norms, lr=0.01)

    def step(self, images, engine):
        for late in (False, True):
            engine.gradient(images, lambda z: (entropy(z), torch.ones(len(z), dtype=torch.bool)))
            if late:
                engine.adapted.update()
                self.count += 1
            if engine.ranks.rank and int(self.count) == 2 + late and self.late == late:
                self.late = None
                raise OSError("the disk is full")
        return acclimate.Step(engine.predict(images))


@scene
def clumsy(rank, folder):
    out = {}
    for late in (False, True):
        model = wrap(Clumsy, late=late)
        go(model, tiny_batches(2))
        before = model.state.capture()
        error = attempt(model, part(tiny_batches(1)[0], 3))
        out[str(late)] = {"error": error, "unchanged": unchanged(model, before), **go(model, tiny_batches(2))}
    return out


@scene
def files(rank, folder):
    """Rank 1 saves; both load that and go on; a file that only one rank finds is no file."""
    model = wrap("dct")
    path = folder / "shared.safetensors"
    go(model, tiny_batches(3))
    if rank:
        model.save(path)
    model.save(folder / f"{rank}.safetensors")
    dist.barrier()
    loaded = acclimate.load(path, double_model(), group=world())
    plain = double_model()
    error = attempt(acclimate.load, path if rank else folder / "none.safetensors", plain, group=world())
    acclimate.load(path, plain).unwrap()  # nobody else, and it was given back
    return {"error": error, "loaded": go(loaded, tiny_batches(2, seed=5)), "kept": go(model, tiny_batches(2, seed=5))}


@scene
def copies(rank, folder):
    model = wrap("dct")
    go(model, tiny_batches(1))
    twin = copy.deepcopy(model)
    out = {"copy": go(twin, tiny_batches(2, seed=5)), "steps": int(model.steps)}
    out["original"] = go(model, tiny_batches(2, seed=5))
    return {**out, "pickle": attempt(pickle.dumps, model), "repr": repr(model)}


@scene
def gather(rank, folder):
    engine = wrap("tent").engine
    return [
        engine.ranks.gather(torch.arange(12.0).view(6, 2)[part(torch.arange(6), 2)]),
        engine.ranks.gather(part(torch.tensor([True, False, True]), 3)),
        engine.ranks.gather(part(torch.arange(5), 0)),
        engine.ranks.gather(torch.zeros(0, 4)),
    ]


@scene
def lost(rank, folder):
    """Rank 1 leaves without a word; comes last."""
    model = wrap("dct")
    go(model, tiny_batches(1))
    if rank:
        return None
    before = model.state.capture()
    return {"error": attempt(model, tiny_batches(1)[0]), "unchanged": unchanged(model, before)}


def play(rank, folder):
    """All scenes, in a process of the pair."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS)
    )
    results = {}
    for name, run in SCENES.items():
        try:
            results[name] = run(rank, folder)
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
    torch.save(results, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What each rank reports of a scene."""
    folder = tmp_path_factory.mktemp("pair")
    commands = [[sys.executable, __file__, str(rank), str(folder)] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, env=child_environment(), stderr=subprocess.PIPE) for command in commands]
    try:
        said = [process.communicate(timeout=3 * SECONDS)[1].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    results = [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]

    def reports(name):
        found = [result[name] for result in results]
        failures = [result["failed"] for result in found if isinstance(result, dict) and "failed" in result]
        assert not failures, "\n".join(failures)
        return found

    reports.folder = folder
    return reports


# ---- what the ranks report --------------------------------------------------------------------------------------------


def require_one_run(ranks, alone):
    """Two ranks, bit for bit alike, have made the run of a single process."""
    assert_identical(ranks[0]["state"], ranks[1]["state"], "ranks")
    assert ranks[0]["records"] == ranks[1]["records"]
    for name, expected in alone["state"].items():
        assert_exact(ranks[0]["state"][name], expected, name)
    for *shares, expected in zip(ranks[0]["logits"], ranks[1]["logits"], alone["logits"]):
        assert_exact(torch.cat(shares), expected, "logits")
    for record, expected in zip(ranks[0]["records"], alone["records"]):
        assert record == {  # SAR keeps its average loss in float32
            name: pytest.approx(value, rel=SINGLE, abs=EXACT) if isinstance(value, float) else value
            for name, value in expected.items()
        }


@pytest.mark.parametrize(
    "name",
    [
        *("tent", "sar", "dct", "eata", "cfa", "foa", "rdumb", "delta", "poem", "recap", "actmad"),
        *("recentred", "after", "none_reliable", "recovery"),
    ],
)
def test_two_ranks_adapt_as_one_process(pair, name):
    alone = SCENES[name](0, None)
    require_one_run(pair(name), alone)
    assert [len(logits) for logits in pair(name)[0]["logits"]] == list(CUTS[: len(alone["logits"])])
    if name == "recovery":
        assert alone["records"][0]["event"] == "recovered"
    elif name != "none_reliable":
        assert alone["records"][-1]["drift"] > 1e-3


@pytest.mark.parametrize("name", BESIDE)
def test_two_ranks_remember_and_compare_as_one_process(pair, name):
    require_one_run(pair(name), SCENES[name](0, None))


def test_in_float32_two_ranks_differ_from_one_process_by_rounding_alone(pair):
    ranks, alone, exact = pair("single_precision"), single_precision(0, None), dct(0, None)
    assert_identical(ranks[0]["state"], ranks[1]["state"], "ranks")
    tolerance = rounding(alone["logits"], exact["logits"])
    for *shares, expected in zip(ranks[0]["logits"], ranks[1]["logits"], alone["logits"]):
        torch.testing.assert_close(torch.cat(shares), expected, atol=tolerance, rtol=0)


def test_learning_rates_follow_the_whole_batch(pair):
    expected = {"lr": pytest.approx(0.001 * 6 / 64), "batch_size": 6}
    assert pair("default_rates") == [expected, expected]


@pytest.mark.parametrize("method", ["sar", "dct"])
def test_a_rank_that_keeps_nothing_makes_the_update_of_the_others(pair, method):
    ranks = [result[method] for result in pair("one_side_reliable")]
    alone = one_side_reliable(0, None)[method]
    assert 0 < alone["reliable"] < 10 and alone["records"][0]["used"] > 0
    require_one_run(ranks, alone)


def test_bad_images_of_one_rank_are_refused_by_all(pair):
    ranks = pair("bad_images")
    for first, second in zip(*(rank["errors"] for rank in ranks)):
        assert first == second
    for error, words in zip(
        ranks[0]["errors"],
        [
            "On rank 1: NaN or Inf in image 1 ",
            "On rank 0: Expected images of shape (batch, 3, 32, 32), got (4, 3, 16, 16)",
            "On rank 1: Images must be a torch.Tensor, not list",
            "The batch is empty on every rank",
            "On rank 1: Expected images of shape (batch, 3, 32, 32), got (1, 3, 32, 16)",
        ],
    ):
        assert error.startswith(f"InputError: {words}")
    assert all(rank["unchanged"] for rank in ranks)
    model = acclimate.adapt(double_model(), "dct", **OPTIONS["dct"])
    first, *others = tiny_batches(3)
    go(model, [first])
    require_one_run([rank["after"] for rank in ranks], go(model, others))


@pytest.mark.parametrize("guarded", [True, False])
def test_an_update_that_is_not_finite_on_one_rank_is_made_by_none(pair, guarded):
    ranks = pair("not_finite")
    which = f"guard {'default' if guarded else None}"
    problem = "On rank 1: the logits of this batch are not finite; no update was applied."
    for rank in ranks:
        assert rank[f"error, {which}"] == ("no error" if guarded else f"NonFiniteError: {problem}")
        assert rank[f"event, {which}"] == (f"skipped: {problem}" if guarded else None)
        assert rank[f"unchanged, {which}"]
    after = [rank[f"after, {which}"] for rank in ranks]
    assert_identical(after[0]["state"], after[1]["state"], "after")
    model = acclimate.adapt(double_model(), "sar", **OPTIONS["sar"])
    alone = go(model, tiny_batches(2))
    for name in model.engine.adapted.named:
        assert_exact(after[0]["state"][name], alone["state"][name], name)


def test_an_overflow_halves_the_loss_scale_on_all_ranks(pair):
    for rank in pair("overflow"):
        assert rank["event"].startswith("skipped: the gradient") and rank["scale"] == 2.0**119


def test_the_guard_sees_all_predictions_and_acts_on_all_ranks(pair):
    expected = guard(0, None)
    for name, begins in (("rollback", "rolled back"), ("freeze", "frozen"), ("drift", "slower")):
        ranks, single = [result[name] for result in pair("guard")], expected[name]
        events = [record["event"].partition(":")[0] for record in single["records"] if record["event"]]
        assert next(event for event in events if event != "on trial") == begins
        require_one_run(ranks, single)
    assert expected["rollback"]["good"] == 8 and expected["freeze"]["good"] is None
    assert [result["rollback"]["good"] for result in pair("guard")] == [8, 8]


def test_ranks_that_differ_are_not_wrapped(pair):
    ranks = pair("refused")
    assert ranks[0]["errors"] == ranks[1]["errors"]
    for error, words in zip(
        ranks[0]["errors"],
        [
            "ModelError: Rank 1 wraps a model with other weights than rank 0",
            "ConfigError: Rank 1 was given another method or other options than rank 0",
            "ConfigError: Rank 1 was given another method or other options than rank 0",
            "ConfigError: On rank 1: Unknown method 'tend'",
            "ConfigError: group: in this model the samples of a batch interact",
            "ConfigError: On rank 1: group: in this model the samples of a batch interact",
            "ConfigError: group='world'",
        ],
    ):
        assert error.startswith(words)
    assert all(rank["given back"] for rank in ranks)
    assert_identical(ranks[0]["after"]["state"], ranks[1]["after"]["state"], "wrapped after that")


def test_ranks_that_went_different_ways_are_told(pair):
    ranks = pair("apart")
    assert ranks[0]["errors"] == ranks[1]["errors"]
    for error, words in zip(
        ranks[0]["errors"],
        [
            "The ranks have not adapted alike: rank 0 is at step 1",
            "The ranks have not adapted alike: rank 0 is at step 0",
            "The ranks went different ways (rank 0 at the start of a batch, rank 1 at a gather)",
            "The ranks gather rows of different sizes",
        ],
    ):
        assert error.startswith(f"StateError: {words}")
    require_one_run([rank["after"] for rank in ranks], go(wrap("tent"), tiny_batches(2)))


@pytest.mark.parametrize("late", ["False", "True"])
def test_a_method_that_fails_on_one_rank_changes_no_rank(pair, late):
    ranks = [result[late] for result in pair("clumsy")]
    assert [rank["error"] for rank in ranks] == [
        "AcclimateError: On rank 1: OSError: the disk is full",
        "OSError: the disk is full",
    ]
    assert all(rank["unchanged"] for rank in ranks)
    assert_identical(ranks[0]["state"], ranks[1]["state"], "after that")


def test_any_rank_may_save_and_any_number_may_go_on(pair):
    ranks = pair("files")
    assert [rank["error"].partition("none")[0] for rank in ranks] == [f"StateError: On rank 0: {pair.folder}/"] * 2
    (first, header), (second, other) = (statefile.read(pair.folder / f"{rank}.safetensors") for rank in (0, 1))
    assert_identical(first, second, "files")
    assert header == other and "group" not in header["options"]
    for rank in ranks:
        assert_identical(rank["loaded"]["state"], rank["kept"]["state"], "loaded")
    alone = acclimate.load(pair.folder / "shared.safetensors", double_model())
    require_one_run([rank["loaded"] for rank in ranks], go(alone, tiny_batches(2, seed=5)))


def test_a_copy_stays_in_the_group_and_is_not_pickled(pair):
    for number, rank in enumerate(pair("copies")):
        assert_identical(rank["copy"]["state"], rank["original"]["state"], "copy")
        assert rank["steps"] == 1
        assert rank["pickle"].startswith("StateError: An adapter with a process group cannot be pickled")
        assert rank["repr"].endswith(f"step 3; rank {number} of 2)")


def test_gather_joins_shares_of_any_size(pair):
    for rank in pair("gather"):
        expected = [torch.arange(12.0).view(6, 2), torch.tensor([True, False, True]), torch.arange(5), torch.zeros(0, 4)]
        for found, wanted in zip(rank, expected):
            torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    tensor = torch.zeros(2)
    assert wrap("tent").engine.ranks.gather(tensor) is tensor


def test_a_rank_that_is_gone_is_an_error(pair):
    left = pair("lost")[0]
    assert left["error"].startswith("StateError: The ranks lost each other") and left["unchanged"]


if __name__ == "__main__":
    play(int(sys.argv[1]), Path(sys.argv[2]))
