"""For ONNX: a graph with its weights, for any batch size, compared with the encoder before it is kept."""

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from momentum2.errors import UserError
from momentum2.export.tool import Tool, preprocessing, write_preprocessing
from momentum2.runs.encoder import LoadedEncoder

#: Largest difference between the features of graph and encoder, as a share of the largest if that is above 1.
TOLERANCE = 1e-4


def write(loaded: LoadedEncoder, folder: Path) -> None:
    os.environ.setdefault(
        "ORT_DISABLE_TELEMETRY", "1"
    )  # it would also warn, in colors, where it cannot keep its id
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("Export to ONNX needs more packages. Run pip install 'momentum2[export]'.") from None
    size, path = loaded.card.image_size, folder / "model.onnx"
    images = torch.randn(7, loaded.card.channels, size, size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        # torch's exporter about torch's own code
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        program = torch.onnx.export(
            loaded.encoder,
            (images[:2],),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props["preprocessing"] = json.dumps(preprocessing(loaded.card))
    program.model.metadata_props["momentum2"] = json.dumps(asdict(loaded.card))
    program.save(path)  # one file: a network of less than 2 GB needs no other for its weights
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (images[:1], images):
        _compare(loaded, batch, session.run(["features"], {"images": batch.numpy()})[0])
    write_preprocessing(folder, loaded.card)


@torch.no_grad()
def _compare(loaded: LoadedEncoder, images: Tensor, features: object) -> None:
    expected = loaded(images)
    scale = expected.abs().max().clamp(min=1)
    difference = float((torch.as_tensor(features) - expected).abs().max() / scale)
    if not difference <= TOLERANCE:
        raise UserError(
            f"The ONNX graph differs from the encoder by {difference:.1e} and was not kept. Try other "
            "versions of torch and onnxscript."
        )


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    return (
        "import onnxruntime\n"
        f'session = onnxruntime.InferenceSession("{folder.as_posix()}/model.onnx")\n'
        'model = lambda images: session.run(["features"], {"images": images})[0]\n'
    )


TOOL = Tool(lambda card: None, write, lines)  # it takes any network
