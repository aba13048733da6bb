"""serve without an engine: which prompts, what the oracle says of an output, and what is refused before anything starts.

The real engine is in replicas/test_speculative.py and tests/e2e.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import ARGUMENTS, TinyRun

from drafter.errors import DrafterError
from ray_jobs import job, serve
from ray_jobs.inputs import open_verifier
from ray_jobs.oracle import TIE, Verdict, compare_passes, judge
from ray_jobs.prompts import load_tokenizer
from ray_jobs.recipe import load_recipe
from ray_jobs.replicas.speculative import Served
from ray_jobs.serve_prompts import ServePrompt, choose_prompts, room_for_prompts
from ray_jobs.serving import NONE, TRAINED, UNTRAINED, OracleActor, ServeActor
from storage.errors import RecipeError, StatehouseError

pytestmark = pytest.mark.timeout(280)


# ---- prompts -------------------------------------------------------------------------------------------------------


def chosen(made: TinyRun, *overrides: str) -> list[ServePrompt]:
    recipe = made.changed(*overrides)
    return choose_prompts(recipe, open_verifier(recipe))


def test_held_out_prompts_are_served_in_turn_from_each_source_and_given_ones_never(tiny_run: TinyRun) -> None:
    prompts = chosen(tiny_run)
    assert {one.source for one in prompts} == {"numbers", "colours"}
    assert len(prompts) < 24
    few = chosen(tiny_run, "evaluation.serve_prompts=4")
    assert Counter(one.source for one in few) == {"numbers": 2, "colours": 2}
    text = load_tokenizer(str(tiny_run.verifier)).decode(few[0].token_ids)
    assert text.rstrip().endswith("assistant")


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_of_a_file_may_be_ours_or_spec_benchs(tiny_run: TinyRun, tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        {"prompt": "Say one."},
        {"messages": [{"role": "user", "content": "Say two."}]},
        {"question_id": 3, "category": "qa", "turns": ["Say three.", "And four."], "reference": ["3"]},
    )
    prompts = chosen(tiny_run, f"evaluation.prompts=[{{path: {path}}}]")
    tokenizer = load_tokenizer(str(tiny_run.verifier))
    texts = [tokenizer.decode(one.token_ids) for one in prompts]
    assert [word for text in texts for word in ("one", "two", "three", "four") if word in text] == [
        "one",
        "two",
        "three",
    ]
    assert {one.source for one in prompts} == {"mine"}
    assert prompts[2].row == f"{path}:3"


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([], [], "no rows; add prompts"),
        ([{"prompt": "word " * 3000}], [], "leaves no room"),
        ([{"prompt": "a", "response": "b"}, {"text": "?"}], [], "expected one of messages"),
        ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], [], "ends with an answer"),
        ([{"turns": ["Say it."]}], ["evaluation.serve_tokens=4000"], "lower evaluation.serve_tokens"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_served_are_one_line(
    tiny_run: TinyRun, tmp_path: Path, rows: list[Any], overrides: list[str], message: str
) -> None:
    path = write(tmp_path / "mine.jsonl", *rows)
    with pytest.raises(RecipeError, match=message) as raised:
        chosen(tiny_run, f"evaluation.prompts=[{{path: {path}}}]", *overrides)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_second_file_of_a_source_that_has_enough_is_not_called_empty(tiny_run: TinyRun, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"Say {name}."} for _ in range(3)))
    prompts = chosen(
        tiny_run, f"evaluation.prompts=[{{path: {tmp_path}/*.jsonl, source: mine}}]", "evaluation.serve_prompts=2"
    )
    assert len(prompts) == 2


def test_a_verifier_that_does_not_say_how_long_it_reads_is_one_line(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = tiny_run.changed("extraction.replica.gpus=1")
    with pytest.raises(RecipeError, match=r"config.json: max_position_embeddings: expected"):
        room_for_prompts(recipe, str(tmp_path))


@pytest.mark.parametrize(
    ("cpus", "gpus", "fit"), [(8, 0, 2), (9, 0, 0), (1, 0, 16), (4, 2, 2), (1, 4, 1), (1, 3, 1), (8, 4, 1)]
)
def test_processes_are_counted_node_by_node(monkeypatch: pytest.MonkeyPatch, cpus: int, gpus: int, fit: int) -> None:
    import ray

    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert job.fitting(cpus, gpus) == fit


def test_a_file_that_is_not_there_is_named(tiny_run: TinyRun) -> None:
    with pytest.raises(RecipeError, match="absent.jsonl: no such file"):
        chosen(tiny_run, "evaluation.prompts=[{path: absent.jsonl}]")


def test_long_held_out_prompts_name_the_key_to_lower(tiny_run: TinyRun) -> None:
    with pytest.raises(RecipeError, match="evaluation.serve_tokens is 2030, which leaves room for prompts of 13"):
        chosen(tiny_run, "evaluation.serve_tokens=2030")


# ---- the oracle ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tiny_run: TinyRun) -> OracleActor:
    actor = OracleActor(tiny_run.recipe)
    actor.start()
    return actor


@pytest.fixture(scope="module")
def written(tiny_run: TinyRun, oracle: OracleActor) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts, and the verifier's greedy responses."""
    from ray_jobs.replicas.replica import Sampling

    prompts = [one.token_ids for one in chosen(tiny_run, "evaluation.serve_prompts=4")]
    assert oracle._replica is not None
    sampling = Sampling(max_new_tokens=24)
    return prompts, [one.token_ids for one in oracle._replica.generate(prompts, [sampling] * len(prompts))]


def served(tokens: np.ndarray, passes: tuple[int, ...] = ()) -> Served:
    return Served(tokens, "length", len(passes), sum(passes), passes)


def test_greedy_output_is_found_to_be_greedy_and_its_passes_are_the_walks(
    oracle: OracleActor, written: tuple[list[np.ndarray], list[np.ndarray]]
) -> None:
    prompts, tokens = written
    first = oracle.judge(TRAINED, prompts, [served(one) for one in tokens])
    assert all(not verdict.mismatches for verdict in first)
    assert sum(sum(verdict.walked) for verdict in first) > 5, "nothing accepted: this shows nothing"
    again = oracle.judge(TRAINED, prompts, [served(t, v.walked) for t, v in zip(tokens, first, strict=True)])
    for verdict in again:
        assert not verdict.differing
        assert verdict.last_agrees
    untrained = oracle.judge(UNTRAINED, prompts, [served(one) for one in tokens])
    assert sum(sum(v.walked) for v in untrained) < sum(sum(v.walked) for v in first)
    alone = oracle.judge(NONE, prompts, [served(one) for one in tokens])
    assert [verdict.walked for verdict in alone] == [()] * len(prompts)


def test_a_token_the_verifier_would_not_write_is_found_where_it_stands(
    oracle: OracleActor, written: tuple[list[np.ndarray], list[np.ndarray]]
) -> None:
    prompts, tokens = written
    wrong = tokens[0].copy()
    wrong[5] = (wrong[5] + 1) % 49152
    (verdict,) = oracle.judge(NONE, prompts[:1], [served(wrong)])
    assert verdict.mismatches[0].position == 5
    assert verdict.mismatches[0].token == wrong[5]
    assert verdict.mismatches[0].best == tokens[0][5]
    assert verdict.mismatches[0].gap > TIE


def test_a_tie_is_counted_and_a_hair_more_is_wrong() -> None:
    states = np.zeros((4, 2, 3), np.float32)
    states[:, -1, 0] = 1
    ids = np.array([0, 1, 0, 1], np.int32)
    for gap, ties, wrong in ((TIE / 2, 2, 0), (TIE * 2, 0, 2)):
        head = torch.tensor([[1.0, 0, 0], [1.0 - gap, 0, 0]])
        verdict = judge(states, ids, 1, (), head, None, 3)
        assert (verdict.ties, len(verdict.mismatches)) == (ties, wrong)


def compared(passes: list[int], gaps: dict[int, float] | None = None) -> tuple[tuple[int, ...], int, bool]:
    #                     0   1   2  3  4  5  6  7  8  9
    accepted = np.array([-1, -1, 2, 9, 9, 0, 1, 9, 1, 0])
    gap = np.full(10, 1.0, np.float32)
    for at, value in (gaps or {}).items():
        gap[at] = value
    return compare_passes(accepted, gap, passes, 2, 10, 3)


def test_passes_are_compared_where_the_server_drafted() -> None:
    assert compared([2, 0, 1, 1]) == ((), 0, True)
    # The response ends inside the last chain: the server may have seen more of it.
    assert compared([2, 0, 1, 3]) == ((), 0, True)
    assert compared([2, 0, 1, 0]) == ((), 0, False)
    # One wrong pass is one difference, not all that follow.
    assert compared([1, 3, 1])[0] == (0,)
    assert compared([1, 3, 1], {2: TIE / 2}) == ((), 1, True)
    # Too few, too many.
    assert compared([2, 0, 1])[0] == (3,)
    assert compared([2, 0, 1, 1, 0])[0] == (4,)


# ---- the report ----------------------------------------------------------------------------------------------------


def found(verdict: Verdict, passes: tuple[int, ...] = (2, 0, 1)) -> dict[str, Any]:
    prompts = [ServePrompt("maths", "file:1", np.arange(3, dtype=np.int32))]
    return serve.report(prompts, [served(np.arange(7, dtype=np.int32), passes)], [verdict], 2.0)


GOOD = Verdict(0, (), (2, 0, 1), True, (), 0, True)


def test_the_table_tells_served_and_offline_side_by_side() -> None:
    one = found(GOOD)
    assert one["total"]["tau"] == one["total"]["offline_tau"] == 2.0
    assert one["total"]["before_last_block"] == one["total"]["offline_before_last_block"] == 2
    assert one["total"]["tokens_per_s"] == 3.5
    json.dumps(one)
    from rich.console import Console

    console = Console(width=200, record=True)
    console.print(serve.render(one, 3))
    text = console.export_text()
    assert "1 / 1 cut" in text
    assert "identical" in text
    assert "1 of 1" in text


def test_a_wrong_output_or_other_counts_fail_the_job(tiny_run: TinyRun) -> None:
    from ray_jobs.oracle import Mismatch

    serve._require_proof(tiny_run.recipe, {TRAINED: found(GOOD)}, "serve.json")
    wrong = Verdict(0, (Mismatch(4, 17, 18, 0.5),), (2, 0, 1), False, (), 0, True)
    with pytest.raises(StatehouseError, match="response 1, token 4: expected id 18, found 17"):
        serve._require_proof(tiny_run.recipe, {TRAINED: found(wrong)}, "serve.json")
    other = Verdict(0, (), (2, 1, 1), False, (1,), 0, True)
    with pytest.raises(StatehouseError, match="response 1, pass 1 of 3"):
        serve._require_proof(tiny_run.recipe, {TRAINED: found(other)}, "serve.json")
    with pytest.raises(StatehouseError, match="it has learnt nothing"):
        serve._require_proof(tiny_run.recipe, {TRAINED: found(GOOD), UNTRAINED: found(GOOD)}, "serve.json")
    half = tiny_run.changed("evaluation.serve_dtype=bfloat16")
    serve._require_proof(half, {TRAINED: found(wrong)}, "serve.json")


# ---- refused before an engine starts -------------------------------------------------------------------------------


def test_a_run_that_is_not_there_fails_before_ray_starts(tiny_run: TinyRun) -> None:
    with pytest.raises(DrafterError, match="there is no run here"):
        serve.run(tiny_run.changed("training.run=absent"), ARGUMENTS)
    with pytest.raises(StatehouseError, match="as they were in training"):
        serve.run(tiny_run.changed("evaluation.held_out=0.9"), ARGUMENTS)


def test_a_damaged_drafter_never_reaches_the_engine(tiny_run: TinyRun, tmp_path: Path) -> None:
    import shutil

    from ray_jobs.replicas.replica import ReplicaConfig
    from ray_jobs.replicas.speculative import SpeculativeReplica

    folder = tmp_path / "drafter"
    shutil.copytree(Path(tiny_run.recipe.run_uri) / "drafter", folder)
    SpeculativeReplica(ReplicaConfig(), tiny_run.verifier, folder, 3)
    with pytest.raises(RecipeError, match="draft_length: expected at least 1"):
        SpeculativeReplica(ReplicaConfig(), tiny_run.verifier, folder, 0)
    with pytest.raises(RecipeError, match="serving needs sglang"):
        SpeculativeReplica(ReplicaConfig(engine="transformers"), tiny_run.verifier, folder, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(DrafterError, match="expected"):
        SpeculativeReplica(ReplicaConfig(), tiny_run.verifier, folder, 3)
    assert isinstance(ServeActor(tiny_run.recipe, TRAINED), ServeActor)
    assert load_recipe(tiny_run.path).evaluation.serve_prompts == 20
