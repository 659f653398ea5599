"""A hub of models on 127.0.0.1, for the real huggingface_hub client in a process of its own.

In: repositories as dictionaries of files, some gated; those of `down` never answer. Out:
`FakeModelHub.url`, to be given as HF_ENDPOINT, and `environment(folder)`, that of a user of this hub. It
answers what transformers asks of models: info, tree, resolve. Datasets are in helpers_hub.
PYTEST_DONT_REWRITE
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from helpers_faults import Handler, Server
from helpers_hub import TOKEN


class HubHandler(Handler):
    """How a hub says things."""

    def say(self, data: Any) -> None:
        self.answer(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str, message: str = "") -> None:
        self.answer(status, json.dumps({"error": message or code}).encode(), {"X-Error-Code": code})


class HubServer(Server):
    """Repositories by name, and what was asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.seen: list[str] = []

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode(), usedforsecurity=False).hexdigest()

    def environment(self, folder: Path) -> dict[str, str]:
        """With a planted token, and a cache in `folder`."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder),
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


class _ModelHandler(HubHandler):
    def handle_any(self) -> None:
        self.body()
        hub, path = cast("FakeModelHub", self.server.owner), urlsplit(self.path).path
        hub.seen.append(f"{self.command} {path}")
        hub.tokens.append(self.headers.get("Authorization"))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(?:revision|tree)/([^/]+))?.*", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = info or file
        if "/down/" in path:
            return self.hang_up()
        if found is None or found[1] not in hub.repos:
            return self.error(401, "RepoNotFound", "Repository Not Found")
        if found[1] in hub.gated and file is not None:
            return self.error(403, "GatedRepo", f"Access to model {found[1]} is restricted")
        revision, files = unquote(found[2] or "main"), hub.repos[found[1]]
        if revision not in ("main", "v1", hub.commit(found[1])):
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if info is not None and "/tree/" in path:
            return self.say(
                [{"type": "file", "path": name, "size": len(files[name]), "oid": "1" * 40} for name in files]
            )
        if info is not None:
            siblings = [{"rfilename": name} for name in files]
            return self.say({"id": found[1], "sha": hub.commit(found[1]), "siblings": siblings})
        assert file is not None
        name = unquote(file[3])
        if name not in files:
            return self.error(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha1(files[name], usedforsecurity=False).hexdigest()
        headers = {"X-Repo-Commit": hub.commit(found[1]), "ETag": f'"{etag}"'}
        self.answer(200, files[name], headers)

    do_GET = do_HEAD = do_POST = handle_any


class FakeModelHub(HubServer):
    """See the module's docstring."""

    handler = _ModelHandler

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[str | None] = []

    def fill(self, repo: str, folder: Path, without: tuple[str, ...] = ()) -> None:
        self.repos[repo] = {
            path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name not in without
        }
