"""What a capture that fails leaves behind is taken back, with stand-ins for PyTorch's CUDA. Needs no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, Iterator

import pytest
import torch

from lazy_backend import graphs


class Graph:
    """Stands for a CUDA graph. A pool that graphs have left is dead, but for PyTorch it is still there."""

    def __init__(self, stands: Stands) -> None:
        self.stands, self.pool, self.instantiated = stands, None, False
        if not stands.ends_itself:  # later versions find the states by themselves
            self.register_generator_state = lambda state: stands.calls.append(("register", state))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local" and self.stands.used.get(pool, 1) > 0
        self.pool = pool
        self.stands.calls.append(("begin", pool))
        if pool in self.stands.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.stands.used[pool] = self.stands.used.get(pool, 0) + 1
        self.stands.recording.add(pool)

    def capture_end(self) -> None:
        self.stands.calls.append(("end", self.pool))
        if self.pool is not None and "failed" in self.stands.calls:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stands.recording.discard(self.pool)

    def instantiate(self) -> None:
        self.instantiated = True

    def raw_cuda_graph(self) -> int:
        raise AssertionError("asked for where products count, and none does here")

    def raw_cuda_graph_exec(self) -> int:
        assert self.instantiated
        return 0x20

    def replay(self) -> None:
        self.stands.calls.append("replay")

    def __del__(self) -> None:
        if self.pool is not None and "failed" not in self.stands.calls:
            self.stands.used[self.pool] -= 1


class Stands:
    """Stands for torch.cuda: notes calls, and raises where PyTorch would."""

    def __init__(self, ends_itself: bool) -> None:
        self.calls: list[Any] = []
        self.ends_itself = ends_itself
        self.current = SimpleNamespace(stream_id=0, cuda_stream=0)
        self.made = self.pools = 0
        self.waited = False
        self.used: dict[Any, int] = {}
        self.recording: set[Any] = set()  # pools that the allocator of pinned memory takes for being captured into
        self.reserved, self.allocated, self.free, self.takes = 1 << 30, 1 << 30, 1 << 33, 0

    def pool(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def stream(self, device: int) -> Any:
        self.made += 1
        return SimpleNamespace(stream_id=self.made, cuda_stream=0x100 + self.made, wait_stream=lambda other: None)

    @contextlib.contextmanager
    def inside(self, _: Any) -> Iterator[None]:
        yield

    def graph(self, keep_graph: bool = False) -> Graph:
        return Graph(self)

    def end_pool(self, device: int, pool: Any) -> None:
        if self.ends_itself:
            raise RuntimeError("not currently recording to mempool_id")
        self.calls.append(("end pool", pool))

    def take(self, stream: int) -> None:
        """What a graph's memory takes."""
        self.reserved, self.free = self.reserved + self.takes, self.free - self.takes

    def fail(self, stream: int) -> None:
        """What can't be captured."""
        self.calls.append("failed")
        raise RuntimeError("operation not permitted when stream is capturing")

    def synchronize(self) -> None:
        self.waited = True

    def empty_cache(self) -> None:
        assert self.waited, "an ended graph may still run on another stream than that of its capture"
        self.waited = False
        self.calls.append("empty cache")
        self.free, self.reserved = self.free + self.reserved - self.allocated, self.allocated

    def release_pool(self, device: int, pool: Any) -> None:
        self.calls.append(("release pool", pool))


@pytest.fixture(params=[False, True], ids=["PyTorch 2.11", "newer"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stands:
    stands = Stands(request.param)
    for name, value in {"device": stands.inside, "stream": stands.inside, "current_stream": lambda: stands.current,
                        "Stream": stands.stream, "CUDAGraph": stands.graph,
                        "graph_pool_handle": stands.pool, "memory_reserved": lambda: stands.reserved,
                        "memory_allocated": lambda: stands.allocated, "mem_get_info": lambda: (stands.free, 1 << 34),
                        "synchronize": stands.synchronize, "empty_cache": stands.empty_cache}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", stands.end_pool)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", stands.release_pool)
    monkeypatch.setattr(graphs, "_streams", {})
    monkeypatch.setattr(graphs, "can_map", lambda device: False)  # test_lazy_backend_graph_memory.py looks at that
    graphs._pools.clear()
    return stands


def test_graphs_of_one_stream_share_a_pool_and_others_do_not(cuda: Stands) -> None:
    seen: list[int] = []
    kept = [graphs.capture(0, (), seen.append) for _ in range(3)]
    assert kept[0][0] == 0x20 and cuda.used == {(0, 1): 4} and len(set(seen)) == 1
    cuda.current = SimpleNamespace(stream_id=5, cuda_stream=5)
    kept.append(graphs.capture(0, (), seen.append))
    assert seen[3] != seen[0] and cuda.used == {(0, 1): 4, (0, 2): 2}, "graphs that run side by side share no memory"


def test_a_pool_ends_with_its_last_graph(cuda: Stands) -> None:
    kept = [graphs.capture(0, (), lambda stream: None)]
    kept = [graphs.capture(0, (), lambda stream: kept.clear())]
    assert cuda.used == {(0, 1): 2}, "the new graph had begun"
    kept.clear()
    assert cuda.used == {(0, 1): 0}
    kept.append(graphs.capture(0, (), lambda stream: None))
    assert cuda.used == {(0, 1): 0, (0, 2): 2}


def test_a_capture_that_fails_is_undone(cuda: Stands) -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(0, (), cuda.fail)
    pool = [] if cuda.ends_itself else [("end pool", (0, 1)), ("release pool", (0, 1))]
    nothing = [("begin", None), ("end", None)]
    assert cuda.calls == [("begin", (0, 1)), ("end", (0, 1)), ("begin", (0, 1)), "failed", ("end", (0, 1)), *pool, *nothing]


def test_a_pool_in_which_a_capture_failed_is_not_used_again(cuda: Stands) -> None:
    kept = [graphs.capture(0, (), lambda stream: None)]
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(0, (), cuda.fail)
    cuda.calls.clear()
    kept.append(graphs.capture(0, (), lambda stream: None))
    assert cuda.calls == [("begin", (0, 2)), ("end", (0, 2))] * 2


def test_a_capture_that_can_not_begin_is_undone(cuda: Stands) -> None:
    """It has told the generator before."""
    kept = [graphs.capture(0, (), lambda stream: None)]
    cuda.recording.add((0, 1))
    cuda.calls.clear()
    with pytest.raises(RuntimeError, match="already recording"):
        graphs.capture(0, (), lambda stream: None)
    assert cuda.calls[0] == ("begin", (0, 1)) and cuda.calls[-2:] == [("begin", None), ("end", None)] and len(kept) == 1


def test_states_are_known_before_the_capture_begins_and_replays_go_through_pytorch(cuda: Stands) -> None:
    handle, launch = graphs.capture(0, ["one", "two"], lambda stream: cuda.calls.append("body"))  # type: ignore[list-item]
    registered = [] if cuda.ends_itself else [("register", "one"), ("register", "two")]
    keeper = [("begin", (0, 1)), ("end", (0, 1))]
    assert handle == 0x20 and cuda.calls == [*registered, *keeper, ("begin", (0, 1)), "body", ("end", (0, 1))]
    launch()
    assert cuda.calls[-1] == "replay"


def test_cached_memory_does_not_lie_beside_a_large_graph(cuda: Stands) -> None:
    cuda.takes = graphs.LARGE - 1
    kept = [graphs.capture(0, (), cuda.take)]
    assert "empty cache" not in cuda.calls
    cuda.takes = graphs.LARGE
    kept.append(graphs.capture(0, (), cuda.take))
    assert cuda.calls[-1] == "empty cache"


def test_much_cached_memory_is_given_back_before_a_streams_first_graph_takes_its_own(cuda: Stands) -> None:
    cuda.reserved = cuda.allocated + graphs.LARGE - 1
    kept = [graphs.capture(0, (), lambda stream: None)]
    cuda.reserved += 1
    kept.append(graphs.capture(0, (), lambda stream: None))
    assert "empty cache" not in cuda.calls, "little, then not the first"
    cuda.current = SimpleNamespace(stream_id=5, cuda_stream=5)
    cuda.calls.clear()
    kept.append(graphs.capture(0, (), lambda stream: None))
    assert cuda.calls[0] == "empty cache" and cuda.calls.count("empty cache") == 1


def test_room_is_made_before_a_capture_which_cannot_make_any(cuda: Stands) -> None:
    cuda.free = 1 << 29
    cuda.reserved = cuda.allocated + (1 << 31)
    kept = [graphs.capture(0, (), lambda stream: None)]
    assert cuda.calls[0] == "empty cache"
    cuda.free = (1 << 34) // graphs.SPARE - 1
    with pytest.raises(RuntimeError, match="memory is free"):
        graphs.capture(0, (), lambda stream: None)
    assert len(kept) == 1
