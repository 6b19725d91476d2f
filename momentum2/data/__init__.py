"""Images in, uint8 batches on the device out: data sets, their cache, the sampler and the loader."""

from momentum2.data.dataset import Dataset
from momentum2.data.loader import Batch, Loader, iterate
from momentum2.data.opening import open_dataset
from momentum2.data.sampler import batch_indices, steps_per_epoch

__all__ = ["Batch", "Dataset", "Loader", "batch_indices", "iterate", "open_dataset", "steps_per_epoch"]
