"""Translates command lines of YOLOv5 and Ultralytics (`utils.config.other_programs.table`)."""

from __future__ import annotations

from collections.abc import Sequence

from utils.config.other_programs.options import translate_option
from utils.config.other_programs.typed_words import split_words
from utils.config.other_programs.yolo_words import flags_of_yolo_words
from utils.errors import Mistakes


def translate_command_line(command: str, arguments: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    """Returns the command line in our flags, and a log line for each flag that was dropped because it has no effect
    here. Adds to ``mistakes`` what is refused, with reasons, and what to write instead of words of the yolo command."""
    typed = split_words(command, arguments)
    translated = flags_of_yolo_words(command, typed.yolo_words, mistakes, options=typed.options)
    log_lines: list[str] = []
    words = [*typed.positional, *typed.unexpected, *translated]  # the last flag may take all words after it
    for option in typed.options:
        result = translate_option(command, option)
        words += result.words
        if result.log_line:
            log_lines.append(result.log_line)
        if result.mistake:
            mistakes.add(result.mistake)
    return words, log_lines
