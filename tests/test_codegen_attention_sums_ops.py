"""The ops that stand for attention's backwards and sums of their gradients, as any engine may call them."""

from __future__ import annotations

import pytest
import torch
from attentions import Case
from graphs import execute
from test_codegen_attention_sums import INTERPRETED, summed

from codegen.attention_joined import JOINED
from codegen.attention_sums import ROWS, SUMMED
from ir_nodes import call, ops, reference


@INTERPRETED
@pytest.mark.parametrize("case", [Case((2, 3, 128, 192, 64), False, None), Case(p=None, cat="qkv")], ids=["plain", "joined"])
def test_the_op_gives_what_kernels_leave(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = case.recording()
    for letter in "" if case.cat else "qkv":
        case.add_sum(recording, f"d{letter}0")
    made = summed(recording.graph)
    memory = execute(recording, made)
    node = recording.graph.nodes[1]
    data = [reference.window(memory[write.value.buffer.index], write.layout) for write in node.writes]
    (target,) = [target for target, ours in SUMMED.items() if ours == node.target]
    ours, given = ops.overload(node.target), data[0] if case.cat else tuple(data[:3])
    fill = call.Fill(lambda operand: data[0], lambda write: None, lambda number: 1.0, torch.device("cpu"))
    args, keyword = call.arguments(node, fill)
    monkeypatch.setattr(ops, "overload", {target: lambda *args, **keyword: given}.__getitem__)
    found = ours(*args, **keyword)
    assert len(found) == len(data) == (2 if case.cat else 6)
    for one, other in zip(found, data):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("target", "ours"), SUMMED.items(), ids=[ours.split("product_")[1] for ours in SUMMED.values()])
def test_the_op_is_one_that_any_engine_can_call(target: str, ours: str) -> None:
    """It takes what the backward takes, and gives what that gives, and then sums."""
    assert [arg.name for arg in ops.schema(ours).arguments] == [arg.name for arg in ops.schema(target).arguments]
    assert ops.info(ours).kind == ops.info(target).kind == "attention"
    q = torch.empty(2, 128, 3, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.empty(2, 192, 3, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)
    keys = q if target in JOINED.values() else k
    given = {"grad_out": q, "query": q, "key": keys, "value": keys, "out": q, "dropout_p": 0.0, "is_causal": False,
             "max_q": 128, "max_k": keys.shape[2]}
    sums = torch.empty(2, 3, 128, 1, device="meta")
    args = [given.get(arg.name, sums) for arg in ops.schema(ours).arguments if not arg.kwarg_only]
    made, plain = ops.overload(ours)(*args), ops.overload(target)(*args)
    first = (plain,) if isinstance(plain, torch.Tensor) else plain
    assert [one.shape for one in made[: len(first)]] == [one.shape for one in first]
    rows = [2 * 128 // ROWS] if len(first) == 1 else [2 * 128 // ROWS, 2 * 192 // ROWS, 2 * 192 // ROWS]
    assert [(tuple(one.shape), one.dtype) for one in made[len(first) :]] == [
        ((count, 576 if len(first) == 1 else 192), torch.float32) for count in rows]
