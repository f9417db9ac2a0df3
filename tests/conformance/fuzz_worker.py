"""A process of the fuzzer: runs the programs that are asked for on its standard input, one answer a line on its output.

Asked ``{"seed", "program", "keep", "check_each"}``, it answers ``{"calls", "barriers", "errors", "failure", "log"}``. That it
dies is an answer too: a crash. Imports `fuzz_program` only.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback

import torch

from tests.conformance.fuzz_program import Program


def answer(asked: dict) -> dict:
    program = Program(asked["seed"], asked["program"])
    failure = ""
    try:
        program.run(asked["keep"], asked["check_each"])
    except Exception as error:  # any error is a finding
        failure = f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error)[-4:])
    return {"calls": program.calls, "barriers": program.barriers, "errors": program.errors, "failure": failure,
            "log": program.log if failure else []}


def main() -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LAPACK prints its complaints below Python's sys.stdout
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
