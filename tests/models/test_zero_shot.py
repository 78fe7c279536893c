"""Zero-shot classifiers give the logits of their models, and adapt as any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acclimate
from acclimate.core.registry import fitting_methods
from acclimate.errors import ConfigError, ModelError
from acclimate.models.families import view_of
from acclimate.testing.zoo import HF_TEXT, HF_VIT, tiny

NAMES = ["cat", "dog", "house"]


class Tokens(dict):
    def to(self, device):
        return self


def ids(texts, length):
    """Return a number for each letter, between those of the beginning and of the end, which also fills the rest."""
    rows = ([0, *(ord(letter) % 90 + 5 for letter in text[: length - 2])] for text in texts)
    return torch.tensor([row + [1] * (length - len(row)) for row in rows])


def tokenizer(text, padding, truncation, return_tensors):
    """Stand for a tokenizer of transformers."""
    assert (padding, truncation, return_tensors) == ("max_length", True, "pt")
    return Tokens(input_ids=ids(text, 16))


@pytest.fixture(params=["CLIP", "Siglip"])
def both_towers(request):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(vision_config=HF_VIT, text_config=HF_TEXT)
    return getattr(transformers, f"{request.param}Model")(config).eval()


def test_logits_are_those_of_the_model(both_towers):
    images = torch.randn(4, 3, 32, 32)
    texts = tokenizer([f"a photo of a {name}." for name in NAMES], "max_length", True, "pt")
    with torch.no_grad():
        expected = both_towers(pixel_values=images, **texts).logits_per_image
        ours = acclimate.zero_shot(both_towers, NAMES, tokenizer=tokenizer)(images)
    torch.testing.assert_close(ours, expected)


def test_methods_apply(both_towers):
    model = acclimate.zero_shot(both_towers, NAMES, tokenizer=tokenizer, templates=["a {}.", "a drawing of a {}."])
    assert model.class_names == tuple(NAMES)
    seen = view_of(model)
    assert {"norms", "features", "attention"} <= {*seen.parts} and seen.head is model.head
    assert ("dct" in fitting_methods(seen)) == ("class token" in seen.parts)
    assert not any(p is q for p in both_towers.text_model.parameters() for q in model.parameters())
    for method in ("tent", "keel", "t3a", "neo"):
        adapter = acclimate.adapt(model, method, **({"margin": 9.0} if method == "keel" else {}))
        assert adapter(torch.randn(4, 3, 32, 32)).shape == (4, 3)
        adapter.unwrap()


def test_a_processor_says_how_images_are_normalised(both_towers):
    class Processor:
        class image_processor:
            image_mean, image_std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)

        def __call__(self, **given):
            return tokenizer(**given)

    model = acclimate.zero_shot(both_towers, NAMES, tokenizer=Processor())
    adapter = acclimate.adapt(model, "memo", views=2)  # augments pixels
    assert adapter.engine.normalisation.mean == (0.1, 0.2, 0.3)
    with pytest.raises(ConfigError, match="does not say how its images are normalised"):
        acclimate.adapt(acclimate.zero_shot(both_towers, NAMES, tokenizer=tokenizer), "memo")


def test_a_model_of_open_clip():
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    image = dict(image_size=32, layers=2, width=32, patch_size=8, head_width=16)
    text = dict(context_length=16, vocab_size=99, width=32, heads=2, layers=1)
    clip = open_clip.CLIP(embed_dim=16, vision_cfg=image, text_cfg=text).eval()
    tokens = ids([f"a photo of a {name}." for name in NAMES], 16)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        features, words, scale = clip(images, tokens)[:3]
    model = acclimate.zero_shot(clip, NAMES, tokenizer=lambda texts: ids(texts, 16))
    torch.testing.assert_close(model(images), scale * features @ words.T)
    for method in ("tent", "keel", "dct"):
        adapter = acclimate.adapt(model, method, **({} if method == "tent" else {"margin": 9.0}))
        adapter(images)
        assert adapter.record.drift > 0
        adapter.unwrap()


def test_bad_arguments_are_named(both_towers):
    for names in (["cat"], "cat", []):
        with pytest.raises(ConfigError, match=r"class_names=.*at least two classes"):
            acclimate.zero_shot(both_towers, names, tokenizer=tokenizer)
    for templates in ([], "a {}", ["a cat"]):
        with pytest.raises(ConfigError, match=r"templates=.*in which \{\} stands"):
            acclimate.zero_shot(both_towers, NAMES, tokenizer=tokenizer, templates=templates)
    with pytest.raises(ModelError, match="torch Linear is no CLIP or SigLIP"):
        acclimate.zero_shot(nn.Linear(3, 3), NAMES, tokenizer=tokenizer)
    with pytest.raises(ModelError, match="is no CLIP or SigLIP"):
        acclimate.zero_shot(tiny("ResNet"), NAMES, tokenizer=tokenizer)
