"""The offline walk against drafter and verifier really run together, token by token, and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from dense import rope, small_drafter
from torch import Tensor

from drafter.acceptance import (
    Tally,
    Walk,
    draft_chains,
    greedy_ceiling,
    responses,
    shifted_d2t,
    tally_sequence,
    tau_interval,
    walk,
)
from drafter.errors import DrafterError
from drafter.model import Drafter

# So few tokens that a random drafter is right now and then.
VOCAB, DRAFT_VOCAB, WIDTH = 7, 5, 16
CAPTURE = (0, 1, 3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny products: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Response:
    """What the loop below wrote. accepted: by each verify pass, the last one in full."""

    tokens: list[int]
    prompt: int
    passes: list[int]


class Server:
    """Speculative decoding as plainly as it can be written: every pass from the beginning, no cache kept, greedy."""

    def __init__(self, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5,
        )  # fmt: skip
        self.verifier = LlamaForCausalLM(config).eval().double()
        self.drafter = small_drafter(
            seed, torch.float64, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, capture_layers=CAPTURE
        )

    def read(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """(features [T, F], the verifier's own next token after each [T])."""
        with torch.no_grad():
            out = self.verifier(torch.tensor([tokens]), output_hidden_states=True)
        features = torch.cat([out.hidden_states[layer + 1][0] for layer in CAPTURE], dim=-1)
        return features, out.logits[0].argmax(-1)

    @torch.no_grad()
    def draft(self, tokens: list[int], features_TF: Tensor, count: int) -> list[int]:
        """A chain of drafts after `tokens`, one at a time, with a fresh cache of keys and values."""
        drafter = self.drafter
        keys: list[Tensor] = []
        values: list[Tensor] = []
        # Row t reads features of token t and the embedding of token t+1.
        rows = [(drafter.fc(features_TF[t]), tokens[t + 1]) for t in range(len(tokens) - 1)]
        drafts: list[int] = []
        for at in range(len(rows) + count - 1):
            hidden, token = rows[at] if at < len(rows) else (hidden, drafts[-1])  # noqa: F821
            hidden = self._row(hidden[None], torch.tensor([token]), at, keys, values)
            if at >= len(rows) - 1:
                best = drafter.logits(hidden).argmax(-1)
                drafts.append(int(drafter.target_ids(best)))
            hidden = hidden[0]
        return drafts

    def _row(self, hidden: Tensor, token: Tensor, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer = self.drafter.midlayer
        attention, where = layer.self_attn, torch.tensor([position])
        inputs = torch.cat([layer.input_layernorm(self.drafter.embed_tokens(token)), layer.hidden_norm(hidden)], dim=-1)
        query, key, value = (
            part(inputs).view(-1, attention.head_dim) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        theta = self.drafter.config.rope_theta
        query = rope(query[None], where, theta)[0]
        keys.append(rope(key[None], where, theta)[0])
        values.append(value)
        group = len(query) // len(key)
        attended = [
            torch.softmax(torch.stack([k[head // group] for k in keys]) @ one / one.shape[0] ** 0.5, 0)
            @ torch.stack([v[head // group] for v in values])
            for head, one in enumerate(query)
        ]
        return layer.outputs(hidden, torch.stack(attended)[None])

    def respond(self, prompt: list[int], count: int, max_new: int, end_id: int | None) -> Response:
        tokens = [*prompt, int(self.read(prompt)[1][-1])]
        passes: list[int] = []

        def finished() -> bool:
            nonlocal tokens
            new = tokens[len(prompt) :]
            stop = new.index(end_id) + 1 if end_id in new else max_new
            tokens = tokens[: len(prompt) + min(stop, max_new)]
            return len(new) >= max_new or end_id in new

        while not finished():
            drafts = self.draft(tokens, self.read(tokens)[0], count)
            _, own = self.read(tokens + drafts)
            verdict = own[len(tokens) - 1 :].tolist()
            right = 0
            while right < count and drafts[right] == verdict[right]:
                right += 1
            passes.append(right)
            tokens = [*tokens, *verdict[: right + 1]]
        return Response(tokens, len(prompt), passes)


@pytest.mark.parametrize("seed", [2, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_verify_pass_accepts_what_really_running_drafter_and_verifier_accepts(seed: int, count: int) -> None:
    server = Server(seed)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (2, 3, 5, 9, 4, 7)]
    written = [server.respond(prompt, count, 17, end_id=3 if at % 2 else None) for at, prompt in enumerate(prompts)]
    lengths = [len(one.tokens) for one in written]
    chains = draft_chains(
        server.drafter,
        torch.tensor([token for one in written for token in one.tokens]),
        torch.cat([torch.arange(len(one.tokens)) >= one.prompt for one in written]),
        torch.cat([server.read(one.tokens)[0] for one in written]),
        lengths,
        count,
    )
    right = passes = cuts = 0
    for accepted, one in zip(chains.accepted_T.split(lengths), written, strict=True):
        found = walk(accepted.numpy(), one.prompt, len(one.tokens), count)
        assert len(found.accepted) == len(one.passes)
        assert list(found.accepted[:-1]) == one.passes[:-1]
        if one.passes and found.cut:  # the server saw drafts behind the end
            assert found.accepted[-1] <= one.passes[-1]
            cuts += 1
        elif one.passes:
            assert found.accepted[-1] == one.passes[-1]
        right += sum(found.accepted)
        passes += len(found.accepted)
    assert passes > 15
    assert right > 3, "nothing was accepted: this run shows nothing"


def test_a_shorter_chain_is_the_beginning_of_a_longer_one() -> None:
    drafter, *batch = packed()
    whole = draft_chains(drafter, *batch, steps=6).accepted_T
    assert int(whole.max()) > 1
    for steps in range(1, 6):
        chains = draft_chains(drafter, *batch, steps=steps)
        assert torch.equal(chains.accepted_T, whole.clamp(max=steps))


def packed(lengths: tuple[int, ...] = (40, 2, 31, 1, 60)) -> tuple[Any, ...]:
    """A batch in which the drafter is often right: after each token stands, mostly, what it would draft first."""
    drafter = small_drafter(3, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB)
    torch.manual_seed(5)
    tokens = sum(lengths)
    token_ids = torch.randint(0, VOCAB, (tokens,))
    features = torch.randn(tokens, drafter.config.feature_size)
    mask = torch.rand(tokens) > 0.1
    for _ in range(12):
        first = draft_chains(drafter, token_ids, mask, features, list(lengths), 1).first_T
        here = (first[:-1] >= 0) & (torch.rand(tokens - 1) < 0.5)
        token_ids[1:][here] = first[:-1][here]
    return drafter, token_ids, mask, features, list(lengths)


def test_packing_changes_nothing() -> None:
    drafter, token_ids, mask, features, lengths = packed()
    together = draft_chains(drafter, token_ids, mask, features, lengths, 4)
    parts = zip(*(part.split(lengths) for part in (token_ids, mask, features)), lengths, strict=True)
    alone = [draft_chains(drafter, *part[:3], [part[3]], 4) for part in parts]
    assert torch.equal(together.accepted_T, torch.cat([one.accepted_T for one in alone]))
    assert torch.equal(together.first_T, torch.cat([one.first_T for one in alone]))


def test_chains_stand_after_tokens_of_responses_only_and_end_with_them() -> None:
    drafter, token_ids, mask, features, lengths = packed()
    chains = draft_chains(drafter, token_ids, mask, features, lengths, 4)
    begin = 0
    for accepted, one in zip(chains.accepted_T.split(lengths), mask.split(lengths), strict=True):
        inside = one.clone()
        inside[0] = False  # nothing was read before it
        assert torch.equal(accepted >= 0, inside)
        for first, end in responses(one.numpy()):
            room = end - 1 - torch.arange(max(first, 1), end)
            assert bool((accepted[max(first, 1) : end] <= room).all())
        begin += len(one)


def test_responses_are_the_runs_of_the_mask() -> None:
    mask = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], bool)
    assert responses(mask) == [(0, 2), (4, 5), (6, 9)]
    assert responses(np.zeros(4, bool)) == []
    assert responses(np.ones(3, bool)) == [(0, 3)]


def test_the_walk_jumps_over_what_was_accepted_and_the_bonus_token() -> None:
    #                  0   1   2  3  4  5  6  7  8  9
    right = np.array([-1, -1, 2, 9, 9, 0, 3, 9, 9, 0])
    assert walk(right, 2, 10, 3) == Walk((2, 5, 6), (2, 0, 3), cut=False)  # 6 + 3 reaches the end with a full chain
    assert walk(right, 2, 10, 5) == Walk((2, 5, 6), (2, 0, 3), cut=True)  # a longer chain would have gone on
    assert walk(right, 2, 10, 1) == Walk((2, 4, 6, 8), (1, 1, 1, 1), cut=False)
    assert walk(right, 2, 3, 3) == Walk((), ())  # the prefill wrote it
    assert walk(right, 2, 7, 3) == Walk((2, 5), (2, 0))  # the bonus token is the last


def test_tallies_are_ratios_of_sums_and_leave_out_drafts_that_nothing_judges() -> None:
    one = Tally.of([Walk((0, 3), (2, 0)), Walk((0, 2), (1, 1), cut=True)], 3)
    assert (one.verifies, one.accepted, one.cut_verifies, one.cut_accepted) == (4, 4, 1, 1)
    assert one.tau == 2.0
    # Draft 0 judged in all four; draft 1 in the first pass and the third; the last pass ends before its draft 1.
    np.testing.assert_array_equal(one.reached, [4, 2, 1])
    np.testing.assert_array_equal(one.right, [3, 1, 0])
    both = one + Tally.of([Walk((0,), (0,))], 3)
    assert both.tau == 1 + 4 / 5
    np.testing.assert_allclose(both.conditional, [3 / 5, 1 / 2, 0])
    assert np.isnan(Tally.zero(2).tau)
    assert np.isnan(Tally.zero(2).conditional).all()


def test_every_response_of_a_conversation_is_walked_on_its_own() -> None:
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1], bool)
    right = np.where(mask, 0, -1)
    tallies = tally_sequence(right, mask, [1, 3])
    assert {k: tally.verifies for k, tally in tallies.items()} == {1: 4, 3: 4}


def test_the_interval_holds_tau_and_narrows_with_more_sequences() -> None:
    random = np.random.default_rng(0)

    def draw(count: int) -> tuple[float, float, float]:
        verifies = random.integers(5, 40, count)
        accepted = random.binomial(verifies * 3, 0.2)
        return (1 + accepted.sum() / verifies.sum(), *tau_interval(verifies, accepted))

    few, many = draw(20), draw(2000)
    for tau, low, high in (few, many):
        assert low < tau < high
    assert many[2] - many[1] < (few[2] - few[1]) / 3
    assert np.isnan(tau_interval(np.zeros(3, int), np.zeros(3, int))[0])


def test_the_shifted_map_gives_every_draft_another_token_and_loses_the_skill() -> None:
    drafter, *batch = packed()
    before = drafter.d2t.clone()
    shifted = shifted_d2t(drafter)
    assert torch.equal(drafter.d2t, before), "the drafter itself is as it was"
    # A row of the lm_head stands for the token after the one that it stood for.
    rows = {
        tuple(row): token
        for row, token in zip(drafter.lm_head.weight.tolist(), drafter.draft_vocab.target_ids, strict=True)
    }
    moved = zip(shifted.lm_head.weight.tolist(), shifted.target_ids(torch.arange(DRAFT_VOCAB)).tolist(), strict=True)
    assert {(rows[tuple(row)] + 1) % VOCAB - token for row, token in moved} == {0}
    assert torch.equal(shifted.t2d.nonzero().squeeze(1), shifted.target_ids(torch.arange(DRAFT_VOCAB)))
    skill, left = (draft_chains(one, *batch, steps=3).accepted_T.clamp(min=0).sum() for one in (drafter, shifted))
    assert left < skill / 2


def test_on_greedy_output_no_drafter_passes_the_ceiling() -> None:
    server = Server(5)
    written = [server.respond([1, 2, at], 3, 17, None) for at in range(4)]
    lengths = [len(one.tokens) for one in written]
    token_ids = torch.tensor([token for one in written for token in one.tokens])
    mask = torch.cat([torch.arange(len(one.tokens)) >= one.prompt for one in written])
    best = torch.cat([server.read(one.tokens)[1] for one in written])
    everything = greedy_ceiling(best, torch.ones_like(mask), token_ids, mask, lengths, 3)
    inside = greedy_ceiling(best, server.drafter.t2d[best], token_ids, mask, lengths, 3)
    features = torch.cat([server.read(one.tokens)[0] for one in written])
    real = draft_chains(server.drafter, token_ids, mask, features, lengths, 3).accepted_T
    for accepted, one in zip(everything.split(lengths), written, strict=True):
        # Greedy output: every draft is right, as far as the response goes.
        room = len(one.tokens) - 1 - torch.arange(one.prompt, len(one.tokens))
        assert torch.equal(accepted[one.prompt :], room.clamp(max=3))
    assert (real <= inside).all()
    assert (inside <= everything).all()
    assert inside.sum() < everything.sum()


def test_a_draft_without_a_rival_is_certain_and_a_tie_is_not() -> None:
    drafter, *batch = packed()
    with torch.no_grad():
        drafter.lm_head.weight.zero_()
    gaps = draft_chains(drafter, *batch, steps=2).gap_T
    drafted = draft_chains(drafter, *batch, steps=2).first_T >= 0
    assert (gaps[drafted] == 0).all()
    assert torch.isinf(gaps[~drafted]).all()


def test_parts_that_do_not_belong_together_are_refused() -> None:
    drafter, token_ids, mask, features, lengths = packed()
    with pytest.raises(DrafterError, match="loss mask"):
        draft_chains(drafter, token_ids, mask[1:], features, lengths, 2)
    with pytest.raises(DrafterError, match="features"):
        draft_chains(drafter, token_ids, mask, features[:, 1:], lengths, 2)
    assert isinstance(drafter, Drafter)
