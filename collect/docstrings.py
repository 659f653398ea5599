"""The docstrings of an installed package, read from its source without importing it.

In: the name of a top-level package, or the folder of the standard library. Out: (dotted name, cleaned
docstring) in path order, each name once. Files are parsed with `ast`, so no code of the package runs; test
folders, vendored copies and files without a triple-quoted string are passed over. Functions inside
functions are not visited: their docstrings are rare and a full walk of the trees doubles the time.
Cost: about 0.2 s per MB of source.
"""

import ast
import importlib.util
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {
        "test", "tests", "testing", "__pycache__", "site-packages", "dist-packages", "externals", "_vendor",
        "vendored", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "encodings", "ensurepip", "_lib",
        "f2py", "_examples",
    }
)  # fmt: skip

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of an installed package; `stdlib` stands for the standard library."""
    root = package_folder(package)
    prefix = () if package == "stdlib" else (package,)
    seen: set[str] = set()
    for path in source_files(root):
        module = ".".join(prefix + module_parts(path.relative_to(root)))
        for name, text in file_docstrings(path.read_bytes(), module):
            if name not in seen:
                seen.add(name)
                yield name, text


def package_folder(package: str) -> Path:
    """Where the source of a package lies; ModuleNotFoundError when it is not installed."""
    if package == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"package {package!r} is not installed", name=package)
    return Path(spec.origin).parent


def source_files(folder: Path) -> Iterator[Path]:
    """Python files under a folder in sorted order, without the skipped folders."""
    entries = sorted(folder.iterdir())
    yield from (entry for entry in entries if entry.suffix == ".py" and entry.is_file())
    for entry in entries:
        if entry.name not in SKIPPED_FOLDERS and "." not in entry.name and entry.is_dir():
            yield from source_files(entry)


def module_parts(relative: Path) -> tuple[str, ...]:
    parts = relative.with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def file_docstrings(source: bytes, module: str) -> Iterator[tuple[str, str]]:
    """Docstrings of one file: the module's, its classes', functions' and methods'."""
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's source are not our news
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and files for other Python versions lie around
        return
    yield from walk(tree, module)


def walk(node: Definition, name: str) -> Iterator[tuple[str, str]]:
    """The docstring of a definition and of the definitions in its body, in source order."""
    text = ast.get_docstring(node, clean=False)
    if text is not None:
        yield name, inspect.cleandoc(text).strip()
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from walk(child, f"{name}.{child.name}" if name else child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(child, clean=False)
            if text is not None:
                yield f"{name}.{child.name}" if name else child.name, inspect.cleandoc(text).strip()
