"""Autocast casts as it does for CUDA, by PyTorch's own lists; the gradient scaler scales, skips and updates as it does there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists, TestAutocast
from torch.utils.checkpoint import checkpoint

import lazy_backend
from tests.conformance.eager import DEVICE, EAGER, on_cpu

HALVES = (torch.bfloat16, torch.float16)


class TestLists(TestAutocast):
    """PyTorch's lists for CUDA: each op casts to the dtype that the list says, and computes what it does for cast operands."""

    def setUp(self) -> None:
        super().setUp()
        torch.manual_seed(0)
        self.lists = AutocastTestLists(torch.device(DEVICE))

    def check(self, rows, dtype, half, **more) -> None:
        for row in rows:
            op, args, *kwargs = row
            if op == "einsum":  # its row is no list of arguments
                continue
            with self.subTest(op=op, half=half):
                given = {"add_kwargs": kwargs[0]} if kwargs and isinstance(kwargs[0], dict) else {}
                self._run_autocast_outofplace(op, args, dtype, DEVICE, amp_dtype=half, **more, **given)

    def test_to_half(self) -> None:
        for half in HALVES:
            skipped = [row for row in self.lists.torch_fp16 if row[0] not in self.cudnn_only]
            self.check(skipped, half, half)
            self.check(self.lists.nn_fp16, half, half, module=torch._C._nn)
            self.check(self.lists.methods_fp16, half, half, module=None)
            self.check(self.lists.linalg_fp16, half, half, module=torch._C._linalg)

    # Ops of cuDNN's own, which a CPU does not have.
    cudnn_only = () if EAGER == "cuda" else ("cudnn_convolution", "cudnn_convolution_transpose")

    def test_to_float32(self) -> None:
        self.check(self.lists.torch_fp32, torch.float32, torch.float16)
        self.check(self.lists.nn_fp32, torch.float32, torch.float16, module=torch._C._nn)
        self.check(self.lists.methods_fp32, torch.float32, torch.float16, module=None)

    def test_to_the_widest(self) -> None:
        self.check(self.lists.torch_need_autocast_promote, torch.float32, torch.float16)
        for rows, module in ((self.lists.torch_expect_builtin_promote, torch), (self.lists.methods_expect_builtin_promote, None)):
            for op, args, out_type in rows:
                with self.subTest(op=op):
                    self._run_autocast_outofplace(op, args, torch.float32, DEVICE, module=module, out_type=out_type,
                                                  amp_dtype=torch.float16)

    def test_banned(self) -> None:
        with torch.autocast(DEVICE, dtype=torch.float16):
            for op, args, module in self.lists.banned:
                with self.assertRaisesRegex(RuntimeError, "unsafe to autocast"):
                    getattr(module, op)(*args)


def test_the_same_ops_as_on_cuda() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    listed = {key: {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
              for key in ("AutocastCUDA", "AutocastPrivateUse1")}
    torch.empty(0, device=DEVICE)
    recurrent = {"aten::_cudnn_rnn"}  # builds of PyTorch without cuDNN leave it out
    # Modules keep these from CUDA's autocast, and from no other device's.
    fast_paths = {"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}
    assert listed["AutocastCUDA"] | recurrent | fast_paths == listed["AutocastPrivateUse1"]


def test_dtype_nesting_and_switching_off() -> None:
    a = torch.randn(4, 4, device=DEVICE)
    assert torch.get_autocast_dtype(DEVICE) in HALVES
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert torch.is_autocast_enabled(DEVICE) and torch.get_autocast_dtype(DEVICE) is torch.float16
        assert (a @ a).dtype is torch.float16
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert (a @ a).dtype is torch.bfloat16
        with torch.autocast(DEVICE, enabled=False):
            assert (a @ a).dtype is torch.float32
        assert (a.double() @ a.double()).dtype is torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert (a @ a).dtype is torch.float16
        assert torch.nn.functional.softmax(a @ a, -1).dtype is torch.float32
    assert (a @ a).dtype is torch.float32

    @torch.autocast(DEVICE, dtype=torch.bfloat16)
    def decorated() -> torch.Tensor:
        return a @ a

    assert decorated().dtype is torch.bfloat16


def test_unknown_dtype_switches_autocast_off() -> None:
    with pytest.warns(UserWarning, match="autocast"):
        context = torch.autocast(DEVICE, dtype=torch.float64)
    with context:
        assert not torch.is_autocast_enabled(DEVICE)


@pytest.mark.parametrize("cache", [True, False])
def test_weights_are_cast_once(cache: bool) -> None:
    layer = nn.Linear(4, 4, bias=False).to(DEVICE)
    x = torch.randn(2, 4, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=cache):
        out = layer(layer(x))
    casts = [line for line in lazy_backend.debug.text([out]).splitlines() if ":bfloat16[4,4]" in line and "copy_" in line]
    assert len(casts) == (1 if cache else 2)


class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE)
    def forward(ctx, x):
        ctx.seen = torch.is_autocast_enabled(DEVICE)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx, grad):
        assert torch.is_autocast_enabled(DEVICE) == ctx.seen
        return grad * 2


class InFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=DEVICE, cast_inputs=torch.float32)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled(DEVICE) and x.dtype is torch.float32
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type=DEVICE)
    def backward(ctx, grad):
        assert not torch.is_autocast_enabled(DEVICE)
        return grad * 2


def test_custom_functions() -> None:
    for function, dtype in ((Twice, torch.float16), (InFloat32, torch.float32)):
        x = torch.randn(4, 4, device=DEVICE, dtype=torch.float16 if function is InFloat32 else torch.float32, requires_grad=True)
        with torch.autocast(DEVICE, dtype=torch.float16):
            out = function.apply(x)
        assert out.dtype is dtype
        out.sum().backward()
        assert x.grad.tolist() == [[2.0] * 4] * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_under_the_same_autocast(reentrant: bool) -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(DEVICE)
        x = torch.randn(3, 4).to(DEVICE).requires_grad_()
        torch.manual_seed(1)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = checkpoint(model, x, use_reentrant=reentrant) if wrapped else model(x)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        results.append(on_cpu([x.grad, *(p.grad for p in model.parameters())]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_step_in_half_precision_equals_eager() -> None:
    """Autocast's lists are CUDA's, which on a CPU have no eager form: the casts written by hand."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    ours = copy.deepcopy(model).to(DEVICE)
    x, y = torch.randn(4, 6), torch.arange(4)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        F.nll_loss(F.log_softmax(ours(x.to(DEVICE)), -1), y.to(DEVICE)).backward()
    model = model.to(EAGER)
    half = F.linear(x.to(EAGER).bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    F.nll_loss(F.log_softmax(half.float(), -1), y.to(EAGER)).backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), model.weight.grad.cpu())


SCALED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam for-loop": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
if EAGER == "cpu":  # there is no such kernel for CUDA
    SCALED["adagrad fused"] = lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True)


def scaled_run(make, device: str, unscale: bool) -> list:
    """Five steps, the third with an infinite gradient; what is left of the model and of the scaler."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)
    seen = []
    for step in range(5):
        x = torch.linspace(-1, 1, 8).reshape(2, 4) * (float("inf") if step == 2 else 1.0)
        loss = model(x.to(device)).square().sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen += [scaler.get_scale(), *on_cpu(list(model.parameters()))]
    return [*seen, scaler.state_dict()["_growth_tracker"]]


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_scaler(name: str, unscale: bool) -> None:
    ours, theirs = (scaled_run(SCALED[name], device, unscale) for device in (DEVICE, EAGER))
    torch.testing.assert_close(ours, theirs)
    assert [value for value in ours if isinstance(value, float)] == [4.0, 8.0, 4.0, 4.0, 8.0]


def test_scaler_compiles_nothing_when_the_scale_changes() -> None:
    model = nn.Linear(4, 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0, growth_interval=1)
    compiles = []
    for _ in range(6):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(torch.ones(2, 4, device=DEVICE)).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        compiles.append(lazy_backend.stats()["compiles"])
    assert scaler.get_scale() == 4.0 * 2**6 and compiles[3] == compiles[5]


def test_scaler_state_goes_through_a_file(tmp_path) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0)
    scaler.scale(torch.ones((), device=DEVICE))
    torch.save(scaler.state_dict(), tmp_path / "scaler")
    other = torch.amp.GradScaler(DEVICE)
    other.load_state_dict(torch.load(tmp_path / "scaler", weights_only=True))
    assert other.scale(torch.ones((), device=DEVICE)).item() == 16.0
