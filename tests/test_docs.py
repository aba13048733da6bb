"""What the documents show is run, and what they link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tiny import sealed, states_of

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


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere_and_no_path_of_a_machine_stands_in_the_docs(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    assert not re.search(r"/(root|home|work|tmp)/", text)
