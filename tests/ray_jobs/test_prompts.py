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

from ray_jobs.conversations import Reject
from ray_jobs.prompt_files import PromptFile, expand, files_of, parse, read_rows
from ray_jobs.prompts import Limits, end_ids, load_tokenizer, prepare_file, tokenise
from ray_jobs.recipe import PromptSource
from storage.errors import RecipeError
from storage.objects import open_store

ROOT = Path(__file__).resolve().parent.parent.parent
VOCAB = 49152
# SmolLM2's tokeniser has no tokens for the bytes of the rarest planes.
TEXT = st.text(st.characters(max_codepoint=0x2FF, exclude_categories=("Cs", "Cc")), min_size=1, max_size=80).filter(
    lambda text: text.strip() and "<|" not in text
)


def one_file(path: str) -> PromptFile:
    return PromptFile(path, "s", PromptSource(path=path))


def one(row: dict[str, Any], tokenizer: Any, limits: Limits, **entry: Any) -> dict[str, Any]:
    """The only sequence of a row."""
    (sequence,) = tokenise(row, tokenizer, limits, PromptSource(path="-", **entry))
    return sequence


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return load_tokenizer(str(smollm2))


@pytest.fixture(scope="module")
def limits(smollm2: Path, tokenizer: Any) -> Limits:
    return Limits(VOCAB, 200, end_ids(str(smollm2), tokenizer))


def test_a_question_ends_where_the_verifier_is_to_speak(tokenizer: Any, limits: Limits) -> None:
    row = one({"prompt": "Hello there"}, tokenizer, limits)
    assert row["kind"] == "generate"
    assert tokenizer.decode(row["token_ids"]).endswith(
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not row["loss_mask"].any()
    same = one({"messages": [{"role": "user", "content": "Hello there"}]}, tokenizer, limits)
    assert same["id"] == row["id"] == same["id"]


@settings(deadline=None, max_examples=40)
@given(answer=TEXT)
def test_the_mask_of_a_given_answer_covers_exactly_it_and_its_end_token(
    tokenizer: Any, limits: Limits, answer: str
) -> None:
    row = one({"prompt": "Why?", "response": answer}, tokenizer, Limits(VOCAB, 4000, limits.end_ids))
    masked = row["token_ids"][row["loss_mask"]]
    assert tokenizer.decode(masked) == answer + "<|im_end|>"
    question = one({"prompt": "Why?"}, tokenizer, limits)
    assert row["token_ids"][: len(question["token_ids"])].tolist() == question["token_ids"].tolist()
    assert row["kind"] == "given"


def test_answers_to_one_prompt_share_their_group(tokenizer: Any, limits: Limits) -> None:
    rows = [one({"prompt": "Why?", "response": answer}, tokenizer, limits) for answer in ("Yes.", "No.")]
    question = one({"prompt": "Why?"}, tokenizer, limits)
    assert rows[0]["id"] != rows[1]["id"]
    assert rows[0]["group"] == rows[1]["group"] == question["group"]


def test_pretokenised_ids_and_masks_are_kept_as_they_are(tokenizer: Any, limits: Limits) -> None:
    row = one({"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, tokenizer, limits)
    assert row["token_ids"].tolist() == [5, 6, 7]
    assert row["loss_mask"].tolist() == [False, True, True]
    assert one({"token_ids": [5, 6]}, tokenizer, limits)["loss_mask"].all()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "expected one of messages, conversations, prompt, turns, text, token_ids; found nothing"),
        ({"prompt": None, "x": 1}, "prompt must be a string"),
        ({"prompt": "x", "token_ids": [1]}, "found prompt and token_ids"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content must be a string, found list"),
        ({"prompt": "  "}, r"messages\[0\] \(user\) is empty"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "is empty"),
        ({"messages": ["hi"]}, "must have a role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must end with a user, a tool or an assistant turn"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "without a question"),
        ({"prompt": "word " * 300}, "leaves no room below 200"),
        ({"prompt": "Why?", "response": "word " * 300}, "are more than 200"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, 49152]}, r"token_ids\[1\] is 49152, outside the verifier's vocabulary of 49,152"),
        ({"token_ids": [1, -1]}, r"token_ids\[1\] is -1"),
        ({"token_ids": [1, "a"]}, "list of integers"),
        ({"token_ids": [1, 2], "loss_mask": [1]}, "list of 2 booleans"),
        ({"token_ids": [1, 2], "loss_mask": [0, 0]}, "no token of it counts for the loss"),
        ({"text": " "}, "text must be a string that says something"),
        ({"turns": []}, "list of questions"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "without a question"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "has the role 'narrator'"),
        ({"messages": "[{"}, "not JSON"),
        ({"prompt": "x", "tools": [3]}, "list of tool definitions"),
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
        [row["id"] for row in prepare_file(one_file(path), tokenizer, limits)] for path in expand(str(tmp_path / "*"))
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
    rows = list(prepare_file(one_file(str(path)), tokenizer, limits))
    assert [("reject" in row) for row in rows] == [False, True, True, True, True]
    assert "surrogate" in rows[3]["reject"]["reason"]
    assert rows[1]["reject"]["file"].endswith("a.jsonl")
    assert [row["reject"]["row"] for row in rows[1:]] == [2, 3, 4, 5]
    assert {row["reject"]["code"] for row in rows[1:]} == {"not_json"}
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(RecipeError, match=r"b\.parquet: cannot be read"):
        list(read_rows(str(tmp_path / "b.parquet")))
    with pytest.raises(RecipeError, match="no such file"):
        expand(str(tmp_path / "absent.jsonl"))


def test_the_prompts_that_we_ship_are_all_accepted(tokenizer: Any, limits: Limits) -> None:
    seen: set[str] = set()
    for path in sorted((ROOT / "prompts").glob("*.jsonl")):
        rows = list(prepare_file(one_file(str(path)), tokenizer, Limits(VOCAB, 1024, limits.end_ids)))
        assert len(rows) >= 60
        assert not [row for row in rows if "reject" in row]
        assert {row["kind"] for row in rows} == {"generate"}
        assert not seen & {row["id"] for row in rows}
        seen |= {row["id"] for row in rows}


def test_token_ids_are_int32_and_masks_bool(tokenizer: Any, limits: Limits) -> None:
    row = one({"prompt": "x"}, tokenizer, limits)
    assert row["token_ids"].dtype == np.int32
    assert row["loss_mask"].dtype == bool


def test_every_form_of_one_conversation_gives_the_same_sequence(tokenizer: Any, limits: Limits) -> None:
    ask, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    forms: list[dict[str, Any]] = [
        {"prompt": "Why?", "response": "So."},
        {"prompt": "Why?", "completion": "So."},
        {"messages": [ask, answer]},
        {"messages": json.dumps([ask, answer])},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, answer]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
    ]
    assert len({one(form, tokenizer, limits)["id"] for form in forms}) == 1
    system = {"role": "system", "content": "Be brief."}
    assert (
        one({"system": "Be brief.", "conversations": forms[-1]["conversations"]}, tokenizer, limits)["id"]
        == one({"messages": [system, ask, answer]}, tokenizer, limits)["id"]
    )
    assert one({"turns": ["Why?", "And?"]}, tokenizer, limits)["id"] == one({"prompt": "Why?"}, tokenizer, limits)["id"]
    both = {"prompt": "other", "messages": [ask, answer]}
    assert one(both, tokenizer, limits, use="messages")["id"] == one(forms[0], tokenizer, limits)["id"]


def test_plain_text_counts_as_a_whole(tokenizer: Any, limits: Limits) -> None:
    row = one({"text": "Once upon a time"}, tokenizer, limits)
    assert tokenizer.decode(row["token_ids"]) == "Once upon a time"
    assert row["loss_mask"].all()
    assert row["kind"] == "given"


@settings(deadline=None, max_examples=60)
@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=120),
    longest=st.integers(2, 50),
    shortest=st.integers(1, 20),
    truncation=st.sampled_from(["drop", "truncate", "split"]),
)
def test_what_is_too_long_is_refused_cut_or_made_into_several(
    tokenizer: Any, mask: list[bool], longest: int, shortest: int, truncation: str
) -> None:
    ids = list(range(len(mask)))
    entry = PromptSource.model_validate(
        {"path": "-", "truncation": truncation, "min_length": shortest, "max_length": longest}
    )
    try:
        made = tokenise({"token_ids": ids, "loss_mask": mask}, tokenizer, Limits(VOCAB, 100), entry)
    except Reject as reject:
        assert reject.code in ("too_long", "too_short", "nothing_to_learn")
        if reject.code == "too_short":
            assert len(ids) < shortest
        elif reject.code == "too_long":
            assert truncation == "drop"
            assert len(ids) > longest
        return
    assert len(ids) >= shortest
    assert len({row["group"] for row in made}) == 1  # a hold-out never parts them
    for row in made:
        low = int(row["token_ids"][0])
        assert row["token_ids"].tolist() == ids[low : low + len(row["token_ids"])]
        assert row["loss_mask"].tolist() == mask[low : low + len(row["token_ids"])]
        assert row["loss_mask"].any()
        assert shortest <= len(row["token_ids"]) <= longest
    lost = sum(mask) - sum(int(row["loss_mask"].sum()) for row in made)
    if truncation == "truncate":
        assert len(made) == 1
        assert lost == sum(mask[longest:])
    else:  # only a tail that is shorter than allowed
        assert lost <= shortest


def test_a_prompt_is_never_cut(tokenizer: Any, limits: Limits) -> None:
    with pytest.raises(Reject, match="leaves no room below 20"):
        one({"prompt": "word " * 30}, tokenizer, limits, truncation="split", max_length=20)


def test_a_row_that_nobody_foresaw_is_a_reject_too(tmp_path: Path, limits: Limits) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError("surprise")

    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    (row,) = prepare_file(one_file(str(path)), Broken(), limits)
    assert (row["reject"]["code"], row["reject"]["reason"]) == ("unexpected", "ZeroDivisionError: surprise")


CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": f"Q{n}?"},
            {"role": "assistant", "content": f"A{n}.", "reasoning_content": None},
        ]
    }
    for n in range(7)
]


def save_to_disk(folder: Path, tables: list[pa.Table]) -> None:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams, and state.json that names them in their order."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-{len(tables):05d}.arrow" for at in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    (folder / "dataset_info.json").write_text("{}")


def test_a_file_may_be_named_twice_for_other_rows_and_not_for_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(4)))
    whole, first = PromptSource(path=path), PromptSource(path=path, limit=2, source="x")
    rest = PromptSource(path=path, skip=2, source="y", thinking=True)
    assert [(file.source, file.entry.skip) for file in files_of([first, rest])] == [("x", 0), ("y", 2)]
    assert len(files_of([whole, whole, PromptSource(path=str(tmp_path / "*.jsonl"))])) == 1
    for two in ([whole, first], [first, PromptSource(path=path, skip=1, source="x")]):
        with pytest.raises(RecipeError, match="two entries with other settings name the same rows"):
            files_of(two)


def test_a_dataset_on_disk_is_read_like_files(tmp_path: Path, tokenizer: Any, limits: Limits) -> None:
    table = pa.Table.from_pylist(CONVERSATIONS)
    save_to_disk(tmp_path / "set" / "train", [table.slice(0, 4), table.slice(4)])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CONVERSATIONS))
    expected = [row["id"] for row in prepare_file(one_file(str(tmp_path / "a.jsonl")), tokenizer, limits)]
    for path in (tmp_path / "set" / "train", tmp_path / "set"):
        files = files_of([PromptSource(path=str(path))])
        assert [file.source for file in files] == [path.name] * 2
        assert [row["id"] for file in files for row in prepare_file(file, tokenizer, limits)] == expected
    assert [file.source for file in files_of([PromptSource(path=str(tmp_path / "s*/train"))])] == ["train"] * 2
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(RecipeError, match="holds the splits train, test; name one of them"):
        expand(str(tmp_path / "set"))
    with pytest.raises(RecipeError, match="is a folder, and no Hugging Face dataset"):
        expand(str(tmp_path))


def test_zstandard_is_read_and_a_torn_archive_is_an_error(tmp_path: Path) -> None:
    import zstandard

    text = "".join(json.dumps(row) + "\n" for row in CONVERSATIONS).encode()
    whole = zstandard.compress(text)
    (tmp_path / "a.jsonl.zst").write_bytes(whole + whole)  # as `cat` and pzstd make them
    assert len(list(read_rows(str(tmp_path / "a.jsonl.zst")))) == 14
    for name, torn in (("b.jsonl.gz", gzip.compress(text)[:-20]), ("c.jsonl.zst", whole[:-5])):
        (tmp_path / name).write_bytes(torn)
        with pytest.raises(RecipeError, match=rf"{name}: cannot be read"):
            list(read_rows(str(tmp_path / name)))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_line_breaks_the_parser(line: bytes) -> None:
    try:
        assert isinstance(parse(line), dict)
    except Reject as reject:
        assert reject.code == "not_json"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 50000) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "reasoning_content"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "conversations", "prompt", "response", "turns", "text", "token_ids", "loss_mask", "tools"]
        ),
        VALUES
        | st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": VALUES}),
            max_size=3,
        ),
        max_size=3,
    )
)
def test_no_row_raises_but_a_reject(tokenizer: Any, limits: Limits, row: dict[str, Any]) -> None:
    try:
        for made in tokenise(row, tokenizer, limits):
            assert 0 < len(made["token_ids"]) == len(made["loss_mask"]) <= limits.max_length
            assert made["kind"] == "generate" or made["loss_mask"].any()
    except Reject as reject:
        assert str(reject)


@pytest.mark.usefixtures("s3_server")
def test_prompts_on_object_storage_are_read_like_files(tokenizer: Any, limits: Limits, tmp_path: Path) -> None:
    text = "".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(5))
    store = open_store("s3://statehouse/corpus")
    store.put("a.jsonl.gz", gzip.compress(text.encode()))
    store.put("b.jsonl", text.encode())
    files = expand("s3://statehouse/corpus/*.jsonl*")
    assert files == ["s3://statehouse/corpus/a.jsonl.gz", "s3://statehouse/corpus/b.jsonl"]
    ids = [[row["id"] for row in prepare_file(one_file(path), tokenizer, limits)] for path in files]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 5
    save_to_disk(tmp_path / "set", [pa.Table.from_pylist([{"prompt": f"Question {n}?"} for n in range(5)])])
    for file in (tmp_path / "set").iterdir():
        store.put(f"set/{file.name}", file.read_bytes())
    (arrow,) = files_of([PromptSource(path="s3://statehouse/corpus/set")])
    assert arrow.source == "set"
    assert [row["id"] for row in prepare_file(arrow, tokenizer, limits)] == ids[0]


@pytest.mark.usefixtures("s3_server")
@pytest.mark.parametrize(
    "path", ["s3://absent-bucket/*.jsonl", "s3://statehouse/absent/*.jsonl", "nonsense://x/*.jsonl"]
)
def test_prompts_that_are_not_there_are_one_clear_error(path: str) -> None:
    with pytest.raises(RecipeError, match="prompts: ") as caught:
        expand(path)
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
