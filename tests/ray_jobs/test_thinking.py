"""A verifier that thinks too long is made to end, its answer follows, and everybody knows which token was not its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.replicas.replica import Generation, Heard, Sampling, unheard
from ray_jobs.thinking import Budget, Response, one_token, respond
from storage.errors import RecipeError, ReplicaFailed

BEGIN, END, EOS, WORD = 1, 2, 3, 9


class Thinker:
    """Opens a block unless the prompt did, thinks `thoughts` tokens, says `words` tokens, ends."""

    def __init__(self, thoughts: int, words: int) -> None:
        self.thoughts, self.words, self.rounds = thoughts, words, 0

    def next(self, said: list[int]) -> int:
        if END not in said:
            if BEGIN not in said:
                return BEGIN
            return WORD if len(said) - said.index(BEGIN) - 1 < self.thoughts else END
        after = len(said) - said.index(END) - 1
        return WORD if after < self.words else EOS

    def __call__(
        self, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard = unheard
    ) -> list[Generation]:
        self.rounds += 1
        found = []
        for at, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            said = prompt.tolist()
            while said[-1] != EOS and len(said) - len(prompt) < sampling.max_new_tokens:
                said.append(self.next(said))
            found.append(Generation(np.array(said[len(prompt) :], np.int32), "stop" if said[-1] == EOS else "length"))
            heard(at, found[-1])
        return found


@given(
    thoughts=st.integers(0, 20), words=st.integers(0, 10), budget=st.integers(1, 25), room=st.integers(1, 40), opened=st.booleans()
)  # fmt: skip
def test_thinking_ends_at_its_budget_and_nothing_else_changes(
    thoughts: int, words: int, budget: int, room: int, opened: bool
) -> None:
    prompt = np.array([5, BEGIN] if opened else [5], np.int32)
    thinker = Thinker(thoughts, words)
    (free,) = thinker([prompt], [Sampling(max_new_tokens=room)])
    thinker.rounds = 0
    (held,) = respond(thinker, [prompt], [Sampling(max_new_tokens=room)], [Budget(budget, BEGIN, END)])
    assert thinker.rounds <= 2
    assert len(held.token_ids) <= room
    assert held.token_ids.dtype == np.int32
    ids = held.token_ids.tolist()
    if held.forced is None:
        assert ids == free.token_ids.tolist()
        assert held.finish_reason == free.finish_reason
    else:
        assert ids[held.forced] == END
        assert held.forced == budget
        assert ids[:budget] == free.token_ids.tolist()[:budget]
        assert ids.count(END) == 1
        assert ids[budget + 1 :] == ([WORD] * words + [EOS])[: room - budget - 1]
        assert held.finish_reason == ("stop" if ids[-1] == EOS else "length")


def test_prompts_without_a_budget_share_the_batch_of_those_with_one() -> None:
    prompts = [np.array([5], np.int32)] * 2
    held, free = respond(Thinker(8, 2), prompts, [Sampling(max_new_tokens=30)] * 2, [Budget(3, BEGIN, END), None])
    assert held.token_ids.tolist() == [BEGIN, WORD, WORD, END, WORD, WORD, EOS]
    assert free.token_ids.tolist() == [BEGIN, *[WORD] * 8, END, WORD, WORD, EOS]
    assert (held.forced, free.forced) == (3, None)


def test_a_mark_that_is_no_single_token_is_named() -> None:
    class Letters:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(one) for one in text]}

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    assert one_token(Letters(), "x", "generation.stop") == ord("x")
    with pytest.raises(RecipeError, match="generation.stop: expected a single token .* found 'xy', which is 2"):
        one_token(Letters(), "xy", "generation.stop")


def test_what_is_finished_is_told_before_the_engine_fails_at_the_rest() -> None:
    thinker = Thinker(8, 2)
    told: dict[int, Response] = {}

    def fails_in_its_second_round(
        prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], heard: Heard
    ) -> list[Generation]:
        if thinker.rounds:
            raise ReplicaFailed("the engine died")
        return thinker(prompts, samplings, heard)

    prompts, samplings = [np.array([5], np.int32)] * 3, [Sampling(max_new_tokens=30)] * 3
    budgets = [None, Budget(3, BEGIN, END), Budget(20, BEGIN, END)]
    with pytest.raises(ReplicaFailed):
        respond(fails_in_its_second_round, prompts, samplings, budgets, told.__setitem__)
    assert sorted(told) == [0, 2]
    thinker.rounds = 0
    whole = respond(thinker, prompts, samplings, budgets, lambda at, one: told.update({at: one}))
    assert sorted(told) == [0, 1, 2]
    assert all(
        (told[at].token_ids == one.token_ids).all() and told[at].forced == one.forced for at, one in enumerate(whole)
    )
