"""What the documents show is run, and what they link to exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import test_teacher
from pydantic import BaseModel
from tiny import sealed, states_of

from storage.commit import PlanDocument
from storage.contract import Contract
from storage.plan import PLAN_SCHEMA, Geometry
from storage.receipt import LossyError, Receipt, SelfCheck
from storage.seal import Seal
from storage.shards_table import SHARDS_SCHEMA

ROOT = Path(__file__).resolve().parent.parent


def test_the_zarr_snippet_of_the_format_document_reads_the_same_bits(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "dataset-format.md").read_text()
    snippet = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    sealed(str(tmp_path))
    names: dict[str, object] = {"uri": str(tmp_path)}
    exec(snippet, names)
    row, bits, states = names["row"], names["bits"], names["states"]
    assert isinstance(row, dict)
    assert isinstance(bits, np.ndarray)
    assert isinstance(states, np.ndarray)
    expected = states_of(row["id"], row["length"])
    assert (bits == expected).all()
    assert (states.view(np.uint32) >> 16 == expected).all()
    assert len(np.asarray(names["token_ids"])) == row["length"]


@pytest.mark.parametrize("teacher", ["none", "argmax"])
def test_the_fingerprint_snippet_of_the_format_document_makes_the_sealed_one(tmp_path: Path, teacher: str) -> None:
    text = (ROOT / "docs" / "dataset-format.md").read_text()
    snippet = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    _, seal = sealed(str(tmp_path)) if teacher == "none" else test_teacher.sealed(str(tmp_path), teacher)
    names: dict[str, object] = {"uri": str(tmp_path)}
    exec(snippet, names)
    assert names["fingerprint"] == seal.fingerprint


def documented_fields(title: str) -> dict[str, str]:
    """{field: type} of the table of the format document below a line that begins with `title`."""
    text = (ROOT / "docs" / "dataset-format.md").read_text()
    table = text.split(f"\n{title}", 1)[1].split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {row[0].strip("`"): row[1] for row in rows}


def json_type(schema: dict[str, Any]) -> str:
    """As the format document calls it."""
    if "anyOf" in schema:
        return ", ".join(json_type(one) for one in schema["anyOf"])
    if "$ref" in schema:
        return "object"
    if schema.get("type") == "object":
        return "map"
    return str(schema.get("type", "string"))


@pytest.mark.parametrize(
    ("title", "model"),
    [
        ("Fields of `plan.json`", PlanDocument),
        ("Fields of `contract`", Contract),
        ("Fields of `geometry`", Geometry),
        ("Fields of a receipt", Receipt),
        ("Fields of `lossy_error`", LossyError),
        ("Fields of `self_check`", SelfCheck),
        ("Fields of a seal", Seal),
    ],
)
def test_the_format_document_lists_the_fields_of_every_document(title: str, model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    assert documented_fields(title) == {name: json_type(one) for name, one in schema["properties"].items()}


@pytest.mark.parametrize(
    ("title", "schema"),
    [("Columns of `sequences.parquet`", PLAN_SCHEMA), ("Columns of `shards.parquet`", SHARDS_SCHEMA)],
)
def test_the_format_document_lists_the_columns_of_every_table(title: str, schema: pa.Schema) -> None:
    expected = {one.name: str(one.type).replace("item: ", "") for one in schema}
    assert documented_fields(title) == expected


def test_the_recorded_fields_of_the_contract_are_those_the_format_document_names() -> None:
    text = (ROOT / "docs" / "dataset-format.md").read_text()
    recorded = re.search(r"recorded only: `([^`]+)`", text)
    assert recorded
    assert set(recorded[1].split(", ")) == Contract.RECORDED


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere_and_no_path_of_a_machine_stands_in_the_docs(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    assert not re.search(r"/(root|home|work|tmp)/", text)
