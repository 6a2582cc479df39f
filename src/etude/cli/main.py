"""The `etude` command: reads words, calls one function of the floors below, turns errors into a sentence and a status.

Each verb has its own parser and imports its work only when it is called, so that help, `show`, `methods` and
`check --config-only` answer at once, without torch. Nothing here computes anything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from etude import __version__
from etude.errors import EtudeError, UsageError

if TYPE_CHECKING:
    from etude.config.schema import Recipe

EXPERIMENTS_FOLDER = Path(__file__).parent.parent / "experiments"
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell gives for SIGINT and SIGPIPE
LINE = 100  # characters of a line of prose

HELP = """\
On-policy distillation of language models: the student writes, the teacher marks every token, the student learns.

{verbs}

A recipe is a TOML file or the name of a shipped recipe; key=value changes one of its settings, such as
optim.learning_rate=1e-4 or terms.0.divergence=jsd, and key= takes one back to its default.

`etude VERB --help` says more about a verb. ETUDE_DEBUG=1 shows the traceback of an error. Version {version}.
"""


@dataclass(frozen=True, slots=True)
class Verb:
    """One word of the command line."""

    usage: str
    line: str
    run: Callable[[Sequence[str]], int]


class _Parser(argparse.ArgumentParser):
    """argparse, with mistakes as `UsageError` and help as it is written."""

    def __init__(self, verb: str, description: str, *usages: str) -> None:
        usage = "\n       ".join(f"etude {verb} {usage}".rstrip() for usage in usages)
        super().__init__(
            prog=f"etude {verb}",
            usage=usage,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` shows the usage")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command on `words` (default: the command line's) and return its exit status."""
    try:
        return _dispatch(list(sys.argv[1:] if words is None else words))
    except SystemExit as stop:  # argparse leaves this way after --help
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return PIPE_CLOSED
    except KeyboardInterrupt as stop:
        print(f"etude: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("ETUDE_DEBUG") == "1":
            raise
        print(f"etude: {_sentence(error)}", file=sys.stderr)
        return error.exit_status if isinstance(error, EtudeError) else 1


def _sentence(error: Exception) -> str:
    if isinstance(error, (EtudeError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error} (unexpected, so a fault of etude's; ETUDE_DEBUG=1 shows where)"


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(len(verb.usage) for verb in VERBS.values())
        listing = "\n".join(f"  etude {verb.usage:<{width}}  {verb.line}" for verb in VERBS.values())
        print(HELP.format(verbs=listing, version=__version__), end="")
        return 0
    if words[0] == "--version":
        print(f"etude {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise _unknown("verb", words[0], VERBS)
    return verb.run(words[1:])


# the verbs ------------------------------------------------------------------------------------------------------------


def _train(words: Sequence[str]) -> int:
    parser = _Parser(
        "train",
        "Train a student. The same command goes on from the last checkpoint after an interruption.",
        "RECIPE [key=value ...] [--fresh] [--quiet]",
        "--student MODEL --teacher MODEL --prompts FILE [key=value ...] [--fresh] [--quiet]",
    )
    _add_recipe(parser)
    parser.add_argument("--student", metavar="MODEL", help="student.model: a hub name, a folder or a shipped model")
    parser.add_argument("--teacher", metavar="MODEL", help="teacher.model, likewise")
    parser.add_argument("--prompts", metavar="FILE", help="data.prompts: a JSONL file with a prompt on each line")
    parser.add_argument("--fresh", action="store_true", help="start again even if the run folder has checkpoints")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    options = parser.parse_intermixed_args(words)
    named = {"student.model": options.student, "teacher.model": options.teacher, "data.prompts": options.prompts}
    given = {key: value for key, value in named.items() if value is not None}
    recipe, changes = _split(options.words)
    source: Any = recipe
    if recipe is None:
        if len(given) < len(named):
            raise UsageError(
                "train needs a recipe, or all of --student, --teacher and --prompts; `etude show` lists recipes"
            )
        source = {"name": f"{_last_part(options.student)}-from-{_last_part(options.teacher)}"}
    from etude.config.load import load_recipe

    checked = load_recipe(source, [f"{key}={json.dumps(value)}" for key, value in given.items()] + changes)
    from etude.recipes.run import train
    from etude.runtime.memory import keep_freed_memory

    keep_freed_memory()
    train(checked, fresh=options.fresh, quiet=options.quiet)
    return 0


def _last_part(model: str) -> str:
    """A model's name without its owner or folders, fit for a folder's name."""
    return re.sub(r"[^\w.-]+", "-", Path(model).name)


def _check(words: Sequence[str]) -> int:
    parser = _Parser(
        "check",
        "Everything that can be known before step 1: the legality of each term, files and lengths, and, on a few of\n"
        "the recipe's own prompts, whether student, teacher, sampler and gradient are what they should be. The status\n"
        "is 0 where all passes or is only warned about, and 2 where something must be refused.",
        "RECIPE [key=value ...] [--config-only] [--json]",
    )
    _add_recipe(parser)
    parser.add_argument("--config-only", action="store_true", help="read the recipe only: no model, no data, no torch")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_intermixed_args(words)
    source, changes = _required(parser, options.words)
    from etude.config.load import load_recipe, verdicts
    from etude.preflight.findings import refused

    try:
        recipe = load_recipe(source, changes)
    except UsageError as error:
        if not options.json:
            raise
        stages = [{"stage": None, "verdict": "refuse", "findings": [refused("recipe", str(error)).as_json()]}]
        print(json.dumps({"recipe": source, "verdict": "refuse", "stages": stages}, indent=2))
        return error.exit_status
    terms = {
        name: {"kind": str(rules[0].kind), "reasons": [rule.reason for rule in rules]}
        for name, rules in verdicts(recipe).items()
    }
    report: dict[str, Any] = {"recipe": source, "verdict": "pass", "terms": terms, "stages": []}
    if not options.json:
        for name, term in terms.items():
            for reason in term["reasons"]:
                print(f"term {name}: {term['kind']} gradient: {reason}")
    told = _check_config_only if options.config_only else _check_all
    return told(source, recipe, report, options.json)


def _check_config_only(source: str, recipe: Recipe, report: dict[str, Any], as_json: bool) -> int:
    warnings = [
        warning if recipe.stages is None else f"{stage.name}: {warning}"
        for stage in recipe.stage_recipes
        for warning in stage.warnings
    ]
    if as_json:
        print(json.dumps(report | {"warnings": warnings}, indent=2))
        return 0
    print(
        *warnings,
        f"{source}: every key, its values and the gradient of each term are sound; models, vocabulary, context "
        "window and data are yet to be checked, without --config-only",
        sep="\n",
    )
    return 0


def _check_all(source: str, recipe: Recipe, report: dict[str, Any], as_json: bool) -> int:
    from etude.preflight.findings import Verdict, worst
    from etude.preflight.table import show
    from etude.recipes.check import check
    from etude.runtime.memory import keep_freed_memory

    keep_freed_memory()
    checked = check(recipe)
    verdict = worst([finding for one in checked for finding in one.findings])
    if as_json:
        print(json.dumps(report | {"verdict": str(verdict), "stages": [one.as_json() for one in checked]}, indent=2))
    else:
        for one in checked:
            print("" if one.stage is None else f"\nstage {one.stage}")
            show(one.findings)
        print(f"\n{source}: {verdict}")
    return UsageError.exit_status if verdict is Verdict.REFUSE else 0


def _show(words: Sequence[str]) -> int:
    parser = _Parser(
        "show",
        "Without a word: the shipped recipes. With a recipe: all its values, and where each comes from; the output is\n"
        "a recipe itself. With --keys: every key a recipe may have, or those of one table.",
        "[RECIPE [key=value ...]]",
        "RECIPE --as-written",
        "--keys [TABLE]",
    )
    _add_recipe(parser)
    parser.add_argument(
        "--keys", action="store_true", help="kind, default and meaning of every key, or of TABLE's keys"
    )
    parser.add_argument("--as-written", action="store_true", help="the recipe's file as it is, comments included")
    options = parser.parse_intermixed_args(words)
    if options.keys:
        return _show_keys(options.words)
    if not options.words:
        return _show_shipped()
    source, changes = _required(parser, options.words)
    from etude.config.load import dump_toml, explain, find_recipe, load_recipe

    if options.as_written:
        print(find_recipe(source).read_text(encoding="utf-8"), end="")
        return 0
    origins = {setting.key: setting.origin for setting in explain(source, changes)}
    print(dump_toml(load_recipe(source, changes), comment=origins.__getitem__), end="")
    return 0


def _show_shipped() -> int:
    from etude.config.load import shipped_recipes

    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, path in recipes.items():
        print(f"{name:<{width}}  {path.read_text(encoding='utf-8').partition(chr(10))[0].removeprefix('# ')}")
    return 0


def _show_keys(tables: Sequence[str]) -> int:
    from etude.config.reference import key_reference

    for table in tables or [""]:
        text = key_reference(table)
        if not text:
            raise UsageError(f"a recipe has no key '{table}'; `etude show --keys` lists all")
        print(text)
    return 0


def _methods(words: Sequence[str]) -> int:
    parser = _Parser(
        "methods",
        "The named methods as points of the axes; one of them in full. With --legality: the table of combinations\n"
        "that have a gradient and of those that are refused, as a page in Markdown.",
        "[NAME]",
        "--legality",
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--legality", action="store_true", help="the table of combinations; goes without NAME")
    options = parser.parse_args(words)
    name = options.name
    if options.legality:
        if name is not None:
            parser.error(f"--legality is about all methods and {name} was named too")
        from etude.axes.legality_page import legality_page

        print(legality_page(), end="")
        return 0
    from etude.config.methods import METHODS

    if name is None:
        rows = [{"method": method.name} | method.axes for method in METHODS.values()]
        widths = {axis: max(len(row[axis]) for row in [*rows, {axis: axis}]) for axis in rows[0]}
        for row in [{axis: axis for axis in widths}, *rows]:
            print("  ".join(f"{row[axis]:<{width}}" for axis, width in widths.items()).rstrip())
        return 0
    if name not in METHODS:
        raise _unknown("method", name, METHODS)
    from etude.config.write import toml_text

    method = METHODS[name]
    for text in filter(None, (f"{method.name}: {method.line}", method.source, method.note)):
        print(textwrap.fill(text, LINE))
    print(f'\nA recipe with method = "{name}" starts from\n\n{toml_text(method.settings)}', end="")
    return 0


def _record(words: Sequence[str]) -> int:
    parser = _Parser(
        "record",
        "The student as it begins writes a recipe's rounds and the teacher marks them, into one folder that serves as\n"
        "sampler.recorded and teacher.scores. `etude train` of the recipe with both keys then writes no rollouts, and\n"
        "with teacher.model= (nothing) loads no teacher. The same command goes on after an interruption.",
        "RECIPE [key=value ...] [--rounds N] [--output FOLDER] [--quiet]",
    )
    _add_recipe(parser)
    parser.add_argument("--rounds", type=int, metavar="N", help="how many rounds; left out: all of the recipe's")
    parser.add_argument(
        "--output", metavar="FOLDER", help="left out: the recipe's sampler.recorded, or recordings/ and its name"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    options = parser.parse_intermixed_args(words)
    source, changes = _required(parser, options.words)
    from etude.config.load import load_recipe

    recipe = load_recipe(source, changes)
    folder = options.output or recipe.sampler.recorded or f"recordings/{recipe.name}"
    # Read once more with its places: what cannot be trained from a recording is refused before there is one.
    places = {"sampler.recorded": folder}
    if recipe.teacher is not None and (options.output or recipe.teacher.scores is None):
        places["teacher.scores"] = folder
    if recipe.stages is None:
        recipe = load_recipe(source, [*changes, *(f"{key}={json.dumps(value)}" for key, value in places.items())])
    from etude.recipes.record import record
    from etude.runtime.memory import keep_freed_memory

    keep_freed_memory()
    record(recipe, rounds=options.rounds, quiet=options.quiet)
    return 0


def _export(words: Sequence[str]) -> int:
    parser = _Parser(
        "export", "Write a run's student as a plain folder that transformers loads.", "RUN [--merge] [--to FOLDER]"
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its base model")
    parser.add_argument("--to", metavar="FOLDER", help="where to write it; left out: RUN/export")
    options = parser.parse_args(words)
    from etude.recipes.export import export

    print(export(Path(options.run), to=Path(options.to or Path(options.run) / "export"), merge=options.merge))
    return 0


def _experiment(words: Sequence[str]) -> int:
    experiments = _experiments()
    if not words or words[0] in ("-h", "--help"):
        print("usage: etude experiment NAME [options]\n\nSeveral runs and a table:\n")
        for name, line in experiments.items():
            print(f"  {name:<{max(map(len, experiments))}}  {line}")
        return 0
    if words[0] not in experiments:
        raise _unknown("experiment", words[0], experiments)
    from importlib import import_module

    from etude.runtime.memory import keep_freed_memory

    keep_freed_memory()
    return import_module(f"etude.experiments.{words[0].replace('-', '_')}").main(list(words[1:]))


def _experiments() -> dict[str, str]:
    """Modules of `etude.experiments` that have a `main`, and the first line of their docstring; none is imported."""
    import ast

    found = {}
    for path in sorted(EXPERIMENTS_FOLDER.glob("[a-z]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


# what verbs share -----------------------------------------------------------------------------------------------------


def _unknown(kind: str, word: str, words: Iterable[str]) -> UsageError:
    from etude.config.complaints import suggestion

    return UsageError(f"unknown {kind} '{word}'; {suggestion(word, words)}")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="RECIPE", help="a .toml file or a shipped recipe, then key=value ..."
    )


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, if the first word is one, and the `key=value` words."""
    has_recipe = bool(words) and ("=" not in words[0] or Path(words[0]).is_file())
    recipe, changes = (words[0], list(words[1:])) if has_recipe else (None, list(words))
    return recipe, changes


def _required(parser: _Parser, words: Sequence[str]) -> tuple[str, list[str]]:
    recipe, changes = _split(words)
    if recipe is None:
        parser.error("a recipe is needed first")
    return recipe, changes


VERBS = {
    "quickstart": Verb(
        "quickstart",
        "watch it work: two minutes, nothing to download",
        lambda words: _experiment(["quickstart", *words]),
    ),
    "train": Verb("train RECIPE [key=value ...]", "train a student, or go on with an interrupted run", _train),
    "record": Verb("record RECIPE [key=value ...]", "write and mark rollouts once, to train from them", _record),
    "check": Verb("check RECIPE [--config-only] [--json]", "all that can be known before step 1", _check),
    "show": Verb("show [RECIPE]", "the shipped recipes; one with all its values and their origin", _show),
    "methods": Verb("methods [NAME]", "the named methods as points of the axes", _methods),
    "export": Verb("export RUN [--merge]", "the trained student as a plain folder", _export),
    "experiment": Verb("experiment [NAME]", "several runs and a table", _experiment),
}


if __name__ == "__main__":
    sys.exit(main())
