"""Policies choose what they promise, two choices are compared, and the study's answer holds together."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vocab.counts import TokenCounts
from vocab.errors import VocabError
from vocab.folds import FoldCounts
from vocab.mapping import DraftVocab
from vocab.policies import choose, overlap, policy_order
from vocab.report import report_html
from vocab.study import lost_tokens, study

COUNTS = TokenCounts(np.array([[100, 60, 40, 0, 0, 0], [0, 1, 0, 4, 3, 0]]), ("large", "small"), 6)


def test_frequency_balanced_and_list_order_ids_as_they_say() -> None:
    assert policy_order("frequency", COUNTS).tolist() == [0, 1, 2, 3, 4, 5]
    # shares: id 0 .25, 1 .15+.0625, 2 .1, 3 .25, 4 .1875
    assert policy_order("balanced", COUNTS).tolist() == [0, 3, 1, 4, 2, 5]
    assert policy_order("list", COUNTS, listed=[5, 4, 5]).tolist() == [5, 4, 0, 1, 2, 3]
    assert policy_order("balanced", COUNTS, force_ids=[5]).tolist() == [5, 0, 3, 1, 4, 2]
    assert policy_order("list", COUNTS, listed=[4], force_ids=[5]).tolist() == [5, 4, 0, 1, 2, 3]


def test_balanced_gives_to_the_small_source() -> None:
    plain, balanced = choose("frequency", COUNTS, 3), choose("balanced", COUNTS, 3)
    assert plain.coverage(COUNTS.of("small")) < balanced.coverage(COUNTS.of("small"))
    assert plain.coverage(COUNTS.total()) > balanced.coverage(COUNTS.total())
    assert balanced.provenance["policy"] == "balanced"


def test_a_choice_by_frequency_is_that_of_the_draft_vocabulary_itself() -> None:
    for force in ([], [5]):
        assert choose("frequency", COUNTS, 4, force_ids=force) == DraftVocab.from_counts(
            COUNTS.total(), 4, force_ids=force
        )


@pytest.mark.parametrize(
    ("policy", "more", "named"),
    [
        ("other", {}, "expected one of frequency, balanced, list, found 'other'"),
        ("list", {}, "expected a list of ids, found none"),
        ("list", {"listed": [6]}, "listed ids: id 6 is outside"),
        ("frequency", {"force_ids": [0, 1, 2]}, "3 ids do not fit into a draft vocabulary of 2"),
    ],
)
def test_policies_that_cannot_be_followed_are_refused(policy: str, more: dict[str, list[int]], named: str) -> None:
    with pytest.raises(VocabError, match=named):
        choose(policy, COUNTS, 2, **more)  # type: ignore[arg-type]


def test_overlap_counts_ids_and_tokens() -> None:
    one, other = DraftVocab.from_ids([0, 1, 2], 6), DraftVocab.from_ids([2, 3], 6)
    found = overlap(one, other, np.array([10, 20, 30, 40, 0, 0]))
    assert (found.both, found.only_first, found.only_second, found.jaccard) == (1, 2, 1, 0.25)
    assert found.tokens == (0.3, 0.3, 0.4)
    assert overlap(one, other).tokens is None
    with pytest.raises(VocabError, match="vocabularies of 6 and 7 ids"):
        overlap(one, DraftVocab.from_ids([0], 7))


def test_lost_tokens_come_by_frequency_with_their_source_and_string() -> None:
    lost = lost_tokens(DraftVocab.from_ids([0, 1], 6), COUNTS, lambda token: f"<{token}>")
    assert (lost["ids"], lost["tokens"], lost["share"]) == (3, 47, 47 / 208)
    assert lost["top"][0] == {"id": 2, "count": 40, "source": "large", "text": "<2>"}
    assert [row["id"] for row in lost["top"]] == [2, 3, 4]


def folds() -> FoldCounts:
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, 61)
    rows = [
        np.stack(
            [random.multinomial(2000, weights / weights.sum()), random.multinomial(300, weights[::-1] / weights.sum())]
        )
        for _ in range(3)
    ]
    return FoldCounts(tuple(TokenCounts(row, ("chat", "code"), 60) for row in rows), 0)


def test_a_study_is_whole_and_json() -> None:
    found = json.loads(
        json.dumps(study(folds(), [5, 20, 60], size=20, special_ids=[59, 58], listed=[3, 4]), allow_nan=False)
    )
    assert found["cross_fitted"][-1] == 1.0
    assert found["chosen_on"] == found["best_possible"]
    assert all(held <= own + 0.02 for held, own in zip(found["cross_fitted"], found["chosen_on"], strict=True))
    assert [one["source"] for one in found["worst_source"][:2]] == ["code", "code"]
    assert set(found["policies"]) == {"frequency", "balanced", "frequency + special tokens", "list"}
    balanced, plain = found["policies"]["balanced"], found["policies"]["frequency"]
    assert balanced["worst_source"][1] > plain["worst_source"][1]
    assert balanced["held_out"][1] < plain["held_out"][1]


def test_a_study_of_one_fold_says_what_it_can() -> None:
    one = FoldCounts((folds().folds[0], TokenCounts.empty(60)), 0)
    found = study(one, [5, 60])
    assert "cross_fitted" not in found
    assert found["chosen_on"][-1] == 1.0
    with pytest.raises(VocabError, match="no loss tokens"):
        study(FoldCounts((TokenCounts.empty(60),) * 2, 0), [5])


def test_a_page_loads_nothing_and_escapes_what_it_shows() -> None:
    found = study(folds(), [5, 20, 60], size=20, text_of=lambda token: f"<script>{token}&")
    page = report_html("A <b> title", found, None)
    assert "A &lt;b&gt; title" in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for outside in ("http://", "https://", "src=", "url(", "@import"):
        assert outside not in page
    assert page.count("<svg") == 2
    with pytest.raises(VocabError, match="nothing to report"):
        report_html("x", None, None)
