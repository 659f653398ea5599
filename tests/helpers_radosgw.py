"""A real S3 server for the long tests: Ceph's radosgw, with one monitor and one disk in memory.

In: apt-get with Debian 12's sources (nothing is installed: packages are downloaded and unpacked into
${XDG_CACHE_HOME:-~/.cache}/nearline-tests/ceph, once), and a work folder for this run. Out: an endpoint on
127.0.0.1 and a user's keys, until the context ends and every process is stopped. Whatever fails is a
RuntimeError that says what: the tests that need the server then fail, they are not skipped. Cost: about 65 MB
of downloads and 250 MB of disk once; 10-15 s and 700 MB of memory per start. PYTEST_DONT_REWRITE

As a plugin, `pytest_plugins = ("helpers_radosgw",)`, it gives the fixtures `gateway` (one server a session)
and `gateway_bucket` (a fresh bucket, and the environment of a user of it).
"""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from helpers_servers import Bucket, s3_client, use_s3

WANTED = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
UNUSED = re.compile(
    r"python3-.*|sudo|lvm2|dmeventd|liblvm2.*|logrotate|smartmontools|cryptsetup-bin|xfsprogs|parted"
)
START_S = 90
_numbers = count()


@dataclass(frozen=True)
class Gateway:
    """A running server and its one user."""

    endpoint: str
    access: str
    secret: str


@contextmanager
def radosgw(work: Path) -> Generator[Gateway, None, None]:
    """Start everything below `work`, and stop it at the end."""
    cluster = _Cluster(_packages(), work)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


def _packages() -> Path:
    """The folder with the unpacked packages; it is moved into place whole, so half of one is never used."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearline-tests" / "ceph"
    if (cache / "usr/bin/radosgw").exists():
        return cache
    if all(Path("/usr/bin", program).exists() for program in ("ceph-mon", "ceph-osd", "radosgw")):
        return Path("/")  # installed on this machine
    if shutil.which("apt-get") is None:
        raise RuntimeError("radosgw is taken from Debian's packages, and there is no apt-get here")
    fresh = cache.with_name(f"ceph.{os.getpid()}")
    debs = fresh / "debs"
    debs.mkdir(parents=True)
    try:
        plan = _said(
            "apt-get", "install", "--no-install-recommends", "-s", *WANTED, first=("apt-get", "update")
        )
        names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
        needed = [name for name in names if not UNUSED.fullmatch(name)]
        if not set(WANTED) <= set(needed):
            raise RuntimeError(f"installed already, or renamed: {sorted(set(WANTED) - set(needed))}")
        _said("apt-get", "download", "-q", *needed, cwd=debs)
        for deb in sorted(debs.glob("*.deb")):
            _said("dpkg", "-x", str(deb), str(fresh))
        shutil.rmtree(debs)
        fresh.rename(cache)
    except OSError:
        if not (cache / "usr/bin/radosgw").exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return cache


def _said(*command: str, cwd: Path | None = None, first: tuple[str, ...] = ()) -> str:
    """Output of a command; `first` is run when it fails, and then it is tried once more."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode and first:
        subprocess.run(first, capture_output=True, check=False)
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:6])} failed ({done.returncode}): {done.stderr.strip()[-600:]}"
        )
    return done.stdout


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Generator[Gateway, None, None]:
    with radosgw(tmp_path_factory.mktemp("radosgw")) as found:
        yield found


@pytest.fixture
def gateway_bucket(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(f"bucket{next(_numbers)}", gateway.endpoint)
    s3_client(gateway.endpoint, gateway.access, gateway.secret).create_bucket(Bucket=bucket.name)
    use_s3(monkeypatch, gateway.endpoint, gateway.access, gateway.secret)
    return bucket


class _Cluster:
    def __init__(self, packages: Path, work: Path) -> None:
        self.packages, self.work = packages, work
        self.processes: list[subprocess.Popen[bytes]] = []
        libraries = [packages / "usr/lib/x86_64-linux-gnu", packages / "lib/x86_64-linux-gnu"]
        libraries += [libraries[0] / "ceph", packages / "usr/lib/ceph"]
        self.conf = work / "ceph.conf"
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            "CEPH_CONF": str(self.conf),
        }
        self.port, self.monitor = _free_port(), _free_port()

    def start(self) -> Gateway:
        self._configure()
        keyring = str(self.work / "keyring")
        self._do(
            "monmaptool",
            "--create",
            "--addv",
            "a",
            f"[v2:127.0.0.1:{self.monitor}]",
            "--fsid",
            self.fsid,
            "monmap",
        )
        self._do("osdmaptool", "--createsimple", "1", "osdmap", "--clobber")
        self._do(
            "ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--osdmap", "osdmap", "--keyring", keyring
        )
        self._run("ceph-mon", "-i", "a")
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()), "--keyring", keyring)
        self._run("ceph-osd", "-i", "0")
        self._run("radosgw", "-n", "client.rgw", "--keyring", keyring)
        endpoint = f"http://127.0.0.1:{self.port}"
        self._wait_for(endpoint)
        user = json.loads(
            self._do(
                "radosgw-admin",
                "-n",
                "client.rgw",
                "--keyring",
                keyring,
                "user",
                "create",
                "--uid=tester",
                "--display-name=tester",
            )
        )
        keys = user["keys"][0]
        return Gateway(endpoint, keys["access_key"], keys["secret_key"])

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()  # all of its data is in memory or below `work`
        for process in self.processes:
            process.wait()

    def _configure(self) -> None:
        self.fsid = str(uuid.uuid4())
        libraries = self.packages / "usr/lib/x86_64-linux-gnu"
        for name in ("mon", "osd", "rgw", "run"):
            (self.work / name).mkdir(parents=True)
        self.conf.write_text(f"""[global]
fsid = {self.fsid}
mon host = [v2:127.0.0.1:{self.monitor}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {self.work}/keyring
run dir = {self.work}/run
admin socket = {self.work}/run/$name.asok
pid file =
log file = {self.work}/$name.log
crash dir = {self.work}/run
mon allow pool size one = true
mon cluster log to file = false
mon data avail warn = 1
mon data avail crit = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
plugin dir = {libraries}/ceph
[mon.a]
host = localhost
mon data = {self.work}/mon
[osd.0]
host = localhost
osd data = {self.work}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
[client.rgw]
rgw data = {self.work}/rgw
rgw frontends = beast endpoint=127.0.0.1:{self.port} tcp_nodelay=1
rgw thread pool size = 32
rgw enable apis = s3
""")
        caps = {
            "mon.": {"mon": "allow *"},
            "client.admin": {"mon": "allow *", "osd": "allow *", "mgr": "allow *", "mds": "allow *"},
            "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
            "client.rgw": {"mon": "allow *", "osd": "allow *"},
        }
        lines: list[str] = []
        for name, allowed in caps.items():
            lines += [f"[{name}]", f"key = {_secret()}", *(f'caps {k} = "{v}"' for k, v in allowed.items())]
        (self.work / "keyring").write_text("\n".join(lines) + "\n")

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [str(self.packages / "usr/bin" / name), "-c", str(self.conf), *arguments]

    def _do(self, name: str, *arguments: str) -> str:
        command = self._command(name, *arguments)
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{name} {' '.join(arguments)} failed: {done.stderr.strip()[-800:]}")
        return done.stdout

    def _run(self, name: str, *arguments: str) -> None:
        with (self.work / f"{name}.out").open("wb") as output:
            self.processes.append(
                subprocess.Popen(
                    self._command(name, "-f", *arguments),
                    cwd=self.work,
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _wait_for(self, endpoint: str) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError(f"a server ended at its start: {self._last_words()}")
            try:
                with urlopen(endpoint, timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"radosgw did not answer within {START_S} s: {self._last_words()}")

    def _last_words(self) -> str:
        files = [*self.work.glob("*.out"), *self.work.glob("*.log")]
        return " | ".join(f"{f.name}: {f.read_text(errors='replace')[-400:].strip()}" for f in files)


def _secret() -> str:
    """A cephx key: type 1 (AES), time, length, 16 random bytes."""
    return base64.b64encode(struct.pack("<hiih", 1, int(time.time()), 0, 16) + os.urandom(16)).decode()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
