"""The table of optimisations that can be switched off one by one. Imports nothing of lazysched.

`LAZYSCHED_DISABLE=cse,combo` runs without those two: to find which one is to blame, and to measure what each brings.
`settings.enabled("cse")` is what a pass asks.
"""

from __future__ import annotations

OPTIMISATIONS: dict[str, str] = {
    "cse": "one node where two would compute the same value",
    "fold": "results known when compiling, and ops that change nothing, cost nothing",
    "epilogues": "matrix products with a bias apply the ReLU behind them, where cuBLAS can and nobody else reads them",
    "product_sums": "products add up to one another's results, where LAZYSCHED_AUTOTUNE accepts other last bits and steps replay",
    "channels_last": "images that convolutions read and make lie as cuDNN's fast kernels want them, if nobody outside sees them",
    "conv_bias": "cuDNN adds a convolution's bias with the ReLU behind it, or the kernel of what follows does",
    "conv_gradients": "the kernel that makes a convolution's gradient sums it for the bias",
    "own_part": "what a rank sends to itself in an all_to_all_single is read where it lies, instead of being copied",
    "copy_engines": "large exchanges between GPUs of one host run on their copy engines, which leave the multiprocessors alone",
    "recompute": "cheap values are computed again in backward instead of being kept",
    "hold_less": "values that wait while most memory is held are made again by kernels that read what they come from",
    "peak_order": "the order with the smallest peak memory among several",
    "inplace": "results take the memory of operands that die",
    "static_plan": "one allocation holds all of an executable's intermediate results",
    "pad_rows": "rows of matrices that a product reads or writes start on 16-byte boundaries",
    "fusion": "several ops in one kernel",
    "horizontal": "independent ops over the same elements share a kernel",
    "scans": "running sums, products and extremes are kernels that fuse, instead of ATen's",
    "mix_order": "row and column reductions of one input share a pass over it",
    "one_pass_loss": "a loss over classes makes its gradient where it reads the logits, while a cache holds the row",
    "long_norms": "variances and norms of long rows take one pass, which programs share, as they do softmax of few long rows",
    "keyed_places": "argmax and the like reduce value and place as one number, in one pass that programs may share",
    "cached_rows": "rows too long for registers are walked twice where their multiprocessor's cache holds them",
    "split": "long reductions with few results are split over programs",
    "tiling": "two-dimensional tiles where operands disagree on the fast axis",
    "row_strips": "rows that no power of two fits are held in registers in several strips",
    "aligned_rows": "rows that start or end off 16-byte boundaries are read in whole vectors",
    "loop_order": "a kernel walks its dimensions in the order that suits its operands",
    "packed_rounding": "rounding to bfloat16 between two steps of a kernel is one instruction",
    "combo": "small kernels that do not depend on one another share a launch",
    "early_loads": "kernels that wait for memory load all their operands before they compute with one",
    "numbered_arguments": "programs of a launch that kernels share find their arguments by number, not in branches",
    "templates": "matrix products with what follows them in one kernel, where LAZYSCHED_TEMPLATES asks and it measured faster",
    "attention": "attention in kernels of our own, where LAZYSCHED_ATTENTION asks for it",
    "autotune": "block sizes and warps are measured, once per kernel and machine, where LAZYSCHED_AUTOTUNE asks for it",
    "products": "large products in 16 bits by the fastest of cuBLASLt's suggestions, where LAZYSCHED_AUTOTUNE asks for it",
    "counters": "what cuBLASLt's algorithms count with is set to zero once for a CUDA graph, not before each product",
    "keep_heap": "on a CPU, glibc keeps a step's memory for the next",
    "parallel_compile": "kernels compile in several processes",
    "cuda_graphs": "a cached step replays as a CUDA graph",
    "replay": "functions wrapped in lazy_backend.replayed are recorded again without their Python",
    "windows": "concatenations, pads and gradients of slices are index arithmetic in the kernels around them",
    "varying": "ops whose sizes are new in every recording run at once, so that the rest is compiled once",
    "fused_random": "dropout draws its random numbers inside a fused kernel",
}
