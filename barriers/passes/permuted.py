"""How views of an (N, C, H, W) tensor look once its memory is channels_last. Imports `ir_nodes` only."""

from __future__ import annotations

import functools
from dataclasses import replace

from ir_nodes import Layout, Value

Shape = tuple[int, ...]


@functools.lru_cache(maxsize=1 << 14)  # a graph asks several times
def permuted(layout: Layout, shape: Shape) -> Layout | None:
    """The elements that ``layout`` sees in the row-major memory of ``shape`` (N, C, H, W), where that memory is channels_last.

    None where no strides reach them: where one of its dimensions goes on from one channel, or from one image, into the next.
    """
    if layout.flipped or not layout.numel:
        return None
    images, channels, *plane = shape
    pixels = plane[0] * plane[1]

    def digits(distance: int) -> tuple[int, int, int]:
        """Images, channels and pixels."""
        return distance // (channels * pixels), distance // pixels % channels, distance % pixels

    def moved(image: int, channel: int, pixel: int) -> int:
        return (image * pixels + pixel) * channels + channel

    steps = [digits(stride) for stride in layout.stride]
    start = digits(layout.offset)
    last = [at + sum((size - 1) * step[digit] for size, step in zip(layout.size, steps)) for digit, at in enumerate(start)]
    if min(layout.stride, default=0) < 0 or any(at >= most for at, most in zip(last, (images, channels, pixels))):
        return None
    stride = last_strides(shape) if in_rows(layout, shape) else tuple(moved(*step) for step in steps)
    return replace(layout, stride=stride, offset=moved(*start))


def in_rows(layout: Layout, shape: Shape) -> bool:
    """Does ``layout`` walk the row-major memory of ``shape`` by images, channels, rows and columns?"""
    if len(layout.size) != 4 or any(size > extent for size, extent in zip(layout.size, shape)):
        return False
    walked = Layout.contiguous(layout.dtype, shape).stride
    return all(size == 1 or step == wanted for size, step, wanted in zip(layout.size, layout.stride, walked))


def is_channels_last(layout: Layout) -> bool:
    """Do the channels of a pixel lie side by side, and pixels behind one another?"""
    return len(layout.size) == 4 and all(size == 1 or step == wanted for size, step, wanted in
                                         zip(layout.size, layout.stride, last_strides(layout.size)))


def is_last(value: Value, layout: Layout) -> bool:
    """Is ``value``, seen through ``layout``, an image that lies in channels_last and not in rows?"""
    return is_channels_last(layout) and layout.covers(value.buffer.nbytes) and not same_either_way(layout.size)


def last_strides(shape: Shape) -> Shape:
    """Those of a channels_last tensor of ``shape``, as PyTorch gives them to one of its own."""
    _, channels, height, width = shape
    return height * width * channels, 1, width * channels, channels


def same_either_way(shape: Shape) -> bool:
    """Is row-major memory of ``shape`` channels_last, too?"""
    return shape[1] == 1 or shape[2] * shape[3] == 1


def makes_last(layout: Layout) -> bool:
    """Does PyTorch give results the format channels_last on account of a tensor that lies so (``suggest_memory_format``)? Where
    memory is the same either way, strides of dimensions of one element decide, as in c10's ``is_channels_last_strides_2d``."""
    if len(layout.size) != 4 or layout.stride[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        size, stride = layout.size[dim], layout.stride[dim]
        if size == 0 or stride < least or dim == 0 and least == layout.stride[1]:
            return False
        least = stride * max(size, 1)
    return True
