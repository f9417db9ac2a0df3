"""The op table against torch's own schemas and tags."""

from __future__ import annotations

import pytest
import torch

from ir_nodes import ops


def _all_aten_targets() -> list[str]:
    targets = [f"{s.name}.{s.overload_name}" if s.overload_name else s.name for s in torch._C._jit_get_all_schemas()]
    found = [target for target in dict.fromkeys(targets) if target.startswith("aten::")]
    assert len(found) > 2000
    return found


def _mode(target: str, argument: str) -> str:
    names = [arg.name for arg in ops.schema(target).arguments]
    return ops.written_mode(target, names.index(argument))


def test_every_name_in_the_table_is_an_op_of_this_torch_or_of_another_supported_one() -> None:
    known = {target.split("::")[1].split(".")[0] for target in _all_aten_targets()}
    missing = [name for name in ops._TABLE if name not in known and name + "_" not in known]
    # these came after torch 2.11
    assert set(missing) <= {"_philox_normal", "_philox_uniform"}


def test_no_name_stands_in_two_rows() -> None:
    words = [name for names in ops._KINDS.values() for name in names.split()]
    assert len(words) == len(set(words))


def test_every_write_only_op_writes_its_first_argument() -> None:
    for name in ops._WRITE_ONLY:
        packet = getattr(torch.ops.aten, name, None)
        for over in packet.overloads() if packet is not None else ():
            target = f"aten::{name}.{over}" if over != "default" else f"aten::{name}"
            assert ops.written_mode(target, 0) == "w", target


@pytest.mark.parametrize("target", ["fill_.Scalar", "zero_", "normal_", "uniform_", "bernoulli_.float", "random_", "exponential_",
                                    "geometric_", "log_normal_", "cauchy_", "copy_"])  # fmt: skip
def test_write_only_ops_do_not_read_what_they_overwrite(target: str) -> None:
    """The claim behind the mode: NaNs in the old contents leave no trace in the new."""
    results = []
    for old in (float("nan"), 3.0):
        data = torch.full((64,), old)
        arguments = {"fill_.Scalar": (2.0,), "geometric_": (0.4,), "copy_": (torch.arange(64.0),), "bernoulli_.float": (0.3,)}
        torch.manual_seed(0)
        ops.overload(f"aten::{target}")(data, *arguments.get(target, ()))
        results.append(data)
    assert torch.equal(results[0], results[1]) and not results[0].isnan().any()


@pytest.mark.parametrize(
    ("target", "argument", "mode"),
    [
        ("aten::add.out", "out", "w"),
        ("aten::add.out", "self", "r"),
        ("aten::add_.Tensor", "self", "rw"),
        ("aten::add_.Tensor", "other", "r"),
        ("aten::index_put_", "self", "rw"),
        ("aten::index_put.out", "out", "w"),
        ("aten::scatter_.src", "self", "rw"),
        ("aten::scatter.src_out", "out", "w"),
        ("aten::index_add.out", "out", "w"),
        ("aten::masked_fill_.Scalar", "self", "rw"),
        ("aten::fill_.Tensor", "self", "w"),
        ("aten::copy_", "src", "r"),
        ("aten::bernoulli_.Tensor", "self", "w"),
        ("aten::bernoulli_.Tensor", "p", "r"),
        ("aten::bernoulli.out", "self", "r"),
        ("aten::bernoulli.out", "out", "w"),
        ("aten::randperm.generator_out", "out", "w"),
        ("aten::arange.start_out", "out", "w"),
        ("aten::linspace.out", "out", "w"),
        ("aten::eye.out", "out", "w"),
        ("aten::max.dim_max", "max_values", "w"),
        ("aten::_native_batch_norm_legit", "running_mean", "rw"),
        ("aten::native_batch_norm", "running_var", "rw"),
        ("aten::native_batch_norm", "weight", "r"),
        ("aten::_fused_adam_", "self", "rw"),
        ("aten::_fused_adam_", "exp_avgs", "rw"),
        ("aten::_fused_adam_", "state_steps", "r"),
        ("aten::_foreach_add_.List", "self", "rw"),
        ("aten::_foreach_copy_", "self", "w"),
        ("aten::_foreach_copy_", "src", "r"),
    ],
)
def test_written_mode(target: str, argument: str, mode: str) -> None:
    assert _mode(target, argument) == mode


def test_batch_norm_really_writes_the_running_mean_that_its_schema_hides() -> None:
    mean, var = torch.zeros(3), torch.ones(3)
    torch.ops.aten.native_batch_norm(torch.randn(8, 3) + 5, None, None, mean, var, True, 0.1, 1e-5)
    assert (mean > 0.2).all()


def test_written_mode_never_contradicts_a_schema() -> None:
    for target in _all_aten_targets():
        for index, arg in enumerate(ops.schema(target).arguments):
            written = arg.alias_info is not None and arg.alias_info.is_write
            mode = ops.written_mode(target, index)
            assert (mode != "r") or not written, (target, arg.name)
            assert written or mode == "r" or arg.name in ops.info(target).hidden_writes, (target, arg.name)


def test_an_op_outside_of_the_table_is_extern_with_the_flags_of_its_tags() -> None:
    assert ops.info("aten::grid_sampler_2d").kind == "extern"
    assert ops.info("aten::linalg_lstsq").data_dependent
    assert ops.info("aten::rrelu_with_noise_functional").random
    assert ops.info("mylib::add").kind == "extern"


def test_kinds_and_flags_of_common_ops() -> None:
    kinds = {
        "add.out": "pointwise", "add_.Tensor": "pointwise", "sum.IntList_out": "reduction", "mm.out": "matmul",
        "normal_": "random", "copy_": "copy", "fill_.Scalar": "fill", "_foreach_add_.List": "foreach", "_softmax.out": "softmax",
        "nonzero": "data_dependent",
    }  # fmt: skip
    assert {target: ops.info(f"aten::{target}").kind for target in kinds} == kinds
    assert ops.info("aten::nonzero").data_dependent and ops.info("aten::_unique2").data_dependent
    assert not ops.info("aten::index.Tensor").data_dependent
    assert ops.info("aten::_local_scalar_dense").value_access
    assert ops.info("aten::uniform_").random and ops.info("aten::native_dropout").random
    assert not ops.info("aten::add.Tensor").random


def test_pointwise_and_reduction_rows_agree_with_the_tags_of_torch() -> None:
    for target in _all_aten_targets():
        row, tags = ops.info(target), ops._tags(target)
        if row.kind == "matmul" or row.kind == "data_dependent":
            assert torch.Tag.pointwise not in tags, target
        if row.kind == "random" and row.name != "rrelu_with_noise":
            assert torch.Tag.pointwise not in tags, target


def test_an_unknown_op_is_named() -> None:
    with pytest.raises(KeyError, match="torch has no op 'aten::no_such_op'"):
        ops.schema("aten::no_such_op")
    with pytest.raises(KeyError, match="nosuchlib::f.x"):
        ops.overload("nosuchlib::f.x")


def test_split() -> None:
    assert ops.split("aten::add.out") == ("aten", "add", "out")
    assert ops.split("aten::relu_") == ("aten", "relu_", "")
    assert ops.split("mylib::f.x") == ("mylib", "f", "x")


@pytest.mark.parametrize(
    ("target", "given", "read"),
    [
        ("aten::native_batch_norm", {"training": False}, {"running_mean", "running_var"}),
        ("aten::native_batch_norm", {"training": True}, set()),
        ("aten::_native_batch_norm_legit.no_stats", {"training": False}, set()),
        ("aten::_fused_adamw_", {"grad_scale": None}, {"grads"}),
        ("aten::_fused_sgd_.tensor_lr", {"grad_scale": 1.0}, set()),
        ("aten::add_.Tensor", {}, set()),
    ],
)
def test_what_an_op_only_reads_with_these_arguments(target: str, given: dict[str, object], read: set[str]) -> None:
    names = [arg.name for arg in ops.schema(target).arguments]
    found = ops.reads_only(target, [given.get(name, 0) for name in names])
    assert {names[position] for position in found} == read
