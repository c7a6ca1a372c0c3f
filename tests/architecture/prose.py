"""The project's prose: docstrings, comments, messages and pages, sentence by sentence, and what is wrong with it.

`python -m tests.architecture.prose [PATH ...]` lists the findings; `--sample N --seed S` prints sentences to read.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.sources import ROOT

PROSE = ("kvstore", "connector", "migrations", "tools", "benchmarks", "demo", "docs", "README.md")
WORDS_MAX = 40
"""A sentence with more words than this holds more than one idea."""

AVOIDED = {
    r"whoever|whomever|whichever|whatever": "name the actor or the thing",
    r"nobody|somebody|anybody|no one|someone|anyone": "name the actor: the service, an engine, an operator, a client",
    r"goes? on|going on|went on": "continue, run, proceed",
    r"is told|are told|was told|were told|be told|being told": "receives, is notified, reports",
    r"so many|so much": "give the number or name the bound",
    r"what is meant|is meant": "say it",
    r"anew": "again",
    r"of lately|lately": "recently",
    r"meanwhile": "say during what",
    r"let go|lets go|letting go": "release, free",
    r"puts? aside|putting aside": "quarantine",
    r"left alone|leaves? alone|leave it alone|leaves it alone|left it alone": "skip, not used until",
    r"brought|brings?|bringing": "copy, fetch, write, read",
    r"journeys?|departures?|newcomers?|confess(es)?": "the field's word for the mechanism",
    r"tells? of|tells? what|tells? which|tells? how|tells? who|tells? whether": "reports, returns, gives, says",
    r"looks? again|look again": "poll, retry, check again",
    r"makes? do": "use",
    r"by and by|in the end|at all times|of late|as it were|so to speak": "leave it out",
    r"perhaps": "may, if",
    r"one's own|its like|the like": "name it",
    r"lest|hence|thereby|thereof|therein|whereupon|whence|whilst|amid": "plain word",
}
"""Words that stand for an actor or a mechanism without naming it, or that plain English has a shorter word for."""

_AVOIDED = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), advice) for pattern, advice in AVOIDED.items()]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*(])")
_LOGGED = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence and where it stands."""

    path: Path
    line: int
    kind: str
    text: str

    def problems(self) -> list[str]:
        found = [f"{match[0]!r}: {advice}" for word, advice in _AVOIDED if (match := word.search(self.text))]
        words = len(re.findall(r"[A-Za-z][A-Za-z'-]*", re.sub(r"`[^`]*`", "name", self.text)))
        if words > WORDS_MAX:
            found.append(f"{words} words: at most {WORDS_MAX}")
        return found


def sentences(*places: str) -> Iterator[Sentence]:
    """All prose of files and folders, relative to the project's root."""
    for place in places:
        whole = ROOT / place
        paths = [whole] if whole.is_file() else sorted([*whole.rglob("*.py"), *whole.rglob("*.md")])
        for path in paths:
            relative = path.relative_to(ROOT)
            parts = _of_markdown(path.read_text()) if path.suffix == ".md" else _of_python(path.read_text())
            for line, kind, text in parts:
                for sentence in _SENTENCE_END.split(" ".join(text.split())):
                    if len(sentence.split()) > 2:
                        yield Sentence(relative, line, kind, sentence)


def _of_python(source: str) -> Iterator[tuple[int, str, str]]:
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            # A docstring's paragraphs and its fields are sentences of their own.
            text = re.sub(r"(?m)^\s*\|.*$", "", node.value.value)  # cells of a table are no sentences
            for part in re.split(r"\n\s*\n|\n(?=\s+\S+( \(.*?\))?: )", text):
                if part:
                    yield node.lineno, "docstring", part
        elif isinstance(node, ast.Call) and (text := _message(node)):
            yield node.lineno, "message", text
    comment: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != last + 1:
                yield first, "comment", " ".join(comment)
                comment = []
            first = first if comment else token.start[0]
            comment.append(token.string.lstrip("#: "))
            last = token.start[0]
    if comment:
        yield first, "comment", " ".join(comment)


def _message(call: ast.Call) -> str:
    """The text of an error that is made, of a line that is logged, or of help for a command."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_error = name.endswith("Error") or name in ("InvalidRequest", "Unavailable", "CorruptRecord", "UnsupportedFormat")
    texts = [keyword.value for keyword in call.keywords if keyword.arg in ("help", "description")]
    if is_error or name in _LOGGED:
        texts += call.args[:1]
    return ". ".join(
        part.value
        for text in texts
        for part in ast.walk(text)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def _of_markdown(text: str) -> Iterator[tuple[int, str, str]]:
    is_code, paragraph, first = False, list[str](), 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        starts = not line.strip() or line.lstrip().startswith(("|", "#", "- ", "* ", "```")) or line[:1].isdigit()
        if starts or is_code:
            if paragraph:
                yield first, "page", " ".join(paragraph)
            paragraph, first = [], number
        if not is_code and line.strip() and not line.lstrip().startswith(("```", "#")):
            if line.lstrip().startswith("|"):
                for cell in line.split("|"):
                    yield number, "page", cell
            else:
                first = first if paragraph else number
                paragraph.append(line.lstrip("-*> "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", default=PROSE)
    parser.add_argument(
        "--sample", type=int, help="print this number of sentences of eight words and more, chosen by --seed"
    )
    parser.add_argument("--seed", type=int, default=18)
    arguments = parser.parse_args()
    found = list(sentences(*arguments.places))
    if arguments.sample:
        long = [sentence for sentence in found if len(sentence.text.split()) >= 8]
        for sentence in random.Random(arguments.seed).sample(long, arguments.sample):
            print(f"{sentence.path}:{sentence.line} ({sentence.kind}): {sentence.text}")
        return
    for sentence in found:
        for problem in sentence.problems():
            print(f"{sentence.path}:{sentence.line} ({sentence.kind}): {problem}\n    {sentence.text}")


if __name__ == "__main__":
    main()
