"""`python -m labs <command>`: the board, and the tools around the labs."""

from __future__ import annotations

import argparse
import importlib
import sys

from labs._impl import LoadError

# command -> (module of labs._harness with add_arguments(parser) and run(args) -> exit code, help)
COMMANDS = {
    "board": ("steps", "the board of the labs from their last pytest run (also without a command)"),
    "doctor": ("doctor", "check this machine: versions, card, what runs where, a self-test"),
    "bench": ("bench", "benchmark a lab on this card; without a GPU, count instead of timing"),
    "xray": ("xray", "compile a lab's kernels for NVIDIA cards that are not here"),
    "trace": ("trace", "run attention on a CPU and draw which tiles it really visited"),
    "grade": ("grade", "grade a folder of submissions, each in a process of its own with limits"),
    "handout": ("handout", "write the student edition: the repository without its references"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m labs", description=__doc__, epilog="example: python -m labs bench 06"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    args, rest = parser.parse_known_args(argv)
    name = args.command or "board"
    module_name, text = COMMANDS[name]
    module = importlib.import_module(f"labs._harness.{module_name}")
    sub = argparse.ArgumentParser(
        prog=f"python -m labs {name}",
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(sub)
    try:
        return module.run(sub.parse_args(rest))
    except LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
