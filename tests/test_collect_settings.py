"""Settings say what is wrong, what is allowed and what was probably meant."""

import pytest
from nearline.collect.settings import HarvestSettings, parse
from nearline.store.errors import UsageError
from nearline.store.settings import parse_bytes, parse_layers


def test_every_field_has_a_default_and_a_sentence() -> None:
    HarvestSettings()
    for name, field in HarvestSettings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("token", "tokens"), ("sequence-lenght", "sequence_length"), ("storage", "storage_dtype")],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown setting '{key}': did you mean '{nearest}'"):
        parse({key: 1})


def test_a_key_like_no_other_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"unknown setting 'zzz': known are model, corpus, tokens,"):
        parse({"zzz": 1})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"tokens": 0},
            r"tokens=0: input should be greater than or equal to 1\. tokens: Token rows to store",
        ),
        ({"tokens": "many"}, r"tokens='many': input should be a valid integer"),
        ({"dtype": "float8"}, r"dtype='float8': input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"layers": "5-2"}, r"the range '5-2' runs backwards; write 2-5"),
        ({"layers": "0,x"}, r"'x' is no layer or range; write 0-5,8"),
        ({"memory_limit": "4 parsecs"}, r"'4 parsecs' is no size; write a number and a unit"),
        ({"bos": "sometimes"}, r"bos='sometimes': input should be 'auto', 'always' or 'never'"),
    ],
)
def test_a_wrong_value_is_one_sentence(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(values)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "layers"), [("0-5,8", [0, 1, 2, 3, 4, 5, 8]), ("3", [3]), ("4, 1-2 ,2", [1, 2, 4])]
)
def test_layers_are_ranges_and_numbers(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers
    assert parse({"layers": text}).resolve_layers(9) == layers
    assert parse({"layers": layers}).resolve_layers(9) == layers


def test_no_layers_are_all_layers() -> None:
    assert HarvestSettings().resolve_layers(3) == parse({"layers": "all"}).resolve_layers(3) == [0, 1, 2]


def test_a_layer_that_the_model_has_not() -> None:
    with pytest.raises(UsageError, match=r"layers=0-5,8: this model has layers 0-7\. `nearline sites MODEL`"):
        parse({"layers": "0-5,8"}).resolve_layers(8)


@pytest.mark.parametrize(
    ("text", "size"), [("4 GiB", 4 * 2**30), ("1.5MiB", 3 * 2**19), ("800 mb", 800_000_000), ("12", 12)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse({"memory_limit": text}).memory_limit_bytes == size


@pytest.mark.parametrize(
    ("text", "share"), [("1/8", "1/8"), ("12.5%", "1/8"), ("12.5 %", "1/8"), ("0.125", "1/8"), ("100%", None)]
)
def test_shares_are_fractions_numbers_or_percentages(text: str, share: str | None) -> None:
    assert parse({"keep": text}).keep == share
    for wrong in ("0%", "101%", "%", "1/8/2", "12%5", "2"):
        with pytest.raises(UsageError, match=r"is no share; write .*, such as 1/8 or 12\.5%"):
            parse({"keep": wrong})


def test_settings_come_back_from_their_own_values() -> None:
    settings = parse({"layers": [0, 2], "tokens": 5, "memory_limit": "1 GiB"})
    assert parse(settings.model_dump()) == settings
