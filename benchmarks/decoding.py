"""One contestant's prefill and greedy decoding with a static cache. Imports torch, transformers, `benchmarks.loop` and
`benchmarks.models`; for lazysched, lazy_backend."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loop import MODES, parts
from benchmarks.models import Sizes, zipf
from benchmarks.timing import wait

CHECKED = 16  # steps whose logits are compared


def build(name: str, sizes: Sizes) -> nn.Module:
    """GPT-2 or a Llama of these sizes, with random weights and PyTorch's attention."""
    import transformers

    shared = {"vocab_size": sizes["vocabulary"], "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}
    if name == "gpt2":
        config = transformers.GPT2Config(n_positions=sizes["length"], n_layer=sizes["layers"], n_embd=sizes["width"],
                                         n_head=sizes["heads"], **shared)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(max_position_embeddings=sizes["length"], hidden_size=sizes["width"],
                                      num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
                                      intermediate_size=sizes["inner"], **shared)
    return transformers.LlamaForCausalLM(config)


class Decoder:
    """A model on a contestant's device and a static cache with room for ``sizes["length"]`` tokens. Weights and prompts are alike
    for every contestant."""

    def __init__(self, contestant: str, name: str, sizes: Sizes, batch: int) -> None:
        self.way, extras = parts(contestant)
        if self.way == "lazysched":
            import lazy_backend  # noqa: F401  (registers the device, in this contestant only)
        self.physical = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device("lazysched" if self.way == "lazysched" else self.physical)
        self.sizes, self.batch = sizes, batch
        torch.manual_seed(0)
        self.model = build(name, sizes).eval().requires_grad_(False).to(self.device, torch.bfloat16)
        self.positions = "cache_position" in inspect.signature(self.model.forward).parameters
        self.cache = self.new_cache()
        self.run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = self.forward
        if self.way in MODES:
            self.run = torch.compile(self.forward, mode=MODES[self.way], dynamic=False)
        if "replay" in extras:
            self.run = lazy_backend.replayed(self.forward)

    def new_cache(self) -> Any:
        """Its memory is there before anything is compiled, so that its addresses stay."""
        from transformers import StaticCache

        self.cache = StaticCache(config=self.model.config, max_cache_len=self.sizes["length"])
        with torch.no_grad():
            self.forward(self.prompt(1), self.position(1))
        self.reset()
        return self.cache

    def forward(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The last token's logits [batch, vocabulary] and the next token [batch, 1]."""
        more = {"cache_position": position[0]} if self.positions else {}
        logits = self.model(input_ids=tokens, position_ids=position, past_key_values=self.cache, use_cache=True, logits_to_keep=1,
                            **more).logits[:, -1]
        return logits, logits.argmax(-1, keepdim=True)

    def prompt(self, length: int) -> Tensor:
        return zipf(self.sizes["vocabulary"], (self.batch, length), torch.Generator().manual_seed(1)).to(self.device)

    def position(self, length: int) -> Tensor:
        """Of a prompt; [1, length]."""
        return torch.arange(length, device=self.device)[None]

    def reset(self) -> None:
        self.cache.reset()
        self.mark()

    def mark(self) -> None:
        """A step ends here."""
        if self.way == "lazysched":
            import lazy_backend

            lazy_backend.mark_step()

    def wait(self) -> None:
        wait(self.way == "lazysched")

    def call(self, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """One step; what it gives outlives the next one."""
        if self.way == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
            logits, token = self.run(tokens, position)
            return logits, token.clone()
        return self.run(tokens, position)

    @torch.no_grad()
    def decode(self, length: int, count: int, forced: Tensor | None = None) -> tuple[Tensor, list[Tensor], list[float]]:
        """``count`` tokens after a prompt of ``length``, [batch, count]; some steps' logits on the CPU, if tokens are ``forced``;
        seconds of a token after the first, until the host is done and until the device is. The prompt is never compiled."""
        self.reset()
        prompt, at = self.prompt(length), self.position(length)
        _, token = self.forward(prompt, at)
        position = at[:, -1:] + 1
        made, logits = [token], []
        self.mark()
        self.wait()
        start = time.perf_counter()
        for number in range(1, count):
            given = token if forced is None else forced[:, number - 1 : number]
            found, token = self.call(given, position)
            position.add_(1)
            self.mark()
            made.append(token)
            if forced is not None and number % max(1, count // CHECKED) == 0:
                logits.append(found.float().cpu())
        host = time.perf_counter()
        self.wait()
        spent = [(end - start) / max(1, count - 1) for end in (host, time.perf_counter())]
        return torch.cat(made, 1).cpu(), logits, spent

    @torch.no_grad()
    def prefill(self, length: int) -> tuple[Tensor, list[float]]:
        """The last logits of a prompt, and seconds until the host is done, until the device is."""
        self.reset()
        prompt, at = self.prompt(length), self.position(length)
        self.mark()
        self.wait()
        start = time.perf_counter()
        logits, _ = self.call(prompt, at)
        self.mark()
        host = time.perf_counter()
        self.wait()
        spent = [host - start, time.perf_counter() - start]
        return logits.float().cpu(), spent

    @torch.no_grad()
    def one_token(self) -> None:
        """One step of decoding on the cache as it is, to be profiled."""
        self.call(self.prompt(1), self.position(1))
        self.mark()
        self.wait()


def read_bytes(decoder: Decoder, filled: float) -> float:
    """What a token has to read: the weights that products use, and ``filled`` places of the cache."""
    tables = [module for module in decoder.model.modules() if isinstance(module, nn.Embedding)]
    head = decoder.model.get_output_embeddings().weight
    skipped = sum(table.weight.nbytes for table in tables if table.weight is not head)
    weights = sum(one.nbytes for one in decoder.model.parameters()) - skipped
    layers, width = decoder.sizes["layers"], decoder.sizes["width"]
    return float(weights + 2 * layers * decoder.batch * width * filled * 2)
