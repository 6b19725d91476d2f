"""Every pixel format comes out as the RGB a viewer would show; every kind of damage as a reason."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps

from momentum2.data import images
from momentum2.data.images import BadImage, Encoded

RNG = np.random.default_rng(0)
RGB = RNG.integers(0, 256, (21, 34, 3), dtype=np.uint8)
GRAY = RNG.integers(0, 256, (21, 34), dtype=np.uint8)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_gray(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP"])
def test_rgb_is_kept(kind: str) -> None:
    data = saved(Image.fromarray(RGB), kind, **({"lossless": True} if kind == "WEBP" else {}))
    np.testing.assert_array_equal(Encoded(data).pixels(), RGB)
    assert Encoded(data).size == (21, 34)


def test_grayscale_and_one_bit() -> None:
    np.testing.assert_array_equal(Encoded(saved(Image.fromarray(GRAY), "PNG")).pixels(), as_gray(GRAY))
    bits = Image.fromarray(GRAY > 127)
    np.testing.assert_array_equal(Encoded(saved(bits, "PNG")).pixels(), as_gray((GRAY > 127) * np.uint8(255)))


def test_palette() -> None:
    palette = Image.fromarray(GRAY % 4).convert("P")
    colors = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [9, 8, 7]], np.uint8)
    palette.putdata((GRAY % 4).ravel().tolist())
    palette.putpalette(colors.ravel().tolist())
    np.testing.assert_array_equal(Encoded(saved(palette, "PNG")).pixels(), colors[GRAY % 4])


def over_white(color: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return color * share + 255 * (1 - share)


def test_alpha_goes_over_white() -> None:
    rgba = np.dstack([RGB, GRAY])
    found = Encoded(saved(Image.fromarray(rgba), "PNG")).pixels().astype(float)
    assert np.abs(found - over_white(RGB, GRAY)).max() <= 1
    gray_alpha = np.dstack([GRAY, RGB[..., 0]])
    found = Encoded(saved(Image.fromarray(gray_alpha, "LA"), "PNG")).pixels().astype(float)
    assert np.abs(found - over_white(as_gray(GRAY), RGB[..., 0])).max() <= 1


def test_a_transparent_palette_color_is_white() -> None:
    picture = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    picture.putdata([0, 1])
    picture.putpalette([10, 20, 30, 40, 50, 60])
    data = saved(picture, "PNG", transparency=0)
    np.testing.assert_array_equal(Encoded(data).pixels(), [[[255, 255, 255], [40, 50, 60]]])
    np.testing.assert_array_equal(
        Encoded(saved(picture, "GIF", transparency=0)).pixels()[0, 0], [255, 255, 255]
    )


def test_cmyk() -> None:
    flat = Image.new("CMYK", (16, 16), (255, 0, 0, 0))  # pure cyan ink
    for kind in ("JPEG", "TIFF"):
        found = Encoded(saved(flat, kind)).pixels().astype(int)
        assert np.abs(found - np.array([0, 255, 255])).max() <= 2


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = RNG.integers(0, 65536, (21, 34)).astype(np.uint16)
    expected = as_gray(np.round(deep / 65535 * 255).astype(np.uint8))
    assert expected.std() > 50
    for kind in ("PNG", "TIFF"):
        np.testing.assert_array_equal(Encoded(saved(Image.fromarray(deep), kind)).pixels(), expected)


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_float_tiff(top: float) -> None:
    values = np.linspace(0, top, 21 * 34, dtype=np.float32).reshape(21, 34)
    values[3, 3] = np.nan
    found = Encoded(saved(Image.fromarray(values), "TIFF")).pixels()
    expected = np.nan_to_num(values.astype(np.float64)) * (255 / top)
    assert np.abs(found - as_gray(expected)).max() <= 0.5 + 1e-6


def test_floats_and_integers_of_another_range_are_stretched() -> None:
    values = np.linspace(-3, 1000, 50, dtype=np.float32).reshape(5, 10)
    found = Encoded(saved(Image.fromarray(values), "TIFF")).pixels()
    assert (found[0, 0, 0], found[-1, -1, 0]) == (0, 255)
    integers = np.linspace(0, 2**30, 50).astype(np.int32).reshape(5, 10)
    found = Encoded(saved(Image.fromarray(integers), "TIFF")).pixels()
    assert (found[0, 0, 0], found[-1, -1, 0]) == (0, 255)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(RGB), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as stored:
        stored.load()
        expected = np.asarray(ImageOps.exif_transpose(stored))
    if kind != "JPEG":  # which is lossy
        steps = {1: RGB, 2: RGB[:, ::-1], 3: np.rot90(RGB, 2), 4: RGB[::-1]}
        steps |= {5: RGB.swapaxes(0, 1), 6: np.rot90(RGB, -1), 8: np.rot90(RGB)}
        steps[7] = np.rot90(RGB, 2).swapaxes(0, 1)
        np.testing.assert_array_equal(expected, steps[orientation])
    picture = Encoded(data)
    assert picture.size == expected.shape[:2]
    np.testing.assert_array_equal(picture.pixels(), expected)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_first_frame_of_an_animation(kind: str) -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    options = {"lossless": True} if kind == "WEBP" else {}
    found = Encoded(saved(red, kind, save_all=True, append_images=[blue], **options)).pixels()
    np.testing.assert_array_equal(found, np.full((8, 8, 3), [255, 0, 0], np.uint8))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 95, "subsampling": 0}])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpeg_is_what_pillow_decodes(mode: str, options: dict[str, object]) -> None:
    data = saved(Image.fromarray(RGB).convert(mode), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(Encoded(data).pixels(), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("reduce", [2, 4, 8])
def test_reduced_jpeg_is_the_same_picture_smaller(reduce: int) -> None:
    ramp = np.linspace(0, 255, 403).astype(np.uint8)
    picture = np.dstack([np.tile(ramp, (301, 1))] * 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    encoded = Encoded(saved(Image.fromarray(picture), "JPEG", quality=95, exif=exif))
    assert encoded.size == (403, 301)
    small = encoded.pixels(reduce)
    assert small.shape == (-(-403 // reduce), -(-301 // reduce), 3)
    full = encoded.pixels()[: 403 // reduce * reduce, : 301 // reduce * reduce].astype(float)
    means = full.reshape(403 // reduce, reduce, 301 // reduce, reduce, 3).mean((1, 3))
    assert np.abs(means - small[: 403 // reduce, : 301 // reduce]).max() <= 2


def damaged() -> dict[str, tuple[bytes, str]]:
    jpeg, png = saved(Image.fromarray(RGB), "JPEG"), saved(Image.fromarray(RGB), "PNG")
    header_only_bmp = bytearray(saved(Image.new("RGB", (1, 1)), "BMP"))
    header_only_bmp[18:26] = (30000).to_bytes(4, "little") * 2
    return {
        "empty": (b"", "empty file"),
        "text": (b"this is not an image", "not an image"),
        "html named jpg": (b"<html><body>404</body></html>", "not an image"),
        "truncated jpeg": (jpeg[: len(jpeg) // 2], "truncated"),
        "jpeg without its last bytes": (jpeg[:-40], "truncated"),
        "jpeg header only": (jpeg[:20], ""),
        "truncated png": (png[: len(png) // 2], ""),
        "png with a flipped byte": (png[:60] + bytes([png[60] ^ 255]) + png[61:], ""),
        "bomb": (bytes(header_only_bmp), "bomb"),
    }


@pytest.mark.parametrize("what", damaged())
def test_damage_is_named(what: str) -> None:
    data, reason = damaged()[what]
    with pytest.raises(BadImage, match=f"(?i){reason}"):
        Encoded(data).pixels()


def test_a_jpeg_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    data = saved(Image.fromarray(RGB), "JPEG")
    with pytest.raises(BadImage, match="bomb"):
        _ = Encoded(data).size
    with pytest.raises(BadImage, match="bomb"):
        Encoded(data).pixels()


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICNS", "SGI", "PCX", "IM"])
def test_only_known_formats_are_opened(kind: str) -> None:
    """Of the others Pillow opens some by starting a program."""
    image = Image.fromarray(RGB).resize((16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        data = saved(image, kind)
    with pytest.raises(BadImage, match="not an image in a known format"):
        Encoded(data).pixels()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
def test_bands_make_no_difference(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.fromarray(RGB).convert(mode), "TIFF")
    whole = Encoded(data).pixels()
    for pixels in (1, 34, 100):
        monkeypatch.setattr(images, "_BAND", pixels)
        np.testing.assert_array_equal(Encoded(data).pixels(), whole)
