"""A hub of data sets on 127.0.0.1, for the real `datasets` library in a process of its own.

In: repositories as dictionaries of files, some gated. Out: `FakeDataHub.url`, to be given as HF_ENDPOINT, and
`environment(folder)`, that of a user of this hub. It answers what reading asks for: info, tree, paths-info,
resolve with ranges. Writing is in helpers_hub.
PYTEST_DONT_REWRITE
"""

import hashlib
import re
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from helpers_model_hub import HubHandler, HubServer


class _DataHandler(HubHandler):
    def handle_any(self) -> None:
        content, path = self.body(), unquote(urlsplit(self.path).path)
        hub = cast("FakeDataHub", self.server.owner)
        hub.seen.append(f"{self.command} {path}")
        found = re.fullmatch(
            r"(/api)?/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve)/([^/]+)/?(.*))?", path
        )
        if found is None or found[2] not in hub.repos:
            return self.error(401, "RepoNotFound")
        api, repo, action, revision, name = found.groups()
        if repo in hub.gated and not api:
            return self.error(403, "GatedRepo")
        if revision not in (None, "main", "v1", hub.commit(repo)):
            return self.error(404, "RevisionNotFound")
        files = hub.repos[repo]
        if action == "tree":
            return self.say([self.entry(file, files) for file in files if file.startswith(name)])
        if action == "paths-info":
            asked = parse_qs(content.decode()).get("paths", [])
            return self.say([self.entry(file, files) for file in asked if file in files])
        if api:
            return self.say({"id": repo, "sha": hub.commit(repo), "siblings": []})
        if name not in files:
            return self.error(404, "EntryNotFound")
        etag = hashlib.sha1(files[name], usedforsecurity=False).hexdigest()
        self.send_range(files[name], {"X-Repo-Commit": hub.commit(repo), "ETag": f'"{etag}"'})

    do_GET = do_HEAD = do_POST = handle_any

    def entry(self, name: str, files: dict[str, bytes]) -> dict[str, Any]:
        oid = hashlib.sha1(files[name], usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": len(files[name]), "oid": oid}


class FakeDataHub(HubServer):
    """See the module's docstring."""

    handler = _DataHandler
