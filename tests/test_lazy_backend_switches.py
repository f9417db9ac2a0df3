"""PyTorch's global switches: what is recorded runs as they stood when it was recorded, and no program serves under others."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from children import call

import lazy_backend
from lazy_backend import switches

SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "tf32": (lambda: torch.backends.cuda.matmul.allow_tf32,
             lambda on: setattr(torch.backends.cuda.matmul, "allow_tf32", on), True),
    "cudnn": (lambda: torch.backends.cudnn.deterministic, lambda on: setattr(torch.backends.cudnn, "deterministic", on), True),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, lambda on: setattr(torch.backends.mkldnn, "enabled", on), False),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "half sums": (lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
                  lambda on: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", on), False),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


def ran() -> int:
    return sum(barrier.kind.label == "switch" for barrier in lazy_backend.barriers())


def every_switch() -> None:
    for name, (get, put, other) in SWITCHES.items():
        print(name, flush=True)
        switched(put, get(), other)


def test_a_switch_ends_the_recording_and_parts_the_cache() -> None:
    call(every_switch)  # by itself: parts of PyTorch's tests freeze the switches for good


def switched(put: Callable[[Any], Any], before: Any, other: Any) -> None:
    x = torch.randn(8, 8, device="lazysched")
    lazy_backend.mark_step()

    def step() -> int:
        """How many recordings it compiles."""
        compiles = lazy_backend.stats()["compiles"]
        y = (x @ x).sin() @ x
        lazy_backend.mark_step()
        assert y.isfinite().all()
        return int(lazy_backend.stats()["compiles"]) - compiles

    put(before)
    step()
    assert step() == 0
    y = x @ x
    count = lazy_backend.stats()["flushes"]
    put(before)
    assert lazy_backend.stats()["flushes"] == count, "nothing has changed"
    put(other)
    assert lazy_backend.stats()["flushes"] == count + 1
    assert lazy_backend.barriers()[-1].kind.label == "switch"
    assert step() > 0 and step() == 0
    put(before)
    assert lazy_backend.stats()["flushes"] == count + 5, "nothing was recorded"
    assert step() == 0
    torch.testing.assert_close(y.cpu(), x.cpu() @ x.cpu())


def test_attention_is_chosen_when_it_is_called() -> None:
    x = torch.randn(1, 2, 16, 8, device="lazysched").bfloat16()
    count = lazy_backend.stats()["flushes"]
    for backend in (torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        with torch.nn.attention.sdpa_kernel(backend):
            F.scaled_dot_product_attention(x, x, x)
    assert lazy_backend.stats()["flushes"] == count


def untouched() -> None:
    lazy_backend.stats()
    assert switches.key() == "" and len(switches.read()) > 20


def test_every_switch_can_be_read() -> None:
    call(untouched)


def gradients() -> None:
    """Runs in a process of its own: gradients of a table are atomics, unless deterministic algorithms are asked for."""
    table, ids = torch.zeros(11, 8, device="lazysched", requires_grad=True), torch.randint(11, (5,)).to("lazysched")
    for deterministic, fused in ((False, True), (True, False), (False, True)):
        torch.use_deterministic_algorithms(deterministic)
        before = lazy_backend.stats()["kernels_run"]
        F.embedding(ids, table).backward(torch.ones(5, 8, device="lazysched"))
        report = str(lazy_backend.explain([table.grad]))
        assert ("atomics add in any order" in report) is not fused, report
        lazy_backend.mark_step()
        assert lazy_backend.stats()["kernels_run"] >= before
        table.grad = None


def test_what_a_plan_asks_for_is_asked_for_again() -> None:
    call(gradients, engine="triton")
