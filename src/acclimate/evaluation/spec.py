"""What a run is: everything that decides its result, and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..core.files import file_digest
from ..core.method import Method
from ..core.registry import code_digest, create
from ..core.statistics import SourceStatistics
from ..data.datasets import title
from ..data.streams import Stream
from ..models.families import view
from ..models.fingerprint import fingerprint


@dataclass(frozen=True)
class Protocol:
    """How every run of a bench is made, whatever the method.

    Args:
        predict: Logits from "before" a batch's update, as the papers' code scores them, or "after" it.
        guard: Watch for collapse. The papers' code has no such thing.
        precision: "float32", "bfloat16" or "float16".
        classes: Columns of the head that exist in the data; None for all.
        unknown: The label of pictures of no class; None where there are none.
    """

    predict: str = "before"
    guard: bool = True
    precision: str = "float32"
    classes: tuple[int, ...] | None = None
    unknown: int | None = None


@dataclass(frozen=True)
class Spec:
    """One model, one stream, one method with its configuration."""

    model: dict[str, str]  # name, digests of its architecture and weights, device
    dataset: str  # its name
    domains: list[str]
    data: list[dict[str, Any]]  # for each domain what its pictures are: digest, corruption, preprocessing
    setting: str
    batch_size: int
    seed: int  # of the stream's order and of the method
    order: str  # digest of the stream's order
    method: str
    config: dict[str, Any]
    protocol: dict[str, Any]  # what holds for every run of the bench
    versions: dict[str, str]

    @cached_property
    def id(self) -> str:
        """A name that two runs share if and only if they are the same run."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        """Where the run is kept, readable at a glance."""
        where = self.domains[0].replace("/", "-") if len(self.domains) == 1 else f"{len(self.domains)}-domains"
        return f"{self.method}-{where.replace(' ', '_')}-{self.setting}-{self.seed}-{self.id}"

    @cached_property
    def card(self) -> dict[str, str]:
        """The protocol for people, one line each: no number should be shown without it."""
        counts = [domain.get("sampled", domain.get("count")) for domain in self.data]
        return {
            **self.shared,
            "method": self.method + "".join(f", {name} {_text(value)}" for name, value in self.config.items()),
            "domains": ", ".join(self.domains),
            "images": ", ".join(map(str, dict.fromkeys(counts))),
            "order": f"seed {self.seed}, SHA-256 {self.order[:16]}",
        }

    @cached_property
    def shared(self) -> dict[str, str]:
        """The part of the card that all runs of a table have in common, in whatever row and column: how, not on what."""
        made = {json.dumps(_made(domain), sort_keys=True): _made(domain) for domain in self.data}
        return {
            "model": f"{self.model['name']}, weights {self.model['weights']}, architecture {self.model['architecture']}",
            "device": f"{self.model['device']}, {self.protocol['precision']}",
            "data": self.dataset,
            "pictures": "; or ".join(", ".join(f"{key} {_text(v)}" for key, v in how.items()) for how in made.values()),
            "classes": f"{self.protocol['classes']}"
            + ("" if self.protocol["unknown"] is None else f"; label {self.protocol['unknown']} is none of them"),
            "stream": f"{self.setting}, batches of {self.batch_size}",
            "predict": f"{self.protocol['predict']} the update",
            "reset": self.protocol["reset"],
            "guard": "on" if self.protocol["guard"] else "off",
            "fidelity": "as the authors' code" if self.config.get("reference") else "without its defects",
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }


def _made(domain: Mapping[str, Any]) -> dict[str, Any]:
    """How a domain's pictures were made, leaving out which they are."""
    how = dict(domain.get("preprocess") or {})
    corruption = domain.get("corruption") or {}
    return how | {f"corruption {key}": corruption[key] for key in ("constants", "seed") if key in corruption}


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return _text(value[0]) if len(set(value)) == 1 else "/".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


RESET = "the source model for each run"
LIBRARIES = ("torch", "timm", "numpy", "scipy", "pillow")


def specify(
    stream: Stream,
    method: str | type[Method],
    options: Mapping[str, Any],
    *,
    model: dict[str, str],
    dataset: str = "custom",
    protocol: Protocol = Protocol(),
    source_statistics: SourceStatistics | None = None,
) -> Spec:
    """The run of a method on a stream; `model` comes from `describe`."""
    made = create(method, options)
    known = _contents(made)
    if source_statistics is not None and made.info.needs:
        known["source statistics"] = source_statistics.identity
    return Spec(
        model=model,
        dataset=dataset,
        domains=[title(domain) for domain in stream.domains],
        data=[dict(domain.identity) for domain in stream.domains],
        setting=stream.setting,
        batch_size=stream.batch_size,
        seed=stream.seed,
        order=stream.digest,
        method=made.name,
        config={name: _kept(value) for name, value in made.config.items()} | known,
        protocol={**asdict(protocol), "classes": _columns(protocol.classes), "reset": RESET},
        versions={"acclimate": __version__, **{library: version(library) for library in LIBRARIES}},
    )


def _contents(method: Method) -> dict[str, str]:
    """Return digests of what is not in the options themselves: files that these name, and the file of the method's code."""
    files = {name: Path(value) for name, value in method.config.items() if isinstance(value, str) and Path(value).is_file()}
    digests = {f"{name}, its content": file_digest(path) for name, path in files.items()}
    code = code_digest(type(method))
    return digests if code is None else {**digests, "code": code}


def _kept(value: Any) -> Any:
    """An option as it will come back from the file, which has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else json.loads(json.dumps(value))


def describe(model: nn.Module, name: str) -> dict[str, str]:
    """A model's name, digests and device. On a CPU the number of threads decides how sums are rounded."""
    vit = view(model)
    where = torch.cuda.get_device_name(vit.device) if vit.device.type == "cuda" else vit.device.type
    if vit.device.type == "cpu":
        where += f", {torch.get_num_threads()} threads"
    return {"name": name, "device": where, **fingerprint(vit, model.state_dict())}


def _columns(classes: Sequence[int] | None) -> str:
    if classes is None:
        return "all"
    return f"{len(classes)}, {hashlib.sha256(json.dumps(list(classes)).encode()).hexdigest()[:16]}"
