"""How the text of a setting becomes its value. Each raises ValueError for text that it does not take. Imports nothing of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable


def choice(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ValueError
        return text

    return parse


def boolean(text: str) -> bool:
    word = text.lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    raise ValueError


def positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) == 0:
        raise ValueError
    return int(text)


def nbytes(text: str) -> int:
    if text in ("auto", "none"):
        return 0
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text)
    if not match:
        raise ValueError
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError
    return Path(text).expanduser()


def optional_path(text: str) -> Path | None:
    return path(text) if text else None


def names(*known: str) -> Callable[[str], frozenset[str]]:
    def parse(text: str) -> frozenset[str]:
        words = frozenset(word.strip() for word in text.split(",") if word.strip())
        if not words <= set(known):
            raise ValueError
        return words

    return parse
