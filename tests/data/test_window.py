"""Values of more than 8 bits, and other channels than three: 256 levels inside the window, or a sentence."""

import base64
import io
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from momentum2 import stats
from momentum2.config import DataConfig
from momentum2.data import open_dataset
from momentum2.data.formats import read_tiff
from momentum2.data.images import BadImage, Encoded, NeedsWindow, Reading
from momentum2.errors import SettingError, UserError

RNG = np.random.default_rng(0)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


#: A small image, but for its height: a strip for each row, in seconds.
MANY_STRIPS = (
    "SUkqAAgAAAAIAAABBAABAAAAFAAAAAEBBAABAAAAUEsBAgMBAwABAAAAAQAAAAYBAwABAAAALi4vABEBBAABAAAAbgAAABYBBAABAAAAFAAA"
    "ABcBBAABAAAAPAAcAQMAAQAAAAEAAAAAAAAAWpWg6u4wFBGAa2qwqlRApU0ypVBdKqDGykAZZVDlKyAIbpB3JkCbVaBkzMCKeqBzFXCUdpAr"
    "SVDtbsA="
)


def tiff(array: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


def deep_png(colors: np.ndarray) -> bytes:
    """16-bit colors, which Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = colors.shape
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if channels == 3 else 6, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in colors)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def dicom(stored: np.ndarray, slope: float = 1, intercept: float = 0, **more: object) -> bytes:
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data = FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = SecondaryCaptureImageStorage, meta.MediaStorageSOPInstanceUID
    data.PatientName = "Nobody^Ever"
    data.Rows, data.Columns = stored.shape
    data.SamplesPerPixel, data.PhotometricInterpretation = 1, "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit, data.PixelRepresentation = 15, int(stored.dtype.kind == "i")
    data.RescaleSlope, data.RescaleIntercept = slope, intercept
    data.PixelData = stored.tobytes()
    for name, value in more.items():
        setattr(data, name, value)
    file = io.BytesIO()
    pydicom.dcmwrite(file, data)
    return file.getvalue()


TWELVE = RNG.integers(0, 4096, (21, 34)).astype(np.uint16)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_whole_range_is_what_sixteen_bits_were_before(kind: str) -> None:
    deep = RNG.integers(0, 65536, (21, 34)).astype(np.uint16)
    expected = np.repeat(np.round(deep / 65535 * 255).astype(np.uint8)[..., None], 3, axis=2)
    found = Encoded(saved(Image.fromarray(deep), kind), Reading(window=(0, 65535))).pixels()
    np.testing.assert_array_equal(found, expected)


def files_of(values: np.ndarray) -> dict[str, bytes]:
    """The same values in every kind of file that can have them."""
    signed = values.astype(np.int16)
    return {
        "png": saved(Image.fromarray(values), "PNG"),
        "tiff": saved(Image.fromarray(values), "TIFF"),
        "float tiff": saved(Image.fromarray(values.astype(np.float32)), "TIFF"),
        "npy": npy(values),
        "npy, big end first, in columns": npy(np.asfortranarray(values.astype(">f8"))),
        "dicom": dicom(values),
        "dicom, rescaled": dicom(signed * 2 - 7, slope=0.5, intercept=3.5),
        "dicom, white is low": dicom(65535 - values, PhotometricInterpretation="MONOCHROME1"),
    }


@pytest.mark.parametrize("kind", files_of(TWELVE))
def test_twelve_bits_keep_256_levels(kind: str) -> None:
    """By the definition: clip, shift, scale, round."""
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    for values, window, levels in (
        (ramp, (0, 4095), 256),
        (ramp, (1000, 1255), 256),
        (TWELVE, (5, 4000), None),
    ):
        low, high = window
        expected = np.round((np.clip(values.astype(float), low, high) - low) / (high - low) * 255)
        found = Encoded(files_of(values)[kind], Reading(1, window)).pixels()
        np.testing.assert_array_equal(found[..., 0], expected)
        assert levels is None or len(np.unique(found)) == levels
        gray = Encoded(files_of(values)[kind], Reading(3, window)).pixels()
        np.testing.assert_array_equal(gray, np.repeat(found, 3, axis=2))


def test_the_same_tissue_is_the_same_gray_in_every_slice() -> None:
    lung = RNG.uniform(-1000, 100, (32, 32)).astype(np.float32)
    bone = RNG.uniform(-100, 3000, (32, 32)).astype(np.float32)
    lung[0, 0] = bone[0, 0] = 41.0
    bone[1, 1] = np.nan
    reading = Reading(1, (-160, 240))
    grays = {int(Encoded(npy(one), reading).pixels()[0, 0, 0]) for one in (lung, bone)}
    assert grays == {round(201 / 400 * 255)}
    assert Encoded(npy(bone), reading).pixels()[1, 1, 0] == 0


BANDS = RNG.integers(0, 10_000, (13, 20, 24)).astype(np.uint16)


@pytest.mark.parametrize(
    "content",
    [
        tiff(BANDS),  # a page for each band
        tiff(BANDS, planarconfig="separate", photometric="minisblack"),
        tiff(BANDS.transpose(1, 2, 0).copy(), planarconfig="contig", photometric="minisblack"),
        npy(BANDS),
        npy(BANDS.transpose(1, 2, 0)),
    ],
    ids=["pages", "separate", "interleaved", "npy", "npy, channels last"],
)
def test_thirteen_bands(content: bytes) -> None:
    pairs = [(100.0 * band, 9000.0 + band) for band in range(13)]
    found = Encoded(content, Reading(13, tuple(value for pair in pairs for value in pair))).pixels()
    assert found.shape == (20, 24, 13)
    for band, (low, high) in enumerate(pairs):
        scaled = (np.clip(BANDS[band].astype(float), low, high) - low) / (high - low)
        np.testing.assert_array_equal(found[..., band], np.round(scaled * 255))


@pytest.mark.parametrize("channels", [3, 4])
def test_sixteen_bit_colors_lose_nothing(channels: int) -> None:
    colors = RNG.integers(0, 4096, (9, 7, channels)).astype(np.uint16)
    options = {"photometric": "rgb"} | ({"extrasamples": ["unassalpha"]} if channels == 4 else {})
    expected = np.round(colors / 4095 * 255)
    for content in (deep_png(colors), tiff(colors, **options)):
        with pytest.raises(NeedsWindow):
            Encoded(content, Reading(channels)).pixels()
        np.testing.assert_array_equal(Encoded(content, Reading(channels, (0, 4095))).pixels(), expected)


def test_eight_bits_need_no_window_and_ignore_it() -> None:
    rgb = RNG.integers(0, 256, (9, 7, 3), dtype=np.uint8)
    for content in (saved(Image.fromarray(rgb), "PNG"), npy(rgb), npy(rgb.transpose(2, 0, 1))):
        for window in (None, (0.0, 4095.0)):
            np.testing.assert_array_equal(Encoded(content, Reading(3, window)).pixels(), rgb)
    four = np.dstack([rgb, rgb[..., :1]])
    np.testing.assert_array_equal(Encoded(saved(Image.fromarray(four), "PNG"), Reading(4)).pixels(), four)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_one_channel_is_gray(mode: str) -> None:
    picture = Image.fromarray(RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)).convert(mode)
    expected = np.asarray(picture.convert("L"))[..., None]
    np.testing.assert_array_equal(Encoded(saved(picture, "PNG"), Reading(1)).pixels(), expected)
    jpeg = Encoded(saved(picture, "JPEG", quality=95, subsampling=0), Reading(1)).pixels()
    assert jpeg.shape == (16, 16, 1)
    assert np.abs(jpeg.astype(float) - expected).mean() < 6


class Touch:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_bad_files_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    objects = np.array([[Touch(tmp_path / "run")]], object)
    file = io.BytesIO()
    np.save(file, objects, allow_pickle=True)
    header = np.lib.format.header_data_from_array_1_0(np.zeros((2, 2))) | {"shape": (1 << 20, 1 << 20)}
    bomb = io.BytesIO()
    np.lib.format.write_array_header_1_0(bomb, header)
    good = dicom(TWELVE)
    for content, word in (
        (file.getvalue(), "object"),
        (bomb.getvalue() + b"\0" * 64, "bomb"),
        (npy(TWELVE)[:-9], "ends before"),
        (npy(TWELVE)[:20], "Error"),
        (npy(np.zeros((2, 2, 2, 2), np.uint8)), "not an image"),
        (npy(np.zeros((0, 4), np.uint8)), "bomb"),
        (npy(np.zeros((4, 4), np.complex128)), "complex128"),
        (npy(np.zeros((5, 6, 7), np.uint8)), "5 x 6 x 7"),
        (dicom(TWELVE, NumberOfFrames=2, Rows=10), "2 frames"),
        (dicom(TWELVE, Rows=60_000, Columns=60_000), "bomb"),
        (good[: len(good) // 2], "Error"),
        (good[:140], "without an image"),
        (tiff(BANDS)[:200], "Error|Truncated"),
        (pickle.dumps(Touch(tmp_path / "run")), "not an image"),
    ):
        with pytest.raises(BadImage, match=word):
            Encoded(content, Reading(3, (0, 1))).pixels()
    assert not list(tmp_path.iterdir())


def test_a_tiff_of_more_parts_than_bytes_is_refused_before_they_are_read() -> None:
    with pytest.raises(BadImage, match="1,681,963 parts in a file of 167 bytes"):
        read_tiff(base64.b64decode(MANY_STRIPS), 3)


def test_no_patient_field_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydicom

    seen = []
    read = pydicom.dcmread
    monkeypatch.setattr(pydicom, "dcmread", lambda *a, **k: seen.append(read(*a, **k)) or seen[-1])
    Encoded(dicom(TWELVE), Reading(1, (0, 4095))).pixels()
    assert "PixelData" in seen[0]
    assert "PatientName" not in seen[0]
    assert "SOPInstanceUID" not in seen[0]


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    (tmp_path / "ct").mkdir()
    for i in range(20):
        values = np.random.default_rng(i).uniform(-1000, 1000, (24, 24)).astype(np.float32)
        values[0, :2] = -1024 + i, 3071 - i
        (tmp_path / "ct" / f"{i:02}.npy").write_bytes(npy(values))
    return tmp_path / "ct"


def test_a_missing_window_is_said_with_the_range(slices: Path) -> None:
    with pytest.raises(SettingError) as caught:
        open_dataset(DataConfig(root=str(slices), cache="off"))
    assert caught.value.setting == "data.window"
    assert "00.npy has float32 values; of 20 images looked at they go from -1024 to 3071" in str(caught.value)
    assert "-1024,3071 covers all of these" in str(caught.value)
    dataset = open_dataset(DataConfig(root=str(slices), window=[-160, 240]))
    assert np.asarray(dataset.read([0, 1])).shape == (2, 24, 24, 3)


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ([1.0], "2 or 6 values"),
        ([5.0, 5.0], "not 5,5"),
        ([0.0, float("inf")], "not 0,inf"),
        ([0.0] * 4, "not 4"),
    ],
)
def test_windows_that_make_no_sense(slices: Path, window: list[float], words: str) -> None:
    with pytest.raises(SettingError, match=words) as caught:
        open_dataset(DataConfig(root=str(slices), window=window))
    assert caught.value.setting == "data.window"


def test_other_channels_are_said(tmp_path: Path) -> None:
    (tmp_path / "tile.tif").write_bytes(tiff(BANDS, planarconfig="separate", photometric="minisblack"))
    with pytest.raises(SettingError, match=r"is 3, but tile.tif has 13 x 20 x 24 values") as caught:
        open_dataset(DataConfig(root=str(tmp_path)))
    assert caught.value.setting == "data.channels"
    with pytest.raises(SettingError, match='images of "shapes" have 3'):
        open_dataset(DataConfig("shapes", channels=1))


def test_windows_have_caches_of_their_own(slices: Path) -> None:
    for window in ([-160.0, 240.0], [-1000.0, 1000.0]):
        cached = open_dataset(DataConfig(root=str(slices), channels=1, window=window, cache="on"))
        plain = open_dataset(DataConfig(root=str(slices), channels=1, window=window, cache="off"))
        np.testing.assert_array_equal(cached.read(range(20)), np.array(plain.read(range(20))))


def test_arrays_beside_photos_are_not_images(slices: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("RGB", (24, 24)).save(slices / "photo.png")
    assert list(open_dataset(DataConfig(root=str(slices))).names) == ["photo.png"]
    assert "ignoring 20 arrays" in caplog.text


def test_stats_give_settings_that_work(slices: Path, tmp_path: Path) -> None:
    found = stats(str(slices))
    assert (found.images, found.kind) == (20, "float32")
    low, high = found.window or (0, 0)
    assert -1024 <= low < -900
    assert 900 < high <= 3071
    settings = {name: [float(v) for v in text.split(",")] for name, text in found.settings.items()}
    data = DataConfig(root=str(slices), window=settings["data.window"])
    pixels = np.array(open_dataset(data).read(range(20))) / 255
    np.testing.assert_allclose(pixels.mean((0, 1, 2)), settings["data.mean"], atol=0.005)
    np.testing.assert_allclose(pixels.std((0, 1, 2)), settings["data.std"], atol=0.005)
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "one.tif").write_bytes(tiff(BANDS))
    assert stats(str(tmp_path / "tiles")).settings["data.channels"] == "13"
    assert stats("shapes").window is None


@pytest.mark.parametrize("kind", ["ct", "tile"])
def test_runs_on_them_learn_evaluate_and_export(kind: str, tmp_path: Path, slices: Path) -> None:
    """Settings travel with the encoder: its `preprocess`, its evaluation and its export know channels and window."""
    from momentum2 import evaluate_knn, export_encoder, load_encoder, pretrain, recipe
    from momentum2.evaluate.knn import KnnOptions

    channels, window = (1, "-160,240") if kind == "ct" else (13, "0,10000")
    root = tmp_path / "data"
    for i in range(24):
        place = root / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        if kind == "ct":
            values = np.random.default_rng(i).uniform(-400, 400, (24, 24)).astype(np.float32)
            (place / f"{i}.npy").write_bytes(npy(values + 200 * (i % 2)))
        else:
            (place / f"{i}.tif").write_bytes(tiff(np.random.default_rng(i).permutation(BANDS)))
    config = recipe(
        "folder",
        {
            "data.root": str(root),
            "data.channels": channels,
            "data.window": window,
            "data.mean": ",".join(["0.4"] * channels),
            "model.backbone": "resnet18",  # other tools have it
            "model.width": 0.125,
            "model.projector_hidden": 16,
            "data.image_size": 16,
            "train.batch_size": 8,
            "train.steps": 3,
            "train.device": "cpu",
            "monitor.knn_every": 0,
            "monitor.report": False,
        },
    )
    out = tmp_path / "run"
    assert pretrain(config, out).finished
    assert f"{channels} channel" in (out / "plan.txt").read_text()
    encoder = load_encoder(out)
    assert encoder.card.channels == channels
    values = np.random.default_rng(0).uniform(-500, 500, (20, 20, channels)).astype(np.float32)
    low, high = (float(v) for v in window.split(","))
    shown = np.round((np.clip(values, low, high) - low) / (high - low) * 255) / 255
    view = encoder.preprocess(np.repeat(np.repeat(values, 16, 0), 16, 1))
    assert view.shape == (channels, 16, 16)
    mean = shown.mean((0, 1))
    np.testing.assert_allclose(view.numpy().mean((1, 2)) * encoder.card.std + 0.4, mean, atol=0.06)
    knn = evaluate_knn(out, options=KnnOptions(k=5))
    assert knn.accuracy is not None
    export_encoder(out, "onnx", tmp_path / "onnx")
    assert window.split(",")[1] in (tmp_path / "onnx" / "preprocessing.json").read_text()
    assert "window" in (tmp_path / "onnx" / "MODEL_CARD.md").read_text()
    with pytest.raises(UserError, match="three channels"):
        export_encoder(out, "timm", tmp_path / "timm")
