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

from ray_jobs.replicas.replica import Generation, Sampling
from storage.errors import RecipeError

Generate = Callable[[Sequence[np.ndarray], Sequence[Sampling]], list[Generation]]


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
    generate: Generate, prompts: Sequence[np.ndarray], samplings: Sequence[Sampling], budgets: Sequence[Budget | None]
) -> list[Response]:
    """One response to each prompt ([T] integer ids). max_new_tokens counts thinking, the forced token and the answer."""
    caps = [
        one.max_new_tokens if budget is None else min(one.max_new_tokens, budget.tokens)
        for one, budget in zip(samplings, budgets, strict=True)
    ]
    first = generate(prompts, [replace(one, max_new_tokens=cap) for one, cap in zip(samplings, caps, strict=True)])
    responses = [Response(np.asarray(one.token_ids, np.int32), one.finish_reason) for one in first]
    again: list[int] = []
    for at, (response, sampling, budget) in enumerate(zip(responses, samplings, budgets, strict=True)):
        left = sampling.max_new_tokens - len(response.token_ids)
        if budget is None or response.finish_reason != "length" or left < 1:
            continue
        if budget.open_at(np.concatenate([prompts[at], response.token_ids])):
            ids = np.append(response.token_ids, np.int32(budget.end)).astype(np.int32)
            responses[at] = Response(ids, "length", len(ids) - 1)
            left -= 1
        if left:
            again.append(at)
    if again:
        rest = generate(
            [np.concatenate([prompts[at], responses[at].token_ids]) for at in again],
            [
                replace(samplings[at], max_new_tokens=samplings[at].max_new_tokens - len(responses[at].token_ids))
                for at in again
            ],
        )
        for at, more in zip(again, rest, strict=True):
            ids = np.concatenate([responses[at].token_ids, np.asarray(more.token_ids, np.int32)])
            responses[at] = replace(responses[at], token_ids=ids, finish_reason=more.finish_reason)
    return responses


def one_token(tokenizer: Any, text: str, key: str) -> int:
    """The id of a text that is a single token. Raises RecipeError, naming the recipe's key, for any other."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(ids) != 1 or str(tokenizer.decode(ids)) != text:
        raise RecipeError(
            f"{key}: expected a single token of the verifier's tokeniser, found {text!r}, which is {len(ids)}; "
            f"name a token that its chat template uses, or leave the key out"
        )
    return int(ids[0])
