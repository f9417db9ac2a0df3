"""Asks schedule hooks, and makes sure that what they answer makes sense. Imports `barriers` parts only."""

from __future__ import annotations

import difflib
import traceback
from dataclasses import dataclass, field
from typing import Callable, Iterable, Mapping, Sequence

from barriers.recorded import Ask, Before, Constraint, Early, Late, Named, Overlap, Recorded, RecordedSegment
from barriers.wishes import Moves, Wish
from ir_nodes import SegmentCall

Entry = tuple[Wish, SegmentCall, SegmentCall]
Told = Mapping[SegmentCall, RecordedSegment]
_BESIDE = {None: Moves.NEITHER, "earlier": Moves.EARLIER, "later": Moves.LATER}


class HookError(ValueError):
    """An answer of a schedule hook that makes no sense; the text says what it may be."""


@dataclass(frozen=True, slots=True)
class ScheduleHook:
    """A function that is asked about each new recording. ``owner``: only about calls under this scheduler; None: about all.

    ``number``: no two functions have the same, for keys.
    """

    ask: Ask
    number: int
    owner: int | None = None

    @property
    def name(self) -> str:
        return getattr(self.ask, "__name__", None) or type(self.ask).__name__

    @property
    def place(self) -> str:
        code = getattr(self.ask, "__code__", None)
        return f" at {code.co_filename}:{code.co_firstlineno}" if code else ""


@dataclass(slots=True)
class Asked:
    """All that is asked of one recording."""

    wishes: list[Entry] = field(default_factory=list)
    early: list[SegmentCall] = field(default_factory=list)
    late: list[SegmentCall] = field(default_factory=list)
    overlap: Overlap | None = None

    def __bool__(self) -> bool:
        return bool(self.wishes or self.early or self.late or self.overlap)

    def __add__(self, other: Asked) -> Asked:
        return Asked(self.wishes + other.wishes, self.early + other.early, self.late + other.late, other.overlap or self.overlap)

    def calls(self) -> Iterable[SegmentCall]:
        for _, a, b in self.wishes:
            yield a
            yield b
        yield from self.early
        yield from self.late

    @staticmethod
    def of(constraints: Iterable[Constraint], told: Told, cause: str = "") -> Asked:
        """The same in terms of calls. Raises HookError."""
        asked = Asked()
        find = finder(told)
        for one in constraints:
            match one:
                case (earlier, later):
                    asked.wishes += entries(find(earlier), find(later), Moves.NEITHER, cause)
                case Before(earlier, later, beside) if beside in _BESIDE:
                    asked.wishes += entries(find(earlier), find(later), _BESIDE[beside], cause)
                case Early(segment):
                    asked.early += find(segment)
                case Late(segment):
                    asked.late += find(segment)
                case Overlap():
                    asked.overlap = one
                case _:
                    raise HookError(f"it answered {one!r}; an answer lists pairs (earlier, later), Before(earlier, later, "
                                    "beside=None | 'earlier' | 'later'), Early(segment), Late(segment) or Overlap()")
        return asked


def finder(told: Told) -> Callable[[Named], list[SegmentCall]]:
    """Gives the calls that a segment or its name stands for."""
    by_object = {id(segment): [call] for call, segment in told.items()}
    by_name: dict[str, list[SegmentCall]] = {}
    for call in told:
        by_name.setdefault(call.name, []).append(call)
    by_name |= {str(call): [call] for call in told if call.call}

    def find(named: Named) -> list[SegmentCall]:
        found = by_name.get(named) if isinstance(named, str) else by_object.get(id(named))
        if found is None:
            close = difflib.get_close_matches(str(named), by_name, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            known = ", ".join(by_name) or "it has none"
            raise HookError(f"it answered {named!r}, which is no segment of this recording{hint} ({known})")
        return found

    return find


def entries(earlier: Sequence[SegmentCall], later: Sequence[SegmentCall], moves: Moves, cause: str) -> list[Entry]:
    """The n-th call with the n-th; one that ran once is paired with every call of the other."""
    many = len(earlier) > 1 and len(later) > 1
    both = list(zip(earlier, later)) if many else [(a, b) for a in earlier for b in later]
    return [(Wish(str(a), str(b), moves, cause), a, b) for a, b in both]


def consult(hook: ScheduleHook, recorded: Recorded, told: Told, problems: list[str]) -> Asked:
    """What ``hook`` asks. Nothing where it fails or answers nonsense: ``problems`` then says what to mend."""
    try:
        answer = hook.ask(recorded)
        if isinstance(answer, (str, Mapping)) or not isinstance(answer, Iterable | None):
            raise HookError(f"it answered {answer!r}; it has to answer a list of constraints, [] for none")
        return Asked.of(answer or (), told, f"schedule hook {hook.name}")
    except HookError as error:
        problems.append(f"the schedule hook {hook.name}{hook.place} is passed over for this recording: {error}")
    except Exception as error:  # a user's function may fail in any way, and the step must not be lost
        last = traceback.extract_tb(error.__traceback__)[-1]
        problems.append(f"the schedule hook {hook.name}{hook.place} is passed over for this recording: it raised "
                        f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}")
    return Asked()
