"""Reading rows: every kind of source, and errors that say what to change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.config.schema import DataConfig
from tandem.data.sources import is_heldout, problem_key, read_rows
from tandem.errors import ConfigError, DataError


def write(path: Path, rows: list[Any]) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DataConfig(source="jsonl", path=str(path))


def spelling(**changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "task": "spell_backward",
        "task_kwargs": {"min_word_len": 3, "max_word_len": 5},
        "size": 30,
    }
    return DataConfig(**{**settings, **changes})


def test_jsonl_rows_keep_their_line_numbers_across_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"question": "é"}\n\n{"question": "2"}\n'.encode())
    rows = read_rows(DataConfig(source="jsonl", path=str(path)))
    assert [row["question"] for row in rows.rows] == ["é", "2"]
    assert rows.where(1) == f"{path}, row 3"


@pytest.mark.parametrize("line", [b"{broken", b"[1, 2]", b'{"a": "\xff"}', b"[" * 5000])
def test_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "1"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2"):
        read_rows(DataConfig(source="jsonl", path=str(path)))


@pytest.mark.parametrize("source", ["jsonl", "parquet", "dataset"])
def test_missing_file_is_an_error_that_names_it(tmp_path: Path, source: Any) -> None:
    with pytest.raises(DataError, match=r"data\.path.*nowhere"):
        read_rows(DataConfig(source=source, path=str(tmp_path / "nowhere")))


def test_directory_given_as_jsonl_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path"):
        read_rows(DataConfig(source="jsonl", path=str(tmp_path)))


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        read_rows(write(tmp_path / "rows.jsonl", []))


def test_columns_are_renamed_and_the_others_kept(tmp_path: Path) -> None:
    config = write(tmp_path / "rows.jsonl", [{"q": "1+1", "solution": "2", "level": 3}])
    renamed = config.model_copy(update={"columns": {"question": "q", "answer": "solution"}})
    assert dict(read_rows(renamed).rows[0]) == {"question": "1+1", "answer": "2", "level": 3}


def test_missing_mapped_column_names_it_those_present_and_the_file(tmp_path: Path) -> None:
    config = write(tmp_path / "rows.jsonl", [{"q": "1"}, {"other": "1"}])
    mapped = config.model_copy(update={"columns": {"question": "q"}})
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: missing column 'q'.*present: other"):
        read_rows(mapped)


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": ["a", "b"], "answer": [1, 2]}), path)
    config = DataConfig(source="parquet", path=str(path))
    assert list(read_rows(config).rows) == [
        {"question": "a", "answer": 1},
        {"question": "b", "answer": 2},
    ]


def test_text_file_given_as_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text("question\n")
    with pytest.raises(DataError, match="not a parquet file"):
        read_rows(DataConfig(source="parquet", path=str(path)))


def test_dataset_saved_to_disk_is_read_and_a_directory_of_splits_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"question": ["a", "b"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "split")
    config = DataConfig(source="dataset", path=str(tmp_path / "one"))
    assert [row["question"] for row in read_rows(config).rows] == ["a", "b"]
    with pytest.raises(DataError, match=r"several splits \(train\)"):
        read_rows(DataConfig(source="dataset", path=str(tmp_path / "split")))
    with pytest.raises(DataError, match="save_to_disk"):
        read_rows(DataConfig(source="dataset", path=str(tmp_path)))


def test_size_limits_the_rows_of_a_file(tmp_path: Path) -> None:
    config = write(tmp_path / "rows.jsonl", [{"question": str(i)} for i in range(9)])
    assert len(read_rows(config.model_copy(update={"size": 4}))) == 4


def test_procedural_rows_carry_what_their_scorer_needs() -> None:
    row = read_rows(spelling()).rows[0]
    assert row["answer"] == row["word"][::-1]
    assert row["entry"]["question"] == row["question"]
    assert row["task"] == "spell_backward"
    assert row["task_kwargs"] == {"min_word_len": 3, "max_word_len": 5}


def test_procedural_rows_are_a_function_of_the_seed() -> None:
    words = [[row["word"] for row in read_rows(spelling(seed=s)).rows] for s in (1, 1, 50)]
    assert words[0] == words[1] != words[2]


def test_unknown_task_is_suggested_and_a_bad_setting_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.task.*did you mean spell_backward"):
        read_rows(spelling(task="spell_backwards"))
    with pytest.raises(ConfigError, match=r"data\.task_kwargs.*min_len"):
        read_rows(spelling(task_kwargs={"min_len": 3}))
    with pytest.raises(ConfigError, match=r"data\.task_kwargs.*max_word_len"):
        read_rows(spelling(task_kwargs={"min_word_len": 5, "max_word_len": 3}))


def test_heldout_problems_are_distinct_and_in_no_training_split_of_any_seed() -> None:
    heldout = [problem_key(row) for row in read_rows(spelling(split="heldout", size=40)).rows]
    assert len(set(heldout)) == len(heldout) == 40
    for seed in (0, 7):
        train = read_rows(spelling(split="train", seed=seed, size=3000)).rows
        assert not {problem_key(row) for row in train} & set(heldout)
        assert len(train) == 3000


def test_one_problem_in_ten_is_held_out() -> None:
    share = sum(is_heldout(f"problem {i}") for i in range(10_000)) / 10_000
    assert 0.09 < share < 0.11


def test_too_few_heldout_problems_is_an_error() -> None:
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match=r"distinct heldout problems.*100"):
        read_rows(DataConfig(task="chain_sum", task_kwargs=few, size=100, split="heldout"))


def test_splits_of_a_file_share_nothing_and_lose_nothing(tmp_path: Path) -> None:
    config = write(tmp_path / "rows.jsonl", [{"prompt": str(i)} for i in range(200)])
    parts = {
        split: {row["prompt"] for row in read_rows(config.model_copy(update={"split": split})).rows}
        for split in ("train", "heldout")
    }
    assert not parts["train"] & parts["heldout"]
    assert parts["train"] | parts["heldout"] == {str(i) for i in range(200)}


def test_reading_rows_loads_no_torch(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"question": "1"}])
    code = (
        "import sys; from tandem.config.schema import DataConfig\n"
        "from tandem.data.sources import read_rows\n"
        f"read_rows(DataConfig(source='jsonl', path={str(tmp_path / 'rows.jsonl')!r}))\n"
        "read_rows(DataConfig(task='spell_backward', size=2))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
