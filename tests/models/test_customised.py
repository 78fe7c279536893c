"""Models that a user has changed: what was changed acts under every method, and is still there after `unwrap`.

The models are in float64, so that two ways to the same result differ by rounding only.
"""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention, VisionTransformer
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import acclimate
from acclimate.analysis.attention import attention_maps
from acclimate.core.registry import find_method
from acclimate.core.statistics import KINDS
from acclimate.errors import ModelError
from acclimate.models.families import view_of
from acclimate.models.fingerprint import fingerprint
from acclimate.models.surgery import OpenAttention, capture
from acclimate.testing.check import SIZES, Case, assert_identical, tiny_batches, tiny_model
from support import assert_exact, double_batches, double_model, vit_methods

PROJECTIONS = {"timm": ["qkv"], "hf": ["q_proj", "k_proj", "v_proj"], "torchvision": []}  # linear layers in the attention
LAST_LAYER = {"timm": "mlp.fc2", "hf": "mlp.fc2", "torchvision": "mlp.3"}
OUTPUT = {"timm": "proj", "hf": "o_proj", "torchvision": "out_proj"}


class LoRA(nn.Module):
    """A linear layer with an addition of low rank, whose `weight` is that of the layer inside, as in peft."""

    def __init__(self, base, seed=0):
        super().__init__()
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        generator = torch.Generator().manual_seed(seed)
        shapes = (2, base.in_features), (base.out_features, 2)
        self.a, self.b = (nn.Parameter(torch.randn(s, generator=generator).to(base.weight) / 4) for s in shapes)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T

    def merged(self):
        plain = copy.deepcopy(self.base)
        with torch.no_grad():
            plain.weight += self.b @ self.a
        return plain


class Doubled(nn.Linear):
    """A linear layer of a user's class."""

    def forward(self, x):
        return 2 * super().forward(x)


class Scaled(nn.Module):
    """A parametrisation."""

    def forward(self, weight):
        return 1.5 * weight


def times(factor):
    def hook(module, args, out):
        return (factor * out[0], *out[1:]) if isinstance(out, tuple) else factor * out

    return hook


def mixed(module, args, out):
    """Give a part of all tokens to the class token, which a block that is computed for the class token could not."""
    return torch.cat([out[:, :1] + out.mean(1, keepdim=True), out[:, 1:]], dim=1)


def put(module, path, make):
    holder, _, name = path.rpartition(".")
    holder = module.get_submodule(holder)
    setattr(holder, name, make(getattr(holder, name)))


def logits(model, images):
    with torch.no_grad():
        out = model(images)
    return getattr(out, "logits", out)


def frozen(adapter, images):
    with adapter.frozen():
        return adapter(images)


def attention_of(block):
    """Return the model's own attention module, also while another one stands in its place."""
    attention = block.attention
    return attention.inner if isinstance(attention, OpenAttention) else attention


# ---- single changes ---------------------------------------------------------------------------------------------------


def lora(view, i):
    for name in PROJECTIONS[view.family]:
        put(attention_of(view.blocks[i]), name, LoRA)
    put(view.blocks[i].module, LAST_LAYER[view.family], LoRA)


def subclass(view, i):
    def doubled(base):
        made = Doubled(base.in_features, base.out_features).to(base.weight)
        made.load_state_dict(base.state_dict())
        return made

    for name in PROJECTIONS[view.family]:
        put(attention_of(view.blocks[i]), name, doubled)
    put(view.blocks[i].module, LAST_LAYER[view.family], doubled)


def hook_on_projections(view, i):
    for name in PROJECTIONS[view.family]:
        getattr(attention_of(view.blocks[i]), name).register_forward_hook(times(1.3))


def hook_on_attention(view, i):
    attention_of(view.blocks[i]).register_forward_hook(times(1.3))


def hook_before_attention(view, i):
    def hook(module, args):
        x = torch.cat([args[0][:, :1] * 1.2, args[0][:, 1:]], dim=1)
        return tuple(x if a is args[0] else a for a in args)

    attention_of(view.blocks[i]).register_forward_pre_hook(hook)


def hook_on_output_projection(view, i):
    getattr(attention_of(view.blocks[i]), OUTPUT[view.family]).register_forward_hook(times(1.3))


def hook_on_block(view, i):
    view.blocks[i].module.register_forward_hook(mixed)


def hook_on_mlp(view, i):
    view.blocks[i].mlp.register_forward_hook(mixed)


def hook_on_what_follows(view, i):
    norm = next(name for name in view.after if name.endswith(("norm", "ln")))
    view.model.get_submodule(norm).register_forward_pre_hook(lambda module, args: (mixed(module, args, args[0]),))


def hooks_on_the_head(view, i):
    view.head.register_forward_pre_hook(lambda module, args: (1.2 * args[0],))
    view.head.register_forward_hook(times(0.7))


def forward_of_the_mlp(view, i):
    mlp = view.blocks[i].mlp
    mlp.forward = lambda x: mixed(None, None, type(mlp).forward(mlp, x))


def forward_of_the_block(view, i):
    block = view.blocks[i].module
    block.forward = lambda x, *args, **kwargs: mixed(None, None, type(block).forward(block, x, *args, **kwargs))


def forward_of_the_attention(view, i):
    if i == SIZES.depth - 1:  # of another block, DCT could not run it
        attention = attention_of(view.blocks[i])
        attention.forward = lambda *args, **kwargs: times(1.3)(
            None, None, type(attention).forward(attention, *args, **kwargs)
        )


def norm_of_the_weights(view, i):
    attention = attention_of(view.blocks[i])
    if view.family == "torchvision":
        parametrize.register_parametrization(attention, "in_proj_weight", Scaled())
    for name in PROJECTIONS[view.family]:
        weight_norm(getattr(attention, name)).parametrizations.weight.original0.data.mul_(1.3)
    weight_norm(view.blocks[i].module.get_submodule(LAST_LAYER[view.family])).parametrizations.weight.original0.data.mul_(
        0.7
    )


class Mixing(nn.Sequential):
    """Layers of a user's class, which mix tokens."""

    def forward(self, x):
        return mixed(self, (x,), super().forward(x))


def mlp_that_mixes_tokens(view, i):
    put(view.blocks[i].module, "mlp", Mixing)


def another_mlp(view, i):
    torch.manual_seed(i)
    layers = nn.Linear(view.width, 8), nn.GELU(), nn.Linear(8, view.width)
    put(view.blocks[i].module, "mlp", lambda _: nn.Sequential(*layers).double())


def norm_that_mixes_tokens(view, i):
    if i == SIZES.depth - 1:
        put(view.model, next(name for name in view.after if name.endswith(("norm", "ln"))), Mixing)


CHANGES = [
    lora,
    subclass,
    hook_on_projections,
    hook_on_attention,
    hook_before_attention,
    hook_on_output_projection,
    hook_on_block,
    hook_on_mlp,
    hook_on_what_follows,
    hooks_on_the_head,
    forward_of_the_mlp,
    forward_of_the_block,
    forward_of_the_attention,
    norm_of_the_weights,
    mlp_that_mixes_tokens,
    another_mlp,
    norm_that_mixes_tokens,
]


@contextmanager
def conditioned(model, conditioners):
    """Let torch's attention see one more key and value in these blocks: an independent way to what DCT computes."""
    view, current = view_of(model), []
    own = F.scaled_dot_product_attention

    def more(q, k, v, *args, **kwargs):
        i, tokens = current.pop()
        if str(i) in conditioners:
            with torch.no_grad():
                extra = conditioners[str(i)].key_value(tokens[:, 0])
            k, v = (torch.cat([x, e.to(x)], dim=2) for x, e in zip((k, v), extra))
        return own(q, k, v, *args, **kwargs)

    hooks = [
        attention_of(block).register_forward_pre_hook(lambda _, args, i=i: current.append((i, args[0])))
        for i, block in enumerate(view.blocks)
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    F.scaled_dot_product_attention = more
    try:
        yield model
    finally:
        F.scaled_dot_product_attention = own
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()


CHANGED = (1, SIZES.depth - 1)  # a conditioned block, and the last one
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


def changed(family, change):
    """Return a new model with a change. A copy would not do: a `forward` of an instance keeps its first instance."""
    model = double_model(family)
    for i in CHANGED:
        change(view_of(model), i)
    return model


@every_change
def test_a_change_acts_in_the_last_block_and_in_conditioned_blocks(change, family):
    images = double_batches(1)[0]
    model = changed(family, change)
    expected = logits(model, images)
    if family != "torchvision" or change not in (hook_on_projections, hook_on_output_projection):
        assert (expected - logits(double_model(family), images)).abs().max() > 1e-3
    modules, forwards = dict(model.named_modules()), {name: vars(m).get("forward") for name, m in model.named_modules()}
    hooks = {name: (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for name, m in model.named_modules()}
    for method in ("tent", "dct"):
        blocks = [0, 1] if change is forward_of_the_attention else [0, 1, SIZES.depth - 1]
        adapter = acclimate.adapt(model, method, **({"blocks": blocks} if method == "dct" else {}))
        reference = expected
        if method == "dct":
            alone = changed(family, change)
            with conditioned(alone, adapter.method.generators):
                reference = logits(alone, images)
            assert (reference - expected).abs().max() > 1e-3
        assert_exact(frozen(adapter, images), reference, method)
        adapter(images)
        assert adapter.unwrap() is model
        assert dict(model.named_modules()) == modules
        assert {name: vars(m).get("forward") for name, m in modules.items()} == forwards
        assert {n: (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for n, m in modules.items()} == hooks
        assert torch.equal(logits(model, images), expected)


@every_change
def test_a_change_after_wrapping_acts_too(change, family):
    images = double_batches(1)[0]
    model = double_model(family)
    kept = view_of(model)
    adapter = acclimate.adapt(model, "tent")
    for i in CHANGED:
        change(kept, i)
    expected = logits(changed(family, change), images)
    assert_exact(frozen(adapter, images), expected)
    assert_exact(logits(adapter.unwrap(), images), expected)


# ---- every method -----------------------------------------------------------------------------------------------------


def customised(family):
    """Return a model with many changes, and a plain model that computes the same."""
    model, plain = double_model(family), double_model(family)
    view, other = view_of(model), view_of(plain)
    for i in range(SIZES.depth):
        lora(view, i)
        attention, unchanged = attention_of(view.blocks[i]), attention_of(other.blocks[i])
        for name in PROJECTIONS[family]:
            setattr(unchanged, name, getattr(attention, name).merged())
        put(other.blocks[i].module, LAST_LAYER[family], lambda layer: LoRA(layer).merged())
        with torch.no_grad():
            hook_on_attention(view, i)
            for p in getattr(unchanged, OUTPUT[family]).parameters():
                p *= 1.3
            if family == "torchvision":
                parametrize.register_parametrization(attention, "in_proj_weight", Scaled())
                unchanged.in_proj_weight *= 1.5
            elif family == "hf":
                attention.scaling *= 0.8
                unchanged.q_proj.weight *= 0.8
                unchanged.q_proj.bias *= 0.8
            else:
                attention.fused_attn = False
                attention.scale *= 0.8
                unchanged.qkv.weight[: SIZES.width] *= 0.8
                unchanged.qkv.bias[: SIZES.width] *= 0.8
    put(model, {"timm": "head", "hf": "classifier", "torchvision": "heads.head"}[family], LoRA)
    other.exchange_head(LoRA(other.head).merged())
    images = double_batches(1)[0]
    assert_exact(logits(model, images), logits(plain, images))
    assert (logits(model, images) - logits(double_model(family), images)).abs().max() > 0.1
    return model, plain


@pytest.mark.parametrize("method", vit_methods())
def test_every_method_starts_from_the_customised_model(method, family):
    """An adapter of the customised model predicts as one of a plain model that computes the same.

    If both adapt the same parameters, the second step is the same as well.
    """
    case = Case(find_method(method), family)
    models = customised(family)
    hooks = [dict(m._forward_hooks) for m in models[0].modules()]
    source = [logits(model, double_batches(1)[0]) for model in models]
    ours, theirs = adapters = [case.wrap(model) for model in models]
    batches = double_batches(2)
    if case.method.info.views == 2:
        batches = [torch.stack([images, images.flip(-1)], dim=1) for images in batches]
    assert_exact(*(frozen(adapter, batches[0]) for adapter in adapters))
    before = not ours.method.info.predicts_after
    if ours.engine.adapted.named.keys() == theirs.engine.adapted.named.keys():
        for images in batches:
            assert_exact(*(adapter(images) for adapter in adapters))
    elif before:
        assert_exact(*(adapter(batches[0]) for adapter in adapters))
    else:
        ours(batches[0])
    assert torch.equal(logits(ours.unwrap(), double_batches(1)[0]), source[0])
    assert [dict(m._forward_hooks) for m in models[0].modules()] == hooks


# ---- the short cut of the last block ----------------------------------------------------------------------------------


def tokens_in_the_last_mlp(adapter):
    images = double_batches(1)[0]
    with capture([adapter.engine.view.blocks[-1].mlp]) as seen, adapter.frozen(), adapter.engine.undivided():
        adapter(images)
    return seen[adapter.engine.view.blocks[-1].mlp].inputs.shape[1]


def test_a_plain_model_keeps_its_short_last_block(family):
    model = double_model(family)
    adapter = acclimate.adapt(model, "tent")
    view = adapter.engine.view
    assert tokens_in_the_last_mlp(adapter) == 1
    view.blocks[0].module.register_forward_hook(times(1.1))  # does not concern the last block
    view.head.register_forward_hook(times(1.1))
    model.register_forward_hook(lambda *_: None)
    assert tokens_in_the_last_mlp(adapter) == 1
    for module in (view.layers[-1], view.blocks[-1].module, view.blocks[-1].attention, view.blocks[-1].norm2):
        for register in (module.register_forward_hook, module.register_forward_pre_hook, module.register_full_backward_hook):
            hook = register(lambda *_: None)
            assert tokens_in_the_last_mlp(adapter) == view.tokens
            hook.remove()
            assert tokens_in_the_last_mlp(adapter) == 1
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert tokens_in_the_last_mlp(adapter) == view.tokens
    everywhere.remove()
    assert tokens_in_the_last_mlp(adapter) == 1


def test_a_hook_of_the_last_block_sees_all_tokens(family):
    seen = []
    model = double_model(family)
    last = view_of(model).blocks[-1].module
    last.register_forward_hook(lambda module, args, out: seen.append((module, tuple(out.shape))))
    for method in ("source", "dct", "vpt"):
        adapter = acclimate.adapt(model, method, micro_batch=6)
        frozen(adapter, double_batches(1)[0])
        prompts = 10 if method == "vpt" else 0
        assert seen.pop() == (last, (6, 17 + prompts, SIZES.width))
        adapter.unwrap()


def test_code_of_a_user_runs_in_the_thread_of_the_caller():
    """It may not be ready for several threads: peft, for one, changes the weights of an attention while that runs."""
    threads = set()
    model = double_model()
    model.blocks[0].mlp.register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    adapter = acclimate.adapt(model, "tent", micro_batch=1)
    for images in double_batches(2):
        adapter(images)
    assert threads == {threading.get_ident()}


def test_a_subclass_of_the_model(family):
    """Code of its own is run as it is; a subclass without any keeps the short last block."""
    base = type(double_model(family))
    subclasses = {
        "timm": dict(pool=lambda self, x, *_: mixed(None, None, x)[:, 0]),
        "hf": dict(forward=lambda self, x: self.classifier(mixed(None, None, self.vit(x).last_hidden_state)[:, 0])),
        "torchvision": dict(
            forward=lambda self, x: self.heads(
                mixed(None, None, self.encoder(F.pad(self._process_input(x), (0, 0, 1, 0)) + self.class_token))[:, 0]
            )
        ),
    }  # fmt: skip
    images = double_batches(1)[0]
    plain = logits(double_model(family), images)
    for overridden, tokens in ((subclasses[family], 17), ({}, 1)):
        model = double_model(family)
        model.__class__ = type("Own", (base,), overridden)
        expected = logits(model, images)
        assert torch.equal(expected, plain) is not bool(overridden)
        adapter = acclimate.adapt(model, "tent")
        assert tokens_in_the_last_mlp(adapter) == tokens
        assert_exact(frozen(adapter, images), expected)


def test_a_compiled_model_keeps_its_changes():
    images = double_batches(1)[0]
    model = changed("timm", hook_on_block)
    expected = logits(model, images)
    assert_exact(frozen(acclimate.adapt(model, "tent", compile="eager"), images), expected)


# ---- attention that cannot be opened, or that has rules of its own ----------------------------------------------------


class Shouting(Attention):
    """An attention with code of its own."""

    def forward(self, x, *args, **kwargs):
        return 2 * super().forward(x, *args, **kwargs)


def shouting_attention(model):
    model.blocks[1].attn.__class__ = Shouting


def wrapped_attention(model):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, **kwargs):
            return 2 * self.inner(x, **kwargs)

    model.blocks[1].attn = Wrapped(model.blocks[1].attn)


def patched_attention(model):
    attention = model.blocks[1].attn
    attention.forward = lambda x, **kwargs: 2 * type(attention).forward(attention, x, **kwargs)


@pytest.mark.parametrize("change", [shouting_attention, wrapped_attention, patched_attention])
def test_attention_with_code_of_its_own_is_refused_by_conditioners_alone(change):
    images = double_batches(1)[0]
    model = double_model()
    change(model)
    expected, modules = logits(model, images), dict(model.named_modules())
    forwards = [vars(m).get("forward") for m in modules.values()]
    for _ in range(2):
        with pytest.raises(ModelError, match=r"blocks.1.attn, a \w+, runs code of its own.*merge_and_unload.*blocks="):
            acclimate.adapt(model, "dct")
        assert dict(model.named_modules()) == modules
        assert [vars(m).get("forward") for m in modules.values()] == forwards
        assert torch.equal(logits(model, images), expected)
    with pytest.raises(ModelError, match=r"blocks.1.attn"):
        list(attention_maps(model, images))
    adapter = acclimate.adapt(model, "dct", blocks=[0, 2])
    with conditioned(model_again(change), adapter.method.generators) as alone:
        reference = logits(alone, images)
    assert_exact(frozen(adapter, images), reference)
    for method in ("tent", "vpt", "foa", "cotta"):
        adapter = Case(find_method(method)).wrap(model_again(change))
        if method == "tent":
            assert_exact(frozen(adapter, images), expected)
        assert adapter(images).isfinite().all()


def model_again(change):
    model = double_model()
    change(model)
    return model


def test_another_kind_of_attention_suits_methods_that_leave_it_alone():
    sizes = dict(img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2, num_classes=10)
    model = VisionTransformer(**sizes, attn_layer="diff").double().eval()
    images = double_batches(1)[0]
    expected = logits(model, images)
    with pytest.raises(ModelError, match=r"blocks.0.attn, a DiffAttention, runs code"):
        acclimate.adapt(model, "dct")
    assert_exact(frozen(acclimate.adapt(model, "tent"), images), expected)


def test_a_block_that_masks_its_attention():
    class Causal(TimmBlock):
        def forward(self, x, **kwargs):
            return super().forward(x, is_causal=True)

    images = double_batches(1)[0]
    model = double_model()
    for i in CHANGED:
        model.blocks[i].__class__ = Causal
    expected = logits(model, images)
    adapter = acclimate.adapt(model, "tent")
    assert_exact(frozen(adapter, images), expected)
    adapter = acclimate.adapt(adapter.unwrap(), "dct")
    with pytest.raises(ModelError, match="called with a mask"):
        adapter(images)
    assert int(adapter.steps) == 0
    assert_exact(logits(adapter.unwrap(), images), expected)


def test_a_learned_scale_for_each_head():
    images = double_batches(1)[0]
    scale = torch.tensor([0.1, 0.4], dtype=torch.float64).view(2, 1, 1)
    model, plain = double_model(), double_model()
    for i in range(SIZES.depth):
        ours, theirs = model.blocks[i].attn, plain.blocks[i].attn
        ours.fused_attn, ours.scale = False, scale
        rows = (scale * ours.head_dim**0.5).flatten().repeat_interleave(ours.head_dim)
        with torch.no_grad():
            theirs.qkv.weight[: SIZES.width] *= rows[:, None]
            theirs.qkv.bias[: SIZES.width] *= rows
    assert_exact(logits(model, images), logits(plain, images))
    for method in ("tent", "dct"):
        ours, theirs = (acclimate.adapt(each, method) for each in (model, plain))
        for batch in double_batches(2):
            assert_exact(ours(batch), theirs(batch))
        for (_, a), (_, b) in zip(attention_maps(ours, images), attention_maps(theirs, images)):
            assert_exact(a, b)
        ours.unwrap(), theirs.unwrap()


def test_a_dropout_of_attention_weights_that_a_user_wrote():
    class Sharpened(nn.Dropout):
        def forward(self, weights):
            return weights.square() / weights.square().sum(-1, keepdim=True)

    images = double_batches(1)[0]
    model = double_model()
    for block in model.blocks:
        block.attn.attn_drop, block.attn.fused_attn = Sharpened(), False
    expected = logits(model, images)
    assert_exact(frozen(acclimate.adapt(model, "tent"), images), expected)
    plain = double_model()  # a squared weight is that of a doubled score
    with torch.no_grad():
        for block in plain.blocks:
            block.attn.qkv.weight[: SIZES.width] *= 2
            block.attn.qkv.bias[: SIZES.width] *= 2
    again = double_model()
    for block in again.blocks:
        block.attn.attn_drop, block.attn.fused_attn = Sharpened(), False
    ours, theirs = (acclimate.adapt(each, "dct") for each in (again, plain))
    assert_exact(frozen(ours, images), frozen(theirs, images))


def test_an_attention_function_that_a_user_registered():
    transformers = pytest.importorskip("transformers")

    def cooled(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
        weights = (query @ key.transpose(2, 3) * scaling / 3).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    transformers.AttentionInterface.register("cooled", cooled)
    images = double_batches(1)[0]
    model, plain = double_model("hf"), double_model("hf")
    model.config._attn_implementation = "cooled"
    with torch.no_grad():
        for layer in plain.vit.layers:
            layer.attention.q_proj.weight /= 3
            layer.attention.q_proj.bias /= 3
    assert_exact(logits(model, images), logits(plain, images))
    for method in ("tent", "dct"):
        ours, theirs = (acclimate.adapt(each, method) for each in (model, plain))
        for batch in double_batches(2):
            assert_exact(ours(batch), theirs(batch))
        ours.unwrap(), theirs.unwrap()


# ---- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["t3a", "foa", "zerosiam", "spa"])
def test_a_method_that_calls_the_head_alone_needs_a_model_that_ends_with_it(method, family):
    """A change of the logits after the head is refused; changes of the head, and hooks that only look, are not."""
    case, images = Case(find_method(method), family), double_batches(1)[0]
    cooled = double_model(family)
    cooled.register_forward_hook(
        lambda m, args, out: out.__setitem__("logits", out.logits / 3) or out if family == "hf" else out / 3
    )
    modules = dict(cooled.named_modules())
    with pytest.raises(ModelError, match="changes the logits after its head"):
        case.wrap(cooled)
    assert dict(cooled.named_modules()) == modules
    assert_exact(frozen(acclimate.adapt(cooled, "tent"), images), logits(double_model(family), images) / 3)

    looking, plain = double_model(family), double_model(family)
    looking.register_forward_hook(lambda *_: None)
    view_of(looking).head.register_forward_hook(lambda *_: None)
    assert_exact(case.wrap(looking)(images), case.wrap(plain)(images))

    hooked, merged = double_model(family), double_model(family)
    head = view_of(hooked).head
    head.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    head.register_forward_hook(lambda module, args, out: out[:, [1, 0, *range(2, SIZES.classes)]])
    with torch.no_grad():
        view_of(merged).head.weight.copy_(2 * head.weight[[1, 0, *range(2, SIZES.classes)]])
        view_of(merged).head.bias.copy_(head.bias[[1, 0, *range(2, SIZES.classes)]])
    assert_exact(logits(hooked, images), logits(merged, images))
    assert_exact(case.wrap(hooked)(images), case.wrap(merged)(images))


def test_a_head_in_place_of_torchvisions_layers():
    images = double_batches(1)[0]
    model = double_model("torchvision")
    model.heads = model.heads.head
    for method in ("tent", "t3a", "dct"):
        ours, theirs = (acclimate.adapt(each, method) for each in (model, double_model("torchvision")))
        assert torch.equal(ours(images), theirs(images))
        ours.unwrap()


def test_a_part_of_another_kind_hides_the_blocks_alone():
    model = double_model()
    model.patch_embed = nn.Sequential(model.patch_embed)
    with pytest.raises(ModelError, match=r"vpt needs the blocks of a vision.*timm VisionTransformer lacks.*suit.*: .*tent"):
        acclimate.adapt(model, "vpt")
    images = double_batches(1)[0]
    assert_exact(acclimate.adapt(model, "tent")(images), acclimate.adapt(double_model(), "tent")(images))


def test_prototypes_need_a_linear_head():
    class Cosine(nn.Linear):
        def forward(self, x):
            return F.linear(F.normalize(x, dim=-1), self.weight)

    images = double_batches(1)[0]
    model = double_model()
    model.head = Cosine(SIZES.width, SIZES.classes).double()
    expected = logits(model, images)
    with pytest.raises(ModelError, match="its head, a Cosine, is not a linear function of the features"):
        acclimate.adapt(model, "t3a")
    assert_exact(frozen(acclimate.adapt(model, "tent"), images), expected)


# ---- quantised layers and missing gradients ---------------------------------------------------------------------------


def quantised(family="timm", *, head=False):
    model = tiny_model(family)
    own = view_of(model).head
    names = {name for name, m in model.named_modules() if type(m) is nn.Linear and (head or m is not own)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, names, inplace=True)


@pytest.mark.parametrize("head", [False, True], ids=["body", "body and head"])
def test_quantised_layers_act_in_methods_without_gradients(head, family, tmp_path):
    images = tiny_batches(1)[0]
    model = quantised(family, head=head)
    expected = logits(model, images)
    for method in ("source", "lame", "foa", "t3a"):
        case = Case(find_method(method), family)
        if method == "foa":
            case.options = {**case.options, "source_statistics": acclimate.source_statistics(
                model, tiny_batches(2, seed=3), kinds=["class_tokens"], batch_size=6
            )}  # fmt: skip
        if method == "t3a" and head:
            with pytest.raises(ModelError, match="is not a linear function of the features"):
                case.wrap(model)
            continue
        adapter = case.wrap(model)
        assert adapter(images).isfinite().all()
        adapter.save(tmp_path / f"{method}.safetensors")
        if method == "source":
            assert torch.equal(frozen(adapter, images), expected)
        after = frozen(adapter, images)
        loaded = acclimate.load(tmp_path / f"{method}.safetensors", quantised(family, head=head))
        assert torch.equal(frozen(loaded, images), after)
        assert torch.equal(logits(adapter.unwrap(), images), expected)


def test_quantised_layers_are_refused_by_methods_with_gradients():
    model = quantised()
    modules = dict(model.named_modules())
    for method in vit_methods():
        kind = find_method(method)
        if Case(kind).wrap().method.info.passes[1]:
            learned = any(KINDS[need].learned for need in kind.info.needs)
            known = acclimate.source_statistics(model, tiny_batches(1), kinds=["class_tokens", "features"])
            known.tensors["fisher/x"] = torch.zeros(1)
            with pytest.raises(ModelError, match=r"blocks.0.attn.qkv is a quantised layer.*choose a method"):
                Case(kind, options={} if learned else {"source_statistics": known}).wrap(model)
            assert dict(model.named_modules()) == modules
    with pytest.raises(ModelError, match="quantised layer"):
        acclimate.source_statistics(model, tiny_batches(1), kinds=["fisher"])


def test_quantised_weights_have_fingerprints():
    digests = []
    for family in ("timm", "timm", "torchvision"):
        model = quantised(family)
        digests.append(fingerprint(view_of(model), model.state_dict()))
    assert digests[0] == digests[1] and digests[0]["architecture"] != digests[2]["architecture"]
    other = tiny_model()
    with torch.no_grad():
        other.blocks[2].mlp.fc1.weight[0, 0] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {name for name, m in other.named_modules() if isinstance(m, nn.Linear) and name != "head"}
        torch.ao.quantization.quantize_dynamic(other, names, inplace=True)
    digests.append(fingerprint(view_of(other), other.state_dict()))
    assert digests[0]["architecture"] == digests[3]["architecture"] and digests[0]["weights"] != digests[3]["weights"]


def test_a_layer_without_gradients_is_named():
    model = double_model()
    model.head.register_forward_hook(lambda module, args, out: out.detach())
    adapter = acclimate.adapt(model, "tent")
    before = adapter.state.capture()
    with pytest.raises(ModelError, match="The loss has no gradient"):
        adapter(double_batches(1)[0])
    assert_identical(adapter.state.capture(), before, "after an error")


# ---- parametrisations -------------------------------------------------------------------------------------------------


def test_a_parametrised_norm_adapts_as_a_plain_one(family):
    """What its weight is computed from adapts."""
    model, plain = double_model(family), double_model(family)
    for norm in view_of(model).norms:
        parametrize.register_parametrization(norm, "weight", nn.Identity())
    ours, theirs = (acclimate.adapt(each, "tent", lr=0.01) for each in (model, plain))
    for images in double_batches(3):
        assert_exact(ours(images), theirs(images))
    assert len(ours.engine.adapted.tensors) == len(theirs.engine.adapted.tensors)
    expected = logits(double_model(family), double_batches(1)[0])
    assert_exact(logits(ours.unwrap(), double_batches(1)[0]), expected)
    assert all(parametrize.is_parametrized(norm, "weight") for norm in view_of(model).norms)


def test_all_weights_adapt_when_some_are_parametrised():
    model, plain = double_model(), double_model()
    for block in model.blocks:
        parametrize.register_parametrization(block.attn.qkv, "weight", nn.Identity())
    ours, theirs = (Case(find_method("cotta")).wrap(each, lr=0.1) for each in (model, plain))
    assert sorted(p.shape for p in ours.engine.adapted.tensors) == sorted(p.shape for p in theirs.engine.adapted.tensors)
    ours(double_batches(1)[0])
    weight = ours.engine.view.blocks[0].module.attn.qkv.weight
    assert not torch.equal(weight, double_model().blocks[0].attn.qkv.weight)


# ---- other libraries' wrappers ----------------------------------------------------------------------------------------


TARGETS = {"timm": ["qkv", "fc1"], "hf": ["q_proj", "v_proj", "fc1"], "torchvision": ["mlp.0", "mlp.3"]}


def test_a_model_with_adapters_of_peft(family):
    peft = pytest.importorskip("peft")
    images = double_batches(1)[0]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=TARGETS[family], init_lora_weights=False)
    outer = peft.get_peft_model(double_model(family), config).eval()
    model = outer.get_base_model()
    plain = copy.deepcopy(outer).merge_and_unload()
    expected = logits(model, images)
    assert_exact(expected, logits(plain, images))
    assert (expected - logits(double_model(family), images)).abs().max() > 1e-2
    wrapped = acclimate.adapt(outer, "tent")
    assert_exact(wrapped(images), expected)
    wrapped.unwrap()
    for method in ("tent", "dct", "t3a", "vpt"):
        ours, theirs = (acclimate.adapt(each, method) for each in (model, plain))
        for batch in double_batches(2):
            assert_exact(ours(batch), theirs(batch), method)
        assert_exact(logits(ours.unwrap(), images), expected)
        theirs.unwrap()


def test_peft_on_the_attention_of_torchvision():
    peft = pytest.importorskip("peft")
    images = double_batches(1)[0]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["self_attention"], init_lora_weights=False)
    model = peft.get_peft_model(double_model("torchvision"), config).eval().get_base_model()
    expected = logits(model, images)
    assert (expected - logits(double_model("torchvision"), images)).abs().max() > 1e-2
    with pytest.raises(ModelError, match=r"encoder.layers.0.self_attention, a MultiheadAttention, runs code of its own"):
        acclimate.adapt(model, "dct")
    assert_exact(frozen(acclimate.adapt(model, "tent"), images), expected)


@pytest.mark.parametrize("method", ["tent", "dct", "t3a", "vpt", "keel", "rem", "foa"])
def test_a_wrapper_adapts_as_the_model_inside(method, family):
    """Whatever is around a vision transformer, its blocks and its class token can be used."""
    case, inner = Case(find_method(method), family), double_model(family)
    outer = nn.Sequential(nn.Identity(), double_model(family))
    modules = dict(outer.named_modules())
    ours, theirs = case.wrap(outer), case.wrap(inner)
    for images in double_batches(2):
        assert_exact(ours(images), theirs(images))
    assert ours.unwrap() is outer and dict(outer.named_modules()) == modules


def test_a_wrapper_may_read_any_token():
    """The last block is computed for all tokens, because the module around it may read them."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = double_model()
            self.fc = nn.Linear(SIZES.width, 7).double()

        def forward(self, images):
            return self.fc(self.backbone.forward_features(images).mean(1))

    model, images = Mean(), double_batches(1)[0]
    expected = logits(model, images)
    adapter = acclimate.adapt(model, "dct", init="zero")
    assert adapter.engine.view.head is model.fc and adapter.engine.view.classes == 7
    for method in ("source", "t3a", "tent", "keel"):
        adapter.unwrap()
        adapter = acclimate.adapt(model, method, recentre=False)
        if method != "t3a":
            assert_exact(frozen(adapter, images), expected, method)
        assert adapter(images).shape == (6, 7)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10)
    with pytest.raises(ModelError, match="meta device"):
        acclimate.adapt(model, "tent")
