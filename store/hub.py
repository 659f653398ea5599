"""Stores on the Hugging Face Hub: hf://datasets/ORG/NAME[@revision][/folder].

In: such a URL; the token is huggingface_hub's own (HF_TOKEN, or the one that `hf auth login` stored). Out: a
Place that reads by plain HTTP, at the one commit that the revision named when it was first asked, and sizes
and lists by the Hub's API. What this place itself commits it sees afterwards.

Every write is a commit. `put`, `create` and `delete` make one each, for a mark or a small file; a store goes
up by `upload` (hub_upload.py) in few commits. `create` is exclusive because the commit names its parent, and
the Hub refuses a parent that is no longer the newest. Cost: one request per file, one per 1,000 files listed.
"""

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from .clients import client_options, obstore_module, retry_config
from .errors import EnvironmentFault, UsageError
from .hub_client import hub_api, is_absent, is_file, quietly, refuse, token_headers
from .patience import PATIENCE, Patience, is_passing, status_of
from .places import Place
from .progress import Progress, silent
from .remote import HttpPlace, remote_place
from .scrub import Address, address_of, check_name

T = TypeVar("T")
_PATH = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<folder>.+))?")
CONFLICTS = (409, 412)


def hub_place(url: str, patience: Patience | None = None) -> "HubPlace":
    """The place behind an hf:// URL; nothing is asked of the Hub yet."""
    return HubPlace(address_of(url), patience or PATIENCE)


class HubPlace(HttpPlace):
    """A folder of a dataset repository."""

    def __init__(self, address: Address, patience: Patience) -> None:
        found = _PATH.fullmatch(address.prefix) if address.host == "datasets" else None
        if found is None:
            raise UsageError(
                f"{address.url}: write hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION/FOLDER"
            )
        self.repo: str = found["repo"]
        self.revision = unquote(found["revision"] or "main")
        self.folder = f"{found['folder']}/" if found["folder"] else ""
        self._address, self.patience = address, patience
        self._lock = threading.RLock()
        self._commit, self._client, self._exists = "", None, False
        self.api = hub_api(address.url)
        obstore_module()  # a missing package is said now; the client itself needs to know the commit

    def __reduce__(self) -> tuple[Callable[[str], Place], tuple[str]]:
        return remote_place, (self.url,)

    def size(self, name: str) -> int | None:
        entry = self.look([name]).get(name)
        return None if entry is None else int(entry.size)

    def look(self, names: Sequence[str]) -> dict[str, Any]:
        """The Hub's own records (size, and a digest: sha256 or git's) of these files, by name."""
        paths = [self.folder + check_name(name, self.url) for name in names]

        def request() -> dict[str, Any]:
            found = self.api.get_paths_info(self.repo, paths, revision=self.commit(), repo_type="dataset")
            return {entry.path[len(self.folder) :]: entry for entry in found if is_file(entry)}

        try:
            return self.ask(names[0], request)
        except FileNotFoundError:  # no such revision or repository
            return {}

    def list(self, prefix: str = "") -> dict[str, int] | None:
        return {name: int(entry.size) for name, entry in self.entries(prefix).items()}

    def entries(self, prefix: str = "") -> dict[str, Any]:
        """As `look`, of all files whose name starts with `prefix`."""
        folder = self.folder + prefix.rpartition("/")[0]

        def walk() -> dict[str, Any]:
            tree = self.api.list_repo_tree(
                self.repo,
                folder.rstrip("/") or None,
                recursive=True,
                revision=self.commit(),
                repo_type="dataset",
            )
            return {entry.path[len(self.folder) :]: entry for entry in tree if is_file(entry)}

        try:
            found = self.ask(prefix or "", walk)
        except FileNotFoundError:  # no such folder, revision or repository
            return {}
        return {name: entry for name, entry in found.items() if name.startswith(prefix)}

    def put(self, name: str, source: Path | bytes) -> None:
        """One commit: for single small files."""
        check_name(name, self.url)
        with self._lock:
            self.ensure()
            self.write(f"Write {name}", [(name, source)])

    def create(self, name: str, content: bytes) -> bool:
        """As every place's `create`: exactly one of several callers with different contents gets True."""
        check_name(name, self.url)
        with self._lock:
            self.ensure()
            for attempt in range(self.patience.again + 1):
                self.refresh()
                if self.size(name) is not None:
                    return self.read(name) == content
                try:
                    self.write(f"Create {name}", [(name, content)], parent=self.ask(name, self.commit))
                    return True
                except Conflict:
                    self.patience.wait(attempt)
            raise EnvironmentFault(f"{self.where(name)}: the repository keeps changing; repeat the command")

    def delete(self, name: str) -> None:
        check_name(name, self.url)
        with self._lock:
            self.refresh()
            if self.size(name) is not None:
                self.write(f"Delete {name}", [(name, None)])

    def upload(
        self,
        files: Sequence[tuple[str, Path]],
        *,
        last: Sequence[tuple[str, Path]],
        progress: Progress = silent,
    ) -> None:
        """Many files in few commits, then `last` in one commit of its own: see hub_upload.py."""
        from .hub_upload import upload

        with self._lock:
            upload(self, files, last, progress)

    def commit(self) -> str:
        """The commit that everything is read from: the newest of the revision when it was first asked for."""
        with self._lock:
            if not self._commit:
                info = self.api.dataset_info(self.repo, revision=self.revision)
                self._commit = str(info.sha)
            return self._commit

    def ensure(self) -> None:
        """A repository that is not there yet is made, private: to publish it is a person's decision."""
        if self._exists:
            return
        try:
            self.ask("", lambda: self.api.dataset_info(self.repo))
        except FileNotFoundError:
            make = partial(self.api.create_repo, self.repo, repo_type="dataset", private=True, exist_ok=True)
            try:
                self.ask("", make)
            except FileNotFoundError:
                raise EnvironmentFault(
                    f"{self.url}: there is no such repository, and this token may not make it"
                ) from None
        self._exists = True

    def refresh(self) -> None:
        """Look at the newest commit from now on."""
        self._moved("")

    def write(
        self, message: str, files: Sequence[tuple[str, Path | bytes | None]], parent: str | None = None
    ) -> None:
        """One commit of these files (None: deleted); Conflict when `parent` is not the newest any more.

        A commit whose answer is lost is looked up: a repeat that finds every file as it should be is done.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        from .hub_upload import same

        for attempt in range(self.patience.again + 1):
            operations = [
                CommitOperationDelete(self.folder + name)
                if source is None
                else CommitOperationAdd(
                    self.folder + name, str(source) if isinstance(source, Path) else source
                )
                for name, source in files
            ]
            try:
                with quietly():
                    done = self.api.create_commit(
                        self.repo,
                        operations,
                        commit_message=message,
                        repo_type="dataset",
                        revision=self.revision,
                        parent_commit=parent,
                    )
                return self._moved(str(done.oid))
            except Exception as error:
                where = self.where(files[0][0])
                crossed = status_of(error) in CONFLICTS  # the Hub's word even where no parent is named
                final = attempt == self.patience.again or not (crossed or is_passing(error))
                if final and not (crossed and parent):
                    refuse(where, error)
            self.refresh()
            there = self.look([name for name, _ in files])
            if all(same(there.get(name), source) for name, source in files):
                return
            if parent is not None and (crossed or self.ask(where, self.commit) != parent):
                raise Conflict(f"{where}: somebody else committed at the same moment") from None
            self.patience.wait(attempt)

    def ask(self, name: str, request: Callable[[], T]) -> T:
        """One question to the API, repeated while its failure may pass; the last one in our words."""
        for attempt in range(self.patience.again + 1):
            try:
                return request()
            except Exception as error:
                if is_absent(error):
                    raise FileNotFoundError(self.where(name)) from None
                if attempt == self.patience.again or not is_passing(error):
                    refuse(self.where(name), error)
            self.patience.wait(attempt)
        raise AssertionError("the last attempt returns or raises")

    @property
    def _store(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The files of the commit over HTTP; asked for inside `_try`, so that failures are told as usual."""
        with self._lock:
            if self._client is None:
                commit = self.ask("", self.commit)
                self._client = self._http(commit)
            return self._client

    def _http(self, commit: str) -> Any:
        url = f"{self.api.endpoint}/datasets/{self.repo}/resolve/{commit}/{quote(self.folder)}"
        options = client_options(self.patience, url.startswith("http://"))
        return obstore_module().HTTPStore(
            url.rstrip("/"),
            client_options=options | {"default_headers": token_headers()},
            retry_config=retry_config(self.patience),
        )

    def _moved(self, commit: str) -> None:
        with self._lock:
            self._commit, self._client = commit, None


class Conflict(Exception):
    """The parent of a commit is not the newest commit any more."""
