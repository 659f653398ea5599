"""Pages of the public functions and classes, out of their docstrings: `make api` writes them into api-out/.

In: the packages as installed, and where to write. Out: one page a package, with a search. Names that packages
load when they are first asked for are asked for here, so that pdoc finds them. Cost: the imports.
"""

import sys
from importlib import import_module
from inspect import ismodule
from pathlib import Path

import pdoc

PACKAGES = ("nearline", "nearline.store", "nearline.analyze", "nearline.collect", "nearline.reports")


def build(out: Path) -> None:
    """Write the pages."""
    for name in PACKAGES:
        module = import_module(name)
        public = getattr(module, "__all__", None) or [
            one for one, value in vars(module).items() if not one.startswith("_") and not ismodule(value)
        ]
        for one in public:
            setattr(module, one, getattr(module, one))
        module.__dict__["__all__"] = public
    packages = "|".join(name.partition(".")[2] for name in PACKAGES[1:])
    pdoc.pdoc(*PACKAGES, rf"!nearline\.(?!({packages})$)", output_directory=out)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
