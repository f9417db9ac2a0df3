"""Greedy decoding with transformers' caches: the tokens are eager mode's, and after a warm-up no position compiles anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from children import call
from torch import Tensor, nn

import lazy_backend
from codegen.combo import combine
from codegen.fuse import plan
from codegen.kernel import ExternStep, KernelStep
from ir_nodes import settings
from lazy_backend.explain import optimised

transformers = pytest.importorskip("transformers", minversion="5.0")
PROMPT, ROOM, NEW = 8, 64, 16
SMALL = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_positions=ROOM, n_layer=2, n_embd=32, n_head=2, **SMALL)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(max_position_embeddings=ROOM, hidden_size=32, num_hidden_layers=layers,
                                      num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, **SMALL)
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama}


def build(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().eval().to(device)


def prompt(device: str, length: int = PROMPT) -> Tensor:
    return torch.randint(1, 257, (2, length), generator=torch.Generator().manual_seed(1)).to(device)


def decode(model: nn.Module, device: str, compiled: list[int]) -> Tensor:
    """A loop by hand: positions are tensors, every step reads and writes a cache of fixed size."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    x, position, made = prompt(device), torch.arange(PROMPT, device=device), []
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(input_ids=x, past_key_values=cache, use_cache=True, position_ids=position[None],
                           attention_mask=None).logits
            x, position = logits[:, -1:].argmax(-1), position[-1:] + 1
            made.append(x)
            if device == "lazysched":
                lazy_backend.mark_step()
            compiled.append(lazy_backend.stats()["compiles"])
    return torch.cat(made, 1).cpu()


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_with_a_static_cache_compiles_prefill_and_one_step(name: str) -> None:
    compiled: list[int] = []
    found = decode(build(name, "lazysched"), "lazysched", compiled)
    assert torch.equal(found, decode(build(name, "cpu"), "cpu", []))
    assert compiled[-1] == compiled[2]


def generate(model: nn.Module, device: str, length: int = PROMPT, **how: Any) -> Tensor:
    tokens = prompt(device, length)
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False, **how).cpu()


@pytest.mark.parametrize("how", [{"cache_implementation": "static", "disable_compile": True}, {}], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_compiles_no_position(name: str, how: dict[str, Any]) -> None:
    lazy, eager = build(name, "lazysched"), build(name, "cpu")
    counts = []
    for length in (PROMPT, PROMPT, PROMPT + NEW, PROMPT + NEW):  # the third meets positions that the first two did not
        before = lazy_backend.stats()["compiles"]
        assert torch.equal(generate(lazy, "lazysched", length, **how), generate(eager, "cpu", length, **how))
        counts.append(lazy_backend.stats()["compiles"] - before)
    assert counts[0] < 60 and counts[1] == 0  # for the first tokens, until what grows is known
    most = 30 if torch.cuda.is_available() else 10  # masks are padded for CUDA's attention: more ops whose sizes grow
    assert counts[2] <= most and counts[3] == 0, counts  # prefill, and the steps of a cache of another size


def test_generate_waits_for_one_value_a_token() -> None:
    model = build("llama", "lazysched")
    how = {"cache_implementation": "static", "disable_compile": True}
    generate(model, "lazysched", **how)
    generate(model, "lazysched", **how)
    waits = [one for one in lazy_backend.barriers()[-3 * NEW :] if one.kind.label == "value_access"]
    assert 0 < len(waits) <= NEW
    assert {one.frame.function for one in waits if one.frame} <= {"__call__", "generate"}  # transformers asks whether to stop


def planned_token(layers: int) -> list[KernelStep | ExternStep]:
    """The steps of one token of a Llama, planned as for a GPU and not run."""
    model = llama(layers).eval().to("lazysched")
    cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    x, position = prompt("lazysched"), torch.arange(PROMPT, device="lazysched")
    with torch.no_grad(), settings.override(engine="triton"):
        for _ in range(2):
            lazy_backend.mark_step()
            logits = model(input_ids=x, past_key_values=cache, use_cache=True, position_ids=position[None]).logits
            x, position = logits[:, -1:].argmax(-1), position[-1:] + 1
        held = [x, position, *(part for layer in cache.layers for part in (layer.keys, layer.values, layer.cumulative_length))]
        return list(combine(plan(optimised(held))).steps)


def one_more_layer() -> None:
    two, three = planned_token(2), planned_token(3)
    calls = [[step.node.name for step in steps if isinstance(step, ExternStep)] for steps in (two, three)]
    others = [name for name in calls[1] if name != "mm" and not name.startswith("_scaled_dot_product")]
    assert others in ([], ["bmm"] if torch.cuda.is_available() else [])  # rotations of older transformers
    assert len(calls[1]) - len(calls[0]) == 8  # three for attention's input, its output, three of the perceptron, attention
    more = 2 if torch.cuda.is_available() else 0  # heads repeated for a kernel that wants as many keys
    assert len(three) - len(two) - 8 <= 4 + more  # rotation with both writes to the cache, two norms and sums, gate times up
    stores = [step for step in three if isinstance(step, KernelStep) and any(node.name == "index_copy" for node in step.nodes)]
    assert len(stores) <= 4


def test_a_layer_of_a_decoded_token_is_products_attention_and_four_kernels() -> None:
    call(one_more_layer)  # by itself: where a cache has grown in a process, ops at the same lines run at once ever after
