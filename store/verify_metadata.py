"""Seal, manifest and the files that define a store, checked against each other.

In: a place. Out: a Ground: what the other checks may rely on (attributes, plan, arrays, manifest), and
problems for everything that cannot be relied on. A file that is not what was sealed is named and then not
believed, so that its errors are not blamed on others. Cost: reads the metadata files, no chunk of a block.
"""

from dataclasses import replace
from typing import Any

from blake3 import blake3

from .errors import DamageError, FormatError, StoreNotFound
from .finding import no_store
from .folder import (
    DOCUMENTS,
    GROUP,
    PLAN,
    VOCABULARY,
    parse_group,
    parse_plan,
    specs_of,
)
from .incomplete import PULLING, PUSHING
from .manifest import MANIFEST, SEAL_BYTES, SEALED, Manifest, parse_manifest, read_seal
from .parsing import MAX_JSON_BYTES, parse_json
from .places import Place
from .plan import Plan
from .records import FOLDER as BLOCKS
from .records import record_name
from .replacing import READY
from .verify_arrays import check_arrays
from .verify_findings import RESTORE, Findings, fault, reason
from .verify_ground import Ground, definition_file
from .verify_tables import check_tables


def survey(place: Place, findings: Findings) -> Ground | None:
    """Check what defines the store; None when nothing more can be said before a change is finished."""
    listing = _listing(place)
    names = (SEALED, MANIFEST, PLAN, f"{GROUP}/zarr.json", PUSHING, PULLING, READY)
    there = {name: _is_there(place, listing, name) for name in names}
    looks = any(name.startswith((f"{GROUP}/", f"{BLOCKS}/")) for name in listing or ())
    if not looks and not any(there.values()):
        raise no_store(place)
    if there[READY]:
        text = "a change of the store (`seal --partial` or `repair`) was interrupted; run that command again"
        findings.add("incomplete", READY, text)
        return None
    digest = _seal(place, findings) if there[SEALED] else None
    manifest = _manifest(findings, digest) if there[SEALED] else None
    copying = not there[SEALED] and (there[PUSHING] or there[PULLING] or there[MANIFEST])
    mark = next((name for name in (PUSHING, PULLING) if there[name] and not there[SEALED]), None)
    ground = Ground(listing, there[SEALED], copying, mark, digest if manifest else None, manifest)
    if copying:
        ground = replace(ground, expected=_expected(ground, findings, there))
    return _definition(ground, findings)


def _listing(place: Place) -> dict[str, int] | None:
    try:
        return place.list()
    except StoreNotFound:  # no bucket of this name
        raise
    except OSError as error:
        raise fault(place, "", error) from error


def _is_there(place: Place, listing: dict[str, int] | None, name: str) -> bool:
    try:
        return (listing is not None and name in listing) or place.size(name) is not None
    except OSError as error:
        raise fault(place, name, error) from error


def _seal(place: Place, findings: Findings) -> str | None:
    """The digest in SEALED."""
    try:
        digest = read_seal(place)
    except DamageError as error:
        findings.add("seal", SEALED, reason(error, place.where(SEALED)))
        return None
    except OSError as error:
        raise fault(place, SEALED, error) from error
    findings.count(files=1, bytes_read=SEAL_BYTES)
    return digest


def _manifest(findings: Findings, digest: str | None) -> Manifest | None:
    """The manifest that the seal vouches for. Behind a damaged seal it may be whole, but nothing says so."""
    content = findings.fetch(MANIFEST, f"{SEALED} is there but this file is not; {RESTORE}")
    if content is None or digest is None:
        return None
    if blake3(content).hexdigest() != digest:
        findings.add("seal", MANIFEST, f"the file is not the one that was sealed; {RESTORE}")
        return None
    where = findings.place.where(MANIFEST)
    try:
        return parse_manifest(parse_json(content, where), where)
    except FormatError as error:
        findings.add("unreadable", MANIFEST, reason(error, where))
        return None


def _expected(ground: Ground, findings: Findings, there: dict[str, bool]) -> frozenset[str]:
    """Names of the files that an unfinished copy is to have: its manifest or its mark says so."""
    for name in (MANIFEST, PUSHING, PULLING):
        content = findings.fetch(name) if there[name] else None
        try:
            found = parse_manifest(parse_json(content or b"", name), name)
            return frozenset(found.files)
        except FormatError:
            if there[name]:
                findings.add("incomplete", name, f"the file is cut short: {'; '.join(ground.copy_words)}")
    return frozenset()


def _definition(ground: Ground, findings: Findings) -> Ground:
    """Attributes, plan, arrays and tables, in this order: each is read in the light of the ones before."""
    group, plan_bytes = (definition_file(ground, findings, name) for name in (f"{GROUP}/zarr.json", PLAN))
    attributes = _parsed(findings, f"{GROUP}/zarr.json", parse_group, group)

    def parse(content: bytes, where: str) -> Plan:
        if attributes is not None:
            return parse_plan(content, attributes, where)
        return Plan.parse(parse_json(content, where, MAX_JSON_BYTES), where)

    plan = _parsed(findings, PLAN, parse, plan_bytes)
    plan = None if attributes is None else plan  # both or none: what follows needs both
    ground = replace(ground, attributes=attributes, plan=plan)
    if attributes is not None and plan is not None:
        ground = replace(ground, specs=specs_of(attributes, plan))
        _check_facts(ground, findings)
    whole = check_arrays(ground, findings, group, lambda name: definition_file(ground, findings, name))
    ground = replace(ground, whole_files=frozenset(whole))
    tables = {name: definition_file(ground, findings, name) for name in (DOCUMENTS, VOCABULARY)}
    ground = replace(ground, vocabulary=check_tables(ground, findings, tables))
    _check_names(ground, findings)
    _check_rest(ground, findings)
    return ground


def _parsed(findings: Findings, name: str, parse: Any, content: bytes | None) -> Any:
    if content is None:
        return None
    where = findings.place.where(name)
    try:
        return parse(content, where)
    except FormatError as error:
        findings.add("unreadable", name, reason(error, where))
    except DamageError as error:
        findings.add("metadata", name, reason(error, where))
    return None


def _check_facts(ground: Ground, findings: Findings) -> None:
    """The manifest is that of this plan."""
    plan, manifest = ground.plan, ground.manifest
    if plan is None or manifest is None:
        return
    found = {"plan": plan.digest, "n_tokens": plan.n_tokens, "n_blocks": plan.n_blocks}
    for key, value in found.items():
        if getattr(manifest, key) != value:
            text = f"`{key}` is {getattr(manifest, key)}, {PLAN} says {value}"
            findings.add("metadata", MANIFEST, text)


def _check_rest(ground: Ground, findings: Findings) -> None:
    """Digests of the sealed metadata files that nobody asked for, since what names them is damaged."""
    for name in sorted(set(ground.manifest.files if ground.manifest else ()) - findings.fetched):
        if not name.startswith(f"{BLOCKS}/"):
            definition_file(ground, findings, name)


def _check_names(ground: Ground, findings: Findings) -> None:
    """The manifest names exactly the files of this store."""
    if ground.manifest is None or ground.plan is None:
        return
    needed = {PLAN, DOCUMENTS, VOCABULARY, f"{GROUP}/zarr.json", *ground.whole_files}
    needed |= {f"{GROUP}/{spec.name}/zarr.json" for spec in ground.specs.values()}
    needed |= {record_name(block) for block in range(ground.plan.n_blocks)}
    for name in sorted(needed - set(ground.manifest.files)):
        findings.add("metadata", MANIFEST, f"it does not name {name}, which this store must have")
    for name in sorted(set(ground.manifest.files) - needed):
        findings.add("metadata", MANIFEST, f"it names {name}, which is no file of this store")
