"""Files that somebody has made up: a right digest, and a content that no run has written. All are refused, and do no harm.

ACCLIMATE_FUZZ=20 tries twenty times as many.
"""

from __future__ import annotations

import copy
import json
import random
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

import acclimate
from acclimate.core import registry, statefile
from acclimate.core.adapt import resumed
from acclimate.core.adapter import Adapter
from acclimate.core.ranks import SingleProcess
from acclimate.core.registry import find_method
from acclimate.core.statistics import SourceStatistics, source_statistics
from acclimate.errors import AcclimateError, ConfigError, StateError
from acclimate.testing.check import Case, assert_identical, tiny_batches, tiny_model
from support import trials

# How many files are forged for a method with SGD, Adam, no optimizer, source statistics, a search, and a queue.
METHODS = {"dct": 300, "rotta": 250, "t3a": 250, "eata": 250, "foa": 150, "adacontrast": 40}
SHORT = {"adacontrast": {"queue": 8, "neighbours": 2, "refine_after": 4}}


class Saved(NamedTuple):
    """An adapter after a few steps, and what it saved."""

    adapter: Adapter
    tensors: dict[str, Tensor]
    header: dict[str, Any]
    logits: Tensor  # of the first batch, without adapting


@cache
def saved(method: str) -> Saved:
    case = Case(find_method(method), options={"guard": acclimate.Guard(patience=8), **SHORT.get(method, {})})
    adapter = case.run()
    adapter._good = adapter.state.capture()  # so that the file has all parts
    content: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statefile, "write", lambda _, tensors, header: content.extend((tensors, header)))
        adapter.save("nowhere")
    tensors = {name: tensor.clone() for name, tensor in content[0].items()}
    return Saved(adapter, tensors, json.loads(json.dumps({**content[1], "format": 1})), logits_of(adapter))


def logits_of(adapter: Adapter) -> Tensor:
    with adapter.frozen():
        return adapter(tiny_batches(1)[0])


def everything(adapter: Adapter) -> dict[str, Tensor]:
    good = {f"good/{name}": tensor for name, tensor in (adapter._good or {}).items()}
    return {**adapter.state.capture(), **adapter.state.constants(), **adapter.state.initial, **good}


# ---- what a forger writes ---------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, -5, 7, 1.5, -0.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf")),
    *(
        10**6,
        10**9,
        10**13,
        10**30,
        -(10**30),
        2**63,
        2**64,
        "",
        "x",
        "9" * 5000,
        "\ud800",
        "mine.py",
        "/dev/zero",
        "inductor",
    ),
    *([], [[]], [1, 2], [10**30], ["x"], {}, {"x": 1}, {"patience": 10**13}, [0] * 1000),
]
NAMES = [
    *("", "/", "x", "optimizer", "optimizer/", "optimizer/0", "optimizer/999/x", "optimizer/abc/x", "optimizer/-1/exp_avg"),
    *("optimizer/0/exp_avg", "optimizer/0/momentum_buffer", "optimizer/00/momentum_buffer", "optimizer/0/step", "steps/x"),
    *("good/", "good/rng", "good/optimizer/1/x", "initial/", "initial/x", "method/", "model/x", "guard/x", "n" * 10_000),
]
TYPES = [torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.float64, torch.float8_e5m2]
NUMBERS = [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e30, -(2.0**62), 2.0**62, 255.0]


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a header."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, part in parts for path in ((*above, key), *places(part, (*above, key)))]


def forge_header(header: dict[str, Any], draw: random.Random) -> None:
    *above, last = draw.choice(places(header))
    part = header
    for key in above:
        part = part[key]
    how = draw.randrange(6)
    if how == 0:
        del part[last]
    elif how == 1 and isinstance(part, dict):
        part[draw.choice(["x", "seed", "compile", "group", "model", "source_statistics"])] = draw.choice(VALUES)
    else:
        part[last] = copy.deepcopy(draw.choice(VALUES))


def forge_tensors(tensors: dict[str, Tensor], draw: random.Random) -> None:
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    change: Callable[[], Tensor | None] = draw.choice(
        [
            lambda: None,
            lambda: tensor.to(draw.choice(TYPES)),
            lambda: draw.choice(
                [
                    tensor.flatten(),
                    tensor[None],
                    tensor.flatten()[:0],
                    tensor.flatten()[1:],
                    tensor.mT if tensor.ndim > 1 else tensor,
                ]
            ),
            lambda: with_number(tensor, draw, everywhere=True),
            lambda: with_number(tensor, draw, everywhere=False),
            lambda: with_bytes(tensor, draw),
            lambda: tensors[draw.choice(sorted(tensors))],
        ]
    )
    if draw.randrange(6) == 0:
        tensors[draw.choice(NAMES)] = tensor
        return
    changed = change()
    del tensors[name]
    if changed is not None:
        tensors[name] = changed.clone()


def with_number(tensor: Tensor, draw: random.Random, *, everywhere: bool) -> Tensor:
    tensor = tensor.to(torch.float32) if tensor.dtype is torch.float8_e5m2 else tensor
    number = draw.choice(NUMBERS)
    if not tensor.is_floating_point():
        number = int(number) if abs(number) < 2**63 else draw.choice([-1, 2**62, -(2**62)])
        number = number % 256 if tensor.dtype is torch.uint8 else number
    changed = tensor.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1)
    flat[slice(None) if everywhere else slice(0, 1)] = number
    return changed


def with_bytes(tensor: Tensor, draw: random.Random) -> Tensor:
    changed = tensor.clone(memory_format=torch.contiguous_format)
    flat = changed.view(-1).view(torch.uint8)
    for _ in range(min(len(flat), draw.randrange(1, 20))):
        flat[draw.randrange(len(flat) if draw.randrange(2) else min(len(flat), 24))] = draw.randrange(256)
    return changed


def forged(method: str, seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the content of an honest file with one or two lies in it."""
    draw = random.Random(f"{method} {seed}")
    tensors, header = dict(saved(method).tensors), copy.deepcopy(saved(method).header)
    for _ in range(draw.randrange(1, 3)):
        if draw.randrange(3):
            forge_tensors(tensors, draw)
        else:
            forge_header(header, draw)
    return tensors, header


# Two numbers below 100 and not one below 10,000: see conftest.py.
SEEDS = st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)).map(
    lambda t: t[0] + 100 * t[1] + 10_000 * t[2]
)


# ---- state files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "count"), METHODS.items())
def test_a_forged_state_is_refused_or_works(method, count, one_thread):
    """The adapter is bit for bit as before after a refused file, and can make a step after one that it takes."""
    adapter, tensors, header, logits = saved(method)
    adapter.resume("honest", tensors, header)
    before, refused, taken, images = everything(adapter), 0, 0, tiny_batches(1)[0]

    @settings(max_examples=trials(count), phases=[Phase.generate])
    @given(seed=SEEDS)
    def attempt(seed):
        nonlocal refused, taken
        try:
            adapter.resume("forged", *forged(method, seed))
        except StateError:
            refused += 1
            assert_identical(everything(adapter), before, "after a refused file")
            if refused % 20 == 0:
                assert torch.equal(logits_of(adapter), logits)
        else:
            taken += 1
            if taken % 4 == 0:
                with suppress(AcclimateError):
                    adapter(images)
            adapter.resume("honest", tensors, header)
            assert_identical(everything(adapter), before, "after an honest file")

    attempt()
    assert refused > count / 2
    assert torch.equal(logits_of(adapter), logits)


def touched(model: torch.nn.Module) -> dict[str, Any]:
    """Return what must not change in a model that is not wrapped after all."""
    modules = {name: (type(module), module.training) for name, module in model.named_modules()}
    return {**modules, "flags": [p.requires_grad for p in model.parameters()]}


@pytest.mark.parametrize("method", ["dct", "rotta", "eata"])
def test_load_refuses_a_forged_file_and_leaves_the_model_as_it_was(method, one_thread):
    model = tiny_model().train()
    weights, before, refused = {name: t.clone() for name, t in model.state_dict().items()}, touched(model), 0

    @settings(max_examples=trials(80), phases=[Phase.generate])
    @given(seed=SEEDS)
    def attempt(seed):
        nonlocal refused
        draw = random.Random(seed)
        tensors, header = saved(method).tensors, copy.deepcopy(saved(method).header)
        forge_header(header[draw.choice(["config", "options"])], draw)
        if not draw.randrange(4):
            tensors = dict(tensors)
            forge_tensors(tensors, draw)
        try:
            resumed("forged", tensors, header, model, {}, SingleProcess()).unwrap()
        except StateError:
            refused += 1
        assert touched(model) == before
        assert_identical(dict(model.state_dict()), weights, "after a refused file")

    attempt()
    assert refused > 40


CASES: dict[str, Callable[[dict[str, Tensor], dict[str, Any]], object]] = {
    "an index of a parameter that does not exist": lambda t, h: t.update({"optimizer/999/x": torch.zeros(3)}),
    "an index that is no number": lambda t, h: t.update({"optimizer/abc/x": torch.zeros(3)}),
    "an entry without a name": lambda t, h: t.update({"optimizer/0": torch.zeros(())}),
    "a scalar that SGD does not have": lambda t, h: t.update({"optimizer/0/step": torch.ones(())}),
    "one more entry of the optimizer": lambda t, h: t.update({"optimizer/0/exp_avg": t["optimizer/0/momentum_buffer"]}),
    "a complex momentum": lambda t, h: t.update({"optimizer/0/momentum_buffer": t["optimizer/0/momentum_buffer"] * 1j}),
    "an infinite momentum": lambda t, h: t["optimizer/0/momentum_buffer"].fill_(float("inf")),
    "momenta before the first batch": lambda t, h: t["batch_size"].zero_(),
    "a parameter that is NaN": lambda t, h: t["model/blocks.0.norm1.weight"].fill_(float("nan")),
    "a parameter too large for its type": lambda t, h: t.update(
        {"model/blocks.0.norm1.weight": torch.full((32,), 1e300, dtype=torch.float64)}
    ),
    "a complex parameter": lambda t, h: t.update({"model/blocks.0.norm1.weight": torch.zeros(32, dtype=torch.complex64)}),
    "an infinite buffer": lambda t, h: t["method/average"].fill_(float("inf")),
    "a good state that is NaN": lambda t, h: t["good/model/blocks.0.norm1.weight"].fill_(float("nan")),
    "a negative batch size": lambda t, h: t["batch_size"].fill_(-5),
    "negative steps": lambda t, h: t["steps"].fill_(-1),
    "steps near the end of int64": lambda t, h: t["steps"].fill_(2**63 - 1),
    "steps that are not whole": lambda t, h: t.update(steps=torch.tensor(4.0)),
    "a loss scale of 0": lambda t, h: t["loss_scale"].fill_(0),
    "a negative loss scale": lambda t, h: t["loss_scale"].fill_(-1),
    "a loss scale that is NaN": lambda t, h: t["loss_scale"].fill_(float("nan")),
    "a level that does not exist": lambda t, h: t["guard/level"].fill_(10**12),
    "a flag of another byte": lambda t, h: t["guard/stopped"].view(torch.uint8).fill_(7),
    "a generator of zeros": lambda t, h: t["rng"].zero_(),
    "a generator of ones": lambda t, h: t["rng"].fill_(255),
    "a generator that reads beyond its numbers": lambda t, h: t["rng"][8:24].copy_(
        torch.tensor([112, 2, 0, 0, 1, 0, 0, 0, 112, 2, 0, 0, 0, 0, 0, 0])
    ),
    "a method that is no text": lambda t, h: h.update(method=["dct"]),
    "no method": lambda t, h: h.pop("method"),
    "no options": lambda t, h: h.pop("options"),
    "options that are a list": lambda t, h: h.update(options=[]),
    "no guard": lambda t, h: h["options"].pop("guard"),
    "patience that never ends": lambda t, h: h["options"]["guard"].update(patience=10**13),
    "patience that is not whole": lambda t, h: h["options"]["guard"].update(patience=8.5),
    "a billion blocks": lambda t, h: h["config"].update(blocks=10**9),
    "more blocks than a list can count": lambda t, h: h["config"].update(blocks=10**30),
    "a huge seed": lambda t, h: h["options"].update(seed=10**30),
    "a micro-batch of none": lambda t, h: h["options"].update(micro_batch=-1),
    "a huge micro-batch": lambda t, h: h["options"].update(micro_batch=10**30),
    "classes that are none": lambda t, h: h["options"].update(classes={"a": [[1], 2]}),
    "a mean beyond floats": lambda t, h: h["options"].update(mean=10**400, std=1),
    "an option of another type": lambda t, h: h["config"].update(reference="no"),
    "an option that belongs elsewhere": lambda t, h: h["config"].update(seed=3),
    "a file to read": lambda t, h: h["options"].update(source_statistics="/dev/zero"),
    "a model without a digest": lambda t, h: h["model"].pop("weights"),
    "a digest of another type": lambda t, h: h["model"].update(weights=7),
    "a source that is a list": lambda t, h: h.update(source=[1]),
}


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_each_lie_is_refused_by_load(change, one_thread):
    tensors, header = copy.deepcopy(saved("dct").tensors), copy.deepcopy(saved("dct").header)
    change(tensors, header)
    model = tiny_model()
    before = touched(model)
    with pytest.raises(StateError):
        resumed("forged", tensors, header, model, {}, SingleProcess())
    assert touched(model) == before
    assert acclimate.adapt(model, "source")(tiny_batches(1)[0]).isfinite().all()


def test_squares_and_counts_of_adam_are_not_negative():
    adapter, tensors, header, _ = saved("rotta")
    assert adapter.engine.adapted.optimizer is not None
    for entry, number, taken in (("exp_avg", -1, True), ("exp_avg_sq", -1, False), ("step", -1, False), ("step", 0, True)):
        lie = {**tensors, f"optimizer/0/{entry}": torch.full_like(tensors[f"optimizer/0/{entry}"], number)}
        if taken:
            adapter.resume("forged", lie, header)
        else:
            with pytest.raises(StateError, match=f"optimizer/0/{entry} has values outside of 0"):
                adapter.resume("forged", lie, header)
    lie = {name: tensor for name, tensor in tensors.items() if name != "optimizer/0/exp_avg"}
    with pytest.raises(StateError, match="optimizer/0/exp_avg is missing"):
        adapter.resume("forged", lie, header)


def test_a_method_may_keep_its_own_signs_of_no_value():
    """NaN in the averages of SAR and EATA and infinity in T3A's bank are honest; other such values are not."""
    for method, name, honest, lie in (
        ("dct", "method/average", float("nan"), float("inf")),
        ("eata", "method/average", float("nan"), -float("inf")),
        ("t3a", "method/entropies", float("inf"), float("nan")),
    ):
        adapter, tensors, header, _ = saved(method)
        adapter.resume("honest", {**tensors, name: torch.full_like(tensors[name], honest)}, header)
        with pytest.raises(StateError, match=f"{name} is not finite"):
            adapter.resume("forged", {**tensors, name: torch.full_like(tensors[name], lie)}, header)


@pytest.mark.parametrize(
    ("method", "option"), [("rotta", "memory"), ("adacontrast", "queue"), ("t3a", "supports_per_class"), ("foa", "prompts")]
)
@pytest.mark.parametrize("size", [10**6, 10**12, 10**18])
def test_no_more_memory_is_taken_than_a_file_can_need(method, option, size):
    header = copy.deepcopy(saved(method).header)
    header["config"][option] = size
    model, before = tiny_model(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StateError, match="far too large"):
        resumed("forged", saved(method).tensors, header, model, {}, SingleProcess())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**18  # kilobytes
    acclimate.adapt(model, "source")


def test_a_file_never_makes_python_run_a_file(tmp_path):
    before, script = set(registry._FILES), tmp_path / "mine.py"
    script.write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\n")
    for name in (str(script), "mine.py"):
        with pytest.raises(StateError, match="import the module that registers the method first"):
            resumed(
                "forged", saved("dct").tensors, {**saved("dct").header, "method": name}, tiny_model(), {}, SingleProcess()
            )
    assert not (tmp_path / "was run").exists()
    assert set(registry._FILES) == before


def test_the_caller_decides_whether_to_compile(tmp_path, monkeypatch):
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda function, backend: compiled.append(backend) or function)
    adapter = acclimate.adapt(tiny_model(), "tent", compile="eager")
    assert compiled.pop() == "eager"
    adapter(tiny_batches(1)[0])
    adapter.save(tmp_path / "new.safetensors")
    tensors, header = statefile.read(tmp_path / "new.safetensors")
    assert "compile" not in header["options"]
    header["options"]["compile"] = "inductor"  # as in a file of an earlier version
    statefile.write(tmp_path / "old.safetensors", tensors, header)
    for name in ("new", "old"):
        acclimate.load(tmp_path / f"{name}.safetensors", tiny_model())
        assert not compiled
        acclimate.load(tmp_path / f"{name}.safetensors", tiny_model(), compile="aot_eager")
        assert compiled.pop() == "aot_eager"
        adapter.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="compile=3"):
        acclimate.load(tmp_path / "new.safetensors", tiny_model(), compile=3)


# ---- the file itself --------------------------------------------------------------------------------------------------


def content_of(metadata: Mapping[str, str]) -> bytes:
    return save({"a": torch.zeros(2)}, dict(metadata))


def with_digest(text: str) -> bytes:
    return content_of({"acclimate": text, "digest": statefile.digest({"a": torch.zeros(2)}, text)})


def test_an_honest_header_is_read():
    assert statefile.parse("file", with_digest('{"format": 1, "x": [{"y": null}]}'))[1]["x"] == [{"y": None}]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '"format"',
        "{}",
        '{"format": "1"}',
        '{"format": 0}',
        '{"format": -1}',
        '{"format": true}',
        '{"format": 1.0}',
        '{"format": null}',
        '{"format": 99}',
        '{"format": 1, "format": 1}',
        '{"format": 1, "x": {"a": 1, "a": 2}}',
        '{"format": 1, 2: 3}',
        '{"format": 1, "x": ' + "9" * 10_000 + "}",
        '{"format": 1, "x": ' + "[" * 60 + "]" * 60 + "}",
        '{"format": 1, "x": ' + "[" * 900 + "]" * 900 + "}",
        '{"format": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"format": 1, "x": ' + '{"x":' * 100_000 + "1" + "}" * 100_001,
    ],
    ids=lambda text: text[:40],
)
def test_a_header_that_is_none_is_refused(text):
    with pytest.raises(StateError):
        statefile.parse("forged", with_digest(text))


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [0, 18446744073709551615], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 1000000000000000000000000], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "X", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, '
        b'"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
        b'{"__metadata__": null}',
        b'{"__metadata__": {"acclimate": 1}}',
        b'{"__metadata__": "acclimate"}',
        b'{"__metadata__": {"acclimate": "{\\"format\\": 1}", "acclimate": "{}"}}',
    ],
    ids=lambda index: index[:60].decode(errors="replace"),
)
def test_an_index_that_is_none_is_refused(index):
    known = b'"__metadata__": {"acclimate": "{\\"format\\": 1}"}, '
    for text in (index, index.replace(b'{"a"', b"{" + known + b'"a"', 1)):
        for size in (len(text), 2**40, 2**63):
            with pytest.raises(StateError):
                statefile.parse("forged", size.to_bytes(8, "little") + text)


def test_random_changes_of_a_file_raise_nothing_else():
    honest = with_digest('{"format": 1, "method": "dct", "config": {}, "options": {"guard": null}}')

    @settings(max_examples=trials(1500), phases=[Phase.generate])
    @given(seed=SEEDS)
    def attempt(seed):
        draw, content = random.Random(seed), bytearray(honest)
        for _ in range(draw.randrange(1, 4)):
            where = draw.randrange(len(content))
            content[where : where + draw.randrange(3)] = draw.choice(
                [b"", b"0", b'"', b"{", b"]", b",", b"\\", b"\xff", b"null"]
            )
        with suppress(StateError):
            statefile.parse("forged", bytes(content))

    attempt()


# ---- source statistics ------------------------------------------------------------------------------------------------

USERS = {"fisher": "eata", "features": "cfa", "class_tokens": "foa"}


@cache
def statistics() -> SourceStatistics:
    return source_statistics(tiny_model(), tiny_batches(2, seed=3), batch_size=6)


def test_forged_statistics_are_refused_or_work(tmp_path, monkeypatch, one_thread):
    honest, model, refused = statistics(), tiny_model(), 0
    header = {"format": 1, "statistics": honest.kinds, "model": dict(honest.model), "about": dict(honest.about)}
    before = touched(model)

    @settings(max_examples=trials(200), phases=[Phase.generate])
    @given(seed=SEEDS, kind=st.sampled_from(sorted(USERS)))
    def attempt(seed, kind):
        nonlocal refused
        draw = random.Random(seed)
        tensors, lies = {name: t for name, t in honest.tensors.items() if name.startswith(kind)}, copy.deepcopy(header)
        if draw.randrange(3):
            forge_tensors(tensors, draw)
        else:
            forge_header(lies, draw)
        monkeypatch.setattr(statefile, "read", lambda _: (tensors, lies))
        try:
            acclimate.adapt(model, USERS[kind], source_statistics="forged").unwrap()
        except (StateError, ConfigError):  # kinds that are not there are a wrong choice of the caller
            refused += 1
        assert touched(model) == before

    attempt()
    assert refused > 80


@pytest.mark.parametrize(
    ("kind", "name", "lie"),
    [
        ("fisher", "fisher/blocks.0.norm1.weight", torch.full((32,), -1.0)),
        ("fisher", "fisher/blocks.0.norm1.weight", torch.full((32,), float("nan"))),
        ("fisher", "fisher/blocks.0.norm1.weight", torch.zeros(3)),
        ("fisher", "fisher/blocks.0.norm1.weight", torch.zeros(32, dtype=torch.complex64)),
        ("fisher", "fisher/x", torch.zeros(3)),
        ("features", "features/class_counts", torch.full((10,), -1)),
        ("class_tokens", "class_tokens/std", torch.full((32 * 4 + 32,), -1.0)),
        ("class_tokens", "class_tokens/mean", torch.zeros(7)),
    ],
    ids=str,
)
def test_each_lie_about_the_source_is_refused(tmp_path, kind, name, lie):
    honest, model = statistics(), tiny_model()
    SourceStatistics({**honest.tensors, name: lie}, honest.model, honest.about).save(tmp_path / "forged.safetensors")
    before = touched(model)
    with pytest.raises(StateError, match=name.partition("/")[2]):
        acclimate.adapt(model, USERS[kind], source_statistics=tmp_path / "forged.safetensors")
    assert touched(model) == before
    honest.save(tmp_path / "honest.safetensors")
    acclimate.adapt(model, USERS[kind], source_statistics=tmp_path / "honest.safetensors")
