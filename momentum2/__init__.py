"""momentum2: self-supervised pretraining of vision backbones on the hardware you have."""

__version__ = "0.1.0"

__all__ = ["__version__"]
