"""One random program of op_db calls, run in step on the physical device and on lazysched, drawn call by call from its seed.

Each call has random numbers of its own, so a program without some of its calls is still a program: that is how a failure
is made small. Imports torch, `lazy_backend`, `fuzz_ops` and `fuzz_tensors` only.
"""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any, Callable

import torch
from torch.utils import _pytree as pytree

import lazy_backend
from tests.conformance import fuzz_ops, fuzz_tensors
from tests.conformance.fuzz_tensors import DEVICE, REFERENCE, Different, Pair, Tensor

LENGTH = 12  # calls of a program
POOL = 16  # tensors that it keeps
_MAX_NUMEL = 20000


class Ended(Exception):
    """The program can't go on: an error that shows only when it runs took what was recorded with it."""


class Program:
    """``Program(seed, number).run()`` runs all; ``log`` says what was done, ``calls`` how many op calls both devices ran."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number
        self.log: list[str] = []
        self.calls = self.barriers = self.errors = 0
        self.pool: list[Pair] = []
        self.leaves: list[Pair] = []
        self.rng = random.Random(f"{seed}:{number}")
        self.with_grad = self.rng.random() < 0.5
        self.exact = True

    def run(self, keep: list[int] | None = None, check_each: bool = False) -> None:
        """Raises what lazysched raised wrongly, or Different."""
        lazy_backend.mark_step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            indices = range(LENGTH) if keep is None else keep
            randoms = {index: random.Random(f"{self.seed}:{self.number}:{index}") for index in indices}
            chosen = {index: fuzz_ops.draw(rng, self.with_grad) for index, rng in randoms.items()}
            torch.manual_seed(self.number)  # after op_db, which seeds all generators itself
            try:
                for index, call in chosen.items():
                    self.rng = randoms[index]
                    self.note(f"call {index}:")
                    self.call(*call)
                    self.between()
                    if check_each:
                        self.check()
                self.check()
            except Ended:
                self.note("the program ends here")

    def note(self, text: str) -> None:
        self.log.append(text)

    # ---- one call --------------------------------------------------------------------------------------------------

    def call(self, op: Any, sample: Any, name: str) -> None:
        if sample is None:
            return
        tree = (sample.input, sample.args, sample.kwargs)
        tensors = [leaf for leaf in fuzz_tensors.flat(tree) if isinstance(leaf, Tensor)]
        if any(t.layout is not torch.strided or t.numel() > _MAX_NUMEL or t.is_quantized for t in tensors):
            return
        function, variant = self.variant(op)
        self.note(f"  {name} {variant}")
        self.exact = self.exact and op.name not in fuzz_ops.ALIGNED
        made: dict[int, Pair] = {}
        ref, lazy = (pytree.tree_map(functools.partial(self.side, made, which), tree) for which in (0, 1))
        if op.name in fuzz_ops.ON_HOST:
            ref, lazy = ((given[0], sample.args, sample.kwargs) for given in (ref, lazy))
        self.both(function, ref, lazy, list(made.values()), variant)

    def variant(self, op: Any) -> tuple[Callable[..., Any], str]:
        rng = self.rng
        choices: list[tuple[Callable[..., Any], str]] = [(op.get_op(), "function")] * 4
        if op.get_inplace() is not None:
            choices += [(op.get_inplace(), "in-place")] * 3
        if op.get_method() is not None:
            choices += [(op.get_method(), "method")]
        if op.supports_out and op.name not in fuzz_ops.NO_OUT:
            choices += [(op.get_op(), "out")] * 3
        return rng.choice(choices)

    def side(self, made: dict[int, Pair], which: int, leaf: Any) -> Any:
        """An argument of the sample for one of the devices."""
        if isinstance(leaf, Tensor):
            if id(leaf) not in made:
                made[id(leaf)] = self.stand_in(leaf)
            return made[id(leaf)][which]
        is_device = isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu")
        return (REFERENCE, DEVICE)[which] if is_device else leaf

    def stand_in(self, sample: Tensor) -> Pair:
        """A pair for a sample's tensor: its copy, with another layout, or something that the program already has."""
        rng, chance = self.rng, self.rng.random()
        if chance < 0.35 and (sample.is_floating_point() or sample.is_complex()):
            same = [p for p in self.pool if p.ref.dtype == sample.dtype and p.ref.shape == sample.shape]
            larger = [p for p in self.pool if p.ref.dtype == sample.dtype and p.ref.numel() >= sample.numel()]
            if same:
                self.note("    takes an earlier tensor")
                return rng.choice(same)
            if larger:
                self.note("    takes a part of an earlier tensor")
                return rng.choice(larger).map(lambda t: t.reshape(-1)[: sample.numel()].view(sample.shape))
        pair = fuzz_tensors.twin(sample)
        if chance > 0.6:
            pair = fuzz_tensors.relaid(pair, rng)
            self.note(f"    {list(sample.shape)} with stride {pair.ref.stride()}")
        if sample.requires_grad:
            pair = pair.map(lambda t: t.detach().requires_grad_())
            self.leaves.append(pair)
        if chance > 0.9 and sample.requires_grad:
            pair = pair.map(lambda t: t * 1)
        return pair

    def both(self, function: Callable[..., Any], ref: Any, lazy: Any, given: list[Pair], variant: str) -> None:
        """Call it on the physical device, then here; the results go into the pool."""
        targets: list[Pair] = []
        if variant == "out":
            targets = self.targets(function, ref)
            ref[2]["out"], lazy[2]["out"] = (out[0] if len(out) == 1 else out for out in zip(*targets))
        wanted, error = attempt(lambda: function(ref[0], *ref[1], **ref[2]))
        if error is not None:
            self.calls += 1
            return self.same_error(error, lambda: function(lazy[0], *lazy[1], **lazy[2]), [*given, *targets])
        got = function(lazy[0], *lazy[1], **lazy[2])
        self.calls += 1
        self.take(wanted, got, [*given, *targets])

    def targets(self, function: Callable[..., Any], ref: Any) -> list[Pair]:
        """Pairs to write the results to: of the right shape or not, new or in use. Raw kernels write outside of repeated ones."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if REFERENCE == "cuda" else ()), torch.no_grad():
            args, kwargs = pytree.tree_map(_copied, ((ref[0], *ref[1]), ref[2]))
            results, _ = attempt(lambda: function(*args, **kwargs))
        results = [leaf for leaf in fuzz_tensors.flat(results) if isinstance(leaf, Tensor)]
        return [self.target(like) for like in results or [torch.zeros(2)]]

    def target(self, like: Tensor) -> Pair:
        rng, chance = self.rng, self.rng.random()
        fitting = [p for p in self.pool if p.ref.shape == like.shape and p.ref.dtype == like.dtype]
        fitting = [p for p in fitting if fuzz_tensors.is_apart(p.ref)]
        if fitting and chance < 0.4:
            self.note("    out: an earlier tensor")
            return rng.choice(fitting)
        if chance < 0.6:
            self.note("    out: empty")
            return fuzz_tensors.twin(torch.empty(0, dtype=like.dtype))
        pair = fuzz_tensors.twin(torch.zeros(like.shape, dtype=like.dtype))
        return fuzz_tensors.relaid(pair, rng, apart=True) if chance > 0.75 else pair

    def same_error(self, error: Exception, call: Callable[[], Any], touched: list[Pair]) -> None:
        """The call must raise here too: when it is recorded, or at the next barrier."""
        self.errors += 1
        self.note(f"    must raise {type(error).__name__}: {str(error)[:100]}")
        alone = self.rng.random() < 0.5
        if alone:
            lazy_backend.mark_step()
        got, mine = attempt(call)
        late = mine is None
        if late:
            mine = attempt(lazy_backend.mark_step)[1]
        if type(mine) is not type(error):
            raise Different(f"raised {mine!r}, not {error!r}") from mine
        if late and not alone:
            raise Ended
        gone = {fuzz_tensors.storage(pair.ref) for pair in touched}  # what an op does to its outputs before it fails is its own
        self.pool = [pair for pair in self.pool if fuzz_tensors.storage(pair.ref) not in gone]
        self.leaves = [pair for pair in self.leaves if fuzz_tensors.storage(pair.ref) not in gone]
        torch.manual_seed(self.number)

    def take(self, wanted: Any, got: Any, given: list[Pair]) -> None:
        """Compare what can be compared without a barrier, and keep the results and what was given."""
        known = {id(pair.ref): pair for pair in [*given, *self.pool]}
        results, mine = fuzz_tensors.flat(wanted), fuzz_tensors.flat(got)
        if len(results) != len(mine):
            raise Different(f"gave {len(mine)} results, not {len(results)}")
        for index, pair in enumerate(map(Pair, results, mine)):
            if not isinstance(pair.ref, Tensor):
                if not _equal(*pair):
                    raise Different(f"result {index} is {pair.lazy!r}, not {pair.ref!r}")
            elif id(pair.ref) in known:
                if known[id(pair.ref)].lazy is not pair.lazy:
                    raise Different(f"result {index} is not the argument that was given")
            elif pair.ref.layout is torch.strided:
                fuzz_tensors.same_outside(pair, f"result {index}")
                known[id(pair.ref)] = pair
        kept = [pair for pair in known.values() if pair.ref.numel() <= _MAX_NUMEL]
        self.rng.shuffle(kept)
        self.pool = kept[:POOL]

    # ---- between calls -------------------------------------------------------------------------------------------------

    def between(self) -> None:
        rng = self.rng
        actions = ((self.look, 0.4), (self.write, 0.2), (self.backward, 0.2), (self.barrier, 0.3), (self.forget, 0.2))
        for action, chance in actions:
            if self.pool and rng.random() < chance:
                action(rng.choice(self.pool))

    def look(self, pair: Pair) -> None:
        state = self.rng.getstate()
        _, error = attempt(lambda: fuzz_tensors.a_view(Pair(pair.ref, pair.ref), self.rng))
        self.rng.setstate(state)
        if error is None:
            seen = fuzz_tensors.a_view(pair, self.rng)
            self.note(f"  a view: {list(pair.ref.shape)} as {list(seen.ref.shape)} with stride {seen.ref.stride()}")
            fuzz_tensors.same_outside(seen, "a view")
            self.pool.append(seen)

    def write(self, pair: Pair) -> None:
        rng = self.rng
        other = rng.choice([p for p in self.pool if p.ref.dtype == pair.ref.dtype])
        name, args = rng.choice((("zero_", 0), ("fill_", 1), ("copy_", 2), ("add_", 2), ("mul_", 1)))
        number = rng.randrange(3)
        self.note(f"  {name} on {list(pair.ref.shape)}")
        ref, lazy = ([number] if args == 1 else [side] if args else [] for side in other)
        self.both(lambda x, *rest: getattr(x, name)(*rest), (pair.ref, ref, {}), (pair.lazy, lazy, {}), [pair, other], "in-place")
        self.calls -= 1

    def backward(self, pair: Pair) -> None:
        if not pair.ref.requires_grad:
            return
        again = self.rng.random() < 0.5
        self.note(f"  backward from {list(pair.ref.shape)} of {attempt(lambda: pair.ref.grad_fn)[0]}")
        _, error = attempt(lambda: pair.ref.backward(torch.ones_like(pair.ref), retain_graph=again))
        if error is None:
            return pair.lazy.backward(torch.ones_like(pair.lazy), retain_graph=again)
        self.same_error(error, lambda: pair.lazy.backward(torch.ones_like(pair.lazy), retain_graph=again), [])
        for leaf in self.leaves:
            leaf.ref.grad = leaf.lazy.grad = None

    def barrier(self, pair: Pair) -> None:
        self.barriers += 1
        kind = self.rng.choice(("mark_step", "sync", "wait", "synchronize", "item", "cpu"))
        self.note(f"  barrier: {kind}")
        if kind == "mark_step":
            lazy_backend.mark_step()
        elif kind == "sync":
            lazy_backend.sync([pair.lazy])
        elif kind == "wait":
            lazy_backend.wait_device_ops()
        elif kind == "synchronize":
            torch.get_device_module(DEVICE).synchronize()
        elif kind == "item" and pair.ref.numel():
            self.same_values(pair.map(lambda t: torch.tensor(t.detach().reshape(-1)[-1].item(), dtype=t.dtype)), "item()")
        else:
            self.same_values(pair, "cpu()")

    def forget(self, pair: Pair) -> None:
        self.pool = [kept for kept in self.pool if kept is not pair]

    def same_values(self, pair: Pair, name: str) -> None:
        fuzz_tensors.same_values(pair, name, self.exact)

    def check(self) -> None:
        """Every live tensor, its gradient, and the generator."""
        for index, pair in enumerate(self.pool):
            name = f"live tensor {index}"
            if attempt(lambda: pair.ref.is_leaf)[1] is not None:  # noqa: B023  (autograd forbids to look at this view)
                continue
            fuzz_tensors.same_outside(pair, name)
            self.same_values(pair, name)
        fuzz_tensors.same_sharing(self.pool)
        for index, leaf in enumerate(self.leaves):
            grads = Pair(leaf.ref.grad, leaf.lazy.grad)
            if (grads.ref is None) != (grads.lazy is None):
                raise Different(f"the gradient of leaf {index} is {grads.lazy}, not {grads.ref}")
            if grads.ref is not None:
                self.same_values(grads, f"the gradient of leaf {index}")
        if REFERENCE == "cpu" and not torch.equal(torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state()):
            raise Different("the generators have drawn different numbers")


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _equal(mine: Any, wanted: Any) -> bool:
    return bool(mine == wanted or (mine != mine and wanted != wanted))
