"""Where in a study's folder each result lies.

In: names of tables, stores, needs and layers. Out: paths; a name that cannot be a file's is refused. Cost:
none; `need_steps` looks at the names in one folder.
"""

from pathlib import Path

from .errors import UsageError
from .names import is_file_name


class StudyLayout:
    """The places of results in the folder of a study."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def table_path(self, name: str) -> Path:
        return self.path / "tables" / f"{_name(name)}.parquet"

    def rows_path(self, store: str) -> Path:
        return self.path / "tokens" / "rows" / f"{_name(store)}.parquet"

    def need_path(
        self, layer: int, store: str, *, surrogate: str | None = None, step: str | None = None
    ) -> Path:
        """Where the needs of a layer in a store lie: those of the main fit, of the fit called `surrogate`, or
        the columns that another step brought."""
        folder = "need" if surrogate is None else f"need@{_name(surrogate)}"
        file = _name(store) if step is None else f"{_name(store)}@{_name(step)}"
        return self.path / "tokens" / folder / f"layer={layer:02d}" / f"{file}.parquet"

    def need_steps(self, layer: int, store: str) -> list[str]:
        """Steps other than the fit that brought needs of a layer in a store."""
        folder, prefix = self.need_path(layer, store).parent, f"{_name(store)}@"
        return sorted(path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.parquet"))

    def routing_path(self, layer: int, need: str, store: str) -> Path:
        folder = self.path / "tokens" / "routing" / f"layer={layer:02d}" / f"need={_name(need)}"
        return folder / f"{_name(store)}.parquet"

    def surrogates_path(self, name: str | None = None) -> Path:
        return self.path / ("surrogates.zarr" if name is None else f"surrogates@{_name(name)}.zarr")

    def group_path(self, name: str) -> Path:
        return self.path / f"{_name(name)}.zarr"


def _name(name: str) -> str:
    """A plain file name."""
    if not is_file_name(name) or name.startswith("."):
        raise UsageError(f"{name!r} cannot name a file; use letters, digits, dots, dashes and underscores")
    return name
