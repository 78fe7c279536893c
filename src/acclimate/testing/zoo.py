"""One tiny model of each family of image classifiers, with random weights.

Tests run methods on them, and `tools/refresh_models.py` writes from them what docs/models.md says about each family.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.zero_shot import zero_shot

VIT: dict[str, Any] = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2)
SWIN: dict[str, Any] = dict(embed_dim=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 2, 2))
HF_VIT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
)
HF_TEXT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99,
    bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
CLASSES = 10
NAMES = [f"class {i}" for i in range(CLASSES)]


@dataclass(frozen=True)
class Member:
    """A family of models.

    Args:
        library: The library, or "own" for a module that a user may write.
        example: A published model of the family, or how a user makes one.
        build: A function that returns a tiny model of the family.
        size: The side of its images.
    """

    library: str
    example: str
    build: Callable[[], nn.Module]
    size: int = 32

    @property
    def is_installed(self) -> bool:
        """Whether the library can be imported."""
        return self.library == "own" or importlib.util.find_spec(self.library) is not None


def tiny(name: str) -> nn.Module:
    """Return the tiny model of a family, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = ZOO[name].build().eval()
        side = ZOO[name].size
        model.pretrained_cfg = {**getattr(model, "pretrained_cfg", {}), "input_size": (3, side, side)}
        with torch.no_grad():
            for p in model.parameters():  # some heads begin with zeros, from which nothing is learned
                p.add_(0.05 * torch.randn_like(p))
    return model


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return build


def _group_norm() -> nn.Module:
    from timm.layers import GroupNorm

    small: dict[str, Any] = dict(layers=(1, 1, 1, 1), channels=(16, 16, 32, 32))
    return _timm("resnet18", norm_layer=partial(GroupNorm, num_groups=8), **small)()


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, img_size=32, patch_size=8, num_blocks=4, embed_dim=32)


def _big_transfer() -> nn.Module:
    from timm.layers import GroupNormAct, StdConv2d
    from timm.models.resnetv2 import ResNetV2

    layer, conv = partial(GroupNormAct, num_groups=8), partial(StdConv2d, eps=1e-8)
    sizes: dict[str, Any] = dict(layers=(1, 1, 1, 1), channels=(32, 32, 64, 64), stem_chs=32)
    return ResNetV2(num_classes=CLASSES, norm_layer=layer, conv_layer=conv, **sizes)


def _hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(num_labels=CLASSES, **options)
        return getattr(transformers, model)(made)

    return build


def _torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 16, [1, 1, 2, 1], [1, 2, 2, 2], [2, 2], num_classes=CLASSES)


def _torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=CLASSES)


def _torchvision_efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    settings = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 1), MBConvConfig(4, 3, 2, 16, 24, 2)]
    return EfficientNet(settings, dropout=0.2, num_classes=CLASSES, last_channel=32)


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 4, 2, 32, 64, num_classes=CLASSES)


class Tokens(dict[str, Any]):
    """What a tokenizer of transformers returns."""

    def to(self, device: torch.device) -> Tokens:
        """Return the same tokens."""
        return self


def _ids(texts: Sequence[str]) -> Tensor:
    """Return a number for each letter of short texts, between those of the beginning and of the end."""
    return torch.tensor([[0, *(ord(letter) % 90 + 5 for letter in text[-9:]), 1] for text in texts])


def _zero_shot(kind: str) -> Callable[[], nn.Module]:
    """Return a function that builds a zero-shot classifier of a model of transformers, whose words mean nothing."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vision_config=HF_VIT, text_config=HF_TEXT)
        model = getattr(transformers, f"{kind}Model")(config).eval()
        return zero_shot(model, NAMES, tokenizer=lambda text, **_: Tokens(input_ids=_ids(text)), templates=["{}"])

    return build


def _open_clip() -> nn.Module:
    import open_clip

    image = dict(image_size=32, layers=4, width=32, patch_size=8, head_width=16)
    text = dict(context_length=9, vocab_size=99, width=32, heads=2, layers=1)
    model = open_clip.CLIP(embed_dim=16, vision_cfg=image, text_cfg=text).eval()
    return zero_shot(model, NAMES, tokenizer=_ids, templates=["{}"])


class DINOv3(nn.Module):
    """A module of a user: a linear layer on the class token of a DINOv3 of transformers."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        self.backbone = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**HF_VIT))
        self.classifier = nn.Linear(HF_VIT["hidden_size"], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.classifier(self.backbone(images).last_hidden_state[:, 0])


class Normalise(nn.Module):
    """A layer that normalises pixels, as users put it before a model."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised images."""
        return (images - 0.5) / 0.5


class Probe(nn.Module):
    """A module of a user: a linear layer on the mean token of a backbone without a head."""

    def __init__(self) -> None:
        super().__init__()
        backbone: Any = _timm("vit_tiny_patch16_224", **VIT)()
        backbone.reset_classifier(0)
        self.backbone: Any = backbone
        self.fc = nn.Linear(VIT["embed_dim"], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.backbone.forward_features(images).mean(1))


class Temperature(nn.Module):
    """A module of a user that divides the logits of a model by a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _timm("test_convnext")()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(images) / self.temperature


ZOO: dict[str, Member] = {
    "ViT, DeiT": Member("timm", "vit_base_patch16_224", _timm("vit_tiny_patch16_224", **VIT)),
    "DINOv2": Member(
        "timm", "vit_small_patch14_reg4_dinov2", _timm("vit_small_patch14_reg4_dinov2", init_values=0.1, **VIT)
    ),
    "DeiT, distilled": Member("timm", "deit_base_distilled_patch16_224", _timm("deit_tiny_distilled_patch16_224", **VIT)),
    "SigLIP, attention pooling": Member("timm", "vit_base_patch16_siglip_224", _timm("vit_base_patch16_siglip_224", **VIT)),
    "SigLIP, mean pooling": Member(
        "timm", "vit_base_patch16_siglip_gap_224", _timm("vit_base_patch16_siglip_gap_224", **VIT)
    ),
    "BEiT": Member("timm", "beit_base_patch16_224", _timm("beit_base_patch16_224", **VIT)),
    "BEiT v2": Member("timm", "beitv2_base_patch16_224", _timm("beitv2_base_patch16_224", **VIT)),
    "EVA-02": Member("timm", "eva02_base_patch14_448", _timm("eva02_tiny_patch14_224", **VIT)),
    "DINOv3 (rotary positions)": Member("timm", "vit_base_patch16_dinov3", _timm("vit_small_patch16_dinov3", **VIT)),
    "ViT, rotary positions": Member("timm", "vit_base_patch16_rope_224", _timm("vit_small_patch16_rope_224", **VIT)),
    "CaiT": Member("timm", "cait_s24_224", _timm("cait_xxs24_224", **VIT)),
    "XCiT": Member(
        "timm", "xcit_small_12_p16_224", _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=4, num_heads=2)
    ),
    "Hiera": Member(
        "timm",
        "hiera_base_224",
        _timm("hiera_tiny_224", img_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 2, 1)),
        size=64,
    ),
    "Swin": Member(
        "timm",
        "swin_base_patch4_window7_224",
        _timm("swin_tiny_patch4_window7_224", img_size=32, patch_size=2, window_size=2, **SWIN),
    ),
    "Swin v2": Member(
        "timm",
        "swinv2_base_window8_256",
        _timm("swinv2_tiny_window8_256", img_size=32, patch_size=2, window_size=2, **SWIN),
    ),
    "MaxViT": Member(
        "timm",
        "maxvit_tiny_tf_224",
        _timm(
            "maxvit_tiny_tf_224",
            img_size=32,
            embed_dim=(16, 16, 24, 32),
            depths=(1, 1, 1, 1),
            stem_width=16,
            transformer_dim_head=8,
        ),
    ),
    "Mixer": Member("timm", "mixer_b16_224", _mixer),
    "ConvNeXt": Member("timm", "convnext_base", _timm("convnext_atto", dims=(8, 16, 24, 32), depths=(1, 1, 2, 1))),
    "ConvNeXt v2": Member("timm", "convnextv2_base", _timm("convnextv2_atto", dims=(8, 16, 24, 32), depths=(1, 1, 2, 1))),
    "ResNet": Member("timm", "resnet50", _timm("test_resnet")),
    "ResNet, GroupNorm": Member("timm", "resnet50_gn", _group_norm),
    "ResNeXt": Member(
        "timm", "resnext50_32x4d", _timm("resnext50_32x4d", layers=(1, 1, 1, 1), channels=(16, 16, 32, 32), cardinality=4)
    ),
    "ResNet v2 (BiT)": Member("timm", "resnetv2_50x1_bit", _big_transfer),
    "RegNet": Member("timm", "regnety_032", _timm("regnetx_002")),
    "EfficientNet": Member("timm", "efficientnet_b0", _timm("test_efficientnet")),
    "MobileNet v3": Member("timm", "mobilenetv3_large_100", _timm("mobilenetv3_small_050")),
    "HF ViT": Member("transformers", "ViTForImageClassification", _hf("ViTForImageClassification", "ViTConfig", **HF_VIT)),
    "HF DeiT": Member(
        "transformers", "DeiTForImageClassification", _hf("DeiTForImageClassification", "DeiTConfig", **HF_VIT)
    ),
    "HF DeiT, distilled": Member(
        "transformers",
        "DeiTForImageClassificationWithTeacher",
        _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", **HF_VIT),
    ),
    "HF DINOv2": Member(
        "transformers", "Dinov2ForImageClassification", _hf("Dinov2ForImageClassification", "Dinov2Config", **HF_VIT)
    ),
    "HF DINOv2 with registers": Member(
        "transformers",
        "Dinov2WithRegistersForImageClassification",
        _hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", **HF_VIT),
    ),
    "HF BEiT": Member(
        "transformers", "BeitForImageClassification", _hf("BeitForImageClassification", "BeitConfig", **HF_VIT)
    ),
    "HF Swin": Member(
        "transformers",
        "SwinForImageClassification",
        _hf("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, window_size=2, **SWIN),
    ),
    "HF ConvNeXt": Member(
        "transformers",
        "ConvNextForImageClassification",
        _hf(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 2, 1],
            image_size=32,
        ),
    ),
    "HF ResNet": Member(
        "transformers",
        "ResNetForImageClassification",
        _hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[16, 16, 32, 32],
            depths=[1, 1, 1, 1],
            layer_type="basic",
        ),
    ),
    "HF CLIP": Member(
        "transformers",
        "CLIPForImageClassification",
        _hf("CLIPForImageClassification", "CLIPConfig", vision_config=HF_VIT, text_config=HF_TEXT),
    ),
    "HF SigLIP": Member(
        "transformers",
        "SiglipForImageClassification",
        _hf("SiglipForImageClassification", "SiglipConfig", vision_config=HF_VIT, text_config=HF_TEXT),
    ),
    "HF CLIP, zero-shot": Member("transformers", "CLIPModel", _zero_shot("CLIP")),
    "HF SigLIP, zero-shot": Member("transformers", "SiglipModel", _zero_shot("Siglip")),
    "open_clip, zero-shot": Member("open_clip", "ViT-B-16", _open_clip),
    "torchvision ViT": Member("torchvision", "vit_b_16", _torchvision_vit),
    "torchvision Swin": Member("torchvision", "swin_t", _torchvision_swin),
    "torchvision ResNet": Member("torchvision", "resnet50", _torchvision_resnet),
    "torchvision ConvNeXt": Member("torchvision", "convnext_tiny", _torchvision_convnext),
    "torchvision EfficientNet": Member("torchvision", "efficientnet_b0", _torchvision_efficientnet),
    "normalisation and model": Member(
        "own", "nn.Sequential(normalise, model)", lambda: nn.Sequential(Normalise(), _timm("vit_tiny_patch16_224", **VIT)())
    ),
    "DINOv3 and a head": Member("transformers", "a linear layer on the class token of DINOv3ViTModel", DINOv3),
    "linear probe": Member("own", "a linear layer on the mean token of a ViT", Probe),
    "temperature": Member("own", "a model whose logits are divided by a temperature", Temperature),
}
