"""Which precision a device computes in, and fp16, whose gradients may overflow."""

import logging
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from momentum2.config import Config, MethodConfig, ModelConfig, Precision, TrainConfig
from momentum2.errors import SettingError, UserError
from momentum2.methods import Method
from momentum2.optim import build_optimizer
from momentum2.training.build import build_method, with_precision
from momentum2.training.device import autocast_dtype, choose_device, computing_in, resolve_precision
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize(
    ("capability", "found"),
    [
        ((6, 1), "fp32"),
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 0), "bf16"),
        ((9, 0), "bf16"),
        ((12, 0), "bf16"),
    ],
)
def test_auto_follows_the_tensor_cores(
    capability: tuple[int, int], found: str, monkeypatch: pytest.MonkeyPatch
):
    gpu(monkeypatch, *capability)
    assert resolve_precision("auto", CUDA) == found
    assert resolve_precision("fp32", CUDA) == "fp32"
    dtypes = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert autocast_dtype("auto", CUDA) == dtypes[found]


def test_what_a_device_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch):
    for device in (CPU, CUDA):
        gpu(monkeypatch, 7, 5)
        with pytest.raises(SettingError, match="tf32 needs a GPU of compute capability 8"):
            resolve_precision("tf32", device)
    with pytest.raises(SettingError, match="fp16 is only for CUDA and CPUs"):
        resolve_precision("fp16", torch.device("mps"))
    gpu(monkeypatch, 8, 6)
    assert resolve_precision("tf32", CUDA) == "tf32"


@pytest.mark.parametrize(
    ("before", "capability", "found"),
    [
        ({}, (7, 5), "fp16"),
        ({"threads": 1}, (7, 5), "fp32"),  # begun by a version that knew no fp16
        ({"threads": 1}, (8, 0), "bf16"),
        ({"precision": "bf16"}, (7, 5), "bf16"),  # begun on another machine
        ({"precision": "fp32"}, (8, 0), "fp32"),
    ],
)
def test_a_run_keeps_the_precision_that_auto_stood_for(
    before: dict[str, Any], capability: tuple[int, int], found: str, monkeypatch: pytest.MonkeyPatch
):
    gpu(monkeypatch, *capability)
    assert with_precision(Config(), before, CUDA).train.precision == found
    told = Config(train=TrainConfig(precision="fp32"))
    assert with_precision(told, before, CUDA).train.precision == "fp32"


def test_a_process_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingError, match="cannot be cuda:3"):
        choose_device("cuda")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = 4
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def stepper() -> tuple[Method, torch.optim.Optimizer, Stepper]:
    torch.manual_seed(0)  # with some weights a later step overflows by itself
    train = TrainConfig(batch_size=4, precision="fp16", devices=1, steps=9)
    config = Config(MethodConfig("simsiam"), ModelConfig(projector_hidden=4, projector_out=4), train=train)
    method = build_method(config, resolve(config, 64), 0, Tiny()).train()
    optimizer = build_optimizer(method.named_parameters(), config.optim, 0.1)
    return method, optimizer, Stepper(method, optimizer, train, replace(config.optim, clip_norm=1.0), CPU)


def views(k: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(k)
    return [torch.randn(4, 3, 2, 2, generator=draws) for _ in range(2)]


def copied(method: Method) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in method.named_parameters()}


def test_a_gradient_that_overflows_leaves_the_step_out_and_lowers_the_scale():
    method, optimizer, take_step = stepper()
    take_step(0, 0.1, lambda i: (views(0), None))
    before, scale = copied(method), take_step.scaler.get_scale()
    momentum = {p: dict(state) for p, state in optimizer.state.items()}
    first = next(method.parameters())
    hook = first.register_hook(lambda g: g * torch.inf)
    checked = []
    taken = take_step(1, 0.1, lambda i: (views(1), None), check=lambda value: checked.append(value) or False)
    hook.remove()
    assert not torch.isfinite(taken.norm)
    assert torch.isfinite(checked[0])  # the run goes on
    assert all(torch.equal(before[name], p) for name, p in method.named_parameters())
    assert all(optimizer.state[p] == state for p, state in momentum.items())
    assert take_step.scaler.get_scale() == scale / 2
    take_step(2, 0.1, lambda i: (views(2), None))
    assert any(not torch.equal(before[name], p) for name, p in method.named_parameters())


def test_gradients_that_always_overflow_end_the_run_in_a_sentence():
    method, _, take_step = stepper()
    next(method.parameters()).register_hook(lambda g: g * torch.inf)
    for k in range(16):  # from 65,536 to 1
        take_step(k, 0.1, lambda i: (views(0), None))
    with pytest.raises(UserError, match=r"overflow in fp16 even with a loss scale below 1, in step 17\."):
        take_step(16, 0.1, lambda i: (views(0), None))


def test_the_scale_goes_into_the_checkpoint_and_comes_back():
    _, _, take_step = stepper()
    take_step.scaler.load_state_dict({**take_step.scaler.state_dict(), "scale": 64.0})
    for k in range(3):
        take_step(k, 0.1, lambda i, k=k: (views(k), None))
    saved = take_step.state()
    assert {name: tensor.item() for name, tensor in saved.items()} == {
        "scaler/scale": 64.0,
        "scaler/growth": 3,
    }
    _, _, other = stepper()
    other.load(saved, 3)
    assert {name: t.item() for name, t in other.state().items()} == {"scaler/scale": 64.0, "scaler/growth": 3}
    with pytest.raises(UserError, match=r"step 3 has no loss scale, which fp16 needs"):
        other.load({}, 3)


def test_auto_is_fp32_on_every_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert resolve_precision("auto", CPU) == "fp32"
    assert with_precision(Config(), {"precision": "bf16"}, CPU).train.precision == "bf16"  # begun like that


@pytest.mark.parametrize(("instructions", "told"), [(True, 1), (False, 0)])
def test_a_run_that_did_not_record_its_precision_says_that_it_may_change(
    instructions: bool, told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert with_precision(Config(), {"images": 8}, CPU).train.precision == "fp32"
    assert with_precision(Config(), {}, CPU).train.precision == "fp32"  # a new run
    assert caplog.text.count("did not record its precision") == told


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_activations_are_not_recomputed_in_another_precision(precision: Precision):
    with pytest.raises(SettingError, match="only in fp32") as error:
        with_precision(Config(train=TrainConfig(precision=precision, recompute=True)), {}, CPU)
    assert error.value.setting == "train.recompute"
    with_precision(Config(train=TrainConfig(precision="fp32", recompute=True)), {}, CPU)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(1, 3, 2), (1, 7, 2), (2, 3, 4), (3, 7, 4), (2, 3, 2)]
)
def test_a_stride_over_the_whole_map_leaves_no_gradient_unset(
    precision: Precision, size: int, kernel: int, stride: int
):
    torch.manual_seed(0)
    conv = nn.Conv2d(32, 32, kernel, stride, kernel // 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 32, size, size).to(memory_format=torch.channels_last)
    conv(x).sum().backward()
    exact, conv.weight.grad = conv.weight.grad.clone(), None
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):  # what is not written to shows what was there before
            poison = [torch.full((conv.weight.numel(),), torch.nan, dtype=dtype) for _ in range(8)]
            del poison
        with computing_in(precision, CPU):
            conv(x).float().sum().backward()
        torch.testing.assert_close(conv.weight.grad, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
        conv.weight.grad = None


@pytest.mark.parametrize("stride", [2, [2], (2, 2)])
def test_every_form_of_a_stride_is_understood(stride: int | list[int] | tuple[int, int]):
    x, weight = torch.randn(2, 8, 8, 1), torch.randn(8, 8, 1, 1)
    with computing_in("bf16", CPU):
        assert torch.conv2d(x, weight, stride=stride).dtype == torch.float32
        assert torch.conv2d(x[0], weight, stride=stride).dtype == torch.float32  # without a batch


def test_maps_of_the_usual_sizes_are_computed_in_bf16():
    conv = nn.Conv2d(8, 8, 3, 2, 1)
    with computing_in("bf16", CPU):
        assert conv(torch.randn(2, 8, 8, 8)).dtype == torch.bfloat16
    assert conv(torch.randn(2, 8, 8, 8)).dtype == torch.float32


def test_a_gpu_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def too_old() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    with caplog.at_level(logging.WARNING, "momentum2"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as on the command line
        assert choose_device("auto").type in ("cpu", "mps")
    assert caplog.messages == ["The GPU is not used (The NVIDIA driver on your system is too old)."]
