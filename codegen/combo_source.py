"""Writes the source of a combo: one launch that does the work of several kernel steps. Imports codegen's kernel modules.

Programs are cut into ranges. Where several steps run one kernel, a program finds the range that it lies in, and by its number the
arguments (`combo_arguments.py`); where kernels differ, each has a lane of its own. How many there are is rounded up to a few
numbers with empty ranges, so that few texts arise; no size is in the text.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import Sequence

from codegen.combo_arguments import HELPERS, argument_line, branch_lines, finds_by_number, range_lines, symbol, width
from codegen.kernel import Kernel, KernelArg, KernelStep, Pointer, Scalar, Size, Temporary

MAX_BYTES = 3900
"""Of arguments: before CUDA 12.1 a launch took 4 KiB, of which some align them, and two are Triton's own."""

MAX_LANES = 8
LARGE, MOST_LARGE = 4 << 20, 8
"""Bytes of a step that is large, and how many steps share a launch then that run several kernels, of which some may need more
registers, or whose arguments are chosen in branches, which holds all of them in registers."""

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
"""How many steps of one kernel a combo holds, empty ranges included."""

FLAT_WARPS, PER_WARP = 4, 128
"""Warps of a launch of flat kernels at least, and elements that each takes at least."""

SAME, OWN = -1, -2
"""How an argument of a lane's kernel is passed: one for all steps, or one for each. 0 and up: the argument of that position."""

Pattern = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A kernel's source, cut up: import lines, helper functions by name, the kernel's parameters and its body's lines."""

    imports: tuple[str, ...]
    helpers: tuple[tuple[str, str], ...]
    parameters: tuple[str, ...]
    body: str


@lru_cache(maxsize=4096)
def pieces(source: str, name: str) -> Pieces | None:
    """The pieces of kernel ``name``; None for a source that has others than a combo can call."""
    imports, helpers, kernel = [], [], None
    lines = source.split("\n")
    for item in ast.parse(source).body:
        if isinstance(item, (ast.Import, ast.ImportFrom)):
            imports.append(ast.unparse(item))
        elif isinstance(item, ast.FunctionDef) and item.name == name:
            kernel = item
        elif isinstance(item, ast.FunctionDef):
            first = min([item.lineno, *(decorator.lineno for decorator in item.decorator_list)])
            helpers.append((item.name, "\n".join(lines[first - 1 : item.end_lineno])))
        elif not isinstance(item, ast.Expr):
            return None
    if kernel is None:
        return None
    body = "\n".join(lines[kernel.body[0].lineno - 1 : kernel.end_lineno])
    if body.count("program_id") != body.count("tl.program_id(0)") or "num_programs" in body or "tl.dot" in source:
        return None  # a matrix product fills the machine, and its registers are no other kernel's
    parameters = tuple(argument.arg for argument in kernel.args.args)
    return Pieces(tuple(imports), tuple(helpers), parameters, body.replace("tl.program_id(0)", "program"))


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Steps that run one kernel. ``pattern`` says how each of its arguments is passed."""

    kernel: Kernel
    steps: tuple[KernelStep, ...]
    pattern: Pattern

    @property
    def count(self) -> int:
        return next((count for count in COUNTS if count >= len(self.steps)), len(self.steps))

    @property
    def nbytes(self) -> int:
        """How many bytes the lane's run-time arguments take, those of its ranges included."""
        own, same = widths(self.kernel, self.pattern)
        return self.count * own + same

    @property
    def flat(self) -> bool:
        return self.steps[0].flat > 0


def pattern_of(steps: Sequence[KernelStep]) -> Pattern:
    """How the arguments of steps of one kernel are passed. A size is always a step's own, whatever its value."""
    columns = list(zip(*([place(arg) for arg in step.args] for step in steps)))
    kinds = [kind for _, kind in steps[0].kernel.signature]
    found: list[int] = []
    known: dict[tuple[object, ...], int] = {}
    for position, (column, kind) in enumerate(zip(columns, kinds)):
        if isinstance(steps[0].args[position], Size):
            found.append(OWN)
            continue
        first = known.setdefault((column, kind), position)
        alike = len(steps) > 1 and len(dict.fromkeys(column)) == 1
        found.append(first if first != position else SAME if alike else OWN)
    return tuple(found)


def widths(kernel: Kernel, pattern: Pattern) -> tuple[int, int]:
    """Bytes of arguments: those of each step, with where its programs begin; those of all, with where they end."""
    own, same = (sum(width(kind) for (_, kind), how in zip(kernel.signature, pattern) if how == wanted) for wanted in (OWN, SAME))
    return own + 4, same + 4


def place(arg: KernelArg) -> object:
    """What the argument stands for, whichever value of a buffer it names."""
    if isinstance(arg, Pointer):
        return (arg.source.id if isinstance(arg.source, Temporary) else arg.source.buffer, arg.byte_offset)
    return (arg.index, str(arg.dtype)) if isinstance(arg, Scalar) else arg


def lanes_of(steps: Sequence[KernelStep]) -> list[Lane]:
    """The steps, which run one kernel, as lanes of as many steps as a launch takes, those with most to do first."""
    kernel, pattern = steps[0].kernel, pattern_of(steps)
    by_size = sorted(steps, key=lambda step: -(step.flat or step.grid[0]))
    own, same = widths(kernel, pattern)
    most = max(count for count in COUNTS if count <= max(1, (MAX_BYTES - same) // own))
    if not finds_by_number(most) and any(map(is_large, steps)):
        most = min(most, MOST_LARGE)
    return [Lane(kernel, tuple(chunk), pattern) for chunk in even(by_size, most)]


def is_large(step: KernelStep) -> bool:
    return sum(map(step.bytes_of, (*step.reads, *step.writes))) >= LARGE


def even(steps: Sequence[KernelStep], most: int) -> list[Sequence[KernelStep]]:
    """The steps in as few parts of at most so many as possible, all of about one size."""
    size = -(-len(steps) // -(-len(steps) // most))
    return [steps[at : at + size] for at in range(0, len(steps), size)]


def per_warp(step: KernelStep) -> int:
    """Elements for each warp of a flat kernel, which suit its number of operands."""
    return dict(step.kernel.constexprs)["B1"] // step.kernel.num_warps


class ComboWriter:
    """Builds one combo. A flat kernel's block follows from the number of warps, with as many elements for each as by itself;
    blocks of other kernels stay as they are."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        wanted = [step.kernel.num_warps for lane in lanes for step in lane.steps]
        self.num_warps = max((lane.kernel.num_warps for lane in lanes if not lane.flat), default=max(FLAT_WARPS, *wanted))
        self._blocks = {lane: self.num_warps * max(PER_WARP, *map(per_warp, lane.steps)) for lane in lanes if lane.flat}
        self.entries: list[tuple[str, str, KernelArg]] = []
        self._names: set[str] = set()
        self.constants: list[tuple[str, int]] = []
        self.divisible: list[str] = []
        self._functions: dict[str, str] = {}  # the text of a lane's function to its name
        self._lines: list[str] = []

    def step(self) -> KernelStep:
        """The launch."""
        self._dispatch()
        steps = [step for lane in self.lanes for step in lane.steps]
        total = sum(self._programs(lane, step) for lane in self.lanes for step in lane.steps)
        name = self._name()
        kernel = Kernel(name, self._source(name), tuple((entry, kind) for entry, kind, _ in self.entries),
                        tuple(self.constants), tuple(self.divisible), self.num_warps,
                        max(step.kernel.registers for step in steps))
        return KernelStep(kernel, (total, 1, 1), tuple(arg for _, _, arg in self.entries),
                          tuple(dict.fromkeys(node for step in steps for node in step.nodes)),
                          tuple(dict.fromkeys(value for step in steps for value in step.elided)),
                          tuple(dict.fromkeys(value for step in steps for value in step.reads)),
                          tuple(dict.fromkeys(value for step in steps for value in step.writes)),
                          picks=tuple(pick for step in steps for pick in step.picks))

    def _programs(self, lane: Lane, step: KernelStep) -> int:
        return -(-step.flat // self._blocks[lane]) if lane.flat else step.grid[0]

    def _name(self) -> str:
        counts = "_".join(str(lane.count) for lane in self.lanes)
        ops = "_".join(dict.fromkeys(lane.kernel.name for lane in self.lanes))
        return f"combo_{counts}_{ops}"[:80]

    def _source(self, name: str) -> str:
        cut = [pieces(lane.kernel.source, lane.kernel.name) for lane in self.lanes]
        imports = dict.fromkeys(line for one in cut if one for line in one.imports)
        helpers = dict.fromkeys(text for one in cut if one for _, text in one.helpers)
        helpers |= dict.fromkeys(HELPERS if any(finds_by_number(lane.count) for lane in self.lanes) else ())
        title = "; ".join(f"{lane.count} x {lane.kernel.name}" for lane in self.lanes)
        plain = [line for line in imports if not line.startswith("from")]
        rest = [line for line in imports if line.startswith("from")]
        head = f'"""{title}"""\n\n' + "\n".join([*plain, *rest])
        names = [*(entry for entry, _, _ in self.entries), *(f"{constant}: tl.constexpr" for constant, _ in self.constants)]
        main = f"@triton.jit\ndef {name}({', '.join(names)}):\n" + "\n".join(self._lines)
        return "\n\n\n".join([head, *helpers, *self._functions, main]) + "\n"

    # The function that picks a program's work

    def _line(self, indent: int, text: str) -> None:
        self._lines.append("    " * indent + text)

    def _add(self, name: str, kind: str, argument: KernelArg, divisible: bool = False) -> str:
        assert name not in self._names, f"two arguments called {name}"
        self._names.add(name)
        self.entries.append((name, kind, argument))
        if divisible:
            self.divisible.append(name)
        return name

    def _dispatch(self) -> None:
        self._line(1, "pid = tl.program_id(0)")
        base = 0
        for number, lane in enumerate(self.lanes):
            first = f"end{number - 1}" if number else "tl.full([], 0, tl.int32)"
            programs = [self._programs(lane, step) for step in lane.steps]
            indent = 1
            if len(self.lanes) > 1:
                last = number == len(self.lanes) - 1
                if not last:
                    self._add(f"end{number}", "i32", Size(base + sum(programs)))
                test = "else:" if last else f"if pid < end{number}:" if number == 0 else f"elif pid < end{number}:"
                self._line(1, test)
                indent = 2
            self._lane(number, lane, base, programs, first, indent)
            base += sum(programs)

    def _lane(self, number: int, lane: Lane, base: int, programs: list[int], first: str, indent: int) -> None:
        mark = f"k{number}_" if len(self.lanes) > 1 else ""
        bounds = [base]
        for count in programs:
            bounds.append(bounds[-1] + count)
        bounds += [bounds[-1]] * (lane.count - len(programs))
        own = [(name, kind) for (name, kind), how in zip(lane.kernel.signature, lane.pattern) if how == OWN]
        numbered = finds_by_number(lane.count)
        for index in range(0 if numbered else 1, lane.count):
            self._add(f"{mark}from{index}", "i32", Size(bounds[index]))
        passed = self._arguments(lane, mark)
        names = [name for name, _ in own]
        for line in self._numbered(lane, mark, own) if numbered else branch_lines(mark, names, first, lane.count):
            self._line(indent, line)
        self._call(lane, mark, passed, indent)

    def _arguments(self, lane: Lane, mark: str) -> list[str]:
        """Add the lane's arguments. Returns the names by which its function is called."""
        passed: list[str] = []
        padded = [*lane.steps, *[lane.steps[0]] * (lane.count - len(lane.steps))]
        for position, ((name, kind), how) in enumerate(zip(lane.kernel.signature, lane.pattern)):
            divisible = name in lane.kernel.divisible
            if how == OWN:
                for index, step in enumerate(padded):
                    self._add(f"{mark}{name}_{index}", kind, step.args[position], divisible)
            elif how == SAME:
                self._add(f"{mark}{name}", kind, lane.steps[0].args[position], divisible)
            passed.append(passed[how] if how >= 0 else f"{mark}{name}")
        return passed

    def _numbered(self, lane: Lane, mark: str, own: list[tuple[str, str]]) -> list[str]:
        """Lines that find the range of ``pid`` and its step's arguments by their number."""
        places = {name: symbol(self._name(), position) for position, (name, _, _) in enumerate(self.entries)}
        return range_lines(mark, places[f"{mark}from0"], lane.count) + [
            argument_line(mark, name, kind, places[f"{mark}{name}_0"], name in lane.kernel.divisible) for name, kind in own]

    def _call(self, lane: Lane, mark: str, passed: list[str], indent: int) -> None:
        constants = [(name, self._blocks[lane] if lane.flat and name == "B1" else value)
                     for name, value in lane.kernel.constexprs]
        for name, value in constants:
            self.constants.append((mark + name, value))
        cut = pieces(lane.kernel.source, lane.kernel.name)
        assert cut is not None
        by_name = dict(zip([name for name, _ in lane.kernel.signature], passed)) | {name: mark + name for name, _ in constants}
        names = [name + (": tl.constexpr" if name in dict(constants) else "") for name in cut.parameters]
        body = f"({', '.join(['program', *names])}):\n{cut.body}"
        function = next((known for text, known in self._functions.items() if text.endswith(body)), f"lane{len(self._functions)}")
        self._functions.setdefault(f"@triton.jit\ndef {function}{body}", function)
        arguments = ", ".join(by_name[name] for name in cut.parameters)
        self._line(indent, f"{function}(pid - {mark}first, {arguments})")
