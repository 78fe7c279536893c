"""The adapter: what a user calls, what can go wrong, and that nothing is lost when it does."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
import torchvision.tv_tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import acclimate
from acclimate.core.engine import entropy
from acclimate.core.registry import find_method
from acclimate.errors import ConfigError, InputError, ModelError, NonFiniteError, StateError
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import SINGLE, assert_exact, double_batches, double_model


def subclassed():
    """Return a tensor with rules of its own, which has the shape and type of images and no values."""
    with FakeTensorMode():
        return torch.zeros(2, 3, 32, 32)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.zeros(3, 32, 32), torch.zeros(3, 16, 16)])


IMAGES = torch.zeros(2, 3, 32, 32)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(0, 3, 32, 32), "empty"),
        (torch.zeros(3, 32, 32), r"images\[None\]"),
        (torch.zeros(2, 1, 32, 32), r"\(batch, 3, 32, 32\), got \(2, 1, 32, 32\)"),
        (torch.zeros(2, 3, 16, 16), r"got \(2, 3, 16, 16\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "integer type torch.uint8"),
        (torch.full((2, 3, 32, 32), torch.nan), "NaN or Inf in image 0, 1"),
        ([[1.0]], "must be a torch.Tensor, not list"),
        (IMAGES.bool(), "integer type torch.bool"),
        (IMAGES.cfloat(), r"complex type torch.complex64.*images.abs\(\)"),
        (torch.quantize_per_tensor(IMAGES, 1.0, 0, torch.quint8), r"quantised type torch.quint8.*images.dequantize\(\)"),
        (IMAGES.to_sparse(), r"layout torch.sparse_coo: pass images.to_dense\(\)"),
        (IMAGES.to_mkldnn(), r"layout torch._mkldnn: pass images.to_dense\(\)"),
        (IMAGES.to("meta"), "meta device"),
        (nested(), "nested tensor.*torch.stack"),
        (subclassed(), "a FakeTensor, a tensor with rules of its own: pass an ordinary torch.Tensor"),
    ],
    ids=[
        "empty",
        "rank",
        "channels",
        "size",
        "integer",
        "nan",
        "list",
        "bool",
        "complex",
        "quantised",
        "sparse",
        "mkldnn",
        "meta",
        "nested",
        "fake",
    ],
)
def test_bad_images_are_refused_and_nothing_changes(images, message, batches):
    model = acclimate.adapt(tiny_model(), "dct")
    model(batches[0])
    before, record = model.state.capture(), model.record
    with pytest.raises(InputError, match=message):
        model(images)
    with pytest.raises(InputError, match=message), model.frozen():
        model(images)
    assert_identical(model.state.capture(), before, "after bad images")
    assert model.record is record


def test_images_of_harmless_kinds_are_taken(batches):
    """What a user's pipeline may give: another type or memory format, a gradient, a subclass that only carries a name."""

    class Named(torch.Tensor):
        pass

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    model = acclimate.adapt(tiny_model(), "tent")
    with model.frozen():
        expected = model(batches[0])
        for images in (
            batches[0].double(),
            batches[0].to(memory_format=torch.channels_last),
            batches[0].clone().requires_grad_(),
            nn.Parameter(batches[0].clone()),
            batches[0].as_subclass(Named),
            batches[0].as_subclass(Refusing),
            torchvision.tv_tensors.Image(batches[0]),
        ):
            logits = model(images)
            assert type(logits) is torch.Tensor and not logits.requires_grad
            torch.testing.assert_close(logits, expected)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="new in torch 2.8")
def test_packed_images_are_refused():
    with pytest.raises(InputError, match=r"packed type torch.float4"):
        acclimate.adapt(tiny_model(), "tent")(IMAGES.byte().view(torch.float4_e2m1fn_x2))


def test_pairs_of_images_are_checked_alike():
    pairs = Case(find_method("dda"), options={"generated": "nowhere"}).wrap()
    for images, message in ((nested(), "nested"), (torch.zeros(2, 2, 3, 32, 32).to_sparse(), "layout")):
        with pytest.raises(InputError, match=message):
            pairs(images)


def test_a_wrapped_model_is_not_wrapped_again():
    plain = tiny_model()
    model = acclimate.adapt(plain, "tent")
    for again in (model, plain):
        with pytest.raises(ModelError, match="wrapped already"):
            acclimate.adapt(again, "sar")
    assert acclimate.adapt(model.unwrap(), "sar").method.name == "sar"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(method="dtc"), "Did you mean 'dct'"),
        (dict(method="dct", lr_generater=1), "no option 'lr_generater'. Did you mean 'lr_generator'"),
        (dict(method="tent", margin=1), "tent has no option 'margin'"),
        (dict(method="tent", predict="now"), "predict='now'"),
        (dict(method="tent", classes=[0, 10]), "classes: give distinct indices from 0 to 9"),
        (dict(method="tent", classes=[1, 1]), "distinct"),
        (dict(method="tent", classes=[True, False]), "boolean mask of length 10"),
        (dict(method="tent", classes=[]), "distinct"),
        (dict(method="dct", blocks=9), "blocks=9"),
        (dict(method="dct", precision="float8"), "precision='float8'"),
    ],
)
def test_bad_arguments_leave_the_model_untouched(arguments, message):
    model = tiny_model().train()
    modules, weights = dict(model.named_modules()), {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        acclimate.adapt(model, **arguments)
    assert dict(model.named_modules()) == modules
    assert_identical(dict(model.state_dict()), weights, "after a bad argument")
    assert model.training and all(p.requires_grad for p in model.parameters())
    acclimate.adapt(model, "dct")  # not marked as wrapped


def test_nothing_to_adapt_is_an_error():
    model = tiny_model()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight = module.bias = None
            module.elementwise_affine = False
    for method in ("tent", "sar", "dct"):
        with pytest.raises(ModelError, match=rf"{method} needs normalisation layers with weights.*suit this model: source"):
            acclimate.adapt(model, method)


@pytest.mark.numerics
def test_record_tells_what_happened(batches):
    model = acclimate.adapt(double_model(), "dct")
    assert model.record is None
    with model.frozen():
        h = entropy(model(batches[0]))
    model(batches[0])
    record = model.record
    assert (record.step, record.samples) == (1, 6)
    assert_exact(record.entropy, h.mean())
    assert 0 < record.used <= int((h < 0.4 * torch.tensor(10).log()).sum())
    assert record.recovery == pytest.approx(record.loss, rel=SINGLE) and record.loss > 0  # the average is kept in float32
    assert 0 < record.drift < 1 and record.event is None and record.milliseconds > 0
    model.reset()
    assert model.record is None


def test_predict_before_and_after(batches):
    before, after = (acclimate.adapt(tiny_model(), "tent", lr=0.01, predict=when) for when in ("before", "after"))
    with before.frozen():
        expected = before(batches[0])
    assert torch.equal(before(batches[0]), expected)
    with before.frozen():
        expected = before(batches[0])
    assert torch.equal(after(batches[0]), expected)


def test_class_subset_by_indices_or_mask(batches):
    mask = torch.zeros(10, dtype=torch.bool)
    mask[[2, 5, 9]] = True
    runs = [acclimate.adapt(tiny_model(), "dct", classes=classes) for classes in ([2, 5, 9], mask, mask.tolist())]
    for images in batches:
        logits = [run(images) for run in runs]
        assert logits[0].shape == (6, 3)
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_rollback_needs_a_snapshot_of_this_adapter(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    with pytest.raises(StateError, match="no snapshot"):
        model.rollback()
    first = model.snapshot()
    model(batches[0])
    model.snapshot()
    model(batches[1])
    model.rollback()
    assert int(model.steps) == 1
    model.rollback(first)
    assert int(model.steps) == 0
    before = model.state.capture()
    with pytest.raises(StateError, match="does not fit"):
        model.rollback(acclimate.adapt(tiny_model(), "tent").snapshot())
    assert_identical(model.state.capture(), before, "after a foreign snapshot")
    assert "step 0" in repr(first)


def test_an_unwrapped_adapter_says_so(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    model.unwrap()
    for call in (lambda: model(batches[0]), model.reset, model.snapshot, model.unwrap):
        with pytest.raises(StateError, match="unwrapped"):
            call()


def test_an_error_inside_a_step_leaves_the_state_as_it_was(batches, monkeypatch):
    """Also in the middle of the sharpness-aware step, and in the very first step."""
    for steps in (0, 2):
        model = acclimate.adapt(tiny_model(), "dct", guard=None)
        for images in batches[:steps]:
            model(images)
        before = model.state.capture()
        calls = []
        original = model.engine.gradient

        def failing(images, objective, calls=calls, original=original, **options):
            calls.append(1)
            if len(calls) == 2:
                raise NonFiniteError("boom")
            return original(images, objective, **options)

        with monkeypatch.context() as patch, pytest.raises(NonFiniteError):
            patch.setattr(model.engine, "gradient", failing)
            model(batches[3])
        assert_identical(model.state.capture(), before, "after an error")
        assert all(p.grad is None for p in model.engine.adapted.tensors)


def test_threads_take_their_steps_one_after_another():
    """Whatever the order, every step is whole: the state is that of the same batches in some sequence."""
    batches = tiny_batches(12, 4, seed=8)
    model = acclimate.adapt(tiny_model(), "dct", lr=0.01)
    order, results, lock = [], {}, threading.Lock()
    step = model.method.step

    def noting(images, engine):
        index = next(i for i, b in enumerate(batches) if torch.equal(b, images))
        order.append(index)
        return step(images, engine)

    model.method.step = noting

    def work(indices):
        for i in indices:
            logits = model(batches[i])
            with lock:
                results[i] = logits

    threads = [threading.Thread(target=work, args=(range(k, 12, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == list(range(12)) and int(model.steps) == 12
    alone = acclimate.adapt(tiny_model(), "dct", lr=0.01)
    for i in order:
        assert torch.equal(alone(batches[i]), results[i])
    assert_identical(alone.state.capture(), model.state.capture(), "threads")


def test_frozen_holds_for_one_thread_only(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    with model.frozen():
        other = threading.Thread(target=model, args=(batches[0],))
        other.start()
        other.join()
        assert int(model.steps) == 1
        model(batches[1])
        assert int(model.steps) == 1


def test_deepcopy_is_independent(batches):
    model = acclimate.adapt(tiny_model(), "dct")
    model(batches[0])
    twin = copy.deepcopy(model)
    expected = [twin(images) for images in batches[1:]]
    assert int(model.steps) == 1
    for images, logits in zip(batches[1:], expected):
        assert torch.equal(model(images), logits)
    assert_identical(twin.state.capture(), model.state.capture(), "deepcopy")
    with pytest.raises(ModelError, match="wrapped already"):
        acclimate.adapt(twin.model, "tent")


def test_conversion_takes_everything_along(batches):
    """`to` reaches the optimizer and the source values; the run goes on and can be reset."""
    model = acclimate.adapt(tiny_model(), "dct", lr=0.01)
    model(batches[0])
    model.to(torch.float64)
    logits = model(batches[1])  # images follow the model's type
    assert logits.isfinite().all()
    assert {p.dtype for p in model.engine.adapted.source} == {torch.float64}
    assert all(v.dtype == torch.float64 for s in model.engine.adapted.optimizer.state.values() for v in s.values())
    model.reset()
    assert model.engine.adapted.drift() == 0


def test_a_copy_of_a_compiled_adapter_runs_its_own_model(batches):
    model = acclimate.adapt(tiny_model(), "tent", compile="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    with model.frozen(), twin.frozen():
        assert not torch.allclose(model(batches[0]), twin(batches[0]))


def test_the_callers_autocast_does_not_reach_inside(batches):
    plain, inside = (acclimate.adapt(tiny_model(), "dct", precision="bfloat16", lr_generator=1.0) for _ in range(2))
    for images in batches:
        expected = plain(images[:1])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(inside(images[:1]), expected)


def test_inference_mode_may_hold_around_everything(batches, tmp_path):
    """Not around calls alone: wrapping, snapshots, files and resets leave tensors that can be trained."""
    outside = acclimate.adapt(tiny_model(), "dct")
    model = tiny_model()
    with torch.inference_mode():
        inside = acclimate.adapt(model, "dct")
        for adapter in (outside, inside):
            adapter(batches[0])
            adapter.snapshot()
            adapter(batches[1])
            adapter.rollback()
            adapter.save(tmp_path / "s.safetensors")
            adapter.reset()
            adapter.load(tmp_path / "s.safetensors")
    source = tiny_model()
    with torch.inference_mode():
        loaded = acclimate.load(tmp_path / "s.safetensors", source)
    expected = [outside(images) for images in batches]
    for adapter in (inside, loaded):
        for images, logits in zip(batches, expected):
            assert torch.equal(adapter(images), logits)


def test_a_failing_pass_after_the_update_undoes_it(batches, monkeypatch):
    model = acclimate.adapt(tiny_model(), "dct", predict="after")
    model(batches[0])
    before = model.state.capture()

    def fail(images):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(model.engine, "predict", fail)
        model(batches[1])
    assert_identical(model.state.capture(), before, "after a failed pass")


@pytest.mark.numerics
def test_samples_that_interact_take_part_in_the_second_pass():
    """SAR on a model with batch statistics, against the whole-batch form."""

    def build():
        model = tiny_model()
        model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, nn.BatchNorm2d(32, track_running_stats=False))
        return model.double()

    plain = build().requires_grad_(False)
    parameters = [p for n, p in plain.named_parameters() if n.startswith(("blocks.0.n", "blocks.1.n", "blocks.2.n"))]
    for p in parameters:
        p.requires_grad_(True)
    images = torch.cat(double_batches())
    h = entropy(plain(images))
    margin = float(h.detach().sort().values[9:11].mean())
    first = torch.autograd.grad(h[h < margin].mean(), parameters)
    norm = torch.stack([g.norm() for g in first]).norm()
    before = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, g in zip(parameters, first):
            p.add_(0.05 * g / norm)
    again = entropy(plain(images))[h < margin]
    second = torch.autograd.grad(again[again < margin].mean(), parameters)
    model = acclimate.adapt(build(), "sar", lr=0.5, margin=margin, recovery=0)
    model(images)
    for ours, p, g in zip(model.engine.adapted.tensors, before, second):
        assert_exact(ours, p - 0.5 * g)


def test_an_unregistered_subclass_is_not_saved_under_its_parents_name(batches, tmp_path):
    class Mine(acclimate.core.registry.find_method("dct")):
        pass

    with pytest.raises(StateError, match="Mine is not registered"):
        acclimate.adapt(tiny_model(), Mine).save(tmp_path / "s.safetensors")


def test_options_are_given_by_keyword():
    with pytest.raises(ConfigError, match=r"put a \* before lr"):

        @acclimate.register("loose")
        class Loose(acclimate.Method):
            def __init__(self, lr=1):
                super().__init__()


def test_train_and_eval_do_not_reach_the_model(batches):
    model = acclimate.adapt(tiny_model(), "tent")
    model.train()
    assert model.training and not model.model.training
    assert not model.eval().training


@pytest.mark.numerics
def test_batchnorm_in_training_mode_is_evaluated(batches):
    """A model handed over in training mode is put into evaluation mode first, so its samples do not interact.

    A method that uses the statistics of the batch does so in any mode, and does not change those of the source.
    """
    model = tiny_model()
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj, nn.BatchNorm2d(32))
    model.double()
    statistics = {name: t.clone() for name, t in model.named_buffers()}
    source = acclimate.adapt(copy.deepcopy(model).train(), "source")
    alone = torch.cat([source(image[None]) for image in batches[0]])
    adapter = acclimate.adapt(model.train(), "t3a")
    assert_exact(adapter.engine.predict(batches[0].double()), alone)
    adapter.unwrap()
    adapter = acclimate.adapt(model.train(), "tent")
    assert (adapter(batches[0]) - alone).abs().max() > 0.1
    assert_identical(dict(adapter.unwrap().named_buffers()), statistics, "running statistics")
    assert model.training


def test_repr_is_short_and_true(batches):
    model = acclimate.adapt(tiny_model(), "sar")
    model(batches[0])
    assert "384 parameters adapt; step 1" in repr(model)
    assert "timm VisionTransformer, 4 blocks" in repr(model)


@pytest.mark.numerics
def test_a_class_can_be_given_instead_of_a_name(batches):
    class Mine(acclimate.Method):
        def step(self, images, engine):
            return acclimate.Step(engine.predict(images) + 1)

    model = acclimate.adapt(double_model(), Mine)
    with torch.no_grad():
        assert_exact(model(batches[0]), double_model()(batches[0].double()) + 1)
    with pytest.raises(StateError, match="register"):
        model.save("never.safetensors")


def test_a_name_belongs_to_one_method():
    with pytest.raises(ConfigError, match="registered already"):

        @acclimate.register("dct")
        class Other(acclimate.Method):
            pass
