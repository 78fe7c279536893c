"""The specification of a run, which contains everything that determines its result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..core.digests import digest_json
from ..core.files import file_digest
from ..core.method import Method
from ..core.recentre import form_of
from ..core.registry import code_digest, create_method
from ..core.statistics import SourceStatistics
from ..data.domains import Domain, DomainKey
from ..data.streams import Stream
from ..models.families import view_of
from ..models.fingerprint import fingerprint

LONGEST = 100  # number of letters of the description in the name of a folder
RESET = "the source model for each run"
LIBRARIES = ("torch", "timm", "numpy", "scipy", "pillow")


@dataclass(frozen=True)
class Protocol:
    """The options of every run of a bench, whatever the method.

    Args:
        predict: Whether the logits of a batch come from "before" its update, as in the papers' code, or from "after" it.
        guard: Whether a guard undoes harm. The papers' code has no guard.
        precision: "float32", "bfloat16" or "float16".
        classes: The columns of the head that exist in the data; None for all.
        unknown: The label of images of no class; None if there are none.
    """

    predict: str = "before"
    guard: bool = True
    precision: str = "float32"
    classes: tuple[int, ...] | None = None
    unknown: int | None = None


@dataclass(frozen=True)
class Spec:
    """The specification of a run: one model, one stream, and one method with its configuration."""

    model: dict[str, str]  # name, digests of its architecture and weights, device
    dataset: str  # its name
    domains: list[DomainKey]
    data: list[str]  # for each domain: a digest of everything that determines its images
    images: list[int]  # number of images of each domain
    preprocessing: list[dict[str, Any]]  # the distinct preparations of images
    setting: str
    batch_size: int
    seed: int  # of the order of the stream, and of the method
    order: str  # digest of the order of the stream
    method: str
    config: dict[str, Any]  # all options
    changed: dict[str, Any]  # options that differ from the defaults of the method
    protocol: dict[str, Any]  # the same for every run of the bench
    versions: dict[str, str]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Spec:
        """Return a specification from the values of a JSON file."""
        return cls(**{**values, "domains": [DomainKey(*key) for key in values["domains"]]})

    @cached_property
    def id(self) -> str:
        """The identifier of the run. Two runs have the same one if and only if they are the same run."""
        return digest_json(asdict(self))

    @property
    def folder(self) -> str:
        """The name of the folder of the run, which describes it, in letters that every file system accepts."""
        where = str(self.domains[0]).replace("/", "-") if len(self.domains) == 1 else f"{len(self.domains)}-domains"
        about = f"{self.method}-{where}-{self.setting}-{self.seed}"
        return f"{re.sub('[^a-zA-Z0-9_.+-]', '_', about)[:LONGEST]}-{self.id}"

    @cached_property
    def card(self) -> dict[str, str]:
        """The protocol in words, which should accompany every number."""
        return {
            **self.shared,
            "method": self.method + "".join(f", {name} {_text(value)}" for name, value in self.config.items()),
            "domains": ", ".join(map(str, self.domains)),
            "images": ", ".join(map(str, dict.fromkeys(self.images))),
            "order": f"seed {self.seed}, SHA-256 {self.order[:16]}",
        }

    @cached_property
    def shared(self) -> dict[str, str]:
        """The part of the card that all runs of a table share: everything except method, options, domain and seed."""
        made = [", ".join(f"{key} {_text(value)}" for key, value in how.items()) for how in self.preprocessing]
        return {
            "model": f"{self.model['name']}, weights {self.model['weights']}, architecture {self.model['architecture']}",
            "device": f"{self.model['device']}, {self.protocol['precision']}",
            "data": self.dataset,
            "preprocessing": "; or ".join(made),
            "classes": f"{self.protocol['classes']}"
            + ("" if self.protocol["unknown"] is None else f"; label {self.protocol['unknown']} is none of them"),
            "stream": f"{self.setting}, batches of {self.batch_size}",
            "predict": f"{self.protocol['predict']} the update",
            "reset": self.protocol["reset"],
            "guard": "on" if self.protocol["guard"] else "off",
            "fidelity": "the authors' released code" if self.config.get("reference") else "the paper's algorithm",
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }


def method_of(method: str | type[Method], options: Mapping[str, Any]) -> Method:
    """Return the method of a run, whose options may include `recentre`, which is an option of the adapter."""
    return create_method(method, {name: value for name, value in options.items() if name != "recentre"})


def specify(
    stream: Stream,
    method: str | type[Method],
    options: Mapping[str, Any],
    *,
    model: dict[str, str],
    dataset: str = "custom",
    protocol: Protocol = Protocol(),
    source_statistics: SourceStatistics | None = None,
    shown: Stream | None = None,
) -> Spec:
    """Return the specification of a run.

    Args:
        stream: The stream.
        method: The method, by name or class.
        options: The options of the method, and perhaps `recentre`.
        model: A description of the model, from `describe`.
        dataset: The name of the data set.
        protocol: The protocol of all runs of the bench.
        source_statistics: The source statistics, for a method that needs some.
        shown: The stream that the method gets, if it differs from `stream`.
    """
    made = method_of(method, options)
    config = {name: _kept(value) for name, value in made.config.items()}
    defaults = {name: _kept(p.default) for name, p in made.options().items()}
    form = form_of(options.get("recentre"), made.info.recentre)
    if form or made.info.recentre:
        config["recentre"], defaults["recentre"] = form or False, made.info.recentre
    config |= _contents(made)
    if source_statistics is not None and made.info.needs:
        config["source statistics"] = source_statistics.identity
    if shown is not None and shown is not stream:
        config["shown"] = digest_json([domain.identity for domain in shown.domains])
    ways = {json.dumps(how, sort_keys=True): how for how in map(_preparation, stream.domains)}
    return Spec(
        model=model,
        dataset=dataset,
        domains=[domain.key for domain in stream.domains],
        data=[domain.identity for domain in stream.domains],
        images=[len(domain.labels) for domain in stream.domains],
        preprocessing=list(ways.values()),
        setting=stream.setting,
        batch_size=stream.batch_size,
        seed=stream.seed,
        order=stream.digest,
        method=made.name,
        config=config,
        changed={name: value for name, value in config.items() if name in defaults and value != defaults[name]},
        protocol={**asdict(protocol), "classes": _columns(protocol.classes), "reset": RESET},
        versions={"acclimate": __version__, **{library: version(library) for library in LIBRARIES}},
    )


def describe(model: nn.Module, name: str) -> dict[str, str]:
    """Return the name, the digests and the device of a model.

    On a CPU the device includes the number of threads, which determines the rounding of sums.
    """
    view = view_of(model)
    where = torch.cuda.get_device_name(view.device) if view.device.type == "cuda" else view.device.type
    if view.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    return {"name": name, "device": where, **fingerprint(view, model.state_dict())}


def _preparation(domain: Domain) -> dict[str, Any]:
    """Return how the images of a domain were made, without identifying the images."""
    how = {} if domain.preprocess is None else domain.preprocess.description()
    if domain.corruption is not None:
        about = domain.corruption.description()
        how |= {f"corruption {key}": about[key] for key in ("constants", "seed")}
    return how


def _contents(method: Method) -> dict[str, str]:
    """Return digests of the files that options name, and of the file of the method's code."""
    files = {name: Path(value) for name, value in method.config.items() if isinstance(value, str) and Path(value).is_file()}
    digests = {f"{name}, its content": file_digest(path) for name, path in files.items()}
    code = code_digest(type(method))
    return digests if code is None else {**digests, "code": code}


def _kept(value: Any) -> Any:
    """Return the value of an option in the form in which the file, which has no infinity, returns it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else json.loads(json.dumps(value))


def _columns(classes: Sequence[int] | None) -> str:
    return "all" if classes is None else f"{len(classes)}, {digest_json(list(classes))}"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return _text(value[0]) if len(set(value)) == 1 else "/".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
