"""The small networks behind the encoder."""

from torch import nn


def mlp(inputs: int, hidden: int, outputs: int, norm: bool = True) -> nn.Sequential:
    """Linear – BN – ReLU – Linear: projector and predictor of BYOL; without BN, MoCo's."""
    layers = [nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden) if norm else None, nn.ReLU(inplace=True)]
    return nn.Sequential(*[layer for layer in layers if layer], nn.Linear(hidden, outputs))


def simsiam_projector(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """SimSiam's three layers, each with BN; the last BN has no weight and bias."""
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs, bias=False),
        nn.BatchNorm1d(outputs, affine=False),
    )


def simclr_projector(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """SimCLR's two layers, each with BN; the last BN has a weight, and a bias that stays 0."""
    last = nn.BatchNorm1d(outputs)
    last.bias.requires_grad_(False)
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, outputs, bias=False),
        last,
    )


def classifier(inputs: int, classes: int, norm: bool = True) -> nn.Sequential:
    """A linear head, started at N(0, 0.01²) and bias 0; the paper's has BN over the classes behind it."""
    linear = nn.Linear(inputs, classes)
    nn.init.normal_(linear.weight, std=0.01)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.BatchNorm1d(classes)) if norm else nn.Sequential(linear)
