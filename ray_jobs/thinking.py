"""A thinking budget: a verifier that still reasons after so many tokens is made to end, and goes on with its answer.

In two rounds, whatever the engine: the first ends at the budget; where a think block is open then, its end token is put
behind, and the second round goes on from there. SGLang 0.5.23's own processors do the same within one round, but know the
end token of three models only and are sent to the engine as pickles. A seeded response is the same either way: SGLang draws
each token by seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_jobs.replicas.replica import Generation, Heard, Sampling
from storage.errors import RecipeError

Generate = Callable[[Sequence[np.ndarray], Sequence[Sampling], Heard], list[Generation]]


@dataclass(frozen=True)
class Budget:
    """tokens: of thinking, at most. begin, end: ids of the tokens around it."""

    tokens: int
    begin: int
    end: int

    def open_at(self, token_ids: np.ndarray) -> bool:
        """Whether a think block that began in these ids has not ended."""
        marks = token_ids[(token_ids == self.begin) | (token_ids == self.end)]
        return bool(len(marks)) and int(marks[-1]) == self.begin


@dataclass(frozen=True)
class Response:
    """token_ids: [new tokens] int32. forced: index in them of the token that the budget put in, not the verifier."""

    token_ids: np.ndarray
    finish_reason: str
    forced: int | None = None


def respond(
    generate: Generate,
    prompts: Sequence[np.ndarray],
    samplings: Sequence[Sampling],
    budgets: Sequence[Budget | None],
    done: Callable[[int, Response], None] = lambda _at, _response: None,
) -> list[Response]:
    """One response to each prompt ([T] integer ids). max_new_tokens counts thinking, the forced token and the answer.

    done(index, response) is called once for each as soon as it is finished, also when the engine fails before the others are.
    """
    responses: dict[int, Response] = {}
    again: list[int] = []

    def first(at: int, one: Generation) -> None:
        response, sampling, budget = Response(_ids(one), one.finish_reason), samplings[at], budgets[at]
        left = sampling.max_new_tokens - len(response.token_ids)
        if budget is not None and response.finish_reason == "length" and left > 0:
            if budget.open_at(np.concatenate([prompts[at], response.token_ids])):
                ids = np.append(response.token_ids, np.int32(budget.end)).astype(np.int32)
                response = Response(ids, "length", len(ids) - 1)
                left -= 1
            if left:
                again.append(at)
        responses[at] = response
        if at not in again:
            done(at, response)

    def second(index: int, more: Generation) -> None:
        at = again[index]
        ids = np.concatenate([responses[at].token_ids, _ids(more)])
        responses[at] = replace(responses[at], token_ids=ids, finish_reason=more.finish_reason)
        done(at, responses[at])

    caps = [
        one.max_new_tokens if budget is None else min(one.max_new_tokens, budget.tokens)
        for one, budget in zip(samplings, budgets, strict=True)
    ]
    generate(prompts, [replace(one, max_new_tokens=cap) for one, cap in zip(samplings, caps, strict=True)], first)
    if again:
        again.sort()
        rest = [
            replace(samplings[at], max_new_tokens=samplings[at].max_new_tokens - len(responses[at].token_ids))
            for at in again
        ]
        generate([np.concatenate([prompts[at], responses[at].token_ids]) for at in again], rest, second)
    return [responses[at] for at in range(len(prompts))]


def _ids(one: Generation) -> np.ndarray:
    return np.asarray(one.token_ids, np.int32)


def one_token(tokenizer: Any, text: str, key: str) -> int:
    """The id of a text that is a single token. Raises RecipeError, naming the recipe's key, for any other."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) != 1 or str(tokenizer.decode(ids)) != text:
        raise RecipeError(
            f"{key}: expected a single token of the verifier's tokeniser, found {text!r}, which is {len(ids)}; "
            f"name a token that its chat template uses, or leave the key out"
        )
    return int(ids[0])
