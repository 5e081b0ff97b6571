"""QuestConfig: what each field takes, where it comes from, and what follows from it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from questkv import QuestConfig
from questkv.errors import ConfigError, QuestKVError

# Every field with a value that isn't its default.
OTHER = {
    "token_budget": 0.25,
    "page_size": 4,
    "sink_tokens": 3,
    "recent_tokens": 9,
    "dense_layers": (0, 2, 5),
    "optimism": 0.25,
    "group": "per_head",
    "box_dtype": "model",
    "kv_dtype": "model",
    "span_pages": 0,  # what offload allows
    "dense_below": 100,
    "sparse_prefill": 0,
    "backend": "reference",
    "offload": "host",
    "offload_cache": 1.5,
}


@st.composite
def configs(draw: st.DrawFn) -> QuestConfig:
    size = draw(st.integers(1, 40))
    sink, recent = draw(st.integers(0, 50)), draw(st.integers(0, 100))
    smallest = (math.ceil(sink / size) + math.ceil(recent / size) + 1) * size
    share = st.floats(0, 1, exclude_min=True)
    return QuestConfig(
        token_budget=draw(st.one_of(st.integers(smallest, 4 * smallest), share)),
        page_size=size,
        sink_tokens=sink,
        recent_tokens=recent,
        dense_layers=draw(st.one_of(st.integers(0, 5), st.lists(st.integers(0, 5)).map(tuple))),
        optimism=draw(st.floats(0, 1)),
        group=draw(st.sampled_from(["mean", "softmax_mean", "per_head"])),
        box_dtype=draw(st.sampled_from(["int8", "model"])),
        span_pages=draw(st.sampled_from([0, 2, 8])),
        dense_below=draw(st.integers(0, 300)),
        sparse_prefill=draw(st.integers(0, 100)),
        backend=draw(st.sampled_from(["auto", "reference"])),
    )


def test_defaults_are_the_documented_ones():
    assert QuestConfig().to_dict() == {
        "token_budget": 2048,
        "page_size": 16,
        "sink_tokens": 16,
        "recent_tokens": 64,
        "dense_layers": 2,
        "optimism": 0.5,
        "group": "mean",
        "box_dtype": "int8",
        "kv_dtype": "model",
        "span_pages": 0,
        "dense_below": 0,
        "sparse_prefill": 64,
        "backend": "auto",
        "offload": "none",
        "offload_cache": 2.0,
    }


def test_every_field_is_kept():
    config = QuestConfig(**OTHER)
    assert {field.name for field in fields(config)} == set(OTHER)
    assert {name: getattr(config, name) for name in OTHER} == OTHER


def test_fields_are_given_by_name_and_cannot_be_changed():
    with pytest.raises(TypeError):
        QuestConfig(2048)
    config = QuestConfig()
    with pytest.raises(FrozenInstanceError):
        config.page_size = 32
    assert replace(config, page_size=32).page_size == 32
    assert hash(QuestConfig(**OTHER)) == hash(QuestConfig(**OTHER))


_NO_INTS = (True, 1.0, 1.5, "16", None, math.nan, [16])
_WRONG = {
    "page_size": (*_NO_INTS, 0, -1),
    "sink_tokens": (*_NO_INTS, -1),
    "recent_tokens": (*_NO_INTS, -1),
    "dense_below": (*_NO_INTS, -1),
    "sparse_prefill": (*_NO_INTS, -1),
    "span_pages": (*_NO_INTS, -1, 1),
    "token_budget": (True, "2048", None, 0, -1, -5, 0.0, -0.5, 1.5, 2048.0, math.nan, math.inf, [2048], 95),
    "dense_layers": (True, -1, 1.0, "2", None, [0, -1], (0, True), [0.0], {0, 1}, [[0]]),
    "optimism": (True, -0.1, 1.1, math.nan, math.inf, "1", None),
    "group": ("max", "", None, 1, ["mean"], "Mean"),
    "box_dtype": ("int4", "float16", None, 8),
    "kv_dtype": ("int4", None, 16),
    "backend": ("cuda", "", None, 1),
    "offload": ("disk", "gpu", "", None, True),
    "offload_cache": (True, "2", None, 0, 0.99, -1.0, math.inf, math.nan),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in _WRONG.items() for value in values])
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        QuestConfig(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"[QuestConfig] {name}: expected ")
    assert message.endswith(f", got {value!r}")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, QuestKVError)


def test_a_list_of_wrong_values_exists_for_every_field():
    assert set(_WRONG) == set(OTHER)


def test_dense_layers_are_a_count_or_a_set_of_indices():
    count = QuestConfig(dense_layers=2)
    assert [count.is_dense_layer(layer) for layer in range(4)] == [True, True, False, False]
    listed = QuestConfig(dense_layers=[3, 0, 3])
    assert listed.dense_layers == (0, 3)
    assert listed == QuestConfig(dense_layers=(0, 3))
    assert [layer for layer in range(6) if listed.is_dense_layer(layer)] == [0, 3]
    for none in (0, ()):
        assert not any(QuestConfig(dense_layers=none).is_dense_layer(layer) for layer in range(4))


@pytest.mark.parametrize(
    ("page_size", "sink", "recent", "smallest"),
    [(16, 16, 64, 96), (16, 1, 1, 48), (16, 17, 0, 48), (16, 0, 0, 16), (1, 0, 0, 1), (3, 4, 7, 18), (64, 16, 64, 192)],
)
def test_smallest_budget_is_sink_recent_and_one_open_page(page_size, sink, recent, smallest):
    sizes = {"page_size": page_size, "sink_tokens": sink, "recent_tokens": recent}
    assert QuestConfig(token_budget=smallest, **sizes).smallest_budget == smallest
    with pytest.raises(ConfigError, match=rf"^\[QuestConfig\] token_budget: expected at least {smallest} tokens"):
        QuestConfig(token_budget=smallest - 1, **sizes)


def test_a_share_never_falls_below_the_smallest_selection():
    config = QuestConfig(token_budget=0.1)
    assert config.budget_at(10) == config.smallest_budget == 96
    assert config.budget_at(961) == 96
    assert config.budget_at(5000) == 500


@given(config=configs(), length=st.integers(1, 1000))
def test_pages_at_is_as_many_as_the_budget_holds_beside_the_open_page(config, length):
    size, pages, budget = config.page_size, config.pages_at(length), config.budget_at(length)
    # Page by page, as layout.md tells it.
    sealed, opened = 0, 1
    for _ in range(length - 1):
        opened += 1
        if opened > size:
            sealed, opened = sealed + 1, 1
    fitting = 0
    while fitting < sealed and (fitting + 1) * size + opened <= budget:
        fitting += 1
    assert pages == fitting
    assert pages >= min(sealed, config.sink_pages + config.recent_pages)
    assert (length <= budget) == (pages == sealed)


@given(config=configs(), length=st.integers(1, 1000))
def test_a_row_is_dense_exactly_if_it_fits_the_budget_or_is_short(config, length):
    assert config.is_dense_at(length) == (length <= config.budget_at(length) or length < config.dense_below)


@given(length=st.integers(1, 10**7))
def test_a_share_of_one_reads_everything(length):
    config = QuestConfig(token_budget=1.0)
    assert config.is_dense_at(length)
    assert config.pages_at(length) == (length - 1) // 16


def test_a_budget_of_one_token_is_not_a_share_of_one():
    config = QuestConfig(token_budget=1, page_size=1, sink_tokens=0, recent_tokens=0)
    assert config.is_dense_at(1)
    assert not config.is_dense_at(2)
    assert config.pages_at(2) == 0


@given(config=configs(), length=st.integers(1, 1000))
def test_a_longer_context_never_gets_a_smaller_budget(config, length):
    assert config.budget_at(length) <= config.budget_at(length + 1)
    assert config.budget_at(length) >= config.smallest_budget


@given(config=configs())
def test_to_dict_is_plain_json_that_gives_the_config_back(config):
    values = json.loads(json.dumps(config.to_dict()))
    assert values == config.to_dict()
    assert QuestConfig.from_dict(values) == config


def test_pages_in_host_memory_need_a_backend_for_gpus():
    with pytest.raises(ConfigError, match=r"^\[QuestConfig\] backend: expected one for a GPU with offload='host', got"):
        QuestConfig(offload="host", backend="native")
    assert QuestConfig(offload="host", backend="triton", offload_cache=1).offload_cache == 1.0


@pytest.mark.parametrize("key", ["budget", "page-size", "", "Page_size", 3, None])
def test_an_unknown_key_is_refused_with_the_known_ones(key):
    with pytest.raises(ConfigError, match=rf"^\[QuestConfig\] {key}: expected one of token_budget, page_size, "):
        QuestConfig.from_dict({"page_size": 8, key: 1})


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_a_file_gives_the_config_that_was_written(tmp_path, suffix):
    config = QuestConfig(**OTHER)
    path = tmp_path / f"quest{suffix}"
    dump = json.dumps if suffix == ".json" else yaml.safe_dump
    path.write_text(dump(config.to_dict()), encoding="utf-8")
    assert QuestConfig.from_file(path) == config
    assert QuestConfig.from_file(str(path)) == config


def test_a_file_may_set_a_few_fields_or_none(tmp_path):
    path = tmp_path / "quest.yaml"
    path.write_text("token_budget: 512  # tokens\ndense_layers: [0, 1]\n", encoding="utf-8")
    assert QuestConfig.from_file(path) == QuestConfig(token_budget=512, dense_layers=(0, 1))
    path.write_text("{}", encoding="utf-8")
    assert QuestConfig.from_file(path) == QuestConfig()


_BROKEN = [
    ("quest.json", b"{'page_size': 16}", "expected JSON, got "),
    ("quest.json", b"", "expected JSON, got "),
    ("quest.json", b"[]", "expected one mapping of fields, got list"),
    ("quest.json", b"null", "expected one mapping of fields, got NoneType"),
    ("quest.json", b'{"page_size": "\xff"}', "expected a readable file, got "),
    ("quest.yaml", b"page_size: [16", "expected YAML, got "),
    ("quest.yaml", b"page_size: 16\n  sink: : 3", "expected YAML, got "),
    ("quest.yml", b"!!python/object:os.system {}", "expected YML, got "),
    ("quest.yaml", b"", "expected one mapping of fields, got NoneType"),
    ("quest.yaml", b"- page_size", "expected one mapping of fields, got list"),
    ("quest.toml", b"page_size = 16", "expected a .json, .yaml or .yml file, got .toml"),
    ("quest", b"{}", "expected a .json, .yaml or .yml file, got no suffix"),
]


@pytest.mark.parametrize(("name", "content", "message"), _BROKEN)
def test_a_file_that_holds_no_config_is_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        QuestConfig.from_file(path)
    assert str(caught.value).startswith(f"[QuestConfig] {path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_missing_file_and_a_folder_are_refused(tmp_path, suffix):
    folder = tmp_path / f"folder{suffix}"
    folder.mkdir()
    for path in (tmp_path / f"missing{suffix}", folder):
        with pytest.raises(ConfigError, match=rf"^\[QuestConfig\] {re.escape(str(path))}: expected a readable file, "):
            QuestConfig.from_file(path)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        ('{"page_size": 0}', "[QuestConfig] page_size: expected an int >= 1, got 0"),
        ('{"token_budget": NaN}', "[QuestConfig] token_budget: expected "),
        ('{"pages": 1}', "[QuestConfig] pages: expected one of "),
    ],
)
def test_a_wrong_field_in_a_file_names_the_field_and_the_file(tmp_path, content, start):
    path: Path = tmp_path / "quest.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        QuestConfig.from_file(path)
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith(f"(in {path})")


def test_pages_in_eight_bits_need_boxes_in_eight_bits():
    assert QuestConfig(kv_dtype="int8").kv_dtype == "int8"
    with pytest.raises(
        ConfigError, match=r"\[QuestConfig\] box_dtype: expected 'int8' with kv_dtype='int8', got 'model'"
    ):
        QuestConfig(kv_dtype="int8", box_dtype="model")


@pytest.mark.parametrize(("name", "content"), [("c.json", "["), ("c.yaml", "["), ("c.yml", "{a: ")])
def test_a_file_nested_too_deeply_is_one_line(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content * 20_000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"expected one mapping of fields, got too many levels") as refused:
        QuestConfig.from_file(path)
    assert "\n" not in str(refused.value)


def test_a_value_whose_text_would_fill_the_memory_is_cut() -> None:
    bomb: object = [1]
    for _ in range(30):
        bomb = [bomb] * 10
    with pytest.raises(ConfigError, match="token_budget: expected an int") as refused:
        QuestConfig.from_dict({"token_budget": bomb})
    assert len(str(refused.value)) < 500
