"""The small networks behind the encoder."""

from torch import nn


def mlp(inputs: int, hidden: int, outputs: int, norm: bool = True) -> nn.Sequential:
    """Linear – BN – ReLU – Linear: projector and predictor of BYOL and SimCLR; without BN, MoCo's."""
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


def classifier(inputs: int, classes: int) -> nn.Sequential:
    """The paper's linear head: Linear, then BN over the classes."""
    return nn.Sequential(nn.Linear(inputs, classes), nn.BatchNorm1d(classes))
