"""Real text that every Python installation has: sources of its own library, as bytes. Imports torch only."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TRAIN = """
    argparse ast asyncio/base_events bdb calendar cmd codecs collections/__init__ concurrent/futures/_base configparser
    contextlib dataclasses datetime difflib dis doctest email/message enum filecmp fractions ftplib functools gettext gzip
    heapq html/parser http/client http/cookiejar imaplib inspect ipaddress json/decoder json/encoder locale logging/__init__
    mailbox mimetypes multiprocessing/pool optparse os pdb pickle platform plistlib posixpath pprint random sched selectors
    shelve smtplib socket ssl statistics string subprocess tarfile tempfile threading tokenize trace traceback types typing
    unittest/case unittest/mock urllib/parse urllib/request uuid warnings weakref xml/dom/minidom xml/etree/ElementTree
    zipfile
""".split()
HELD_OUT = ["csv", "shutil", "textwrap", "queue", "bisect", "http/__init__", "unittest/suite", "copyreg"]
ENOUGH = 200_000  # bytes


@dataclass(frozen=True)
class Corpus:
    train: Tensor  # uint8 [bytes]
    held_out: Tensor  # uint8 [bytes]

    def unigram_entropy(self) -> float:
        """Nats per byte of a model that knows how frequent each byte is and nothing else."""
        p = torch.bincount(self.train.long(), minlength=256).double()
        p = p[p > 0] / p.sum()
        return float(-(p * p.log()).sum())


def load() -> Corpus:
    """About 2 MB to train on and 0.1 MB of other modules to test on. Raises RuntimeError where Python came without sources."""
    train, held_out = _read(TRAIN), _read(HELD_OUT)
    if len(train) < ENOUGH or len(held_out) < ENOUGH // 10:
        raise RuntimeError(f"too few sources in {_library()} to train on: install Python with its standard library as .py files")
    return Corpus(_tensor(train), _tensor(held_out))


def batch(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of ``text`` and what follows each byte: two int64 CPU tensors of shape [count, length]."""
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _read(names: list[str]) -> bytes:
    files = [_library() / f"{name}.py" for name in names]
    return b"\n\n".join(file.read_bytes() for file in files if file.is_file())


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
