"""The command `mcore-rl chat`: a conversation with a model in the terminal, or with two models side by side."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mcore_rl.cli.entry_point import Parser, count, exit_on_error
from mcore_rl.cli.launch import split
from mcore_rl.errors import UserError
from mcore_rl.serving.client import KEY_VARIABLE, ServedModel, ServingProcess

DESCRIPTION = "Talk to a model in the terminal."
EPILOG = """\
MODEL is what `mcore-rl serve` takes, or the URL of an endpoint with OpenAI's API; MCORE_RL_API_KEY has its key.
Options of torchrun, such as --nproc-per-node 2, come first."""
HELP = """\
/system TEXT       set the system message (without TEXT: remove it); begins anew
/reset             begin a new conversation
/temperature X     sample at this temperature; 0 takes the likeliest token
/compare OTHER     answer with a second model too, side by side (without OTHER: no longer)
/help              these lines
/quit              end (also Ctrl-D)
A line that ends with a backslash continues on the next one; lines between two lines of three quotes are one message.
Ctrl-C stops an answer."""
QUOTES = '"""'


@dataclass
class Speaker:
    """A model that takes part, and its side of the conversation."""

    model: ServedModel
    messages: list[dict[str, str]] = field(default_factory=list)


class Chat:
    """A conversation of a person with one model or two.

    Args:
        open_model: returns the model that a person names.
        close_model: ends what `open_model` has started for a model.
        ask_line: reads a line; raises EOFError at the end.
    """

    def __init__(
        self,
        first: ServedModel,
        open_model: Callable[[str], ServedModel],
        close_model: Callable[[ServedModel], None],
        console: Console,
        ask_line: Callable[[str], str],
        options: dict[str, Any],
    ) -> None:
        self.speakers, self._console, self._ask_line = [Speaker(first)], console, ask_line
        self._open, self._close = open_model, close_model
        self.system, self.options = "", options

    def run(self) -> None:
        """Talk until the person ends the conversation."""
        while True:
            try:
                text = self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("Ctrl-D ends")
                continue
            if text == "/quit":
                return
            if not text.strip():
                continue
            try:
                self._command(text) if text.startswith("/") else self._answer(text)
            except UserError as error:
                self._say(f"error: {error}")
            except KeyboardInterrupt:  # for example while another model is loaded
                self._say("(stopped)")

    def _read(self) -> str:
        """Read a message, which may have several lines."""
        line = self._ask_line("> ")
        if line.strip() == QUOTES:
            lines = list[str]()
            while (line := self._ask_line("… ")).strip() != QUOTES:
                lines.append(line)
            return "\n".join(lines)
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._ask_line('… ')}"
        return line

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        argument = argument.strip()
        if name == "/help":
            self._say(HELP)
        elif name == "/reset":
            self._reset()
        elif name == "/system":
            self.system = argument
            self._reset()
        elif name == "/temperature":
            try:
                value = float(argument)
            except ValueError:
                value = -1.0
            if not 0 <= value <= 100:
                raise UserError(f"/temperature {argument}: must be a number from 0 to 100")
            self.options["temperature"] = value
        elif name == "/compare":
            for speaker in self.speakers[1:]:
                self._close(speaker.model)
            del self.speakers[1:]
            if argument:
                self._say(f"loading {argument} …")
                self.speakers.append(Speaker(self._open(argument)))
                self._reset()
        else:
            raise UserError(f"{name}: there is no such command; /help lists them")

    def _reset(self) -> None:
        for speaker in self.speakers:
            speaker.messages = []
        self._say("a new conversation")

    def _answer(self, text: str) -> None:
        """Send a message; show the answers as they come. Ctrl-C stops them; a stopped answer is kept as it is."""
        asked = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        answers = [_Answer(s.model, [*system, *s.messages, asked], self.options) for s in self.speakers]
        try:
            if len(answers) == 1:
                self._show_one(answers[0])
            else:
                self._show_all(answers)
        except KeyboardInterrupt:
            for answer in answers:
                answer.stopped.set()
            self._say("\n(stopped)")
        for answer in answers:  # all models have the same conversation, or none
            if answer.error is not None:
                raise answer.error
        for speaker, answer in zip(self.speakers, answers, strict=True):
            speaker.messages += [asked, {"role": "assistant", "content": answer.content}]

    def _show_one(self, answer: _Answer) -> None:
        for key, piece in answer:
            style = "dim italic" if key == "reasoning_content" else ""
            self._console.print(Text(harmless(piece), style=style), end="")
        self._console.print()

    def _show_all(self, answers: Sequence[_Answer]) -> None:
        """Show the answers of several models side by side."""
        threads = [threading.Thread(target=answer.read_all, daemon=True) for answer in answers]
        for thread in threads:
            thread.start()

        def shown() -> Table:
            table = Table(expand=True, show_lines=False)
            for answer in answers:
                table.add_column(answer.model.name, ratio=1, overflow="fold")
            table.add_row(*(answer.text() for answer in answers))
            return table

        with Live(shown(), console=self._console, refresh_per_second=8, vertical_overflow="visible") as live:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.1)
                live.update(shown())
            live.update(shown())

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


class _Answer:
    """The answer of a model as it comes; iterating yields its pieces."""

    def __init__(self, model: ServedModel, messages: Sequence[dict[str, str]], options: dict[str, Any]) -> None:
        self.model, self._messages, self._options = model, messages, options
        self.thought = self.content = ""
        self.error: UserError | None = None
        self.stopped = threading.Event()

    def __iter__(self) -> Any:
        try:
            for key, piece in self.model.chat(self._messages, **self._options):
                if self.stopped.is_set():
                    return
                if key == "content":
                    self.content += piece
                else:
                    self.thought += piece
                yield key, piece
        except UserError as error:
            self.error = error

    def read_all(self) -> None:
        for _ in self:
            pass

    def text(self) -> Text:
        thought = Text(harmless(f"{self.thought}\n" if self.thought else ""), style="dim italic")
        return thought.append(Text(harmless(self.content), style="not dim not italic"))


def harmless(text: str) -> str:
    """Return a model's text without characters that control the terminal."""
    return "".join("␛" if c not in "\n\t" and unicodedata.category(c) == "Cc" else c for c in text)


def chat(arguments: Sequence[str], prog: str) -> None:
    """Run `mcore-rl chat`."""
    with exit_on_error():
        launch_options, rest = split(arguments)
    parser = Parser(prog=prog, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("model", metavar="MODEL", help="the model, or a URL with /v1")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes of the configuration")
    parser.add_argument("--compare", metavar="OTHER", help="a second model, whose answers are shown beside the first's")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="temperature (1); 0 is greedy")
    parser.add_argument("--max-tokens", type=count, metavar="N", help="maximum number of tokens of an answer")
    parsed = parser.parse_intermixed_args(rest)
    with exit_on_error(), contextlib.ExitStack() as started:
        console = Console(highlight=False)

        processes = dict[str, ServingProcess]()

        def open_model(named: str) -> ServedModel:
            if named.startswith(("http://", "https://")):
                return ServedModel(named, os.environ.get(KEY_VARIABLE))
            from mcore_rl.serving.model_source import overrides_for

            is_alone = named == parsed.model and not parsed.compare
            overrides = parsed.overrides if is_alone else overrides_for(named, parsed.overrides)
            process = ServingProcess([*launch_options, named, *overrides])
            started.callback(process.close)
            try:
                model = process.model()
            except BaseException:  # also if the person does not wait for it
                process.close()
                raise
            processes[model.url] = process
            return model

        def close_model(model: ServedModel) -> None:
            if (process := processes.pop(model.url, None)) is not None:
                process.close()

        options: dict[str, Any] = {"temperature": parsed.temperature}
        if parsed.max_tokens is not None:
            options["max_tokens"] = parsed.max_tokens
        with console.status(f"loading {parsed.model} …") if console.is_terminal else contextlib.nullcontext():
            first = open_model(parsed.model)
        session = Chat(first, open_model, close_model, console, _line_reader(console), options)
        session.system = parsed.system
        if parsed.compare:
            session.speakers += [Speaker(open_model(parsed.compare))]
        names = " and ".join(speaker.model.name for speaker in session.speakers)
        console.print(f"{names} (/help lists the commands)", style="dim", markup=False)
        session.run()


def _line_reader(console: Console) -> Callable[[str], str]:
    """Return a function that reads a line of the person, with the terminal's editing keys if there is a terminal."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` history and editing)

        return input

    def read(_: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return read
