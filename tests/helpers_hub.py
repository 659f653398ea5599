"""A small Hugging Face Hub on 127.0.0.1, for the real huggingface_hub client.

In: nothing. Out: the endpoints that the client calls for datasets (create, info, tree with pages, paths-info,
preupload, LFS batch and upload, commit with its parent check, resolve with a redirect to signed URLs), over a
history of commits in memory. `FakeHub.use(monkeypatch)` points the environment at it, with a planted token.
What the real Hub does beyond that (xet, quotas, rate limits, pull requests) is not here. PYTEST_DONT_REWRITE

    with FakeHub() as hub:
        hub.use(monkeypatch)
        hub.files("org/name")           # name → bytes, at the newest commit
        hub.commits("org/name")         # one dict of files per commit, the oldest first
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from helpers_faults import Handler, Server

TOKEN = "hf_PlantedToken123456789"
PAGE = 20  # entries of one page of the tree
LFS_BYTES = 1000  # larger files, and those that are not text, are LFS files
SIGNATURE = "X-Amz-Signature=planted-signature"


class _HubHandler(Handler):
    @property
    def hub(self) -> "FakeHub":
        return cast("FakeHub", self.server.owner)

    def handle_any(self) -> None:
        self.content = self.body()
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        for method, pattern, act in ROUTES:
            match = re.fullmatch(pattern, split.path)
            if match and re.fullmatch(method, self.command):
                self.hub.requests.append((self.command, split.path))
                if act not in (_HubHandler.cdn, _HubHandler.lfs_put) and not self._allowed():
                    return self.error(401, "RepoNotFound")
                with self.hub.lock:
                    return act(self, *(unquote(part) for part in match.groups() if part is not None))
        self.error(404, "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def _allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def say(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.answer(
            status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})}
        )

    def error(self, status: int, code: str) -> None:
        self.say({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def create(self) -> None:
        asked = json.loads(self.content)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.hub.repos:
            return self.say({"error": "exists", "url": f"{self.hub.public}/datasets/{repo}"}, 409)
        self.hub.repos[repo] = [("0" * 40, {".gitattributes": b"*.bin filter=lfs\n"})]
        self.hub.visibility[repo] = str(asked.get("visibility"))
        self.say({"url": f"{self.hub.public}/datasets/{repo}"})

    def info(self, repo: str, revision: str = "main") -> None:
        found = self._at(repo, revision)
        if found is not None:
            self.say({"id": repo, "sha": found[0], "siblings": []})

    def tree(self, repo: str, revision: str, folder: str = "") -> None:
        found = self._at(repo, revision)
        if found is None:
            return
        base = f"{folder}/" if folder else ""
        names = sorted(name for name in found[1] if name.startswith(base))
        if not names:
            return self.error(404, "EntryNotFound")
        start = int(self.query.get("cursor", ["0"])[0])
        page = [_entry(name, found[1][name]) for name in names[start : start + PAGE]]
        page += [{"type": "directory", "path": base + "somewhere", "oid": "1" * 40}] if start == 0 else []
        where = f"{self.hub.public}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}"
        self.say(page, headers={"Link": f'<{where}>; rel="next"'} if start + PAGE < len(names) else None)

    def paths_info(self, repo: str, revision: str) -> None:
        found = self._at(repo, revision)
        if found is not None:
            asked = parse_qs(self.content.decode())["paths"]
            self.say([_entry(name, found[1][name]) for name in asked if name in found[1]])

    def preupload(self, repo: str, revision: str) -> None:
        found = self._at(repo, revision)
        if found is None:
            return
        said = []
        for file in json.loads(self.content)["files"]:
            there = found[1].get(file["path"])
            large = _is_lfs(base64.b64decode(file["sample"])) or file["size"] > LFS_BYTES
            oid = None if there is None else (_sha256(there) if _is_lfs(there) else _blob(there))
            mode = "lfs" if large else "regular"
            said.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.say({"files": said})

    def lfs_batch(self, repo: str) -> None:
        said = []
        for asked in json.loads(self.content)["objects"]:
            action = {"upload": {"href": f"{self.hub.public}/lfs/{asked['oid']}?{SIGNATURE}"}}
            said.append(asked if asked["oid"] in self.hub.large else {**asked, "actions": action})
        self.say({"objects": said, "transfer": "basic"})

    def lfs_put(self, oid: str) -> None:
        if _sha256(self.content) != oid:
            return self.answer(400)
        self.hub.large[oid] = self.content
        self.answer(200)

    def commit(self, repo: str, revision: str) -> None:
        found = self._at(repo, revision)
        if found is None:
            return
        files = dict(found[1])
        for line in self.content.splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    if value.get("parentCommit", found[0]) != found[0]:
                        return self.say(
                            {"error": "A commit has happened since. Please refresh and try again."}, 412
                        )
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
                case key:
                    return self.answer(400, key.encode())
        oid = hashlib.sha1(found[0].encode() + self.content, usedforsecurity=False).hexdigest()
        self.hub.repos[repo].append((oid, files))
        self.say({"commitUrl": f"{self.hub.public}/datasets/{repo}/commit/{oid}", "commitOid": oid})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._at(repo, revision)
        if found is None:
            return
        if name not in found[1]:
            return self.error(404, "EntryNotFound")
        content = found[1][name]
        if not _is_lfs(content):
            return self.send_range(content)
        self.hub.large[_sha256(content)] = content
        self.answer(302, headers={"Location": f"{self.hub.public}/cdn/{_sha256(content)}?{SIGNATURE}"})

    def cdn(self, oid: str) -> None:
        assert "Authorization" not in self.headers or self.headers["Host"] == urlsplit(self.hub.public).netloc
        self.send_range(self.hub.large[oid], {"ETag": f'"{oid}"'})

    def validate(self) -> None:
        self.say({})

    def _at(self, repo: str, revision: str) -> "tuple[str, dict[str, bytes]] | None":
        if repo not in self.hub.repos:
            self.error(404, "RepoNotFound")
            return None
        commits = self.hub.repos[repo]
        if revision == "main":
            return commits[-1]
        found = next((commit for commit in commits if commit[0] == revision), None)
        if found is None:
            self.error(404, "RevisionNotFound")
        return found


_DATASET = r"/api/datasets/([^/]+/[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", _HubHandler.create),
    ("POST", r"/api/validate-yaml", _HubHandler.validate),
    ("GET", rf"{_DATASET}", _HubHandler.info),
    ("GET", rf"{_DATASET}/revision/([^/]+)", _HubHandler.info),
    ("GET", rf"{_DATASET}/tree/([^/]+)(?:/(.+))?", _HubHandler.tree),
    ("POST", rf"{_DATASET}/paths-info/([^/]+)", _HubHandler.paths_info),
    ("POST", rf"{_DATASET}/preupload/([^/]+)", _HubHandler.preupload),
    ("POST", rf"{_DATASET}/commit/([^/]+)", _HubHandler.commit),
    ("POST", r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _HubHandler.lfs_batch),
    ("PUT", r"/lfs/(\w+)", _HubHandler.lfs_put),
    ("GET|HEAD", r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _HubHandler.resolve),
    ("GET|HEAD", r"/cdn/(\w+)", _HubHandler.cdn),
]


class FakeHub(Server):
    """See the module's docstring."""

    handler = _HubHandler

    def __init__(self) -> None:
        super().__init__()
        self.public = self.url  # as clients see it
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.visibility: dict[str, str] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.RLock()

    def files(self, repo: str) -> dict[str, bytes]:
        return {
            name: content for name, content in self.repos[repo][-1][1].items() if name != ".gitattributes"
        }

    def commits(self, repo: str) -> list[dict[str, bytes]]:
        return [files for _, files in self.repos[repo]]

    def fill(self, repo: str, files: dict[str, bytes]) -> None:
        """A repository with one commit, made behind the API."""
        oid = hashlib.sha1(repr(sorted(files)).encode(), usedforsecurity=False).hexdigest()
        self.repos[repo] = [("0" * 40, {}), (oid, dict(files))]

    def use(self, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> None:
        """The environment of a user of this hub; `endpoint`: a proxy in front of it."""
        self.public = endpoint or self.url
        use_hub(monkeypatch, self.public)


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # for children; this process reads it once, at import:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    with FakeHub() as found:
        found.use(monkeypatch)
        yield found


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
    if _is_lfs(content):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
    return entry


def _is_lfs(content: bytes) -> bool:
    return len(content) > LFS_BYTES or b"\0" in content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


__all__ = ["TOKEN", "FakeHub", "hub", "use_hub"]
