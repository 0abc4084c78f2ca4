"""The rules of this house that no linter knows, checked over the files that git tracks or would."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
TEXT_BYTES_MAX = 1 << 20  # larger files are data

# One letter of each is in brackets, so that this file keeps its own rule.
FOREIGN = re.compile(
    r"\bcl[a]ude\b|\banthrop[i]c\b|\b(?:ai|coding|llm) [a]gents?\b|\bsub-?[a]gents?\b"
    r"|(?<![\w.])/wor[k]/|(?<![\w.])/roo[t]/|/op[t]/(?:pypi|wheels)",
    re.IGNORECASE,
)


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """Tracked files, and new ones that are not ignored; all files where this is no git checkout."""
    # safe.directory: the checkout may belong to another user, as in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        return tuple(p for p in sorted(ROOT.rglob("*")) if p.is_file() and ".venv" not in p.parts)
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in sorted(names.split("\0")) if name)
    return tuple(path for path in paths if path.is_file())


def python_files() -> Iterator[Path]:
    return (p for p in repository_files() if p.suffix == ".py" and "_pb2" not in p.name)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def place(path: Path, line: int | None = None) -> str:
    name = str(path.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"


def fail_if_any(found: list[str], rule: str) -> None:
    if found:
        pytest.fail("\n  ".join([rule, *found]), pytrace=False)


def test_there_is_something_to_check() -> None:
    assert len(list(python_files())) > 20


def test_the_rules_can_fail() -> None:
    broad = "try:\n    pass\nexcept (OSError, Exception):\n    suppress(BaseException)\n"
    assert list(broad_lines(ast.parse(broad))) == [3, 4]
    assert list(broad_lines(ast.parse("try:\n    pass\nexcept OSError:\n    pass\n"))) == []
    cleanup = "try:\n    pass\nexcept BaseException:\n    close()\n    raise\n"
    assert list(broad_lines(ast.parse(cleanup))) == []
    assert reason_given("except Exception:  # a plug-in may raise anything")
    assert not reason_given("except Exception:  # noqa: BLE001")
    assert not reason_given("except Exception:")
    function = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n').body[0]
    assert isinstance(function, ast.FunctionDef)
    assert code_lines(function) == 2
    slept = ast.parse("time.sleep(1)\nawait asyncio.sleep(0)\nfrom time import sleep\nx.sleep()")
    assert sum(map(is_sleep, ast.walk(slept))) == 3
    for text in ("see /wor" + "k/x", "an AI a" + "gent", "Cl" + "aude"):
        assert FOREIGN.search(text), text
    for text in ("the store's agent", "network/root/x", "network/works/"):
        assert not FOREIGN.search(text), text


def test_modules_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    fail_if_any(
        [f"{place(p)}: {n} lines" for p, n in lengths.items() if n > MODULE_LINES_MAX],
        f"a module has at most {MODULE_LINES_MAX} lines: there is a second idea in these",
    )


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function, its decorators and docstring not counted."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def test_functions_are_short() -> None:
    found = [
        f"{place(path, node.lineno)} {node.name}: {code_lines(node)} lines"
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and code_lines(node) > FUNCTION_LINES_MAX
    ]
    fail_if_any(found, f"a function has at most {FUNCTION_LINES_MAX} lines")


def is_sleep(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module in ("time", "asyncio") and any(a.name == "sleep" for a in node.names)
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.sleep", "asyncio.sleep")


def test_tests_wait_for_conditions_and_never_sleep() -> None:
    found = [
        place(path, getattr(node, "lineno", None))
        for path in python_files()
        if ROOT / "tests" in path.parents and path != ROOT / "tests" / "waiting.py"
        for node in ast.walk(parsed(path))
        if is_sleep(node)
    ]
    fail_if_any(found, "tests wait for a condition (tests/waiting.py) instead of sleeping")


def is_broad(kind: ast.expr | None) -> bool:
    """Whether an except clause (or a suppress) of this kind catches what nobody thought of."""
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(is_broad(part) for part in kind.elts)
    return isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")


def reason_given(line: str) -> bool:
    """Whether the line ends in a comment that is more than a linter's pragma."""
    comment = line.partition("#")[2].strip()
    pragma = r"(?:noqa|type: ignore|pragma)\S*(?: [A-Z0-9, ]+)?"
    return bool(comment) and not re.fullmatch(pragma, comment)


def broad_lines(tree: ast.Module) -> Iterator[int]:
    """The lines of excepts and suppresses that keep what nobody thought of.

    A handler that ends in a bare `raise` cleans up and keeps nothing.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            last = node.body[-1]
            raises_again = isinstance(last, ast.Raise) and last.exc is None
            if is_broad(node.type) and not raises_again:
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            yield from (a.lineno for a in node.args if is_broad(a))


def test_broad_excepts_give_their_reason() -> None:
    found = []
    for path in python_files():
        lines = path.read_text().splitlines()
        numbers = broad_lines(parsed(path))
        found += [place(path, n) for n in numbers if not reason_given(lines[n - 1])]
    fail_if_any(found, "a broad except says why on its line: `except Exception:  # because ...`")


def entered_conditions(text: str) -> list[str]:
    """Names of attributes that are conditions and are entered by `with`."""
    names = re.findall(r"self\.(\w+) = threading\.Condition\(", text)
    return [name for name in names if re.search(rf"with self\.{name}\b", text)]


def test_the_lock_of_a_condition_is_entered_and_not_the_condition() -> None:
    """A condition's own `__enter__` is written in Python: a Ctrl-C between its taking the lock and
    the block leaves that locked for ever. A lock's is not. In daemons no thread but the main one is
    interrupted, which only waits."""
    assert entered_conditions("self._a = threading.Condition()\nwith self._a:\n") == ["_a"]
    found = [
        f"{place(path)}: {name}"
        for root in ("core", "client")
        for path in (ROOT / root).rglob("*.py")
        for name in entered_conditions(path.read_text())
    ]
    fail_if_any(found, "make the condition of a lock, and enter the lock")


def source_roots() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        hatch = tomllib.load(stream)["tool"]["hatch"]["build"]
    roots: list[str] = hatch["dev-mode-dirs"]
    assert hatch["targets"]["wheel"]["packages"] == [f"{root}/cenote" for root in roots]
    return roots


def test_packages_are_typed_and_known_to_the_import_linter() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        linted = set(tomllib.load(stream)["tool"]["importlinter"]["root_packages"])
    packages = [
        path
        for root in source_roots()
        for path in sorted((ROOT / root / "cenote").iterdir())
        if path.is_dir() and any(path.glob("*.py"))
    ]
    assert {f"cenote.{path.name}" for path in packages} == linted
    for package in packages:
        assert (package / "__init__.py").is_file(), f"{place(package)} has no __init__.py"
        assert (package / "py.typed").is_file(), f"{place(package)} has no py.typed"


def test_the_namespace_package_has_no_init() -> None:
    for root in source_roots():
        assert not (ROOT / root / "cenote" / "__init__.py").exists()


def test_test_files_have_unique_names() -> None:
    names = Counter(p.name for p in python_files() if p.name.startswith("test_"))
    fail_if_any([name for name, count in names.items() if count > 1], "two test files share a name")


def test_the_repository_speaks_of_the_project_alone() -> None:
    found = []
    for path in repository_files():
        raw = path.read_bytes()
        if len(raw) > TEXT_BYTES_MAX or b"\0" in raw or path.name == "LICENSE":
            continue
        for number, line in enumerate(raw.decode(errors="replace").splitlines(), 1):
            match = FOREIGN.search(line)
            if match:
                found.append(f"{place(path, number)}: {match[0]}")
    fail_if_any(found, "words that are not about this project")
