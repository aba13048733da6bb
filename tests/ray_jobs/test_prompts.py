"""Rows become exact token ids and masks, or rejects that say why. SmolLM2's own tokeniser and template."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jobs.prompts import Limits, Reject, end_ids, expand, load_tokenizer, prepare_file, read_rows, tokenise
from storage.errors import RecipeError
from storage.objects import open_store

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 49152
# SmolLM2's tokeniser has no tokens for the bytes of the rarest planes.
TEXT = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=("Cs", "Cc")), min_size=1, max_size=80).filter(
    lambda text: text.strip() and "<|" not in text
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(str(smollm2))


@pytest.fixture(scope="module")
def limits(smollm2: Path, tokenizer: Any) -> Limits:
    return Limits(VOCAB, 200, end_ids(str(smollm2), tokenizer))


def test_a_question_ends_where_the_verifier_is_to_speak(tokenizer: Any, limits: Limits) -> None:
    row = tokenise({"prompt": "Hello there"}, tokenizer, limits)
    assert row["kind"] == "generate"
    assert tokenizer.decode(row["token_ids"]).endswith(
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not row["loss_mask"].any()
    same = tokenise({"messages": [{"role": "user", "content": "Hello there"}]}, tokenizer, limits)
    assert same["id"] == row["id"] == same["id"]


@settings(deadline=None, max_examples=40)
@given(answer=TEXT)
def test_the_mask_of_a_given_answer_covers_exactly_it_and_its_end_token(
    tokenizer: Any, limits: Limits, answer: str
) -> None:
    row = tokenise({"prompt": "Why?", "response": answer}, tokenizer, Limits(VOCAB, 4000, limits.end_ids))
    masked = row["token_ids"][row["loss_mask"]]
    assert tokenizer.decode(masked) == answer + "<|im_end|>"
    question = tokenise({"prompt": "Why?"}, tokenizer, limits)
    assert row["token_ids"][: len(question["token_ids"])].tolist() == question["token_ids"].tolist()
    assert row["kind"] == "given"


def test_answers_to_one_prompt_share_their_group(tokenizer: Any, limits: Limits) -> None:
    rows = [tokenise({"prompt": "Why?", "response": answer}, tokenizer, limits) for answer in ("Yes.", "No.")]
    question = tokenise({"prompt": "Why?"}, tokenizer, limits)
    assert rows[0]["id"] != rows[1]["id"]
    assert rows[0]["group"] == rows[1]["group"] == question["group"]


def test_pretokenised_ids_and_masks_are_kept_as_they_are(tokenizer: Any, limits: Limits) -> None:
    row = tokenise({"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, tokenizer, limits)
    assert row["token_ids"].tolist() == [5, 6, 7]
    assert row["loss_mask"].tolist() == [False, True, True]
    assert tokenise({"token_ids": [5, 6]}, tokenizer, limits)["loss_mask"].all()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "expected one of messages, prompt, token_ids"),
        ({"prompt": "x", "token_ids": [1]}, "found prompt and token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a string, found list"),
        ({"prompt": "  "}, r"messages\[0\] \(user\) is empty"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "is empty"),
        ({"messages": ["hi"]}, "must have a role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must end with a user or an assistant turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "without a question"),
        ({"prompt": "word " * 300}, "leaves no room below 200"),
        ({"prompt": "Why?", "response": "word " * 300}, "are more than 200"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, 49152]}, r"token_ids\[1\] is 49152, outside the verifier's vocabulary of 49,152"),
        ({"token_ids": [1, -1]}, r"token_ids\[1\] is -1"),
        ({"token_ids": [1, "a"]}, "list of integers"),
        ({"token_ids": [1, 2], "loss_mask": [1]}, "list of 2 booleans"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(tokenizer: Any, limits: Limits, row: dict[str, Any], why: str) -> None:
    with pytest.raises(Reject, match=why):
        tokenise(row, tokenizer, limits)


def test_files_of_all_kinds_give_the_same_rows(tmp_path: Path, tokenizer: Any, limits: Limits) -> None:
    rows = [{"prompt": f"Question {n}?"} for n in range(5)]
    text = "".join(json.dumps(row) + "\n\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(text)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    ids = [
        [row["id"] for row in prepare_file(path, "s", None, tokenizer, limits)] for path in expand(str(tmp_path / "*"))
    ]
    assert len(ids) == 3
    assert ids[0] == ids[1] == ids[2]
    assert len(list(read_rows(str(tmp_path / "c.parquet"), 2))) == 2
    for name in ("a.jsonl", "c.parquet"):
        everything = list(read_rows(str(tmp_path / name)))
        assert list(read_rows(str(tmp_path / name), 1, skip=1)) == everything[1:2]
        assert list(read_rows(str(tmp_path / name), skip=1)) == everything[1:]


def test_a_broken_line_is_a_reject_and_a_broken_file_an_error(tmp_path: Path, tokenizer: Any, limits: Limits) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine?"}\n{"prompt": \n[1]\n{"prompt": "\\ud83d hi"}\n' + "[" * 100_000 + "\n")
    rows = list(prepare_file(str(path), "s", None, tokenizer, limits))
    assert [("reject" in row) for row in rows] == [False, True, True, True, True]
    assert "surrogate" in rows[3]["reject"]["reason"]
    assert rows[1]["reject"]["row"].endswith("a.jsonl:2")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(RecipeError, match=r"b\.parquet: cannot be read"):
        list(read_rows(str(tmp_path / "b.parquet")))
    with pytest.raises(RecipeError, match="no such file"):
        expand(str(tmp_path / "absent.jsonl"))


def test_the_prompts_that_we_ship_are_all_accepted(tokenizer: Any, limits: Limits) -> None:
    seen: set[str] = set()
    for path in sorted((ROOT / "prompts").glob("*.jsonl")):
        rows = list(prepare_file(str(path), path.stem, None, tokenizer, Limits(VOCAB, 1024, limits.end_ids)))
        assert len(rows) >= 60
        assert not [row for row in rows if "reject" in row]
        assert {row["kind"] for row in rows} == {"generate"}
        assert not seen & {row["id"] for row in rows}
        seen |= {row["id"] for row in rows}


def test_token_ids_are_int32_and_masks_bool(tokenizer: Any, limits: Limits) -> None:
    row = tokenise({"prompt": "x"}, tokenizer, limits)
    assert row["token_ids"].dtype == np.int32
    assert row["loss_mask"].dtype == bool


@pytest.mark.usefixtures("s3_server")
def test_prompts_on_object_storage_are_read_like_files(tokenizer: Any, limits: Limits) -> None:
    text = "".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(5))
    store = open_store("s3://statehouse/corpus")
    store.put("a.jsonl.gz", gzip.compress(text.encode()))
    store.put("b.jsonl", text.encode())
    files = expand("s3://statehouse/corpus/*.jsonl*")
    assert files == ["s3://statehouse/corpus/a.jsonl.gz", "s3://statehouse/corpus/b.jsonl"]
    ids = [[row["id"] for row in prepare_file(path, "s", None, tokenizer, limits)] for path in files]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 5


@pytest.mark.usefixtures("s3_server")
@pytest.mark.parametrize(
    "path", ["s3://absent-bucket/*.jsonl", "s3://statehouse/absent/*.jsonl", "nonsense://x/*.jsonl"]
)
def test_prompts_that_are_not_there_are_one_clear_error(path: str) -> None:
    with pytest.raises(RecipeError, match="prompts: ") as caught:
        expand(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
