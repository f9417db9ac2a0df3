"""Writes how a kernel draws uniform random numbers with Philox, four at a time where elements allow. Imports codegen's leaf
modules.

Philox maps (counter, subsequence) to four 32-bit words; CUDA's eager kernels use the thread's number as subsequence and count
calls from a quarter of the generator's offset on. A word w becomes w * 2**-32 + 2**-33, as curand_uniform does.
"""

from __future__ import annotations

from codegen.body import Step
from codegen.draws import WORDS, Stream
from codegen.packed_source import BitWriter

PHILOX = '''@triton.jit
def _philox(seed, a, b, c, d):
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        left = a.to(tl.uint64) * 0xD2511F53
        right = c.to(tl.uint64) * 0xCD9E8D57
        a = (right >> 32).to(tl.uint32) ^ b ^ low
        b = right.to(tl.uint32)
        c = (left >> 32).to(tl.uint32) ^ d ^ high
        d = left.to(tl.uint32)
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


'''
"""A function of kernels that draw: Philox4x32-10, whose wide products are one instruction each, unlike those of `tl.philox`."""

_TO_UNIFORM = "{0}.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10"


def random_lines(writer: BitWriter, step: Step, name: str, seed: str, offset: str) -> list[str]:
    """Lines that define ``name`` as a number for each element of the step's block."""
    stream = step.payload
    assert isinstance(stream, Stream)
    threads = writer.arguments.stride(stream.threads)
    run = writer.fraction(step, stream.vector) if stream.vector in (WORDS, 2 * WORDS) else None
    if run is not None and writer.tile.axes[1].block <= stream.threads * stream.vector:
        return _run_by_run(name, *run, stream.vector // WORDS, threads, seed, offset, writer.tile.axes[0] is not None)
    return _one_by_one(name, writer.position(step), stream.vector, threads, seed, offset)


def call_line(name: str, seed: str, number: int = 0) -> str:
    words = ", ".join(f"{name}_{word}{number or ''}" for word in "xyzw")
    count = f"({name}_count + {number})" if number else f"{name}_count"
    return (f"{words} = _philox({seed}, {count}.to(tl.uint32), ({count} >> 32).to(tl.uint32), {name}_thread.to(tl.uint32), "
            f"{name}_thread.to(tl.uint32) * 0)")


def uniform(name: str, word: int) -> str:
    """A number from one of a call's words."""
    return _TO_UNIFORM.format(f"{name}_{'xyzw'[word]}")


def _run_by_run(name: str, first: str, lanes: str, calls: int, threads: str, seed: str, offset: str, two: bool) -> list[str]:
    """``calls`` calls per vector of ATen's, so that numbers lie in registers as elements that are loaded in vectors do. Only the
    block's ``first`` vector is divided: its neighbours belong to the same turn of the threads or to the next."""
    several = "" if calls == 1 else f" * {calls}"
    return [
        f"{name}_first = {first}",
        f"{name}_turn = {name}_first // {threads}",
        f"{name}_thread = {name}_first - {name}_turn * {threads} + {lanes}",
        f"{name}_next = {name}_thread >= {threads}",
        f"{name}_thread = tl.where({name}_next, {name}_thread - {threads}, {name}_thread)",
        f"{name}_count = {offset} // 4 + ({name}_turn + {name}_next){several}",
        *(call_line(name, seed, number) for number in range(calls)),
        *(f"{name}_{word} = tl.join({name}_{word}, {name}_{word}1)" for word in "xyzw" * (calls == 2)),
        f"{name}_words = tl.join(tl.join({name}_x, {name}_z), tl.join({name}_y, {name}_w))",
        f"{name} = " + _TO_UNIFORM.format(f"tl.reshape({name}_words, [{'B0, B1' if two else 'B1'}])"),
    ]


def _one_by_one(name: str, position: str, vector: int, threads: str, seed: str, offset: str) -> list[str]:
    """A call per element, three of whose four words are thrown away."""
    lines = [f"{name}_place = {position}"]
    if vector == 1:  # a thread's words belong to elements that lie `threads` apart
        lines += [f"{name}_thread = {name}_place % {threads}", f"{name}_turn = {name}_place // {threads}",
                  f"{name}_count = {offset} // 4 + {name}_turn // 4", f"{name}_word = {name}_turn % 4"]
    else:
        calls = max(vector // WORDS, 1)
        call = f" * {calls} + {name}_place % {vector} // 4" if calls > 1 else ""
        lines += [f"{name}_thread = {name}_place // {vector} % {threads}",
                  f"{name}_count = {offset} // 4 + {name}_place // {vector} // {threads}{call}",
                  f"{name}_word = {name}_place % {min(vector, WORDS)}"]
    picked = f"{name}_w"
    for number, word in ((2, "z"), (1, "y"), (0, "x")):
        picked = f"tl.where({name}_word == {number}, {name}_{word}, {picked})"
    return [*lines, call_line(name, seed), f"{name} = " + _TO_UNIFORM.format(picked)]
