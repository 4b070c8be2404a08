"""Small faults put into the core on purpose: does a test fail for each of them?

    python tests/mutants.py                          12 faults of each part, the same ones every time
    python tests/mutants.py --of losses --count 100  more of one part
    python tests/mutants.py --only losses/auc.py:97  all of one line
    python tests/mutants.py --of losses --constants  every number that has a name, 16 times as large and as small

A fault (a mutant) is one change in one place: a comparison, an operator, a number, a condition, a call left out. It is
made in a copy of the source, on which the tests of that part run until one fails. A fault that no test sees survives:
it is printed, with what stands there, for somebody to judge whether a user would notice it. Error messages are left as
they are. What takes longer than `--limit` seconds is a fault too, as it does not end.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "backdrop"

# The files of a part, and the tests that are to see its faults, the quickest first.
PARTS = {
    "functional": (
        ["functional.py"],
        ["test_functional.py", "core/test_checks.py", "test_layers.py", "test_theory.py"],
    ),
    "layers": (["layers.py"], ["test_layers.py", "test_functional.py", "core/test_checks.py", "core/test_informed.py"]),
    "losses": (["losses/*.py"], ["losses/test_range.py", "losses"]),
    "skip": (
        ["skip/*.py"],
        [
            *(f"skip/test_{name}.py" for name in ("samples", "windows", "statistics", "tiled_statistics", "tiles")),
            *(f"skip/test_{name}.py" for name in ("source", "sources", "reasons", "compiled")),
            *(f"graph/test_{name}.py" for name in ("cost", "functions")),
        ],
    ),
}
FIRST = {  # tests that are about one file, to be asked before the others
    "losses/auc.py": "losses/test_pairs.py",
    "losses/classes.py": "losses/test_pairs.py",
    "losses/_pairs.py": "losses/test_pairs.py",
    "losses/_soft_ranks.py": "losses/test_soft_ranks.py",
    "losses/survival.py": "losses/test_survival.py",
    "losses/concordance.py": "losses/test_survival.py",
    "losses/contrastive.py": "losses/test_contrastive.py",
    "losses/ranking.py": "losses/test_ranking.py",
    "skip/tiles.py": "skip/test_tiles.py",
    "skip/totals.py": "skip/test_tiled_statistics.py",
    "skip/statistics.py": "skip/test_statistics.py",
    "skip/sources.py": "skip/test_source.py",
    "skip/stream.py": "skip/test_source.py",
    "skip/budget.py": "skip/test_tiles.py",
    "skip/report.py": "skip/test_reasons.py",
}

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}


class Mutant(NamedTuple):
    """A fault: where it is, what stands there, and what is put in its place."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.before.split())} -> {' '.join(self.after.split())}"


def changed(node: ast.AST) -> Iterator[str]:
    """What a part of a program may be turned into."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.unparse(ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield repr(node.value + 1)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "pass"


def other_constants(path: Path) -> Iterator[Mutant]:
    """The numbers of a file that have a name, such as thresholds, by which one more would often make no difference."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for statement in ast.parse(text).body:
        named = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).isupper()
        values = [statement.value] if named else []
        while values:
            node = values.pop()
            if isinstance(node, (ast.Dict, ast.Tuple, ast.List)):
                values += node.values if isinstance(node, ast.Dict) else node.elts
            elif isinstance(node, (ast.Constant, ast.BinOp, ast.UnaryOp)):
                try:
                    value = eval(ast.unparse(node), {})
                except NameError:
                    continue
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                start, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                before = text.encode()[start:end].decode()
                for after in (value * 16, value // 16 if isinstance(value, int) else value / 16) if value else ():
                    yield Mutant(path.relative_to(PACKAGE).as_posix(), node.lineno, start, end, before, repr(after))


def left_alone(node: ast.AST) -> list[ast.AST]:
    """Parts of a program in which nothing is changed: annotations, decorators, errors and imports for types."""
    if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.Assert)):
        return [node]
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return [node]
    found: list[ast.AST | None] = [*getattr(node, "decorator_list", []), getattr(node, "returns", None)]
    return [part for part in (*found, getattr(node, "annotation", None)) if part is not None]


def mutants(path: Path) -> Iterator[Mutant]:
    """All faults that can be put into a file."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST) -> Iterator[Mutant]:
        alone = left_alone(node)
        if node in alone:
            return
        if hasattr(node, "lineno"):
            start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before = text.encode()[start:end].decode()
            for after in changed(node):
                yield Mutant(path.relative_to(PACKAGE).as_posix(), node.lineno, start, end, before, after)
        if not isinstance(node, ast.JoinedStr):
            for part in ast.iter_child_nodes(node):
                if part not in alone:
                    yield from walk(part)

    yield from walk(ast.parse(text))


def chosen(part: str, count: int, seed: int, constants: bool) -> list[Mutant]:
    """So many faults of a part, from all over it."""
    files = sorted({path for pattern in PARTS[part][0] for path in PACKAGE.glob(pattern)})
    if constants:
        return [mutant for path in files for mutant in other_constants(path)]
    every = [mutant for path in files for mutant in mutants(path)]
    random.Random(f"{seed} {part}").shuffle(every)
    return every[:count]


def verdict(mutant: Mutant, tests: list[str], copy: Path, limit: int) -> str:
    """ "killed" if a test fails, "endless" if the tests do not end, else "survived"."""
    path = copy / "backdrop" / mutant.file
    whole = path.read_bytes()
    path.write_bytes(whole[: mutant.start] + mutant.after.encode() + whole[mutant.end :])
    first = [FIRST[mutant.file]] if mutant.file in FIRST else []
    ordered = list(dict.fromkeys(f"tests/{name}" for name in (*first, *tests)))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *ordered]
    surroundings = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))

    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False, preexec_fn=limited
        )
    finally:
        path.write_bytes(whole)
    if ended.returncode < 0:
        return "endless"
    if ended.returncode not in (0, 1, 2):  # 2: tests that cannot even be imported
        raise RuntimeError(f"the tests did not run:\n{ended.stdout}\n{ended.stderr}")
    return "survived" if ended.returncode == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=PARTS, action="append", help="a part; by default all")
    parser.add_argument("--count", type=int, default=12, help="faults of each part")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--limit", type=int, default=600, help="seconds of a core for the tests of one fault")
    parser.add_argument("--only", metavar="FILE:LINE", help="all faults of one line instead")
    parser.add_argument("--constants", action="store_true", help="numbers that have a name, instead of anything")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(PACKAGE, copy / "backdrop", ignore=shutil.ignore_patterns("__pycache__"))
        scores = {}
        for part in given.of or PARTS:
            file = sorted(PACKAGE.glob(PARTS[part][0][0]))[0].relative_to(PACKAGE).as_posix()
            if (found := verdict(Mutant(file, 1, 0, 0, "", ""), PARTS[part][1], copy, given.limit)) != "survived":
                sys.exit(f"the tests of {part} do not pass without a fault ({found}), so they say nothing about faults")
            count = given.count if given.only is None else sys.maxsize
            some = chosen(part, count, given.seed, given.constants)
            if given.only:
                some = [mutant for mutant in some if f"{mutant.file}:{mutant.line}" == given.only]
            verdicts = []
            for mutant in some:
                begin = time.monotonic()
                verdicts.append(verdict(mutant, PARTS[part][1], copy, given.limit))
                print(f"{verdicts[-1]} ({time.monotonic() - begin:.0f} s): {mutant}", flush=True)
            scores[part] = verdicts
        for part, found in scores.items():
            print(f"{part}: {len(found) - found.count('survived')} of {len(found)} faults were seen")


if __name__ == "__main__":
    main()
