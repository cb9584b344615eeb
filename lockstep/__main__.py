"""The command ``lockstep``, also ``python -m lockstep`` or ``torchrun -m lockstep``: all commands of the program."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

DESCRIPTIONS = {
    "train": "train a detector",
    "val": "score checkpoints and exported files on a data set",
    "detect": "find objects in images, videos and streams",
    "export": "export a checkpoint to ONNX, OpenVINO, TorchScript or torch.export",
    "check": "check a data set, and with a trained model, its labels",
    "compare": "compare runs, with intervals of the differences",
    "kfold": "train and score by cross-validation",
    "search": "search hyper-parameters",
    "convert": "convert the export of an annotation tool to COCO JSON",
    "shard": "write a data set as shards, for an object store",
    "cache": "list and remove caches of data sets",
    "weights": "list public weights, show and convert checkpoints",
    "demo": "write the demo data set to a folder",
}
MORE = (
    "lockstep COMMAND --help lists the flags.",
    "lockstep completion bash prints a completion for the shell.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names with the others. Exits as the command does."""
    from utils.entrypoint import run_main

    run_main(_dispatch, sys.argv[1:] if argv is None else list(argv))


def _dispatch(argv: list[str]) -> None:
    from utils.config.yaml_files import suggestion
    from utils.errors import UserError
    from utils.machine.limits import require_package
    from utils.program import VERSION

    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        lines = [f"  {name:10}{text}" for name, text in DESCRIPTIONS.items()]
        print("\n".join(["usage: lockstep COMMAND ...", "", *lines, "", *MORE]))
    elif command == "--version" or (command in DESCRIPTIONS and argv[1:2] == ["--version"]):
        print(f"lockstep {VERSION}")
    elif command == "completion":
        require_package("shtab", "completion", "do without")
        _print_completion(argv[1] if argv[1:] else "bash")
    elif command in DESCRIPTIONS:
        sys.argv = [command, *argv[1:]]  # as the command would have it
        _main_of(command)(argv[1:])
    else:
        known = ", ".join(DESCRIPTIONS)
        raise UserError(f"{command}: no such command{suggestion(command, DESCRIPTIONS)}; commands are {known}")


def _main_of(command: str) -> Callable[[Sequence[str]], None]:
    match command:
        case "train":
            from train import main
        case "val":
            from val import main
        case "detect":
            from detect import main
        case "export":
            from export import main
        case "check":
            from engine.tools.check.command import main
        case "compare":
            from engine.tools.compare import main
        case "kfold":
            from engine.kfold import main
        case "search":
            from engine.search import main
        case "convert":
            from data.convert.__main__ import main
        case "shard":
            from data.shard.__main__ import main
        case "cache":
            from data.cache.__main__ import main
        case "weights":
            from models.weights.__main__ import main
        case "demo":
            from data.demo import main
    return main


def _print_completion(shell: str) -> None:
    """Prints the completion of all commands and flags. Raises UserError for an unknown ``shell``."""
    import shtab

    from utils.errors import UserError

    if shell not in shtab.SUPPORTED_SHELLS:
        raise UserError(f"completion {shell}: must be one of {', '.join(shtab.SUPPORTED_SHELLS)}")
    root = argparse.ArgumentParser("lockstep")
    commands = root.add_subparsers()
    for command, text in DESCRIPTIONS.items():
        commands.add_parser(command, help=text)
        commands.choices[command] = _parser_of(command)
    print(shtab.complete(root, shell))


def _parser_of(command: str) -> argparse.ArgumentParser:
    found: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: object) -> None:
        found.append(parser)
        raise SystemExit

    argparse.ArgumentParser.parse_args = keep  # this process only prints
    with contextlib.suppress(SystemExit):
        _main_of(command)([])
    return found[0]


if __name__ == "__main__":
    if not __package__:  # started as a file (`utils.program.start_of`): its folder is not one to import from
        own = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [folder for folder in sys.path if folder != own]
        if os.path.dirname(own) not in sys.path:
            sys.path.insert(0, os.path.dirname(own))
    main()
