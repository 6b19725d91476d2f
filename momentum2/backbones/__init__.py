"""Name -> encoder: a network of torchvision or timm without its classifier; and any other module as one."""

import functools
import math
import re
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.backbones import fit, timm_networks, torchvision_networks
from momentum2.backbones.torchvision_networks import cosine_filters
from momentum2.config import ModelConfig, Stem, StemInit
from momentum2.errors import SettingError, UserError
from momentum2.settings import BOOLEANS
from momentum2.weights import Architecture, fill, network_in, read_state

#: What a name may begin with: whose network it is. Without it, torchvision's.
TIMM, TORCHVISION = "timm/", "torchvision/"


class Encoder(nn.Module):
    """What `build` returns, for type checkers: images (n, channels, h, w) -> pooled features (n, feature_dim).

    At run time it is torchvision's or timm's own module with `feature_dim` set on it, so every parameter keeps its
    name there.
    """

    feature_dim: int


class Facts(NamedTuple):
    """What is known of an encoder before it is trained.

    Args:
        architecture: With all that it has to be built with.
        feature_dim: Width of its features.
        parameters: Their number.
        batch_norms: Their number.
        map_side: Side of its last map at the image size, where the network says its stride.
        unused: Names of the parameters that its features do not depend on.
        layered: It says what its layers are (timm's `group_matcher`).
        recomputes: It can compute its activations again (timm's `set_grad_checkpointing`).
    """

    architecture: Architecture
    feature_dim: int
    parameters: int
    batch_norms: int
    map_side: int | None
    unused: tuple[str, ...]
    layered: bool
    recomputes: bool


def build(
    name: str,
    stem: Stem = "imagenet",
    width: float = 1.0,
    zero_init_residual: bool = False,
    stem_init: StemInit = "random",
    channels: int = 3,
    options: Sequence[str] = (),
) -> Encoder:
    """The network `name`, randomly initialized, ending in its pooled features.

    Args:
        name: A network of torchvision, `resnet50` or `torchvision/resnet50`, or one of timm, `timm/convnext_tiny`.
        stem: First layers of torchvision's ResNets: imagenet (7x7/2 and pooling), cifar (3x3/1) or small (3x3/2).
        width: Multiplier of all channels of such a ResNet.
        zero_init_residual: The last BN weight of every block of such a ResNet is 0, and it starts as one without
            residual branches.
        stem_init: With cosines, the first layer of such a ResNet starts as `cosine_filters`.
        channels: Of the images.
        options: Arguments of the network's constructor, each `NAME=VALUE`.
    """
    network = _create(
        Architecture(name, stem, width, tuple(options), channels), zero_init_residual, stem_init
    )
    encoder = cast(Encoder, network)
    encoder.feature_dim = _known_width(network) or _some_width(network, name, channels)
    return encoder


def of(architecture: Architecture) -> Encoder:
    """The encoder of an architecture, for weights that come from elsewhere."""
    name, stem, width, options, channels = architecture
    return build(name, stem, width, channels=channels, options=options)


def of_config(model: ModelConfig, channels: int = 3) -> Encoder:
    """The network of these settings, with initial weights."""
    shape = model.backbone, model.stem, model.width
    return build(*shape, model.zero_init_residual, model.stem_init, channels, model.options or ())


def create(name: str) -> nn.Module:
    """The network `name` as it is built without options; nothing about its features is known."""
    return _create(Architecture(name, "imagenet", 1.0))


def has_stem(name: str) -> bool:
    """Whether a stem, a width and residual branches can be chosen: of torchvision's ResNets."""
    if name.startswith(TIMM):
        return False
    with torch.device("meta"):
        return torchvision_networks.is_resnet(create(name))


@functools.lru_cache(maxsize=16)
def inspect(architecture: Architecture, sizes: tuple[int, ...]) -> Facts:
    """What an architecture is for images of these sizes, or one sentence why it cannot be. Nothing is computed.

    A network that takes one size only, such as most ViTs, is built for the first of the sizes.
    """
    with torch.device("meta"):
        network = _create(architecture)
        if torchvision_networks.is_resnet(network):  # they take every size
            return facts_of(network, architecture, fit.Fit(_known_width(network) or 0, ()), sizes[0])
        try:
            found = fit.measure(network, sizes, architecture.channels, name=architecture.backbone)
            return facts_of(network, architecture, found, sizes[0])
        except fit.Unfit as unfit:
            built = _for_size(architecture, sizes)
            if built is None:
                raise _refusal(architecture, sizes, network, *unfit.args) from None
            return built


@functools.lru_cache(maxsize=16)
def for_any_size(architecture: Architecture) -> Architecture:
    """The same network, built so that it takes images of every size; one sentence where it cannot be.

    Names and shapes of its weights stay as they are.
    """
    with torch.device("meta"):
        if torchvision_networks.is_resnet(_create(architecture)):
            return architecture
        # What timm's ViTs want to be told, and its Swins.
        for more in ((), ("dynamic_img_size=true",), ("strict_img_size=false",)):
            told = architecture._replace(options=(*architecture.options, *more))
            try:
                fit.measure(_create(told), (128, 192), architecture.channels, backward=False)
                return told
            except (UserError, fit.Unfit):
                continue
    raise UserError(f"{architecture.backbone} takes images of one size only. Choose another backbone.")


def facts_of(network: nn.Module, architecture: Architecture, found: fit.Fit, size: int) -> Facts:
    """The facts of a network that was measured."""
    norms = sum(isinstance(module, _BatchNorm) for module in network.modules())
    last = (getattr(network, "feature_info", None) or [{}])[-1]
    stride = last.get("reduction") if isinstance(last, dict) else None
    side = math.ceil(size / stride) if stride else None
    return Facts(
        architecture,
        found.feature_dim,
        fit.parameters_of(network),
        norms,
        side,
        found.unused,
        hasattr(network, "group_matcher"),
        hasattr(network, "set_grad_checkpointing"),
    )


def inspect_given(network: nn.Module, sizes: tuple[int, ...], channels: int, name: str) -> Facts:
    """The facts of somebody's own network. One that has a `feature_dim` is believed, and not tried."""
    architecture = Architecture(name, "imagenet", 1.0, (), channels)
    if hasattr(network, "feature_dim"):
        return facts_of(network, architecture, fit.Fit(cast(Encoder, network).feature_dim, ()), sizes[0])
    try:
        return facts_of(network, architecture, fit.measure(network, sizes, channels), sizes[0])
    except fit.Unfit as unfit:
        size, why = unfit.args
        raise UserError(f"{type(network).__name__} does not take images of {size} px ({why}).") from None


def with_feature_dim(network: nn.Module, image_size: int, channels: int = 3) -> Encoder:
    """Any network as an encoder: what it makes of an image must be one row of features.

    Images are (n, channels, image_size, image_size). A network without `feature_dim` is measured, without computing.
    """
    encoder = cast(Encoder, network)
    if not hasattr(network, "feature_dim"):
        encoder.feature_dim = inspect_given(network, (image_size,), channels, "own").feature_dim
    return encoder


def load_weights(encoder: nn.Module, path: str | Path) -> None:
    """Load a state dict (.safetensors, .pth) into the encoder, strictly by name and shape.

    Prefixes of wrappers are taken off, and a classifier in the file is left out.
    """
    path = Path(path)
    fill(encoder, network_in(read_state(path), encoder.state_dict(), path), path)


def listed(pattern: str | None = None) -> list[str]:
    """The names of all backbones, or of those that match a pattern such as `vit_*` or `timm/convnext*`."""
    found = [f"{TORCHVISION}{name}" for name in torchvision_networks.names()]
    try:
        found += [f"{TIMM}{name}" for name in timm_networks.names()]
    except UserError:
        if pattern and pattern.startswith(TIMM):
            raise
    if pattern is None:
        return found
    words = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    return [name for name in found if words.fullmatch(name) or words.fullmatch(name.partition("/")[2])]


def options_of(texts: Sequence[str], reserved: Sequence[str] = ()) -> dict[str, Any]:
    """`["patch_size=4", "class_token=false"]` as arguments."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        if not equals or not name.isidentifier():
            raise SettingError("model.options", f"takes NAME=VALUE, such as patch_size=4, not {text[:80]!r}.")
        if name in reserved:
            raise SettingError(
                "model.options", f"cannot have {name}, which other settings decide. Leave it out."
            )
        if name in found:
            raise SettingError("model.options", f"has {name} twice.")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | bool | str:
    kinds: tuple[Callable[[str], int | float], ...] = (int, float)
    for kind in kinds:
        try:
            return kind(text)
        except ValueError:
            continue
    return BOOLEANS.get(text.lower(), text)


def _create(
    architecture: Architecture, zero_init_residual: bool = False, stem_init: StemInit = "random"
) -> nn.Module:
    """The network itself, on the default device; a `UserError` for a name or an option that does not exist."""
    name, stem, width, options, channels = architecture
    theirs, plain = _checked(name)
    reserved = timm_networks.RESERVED if theirs else torchvision_networks.RESERVED
    given = options_of(options, reserved)

    def make() -> nn.Module:
        if theirs:
            return timm_networks.create(plain, channels, given)
        return torchvision_networks.create(plain, stem, width, zero_init_residual, stem_init, channels, given)

    if theirs and (stem, width, zero_init_residual, stem_init) != ("imagenet", 1.0, False, "random"):
        raise UserError(
            f"Only torchvision's ResNets have a stem, a width and residual branches to choose. Leave them out for "
            f"'{name}'."
        )
    device = torch.get_default_device()
    try:
        try:
            return make()
        except RuntimeError:
            if device.type != "meta":
                raise
        # Some do tensor arithmetic while they are built, which the meta device cannot do.
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return make().to(device)
    except UserError:
        raise
    except Exception as error:
        # Constructors pass most arguments on, so what they do not take is known when one of them says so.
        setting = "model.options" if given else "model.backbone"
        what = f"{', '.join(options)} does not work with" if given else "cannot be"
        raise SettingError(setting, f"{what} {name} ({fit.in_words(error)}).") from None


def _checked(name: str) -> tuple[bool, str]:
    """Whether a name is timm's, and what it is there. It is looked up and never followed: no path, no scheme that would
    download, no import."""
    theirs = name.startswith(TIMM)
    plain = name.removeprefix(TIMM if theirs else TORCHVISION)
    known = timm_networks.names() if theirs else torchvision_networks.names()
    if plain in known or (theirs and plain in timm_networks.tagged_names()):
        return theirs, plain
    shown = plain if len(plain) <= 80 and plain.isprintable() else repr(plain[:80])
    written = {} if theirs else {other: TIMM + other for other in _of_timm()}  # bare names mean torchvision's
    if plain in written:
        raise UserError(f"torchvision has no backbone '{shown}', but timm has. Write {written[plain]}.")
    written |= {name: name for name in (timm_networks.tagged_names() if theirs and "." in plain else known)}
    close = [written[name] for name in get_close_matches(plain[:100], written, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(close)}?" if close else "The command backbones lists all names."
    raise UserError(f"{'timm' if theirs else 'torchvision'} has no backbone '{shown}'. {hint}")


def _of_timm() -> Collection[str]:
    """timm's names, with tags and without; none where it is not installed."""
    try:
        return {*timm_networks.names(), *timm_networks.tagged_names()}
    except UserError:
        return ()


def _known_width(network: nn.Module) -> int | None:
    """The features of torchvision's ResNets, of which there are many in a reproduction: not measured."""
    return cast(Any, network).inplanes if torchvision_networks.is_resnet(network) else None


def _some_width(network: nn.Module, name: str, channels: int) -> int:
    """The width of the features at whatever size the network takes: its own, or one that all others take."""
    usual = _usual_size(network)
    for size in (usual,) if usual else (299, 224):
        try:
            return fit.measure(network, (size,), channels, backward=False, name=name).feature_dim
        except fit.Unfit as unfit:
            why = unfit.args[1]
    raise UserError(f"'{name}' does not take images of {size} px ({why}).")


def _usual_size(network: nn.Module) -> int | None:
    """The size that a network of timm is built for: what its patches are made of, or what its authors used."""
    embedding = getattr(getattr(network, "patch_embed", None), "img_size", None)
    if isinstance(embedding, tuple):
        return int(embedding[0])
    image_size = getattr(network, "image_size", None)  # torchvision's ViTs
    if isinstance(image_size, int):
        return image_size
    config = getattr(network, "pretrained_cfg", None) or {}
    size = config.get("input_size") if isinstance(config, dict) else None
    return int(size[-1]) if size else None


def _for_size(architecture: Architecture, sizes: tuple[int, ...]) -> Facts | None:
    """The same network built for the first of the sizes, if that is what it takes; on the default device."""
    size = f"{'img_size' if architecture.backbone.startswith(TIMM) else 'image_size'}={sizes[0]}"
    crops = [(size, "dynamic_img_size=true")] if len(sizes) > 1 else []  # of another size
    for more in ((size,), *crops):
        told = architecture._replace(options=(*architecture.options, *more))
        try:
            network = _create(told)
            return facts_of(network, told, fit.measure(network, sizes, architecture.channels), sizes[0])
        except (UserError, fit.Unfit):
            continue
    return None


def _refusal(
    architecture: Architecture, sizes: tuple[int, ...], network: nn.Module, size: int, why: str
) -> SettingError:
    def takes(side: int) -> bool:
        try:
            fit.measure(network, (side,), architecture.channels)
        except (UserError, fit.Unfit):
            return size == sizes[0] and _for_size(architecture, (side,)) is not None
        return True

    setting = "data.image_size" if size == sizes[0] else "views.small_size"
    close = fit.nearest(size, _usual_size(network), takes)
    hint = f"The nearest size that it takes is {close}." if close else "Choose another backbone."
    return SettingError(setting, f"{size} does not work with {architecture.backbone} ({why}). {hint}")


__all__ = [
    "Encoder",
    "Facts",
    "build",
    "cosine_filters",
    "create",
    "for_any_size",
    "inspect",
    "inspect_given",
    "listed",
    "load_weights",
    "of",
    "of_config",
    "with_feature_dim",
]
