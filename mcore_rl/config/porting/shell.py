"""Let bash expand the commands of a file, without running a program of the file.

Bash's own rules for quotes, arrays, arithmetic, branches and functions decide what the words of a command are. Bash
runs in its restricted mode with an empty search path, so that it starts no program and writes no file. Redirections,
and the builtins that act on other processes or read other files, are taken out before.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tree_sitter
import tree_sitter_bash

from mcore_rl.errors import UserError

SECONDS = 10
"""Time that bash has for a file."""

UNKNOWN = re.compile(r"<output_of_[^>]*>|\$\{\w+\}")
"""Placeholders in a word: for the output of a program, and for a variable or argument that the file does not set."""

_BUILTINS = frozenset((
    ":", "[", "break", "case", "command", "continue", "declare", "echo", "eval", "exit", "export", "false",
    "getopts", "let", "local", "mapfile", "printf", "read", "readarray", "readonly", "return", "set", "shift", "shopt",
    "test", "true", "typeset", "unset",
))  # fmt: skip
_OF_PROLOGUE = frozenset(("cd", "pwd", "dirname", "basename"))
_PROLOGUE = r"""
_note() { printf '%s\0' "$#" "$@" >&FD; }
command_not_found_handle() {
    [[ -n ${COMMAND-} && $(declare -p COMMAND) == declare\ -*x* ]] && _note "$COMMAND"
    case $1 in
        asked) shift; _note "$@"; return 1;;
        started) shift;;
    esac
    _note "$@"
    [[ ! -p /dev/stdout ]] || printf '<output_of_%s>' "$1"
}
cd() { PWD=${!#}; }
pwd() { printf '%s\n' "$PWD"; }
dirname() { local path=${!#}; [[ $path == */* ]] || path=./; printf '%s\n' "${path%/*}"; }
basename() { local name=${1##*/}; printf '%s\n' "${name%"${2-}"}"; }
eval() {
    case "$*" in *'<'*) _note eval "$@"; return 1;; esac
    builtin eval "$@"
}
readonly -f _note command_not_found_handle cd pwd dirname basename eval
set -T
trap 'set +eux' DEBUG
enable -n . alias bg bind caller compgen complete compopt dirs disown exec fc fg hash help history jobs kill logout
enable -n popd pushd source suspend times trap type ulimit umask wait enable
"""
"""What bash reads before the file. The options that end a file early are switched off before each of its commands."""

_NAMES = ("variable_name", "special_variable_name")
_Edit = tuple[int, int, str]
"""Start, end and text of a change, in bytes."""

_READONLY = frozenset(("PATH", "SHELL", "ENV", "BASH_ENV", "HISTFILE"))
_OF_BASH = frozenset(("HOME", "PWD", "RANDOM", "SECONDS", "LINENO", "IFS", "OLDPWD", "UID", "EUID", "BASH_SOURCE"))


@dataclass(frozen=True)
class Script:
    """The arguments of a script, and the variables of its environment by name."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


PLAIN = Script()
"""Without arguments and variables."""


@dataclass(frozen=True)
class Expanded:
    """The commands of a file. commands: the words of each. told: what a person has to check, one line each."""

    commands: list[list[str]]
    told: list[str]


def expand(text: str, path: Path, script: Script = PLAIN) -> Expanded:
    """Return the commands of the shell script `text`, a file at `path`, as bash expands their words.

    Programs in conditions count as failed, and their output as unknown. HOME and the working directory are those of
    this process; other variables that the file does not set are unknown.

    Raises:
        UserError: there is no bash, or it does not come to the end of the file.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise UserError(f"{path}: needs bash to be read, which is not on the PATH; use YAML")
    source = text.encode()
    root = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(source).root_node
    nodes = _without_false_commands(list(_walk(root)))
    edits, told = _edits(nodes, script)
    for start, end, new in sorted(edits, reverse=True):
        source = source[:start] + new.encode() + source[end:]
    notes, problems, status = _run(bash, source.decode(), path, script)
    if status and not script.arguments and any(_text(node) in ("1", "#") for node in nodes if node.type in _NAMES):
        told.append("the file reads arguments: give them behind its name")
    offset = _PROLOGUE.count("\n") + 1
    for line in problems:
        found = re.match(r".*?: line (\d+): (.*)", line)
        told.append(f"bash, line {int(found[1]) - offset + 1}: {found[2]}" if found else f"bash: {line}")
    return Expanded(notes, list(dict.fromkeys(told)))


def _walk(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    yield node
    for child in () if node.type == "file_redirect" else node.children:
        yield from _walk(child)


_ARITHMETIC = re.compile(r"\$\(\([\w\s+*/%<>=!&|^~?:,(){}$-]*\)\)")


def _is_arithmetic(node: tree_sitter.Node) -> bool:
    """Return whether a node is $(( … )), which the parser takes for a command in places such as ${NAME:-$((2 + 1))}."""
    text = _text(node)
    depths = list(itertools.accumulate((sign == "(") - (sign == ")") for sign in text[3:-2]))
    return node.type == "arithmetic_expansion" or (
        node.type == "command_substitution"
        and _ARITHMETIC.fullmatch(text) is not None
        and "$(" not in text[3:]
        and min(depths, default=0) == 0 == (depths or [0])[-1]
    )


def _without_false_commands(nodes: list[tree_sitter.Node]) -> list[tree_sitter.Node]:
    """Return the nodes without the commands and redirections that the parser sees in arithmetic."""
    whole = [node for node in nodes if node.type == "command_substitution" and _is_arithmetic(node)]
    return [
        node
        for node in nodes
        if node.type in _NAMES
        or not any(one.start_byte < node.start_byte and node.end_byte < one.end_byte for one in whole)
    ]


def _edits(nodes: list[tree_sitter.Node], script: Script) -> tuple[list[_Edit], list[str]]:
    """Return the changes that make the file harmless, and lines about programs on which its branches depend."""
    kept = _BUILTINS | _OF_PROLOGUE | {_text(_child(n, "name")) for n in nodes if n.type == "function_definition"}
    known = _OF_BASH | _set_variables(nodes) | script.variables.keys()
    deciding = _deciding(nodes)
    not_numbers = _outputs(nodes, kept) | (_all_names(nodes) - known)
    edits: list[_Edit] = []
    told = [
        f"{name} is not set by the file: branches depend on it"
        for name in sorted(deciding - known)
        if not name.isdigit()
    ]
    for node in nodes:
        line = node.start_point[0] + 1
        if node.type == "file_redirect":
            edits.append(_without_redirect(node))
            if _text(_parent(node)).split()[0] in ("read", "mapfile", "readarray") and _text(node).startswith("<"):
                told.append(f"line {line}: {_text(_parent(node))[:60]}: the file was not read")
        elif _is_arithmetic(node) and (unknown := _names_in(node) & not_numbers):
            edits.append((node.start_byte, node.end_byte, f"\\${{{min(unknown)}}}"))
        elif node.type == "command_name" and _text(node) not in kept:
            kind, command = _kind(node), _parent(node)
            if _text(node) == "sleep" and _is_in(node, "while_statement", "for_statement"):
                edits.append((node.start_byte, node.end_byte, "break; :"))  # what a loop waits for is there
                continue
            edits.append((node.start_byte, node.start_byte, f"{kind} "))
            if kind == "asked" or deciding & _assigned_by(node):
                taken = "taken as failed" if kind == "asked" else "branches depend on its output"
                told.append(f"line {line}: {_text(command)[:60]}: was not run; {taken}")
            elif _text(node) in ("source", "."):
                told.append(f"line {line}: {_text(command)[:60]}: the file was not read")
        elif _text(node) == "eval" and any(
            n.type == "command_name" and _text(n) not in kept for n in _walk(_parent(node))
        ):
            edits.append((node.start_byte, node.start_byte, ": "))
            told.append(f"line {line}: {_text(_parent(node))[:60]}: was not read")
        elif _text(node) == "command" and node.type == "command_name" and _kind(node) == "asked":
            told.append(f"line {line}: {_text(_parent(node))[:60]}: no program was found")
        elif node.type in ("|", "|&", "&") and not _is_in(
            node, "command_substitution", "if_statement", "while_statement"
        ):
            edits.append((node.start_byte, node.end_byte, ";"))  # one after the other: they write to the same file
        elif node.type == "variable_name":
            edits += _variable_edits(node, known, len(script.arguments))
    ends = [(start, end) for start, end, _ in edits if end > start]
    inside = [one for one in edits if any(a <= one[0] and one[1] <= b and one[:2] != (a, b) for a, b in ends)]
    return [one for one in edits if one not in inside], told


def _outputs(nodes: list[tree_sitter.Node], kept: frozenset[str] | set[str]) -> set[str]:
    """Return the variables whose values have the output of a program."""
    programs = [node for node in nodes if node.type == "command_name" and _text(node) not in kept]
    return {name for node in programs for name in _assigned_by(node)}


def _names_in(node: tree_sitter.Node) -> set[str]:
    if node.type == "command_substitution":  # arithmetic that the parser takes for a command
        return set(re.findall(r"\b[A-Za-z_]\w*", _text(node)))
    return {_text(n) for n in _walk(node) if n.type == "variable_name" and not _text(n).isdigit()}


def _all_names(nodes: list[tree_sitter.Node]) -> set[str]:
    return {name for node in nodes if node.type == "variable_name" or _is_arithmetic(node) for name in _names_in(node)}


def _deciding(nodes: list[tree_sitter.Node]) -> frozenset[str]:
    """Return the variables that decide which commands of the file are run."""
    tests = [node for node in nodes if node.type == "test_command"]
    tests += [node.children[1] for node in nodes if node.type == "case_statement"]
    return frozenset(_text(n) for test in tests for n in _walk(test) if n.type == "variable_name")


def _assigned_by(node: tree_sitter.Node) -> set[str]:
    """Return the variable whose value has the output of a command, if there is one."""
    parent = node.parent if _is_in(node, "command_substitution") else None
    while parent is not None and parent.type != "variable_assignment":
        parent = parent.parent
    return set() if parent is None else {_text(_child(parent, "name"))}


def _without_redirect(node: tree_sitter.Node) -> _Edit:
    parent, new = _parent(node), ""
    if parent.type == "command_substitution":  # $(< FILE)
        new = f"started cat {_text(node).lstrip('< ')}"
    elif parent.type == "redirected_statement" and _child(parent, "body") is None:
        new = ":"
    return node.start_byte, node.end_byte, new


def _variable_edits(node: tree_sitter.Node, known: frozenset[str], given: int) -> Iterator[_Edit]:
    """Yield the changes for one name of a variable: the file's own path, search paths, and unknown values."""
    name, parent = _text(node), _parent(node)
    if name == "BASH_SOURCE":
        whole = parent if parent.type == "subscript" else node
        yield whole.start_byte, whole.end_byte, "0"
        return
    if parent.type == "variable_assignment" and name in _READONLY:
        yield node.start_byte, node.end_byte, f"_{name}"
    is_argument = name.isdigit() and int(name) > 0 and not _is_in(node, "function_definition")
    is_unknown = int(name) > given if is_argument else not name.isdigit() and name not in known
    if is_unknown and _is_plain(parent) and not _is_in(node, "test_command", "arithmetic_expansion"):
        in_braces = parent.type == "expansion"
        yield node.start_byte - 1 - in_braces, node.end_byte + in_braces, f"\\${{{name}}}"


def _kind(node: tree_sitter.Node) -> str:
    """Return how a program is replaced: "asked" fails without output, "started" has an output that is not known."""
    child, parent, is_value = node, node.parent, False
    while parent is not None:
        if parent.type == "list" and (is_value or _is_in(parent, "command_substitution")):
            return "asked"
        is_value = is_value or parent.type == "command_substitution"
        if parent.type in ("if_statement", "elif_clause", "while_statement") and not is_value:
            bodies = [
                part for part in parent.children if part.type in ("then", "do_group", "else_clause", "elif_clause")
            ]
            if bodies and child.end_byte <= bodies[0].start_byte:
                waits = parent.type == "while_statement" and _is_in(node, "negated_command")
                return "started" if waits or parent.children[0].type == "until" else "asked"
        child, parent = parent, parent.parent
    return "started"


def _set_variables(nodes: list[tree_sitter.Node]) -> frozenset[str]:
    """Return the variables that the file sets somewhere, or for which it names a value if they are not set."""
    found: set[str] = set()
    for node in nodes:
        if node.type in ("variable_assignment", "for_statement", "c_style_for_statement"):
            found |= {_text(n) for child in node.children[:2] for n in _walk(child) if n.type == "variable_name"}
        elif node.type == "expansion" and not _is_plain(node):
            found |= {_text(child) for child in node.children[:3] if child.type == "variable_name"}
        elif node.type == "declaration_command":
            found |= {_text(child) for child in node.children if child.type == "variable_name"}
        elif node.type == "unary_expression":
            found |= {_text(n) for n in _walk(node) if n.type == "variable_name"}
        elif node.type == "command" and _text(node).split()[0] in ("read", "mapfile", "readarray", "getopts"):
            found |= set(_text(node).split()[1:])
    return frozenset(found)


def _is_plain(node: tree_sitter.Node) -> bool:
    """Return whether a node is $NAME or ${NAME}."""
    return node.type == "simple_expansion" or (node.type == "expansion" and len(node.children) == 3)


def _is_in(node: tree_sitter.Node, *types: str) -> bool:
    parent = node.parent
    while parent is not None and parent.type not in types:
        parent = parent.parent
    return parent is not None


def _parent(node: tree_sitter.Node) -> tree_sitter.Node:
    assert node.parent is not None, "only the root has no parent"
    return node.parent


def _child(node: tree_sitter.Node, field: str) -> tree_sitter.Node | None:
    return node.child_by_field_name(field)


def _text(node: tree_sitter.Node | None) -> str:
    return "" if node is None or node.text is None else node.text.decode()


def _run(bash: str, text: str, path: Path, script: Script) -> tuple[list[list[str]], list[str], int]:
    """Run a harmless script; return the words of the commands that were noted, the lines of errors, and the status."""
    with tempfile.TemporaryFile() as notes:
        process = subprocess.Popen(
            [
                bash,
                "--noprofile",
                "--norc",
                "--restricted",
                "-c",
                f"{_PROLOGUE.replace('FD', str(notes.fileno()))}\n{text}",
                str(path),
                *script.arguments,
            ],
            env={"HOME": str(Path.home()), **script.variables, "PATH": "/dev/null"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(notes.fileno(),),
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(f"{path}: bash did not come to its end within {SECONDS} seconds; use YAML") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        notes.seek(0)
        words = iter(notes.read().decode(errors="replace").split("\0")[:-1])
    commands = [[next(words) for _ in range(int(count))] for count in words]
    lines = errors.decode(errors="replace").splitlines()
    return commands, [line for line in lines if line and not line.startswith("+")], process.returncode
