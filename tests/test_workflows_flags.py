"""Flags and TOML keys are the settings' own names."""

from pathlib import Path

import pydantic
import pytest
from nearline.analyze.analyze_settings import AnalyzeSettings
from nearline.analyze.settings import FitSettings
from nearline.collect.measure_settings import MeasureSettings
from nearline.collect.settings import HarvestSettings, parse
from nearline.collect.tuning_settings import FinetuneSettings
from nearline.store import UsageError
from nearline.workflows.cli import run
from nearline.workflows.flags import flags_of, given, read_toml


@pytest.mark.parametrize("settings", [HarvestSettings, FitSettings, MeasureSettings])
def test_every_setting_is_a_flag_and_none_is_given_by_default(settings: type) -> None:
    flags = flags_of(settings)
    assert set(flags.model_fields) == set(settings.model_fields)
    assert given(flags()) == {}


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "harvest.toml"
    path.write_text('tokens = 1000\nlayers = "0-1"\n', encoding="utf-8")
    flags = flags_of(HarvestSettings)(tokens=2000)
    settings = parse({**read_toml(path), **given(flags)})
    assert (settings.tokens, settings.layers) == (2000, "0-1")


@pytest.mark.parametrize("content", [None, b"tokens = = 3", b"\xff\xfe"])
def test_unreadable_files_are_usage_errors(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"settings\.toml"):
        read_toml(path)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "harvest.toml"
    path.write_text("tokns = 1000\n", encoding="utf-8")
    with pytest.raises(UsageError, match="tokens"):
        parse(read_toml(path))


# A command, and a field of its settings that another one's settings describe otherwise.
FIELDS = [
    (["collect", "tiny-gpt2", "docs:python", "x"], HarvestSettings, "dtype"),
    (["plan", "tiny-gpt2", "docs:python", "x"], HarvestSettings, "dtype"),
    (["measure", "x"], MeasureSettings, "dtype"),
    (["finetune", "x"], FinetuneSettings, "dtype"),
    (["collect", "tiny-gpt2", "docs:python", "x"], HarvestSettings, "folds"),
    (["fit", "x", "y"], FitSettings, "folds"),
    (["analyze", "x"], AnalyzeSettings, "folds"),
    (["fit", "x", "y"], FitSettings, "seed"),
    (["measure", "x"], MeasureSettings, "seed"),
]


@pytest.mark.parametrize(("command", "settings", "name"), FIELDS)
def test_a_refused_value_is_described_by_the_settings_of_its_command(
    capsys: pytest.CaptureFixture[str], command: list[str], settings: type[pydantic.BaseModel], name: str
) -> None:
    assert run([*command, f"--{name}", "fp16"]) == 2
    meaning = str(settings.model_fields[name].description).rstrip(".")
    assert f". {name}: {meaning}" in capsys.readouterr().err
