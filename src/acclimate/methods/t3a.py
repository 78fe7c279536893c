"""T3A: Test-Time Classifier Adjustment Module for Domain Generalization (Iwasawa and Matsuo, NeurIPS 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.engine import Engine, entropy, require_finite
from ..core.method import Info, Method, Setup, Step
from ..core.registry import register
from ..errors import require_whole
from ..models.view import ModelView


@register("t3a")
class T3A(Method):
    """Replace the head by prototypes: for each class, the mean direction of its features of lowest entropy so far.

    No parameter changes. A bank keeps the supports of lowest entropy for each predicted class; it starts with the rows of
    the head. A batch is stored in the bank before it is scored. A score is the product of a feature with a prototype of
    length 1. The prediction is the softmax of the scores, so they are used as logits.

        w_c = sum over the supports s of class c of s / |s|
        z_c = f w_c / |w_c|

    In addition to the batch, the method needs the bank, of a fixed size: classes x `supports_per_class` x width.

    Args:
        supports_per_class: Number of supports of each class. The paper chooses from 1, 5, 20, 50, 100 and all on validation
            data, so there is no default of its own. Later comparisons on ViT-B use 20. It is not possible to keep all,
            because the state would grow with the stream.
        reference: Behave as the authors' released code: a row of the head starts as a support of the class that the head
            predicts for it, so that a class may start without a prototype and score 0. By default each row belongs to its
            own class, as in the paper.
    """

    info = Info(
        paper="Iwasawa and Matsuo, NeurIPS 2021",
        adapts="prototypes instead of the head",
        requires=("features",),
        remembers="the supports of each class",
    )

    def __init__(self, *, supports_per_class: int = 20, reference: bool = False) -> None:
        super().__init__()
        require_whole(1, supports_per_class=supports_per_class)
        self.supports_per_class = supports_per_class
        self.reference = reference
        self.supports: Tensor
        self.entropies: Tensor

    def attach(self, view: ModelView, setup: Setup) -> Iterable[nn.Parameter]:
        """Create an empty bank, and adapt no parameter."""
        view.require_logits_of_head()
        view.head_weight()  # raises an error if there is none
        shape = (view.classes, self.supports_per_class)
        like = torch.zeros(0, dtype=view.precise, device=view.device)
        self.register_buffer("supports", like.new_zeros(*shape, view.feature_width))
        self.register_buffer("entropies", like.new_full(shape, math.inf))  # infinite for empty entries
        return []

    def step(self, images: Tensor, engine: Engine) -> Step:
        """Store the features of the batch in the bank, and score the batch with the new prototypes."""
        logits, features = engine.features(images)
        require_finite(logits, features)
        bank = self._bank(engine)
        everybody = engine.ranks.gather(logits)
        used = bank.add(engine.ranks.gather(features), everybody.argmax(-1), entropy(everybody))
        count = engine.num_classes  # with a subset of the classes, the last rows stay empty
        self.supports[:count] = bank.supports
        self.entropies[:count] = bank.entropies
        return Step(bank.score(features), used=used)

    def predict(self, images: Tensor, engine: Engine) -> Tensor:
        """Return the scores with the current prototypes."""
        return self._bank(engine).score(engine.features(images)[1])

    @torch.no_grad()
    def _bank(self, engine: Engine) -> Bank:
        """Return a copy of the current bank; an empty one is filled with the rows of the head."""
        count = engine.num_classes
        bank = Bank(self.supports[:count].clone(), self.entropies[:count].clone())
        if bank.entropies.isinf().all():
            rows = engine.view.head_weight().to(bank.supports)
            rows = rows if engine.classes is None else rows[engine.classes]
            logits = engine.classify(rows)
            labels = logits.argmax(-1) if self.reference else torch.arange(count, device=rows.device)
            bank.add(rows, labels, entropy(logits))
        return bank


class Bank:
    """The supports (classes, entries, width) and their entropies (classes, entries), in order of ascending entropy."""

    def __init__(self, supports: Tensor, entropies: Tensor) -> None:
        self.supports = supports
        self.entropies = entropies

    def add(self, features: Tensor, labels: Tensor, entropies: Tensor) -> int:
        """Store the features of lowest entropy for each class, and return how many of the new ones were stored."""
        places, entered = self.entropies.shape[1], 0
        for label in labels.unique().tolist():
            new = labels == label
            h, order = torch.cat([self.entropies[label], entropies[new].to(self.entropies)]).sort(stable=True)
            candidates = torch.cat([self.supports[label], features[new].to(self.supports)])
            self.entropies[label], self.supports[label] = h[:places], candidates[order[:places]]
            entered += int((order[:places] >= places).sum())
        return entered

    def score(self, features: Tensor) -> Tensor:
        """Return the products of the features with the prototypes of length 1.

        The features are not normalised. Empty entries are zero and add nothing to a prototype.
        """
        prototypes = F.normalize(F.normalize(self.supports, dim=-1).sum(1), dim=-1)
        return features.to(prototypes) @ prototypes.T
