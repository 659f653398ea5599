"""Any choice of sites gives a whole store of exactly these, with the bytes that the full one has."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from helpers_harvest import SMALL, files_of, harvested, texts
from helpers_models import tiny_model, tiny_tokenizer
from nearline.analyze.stores import open_stores
from nearline.collect import corpora, repair
from nearline.collect.anatomy import anatomy
from nearline.collect.buffers import BlockBuffer, Shape
from nearline.collect.forecast import forecast
from nearline.collect.models import describe
from nearline.collect.needs import needs_of
from nearline.collect.norm_parameters import apply, norm_parameters
from nearline.collect.proof import TOLERANCES
from nearline.collect.settings import parse
from nearline.collect.site_names import SITES
from nearline.store import Reader, info, pull, verify
from nearline.store import open as open_store
from nearline.store.errors import UsageError
from torch import nn

ALL = "embedding,residual,mlp_output,mlp_input"
CHOICES = ["residual", "mlp_input,mlp_output", "embedding"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store of a tiny llama for each choice."""
    folder, model = tmp_path_factory.mktemp("stores"), tiny_model("llama")[0]
    given: dict[str, Any] = {"storage_dtype": "float32", "tokens": 270, "model": model, "threads": 1}
    return {sites: harvested(folder / sites, sites=sites, **given) for sites in (ALL, *CHOICES)}


@pytest.fixture(scope="module")
def full(stores: dict[str, Path]) -> Path:
    """All four sites."""
    return stores[ALL]


def objects_of(path: Path, site: str) -> dict[str, bytes]:
    return files_of(path / "activations.zarr" / site)


# ---- what is stored


def test_mlp_input_is_what_the_norm_makes_of_the_residual(full: Path) -> None:
    reader, limit = Reader.open(full), TOLERANCES[torch.float32].norm
    for layer in anatomy(tiny_model("llama")[0]).layers:
        residual, found = (
            torch.from_numpy(reader.rows(site, layer.index, 0, reader.n_blocks))
            for site in ("residual", "mlp_input")
        )
        wanted = apply(norm_parameters(layer.norm), residual)
        error = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(error.max()) <= limit


@pytest.mark.parametrize("family", ["opt", "bloom", "olmo2"])
def test_mlp_input_of_other_layouts(family: str, tmp_path: Path) -> None:
    """Flat rows; projections of a module that adds the residual; no norm in front."""
    model, _ = tiny_model(family)
    path = harvested(
        tmp_path / "store", model=model, sites=ALL, storage_dtype="float32", tokens=270, threads=1
    )
    reader, seen = Reader.open(path), list[np.ndarray]()
    rows = np.flatnonzero(reader.column("sequence")[: reader.block_range(0)[1]] == 0)
    ids = torch.from_numpy(reader.column("token_id")[rows]).long()[None]
    first = anatomy(model).layers[1].mlp_first
    handle = first.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].reshape(len(rows), -1).clone().numpy())
    )
    with torch.inference_mode():
        model(input_ids=ids)
    handle.remove()
    np.testing.assert_allclose(reader.rows("mlp_input", 1, 0, 1)[rows], seen[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sites", CHOICES)
def test_a_choice_is_a_whole_store_with_the_bytes_of_the_full_one(
    sites: str, full: Path, stores: dict[str, Path]
) -> None:
    path, names = stores[sites], sites.split(",")
    for site in names:
        assert objects_of(path, site) == objects_of(full, site)
    for site in set(SITES) - set(names):
        assert not (path / "activations.zarr" / site).exists()
    for column in ("nll", "valid", "token_id"):
        np.testing.assert_array_equal(Reader.open(path).column(column), Reader.open(full).column(column))
    assert set(Reader.open(path).sites) == set(names)
    assert set(Reader.open(path).record(2).statistics) == set(names)
    assert Reader.open(path).attributes.proof == Reader.open(full).attributes.proof, "all sites are proved"
    assert verify(path, level="full").whole
    assert set(info(path)["sites"]) == set(names)
    assert all(f"`{site}`" in (path / "README.md").read_text(encoding="utf-8") for site in names)
    opened = open_store(path)
    assert [str(name) for name in opened if name in SITES] == [site for site in opened if site in names]
    xr.open_dataset(path, engine="nearline")[names[0]].mean("token").load()


def test_the_default_is_what_it_always_was(full: Path, tmp_path: Path) -> None:
    path = harvested(tmp_path / "store", storage_dtype="float32", tokens=270, threads=1)
    assert Reader.open(path).sites == ("residual", "mlp_output", "embedding")
    assert objects_of(path, "embedding") == objects_of(full, "embedding")
    assert Reader.open(full).sites == ("residual", "mlp_output", "mlp_input", "embedding")


# ---- what is done with it


def test_pull_takes_mlp_input_too(full: Path, tmp_path: Path) -> None:
    pull(full, tmp_path / "part", sites="mlp_input,embedding", layers=[1])
    assert set(Reader.open(tmp_path / "part").sites) == {"mlp_input", "embedding"}
    assert verify(tmp_path / "part", level="full").whole


@pytest.mark.parametrize(("sites", "missing"), [(CHOICES[0], "mlp_output"), (CHOICES[1], "residual")])
def test_a_fit_needs_its_two_sites(sites: str, missing: str, stores: dict[str, Path]) -> None:
    says = f"store mine has no `{missing}`: a fit needs residual and mlp_output"
    with pytest.raises(UsageError, match=says):
        open_stores({"mine": stores[sites]})


def test_a_damaged_store_of_some_sites_is_repaired(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama")[0], tiny_tokenizer()
    path = harvested(tmp_path / "store", model=model, sites="mlp_input", tokens=270, threads=1)
    before = files_of(path, without=("runs",))
    victim = path / "activations.zarr" / "mlp_input" / "c" / "1" / "2" / "0"
    victim.write_bytes(victim.read_bytes()[:-9])
    texts_again = corpora.from_documents(texts(), "documents")
    repair(path, model=describe(model, tokenizer, None), corpus=texts_again)
    assert files_of(path, without=("runs",)) == before


@pytest.mark.parametrize("sites", [*CHOICES, ALL])
def test_the_needs_are_those_of_the_store(sites: str, stores: dict[str, Path]) -> None:
    reader = Reader.open(stores[sites])
    shape = Shape(reader.layers, 32, reader.plan.block, "float32", parse({"sites": sites}).chosen_sites)
    needs = needs_of(anatomy(tiny_model("llama")[0]), shape, reader.plan)
    assert reader.manifest is not None
    assert needs.store_bytes == reader.manifest.chunk_bytes
    n_files = len(files_of(stores[sites], without=("runs",)))
    assert n_files <= needs.n_files <= n_files + 12
    n_folders = sum(path.is_dir() for path in stores[sites].rglob("*"))
    assert needs.n_folders <= n_folders <= needs.n_folders + 50


def test_plan_counts_the_chosen_sites(stores: dict[str, Path], tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"text": text}) for text in texts()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(rows), encoding="utf-8")
    inputs = {"model": str(tmp_path / "model"), "corpus": f"jsonl:{tmp_path / 'corpus.jsonl'}"}
    settings = parse(
        {**SMALL, **inputs, "sites": "residual", "tokens": 270, "threads": 1, "storage_dtype": "float32"}
    )
    found, manifest = (
        forecast(settings, tmp_path / "store", probe=False),
        Reader.open(stores["residual"]).manifest,
    )
    assert manifest is not None
    assert (found.n_objects, found.store_bytes) == (manifest.n_objects, manifest.chunk_bytes)
    assert found.sites == ("residual",)


@pytest.mark.parametrize("sites", [*CHOICES, ALL])
def test_the_arithmetic_counts_what_a_buffer_holds(sites: str) -> None:
    chosen = parse({"sites": sites}).chosen_sites
    shape = Shape((0, 2), 32, 90, "bfloat16", chosen)
    buffer = BlockBuffer(shape, pinned=False)
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in buffer.sites.values())
    d_model, n_layers, n_sites, itemsize = shape.sizes
    assert n_bytes == 90 * d_model * itemsize * (n_layers * n_sites + 1)
    thin = BlockBuffer(shape, pinned=False, thin=True)
    for site, array in buffer.stored(7).items():
        assert thin.stored(7)[site].shape == array.shape
    assert sum(tensor.untyped_storage().nbytes() for tensor in thin.sites.values()) <= n_bytes


# ---- how a person writes it


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, ("residual", "mlp_output", "embedding")),
        ("embedding, residual", ("residual", "embedding")),
        (["mlp_input", "residual", "residual"], ("residual", "mlp_input")),
        ("mlp_input", ("mlp_input",)),
        ("all", ("residual", "mlp_output", "mlp_input", "mlp_output_grad", "embedding")),
        ("+mlp_output_grad", ("residual", "mlp_output", "mlp_output_grad", "embedding")),
        (
            "+mlp_input,+mlp_output_grad",
            ("residual", "mlp_output", "mlp_input", "mlp_output_grad", "embedding"),
        ),
        (["+residual"], ("residual", "mlp_output", "embedding")),
    ],
)
def test_a_choice_in_any_order(given: Any, chosen: tuple[str, ...]) -> None:
    settings = parse({"sites": given})
    assert settings.chosen_sites == chosen
    assert parse(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("residuals", "no site 'residuals'; did you mean 'residual'"),
        ("residual,mlp_outputs", "no site 'mlp_outputs'; did you mean 'mlp_output'"),
        (
            "attention",
            "no site 'attention'; .* Sites to store: embedding, residual, mlp_output, mlp_input, mlp_output",
        ),
        ("+mlp_output_gradient", "no site 'mlp_output_gradient'; did you mean 'mlp_output_grad'"),
        ("", "no site ''"),
        ([], "at least one of residual"),
        ([3], "sites"),
        (7, "sites"),
    ],
)
def test_a_wrong_choice_is_one_sentence(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse({"sites": given})
    assert "\n" not in str(caught.value)
    assert given == [] or str(caught.value).count("mlp_input") == 1, "the list of them is given once"


def test_the_proof_looks_at_sites_that_are_not_stored(tmp_path: Path) -> None:
    """A block that adds something else than its MLP's output is refused, whatever is asked for."""
    model, _ = tiny_model("llama")

    def more(_: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.5

    model.model.layers[1].register_forward_hook(more)
    with pytest.raises(Exception, match="residual"):
        harvested(tmp_path / "store", model=model, sites="embedding", threads=1)
    assert not (tmp_path / "store").exists()
