"""The teacher summary is that of the whole logits, whatever blocks and parts it was made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jobs.replicas.replica import unpack_summary

torch = pytest.importorskip("torch")
from ray_jobs.replicas.engine_path import statehouse_teacher  # noqa: E402


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_blocks_of_rows_and_of_the_vocabulary_make_no_difference(data: st.DataObject) -> None:
    tokens, vocab, k = (data.draw(st.integers(1, most)) for most in (9, 40, 6))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    # Small whole numbers: products are exact, and many logits are equal.
    final, head = (torch.tensor(random.integers(-2, 3, (rows, 4)), dtype=torch.float32) for rows in (tokens, vocab))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statehouse_teacher, "ROWS", data.draw(st.integers(1, 10)))
        patch.setattr(statehouse_teacher, "COLUMNS", data.draw(st.integers(1, 41)))
        cut = data.draw(st.integers(0, vocab))
        parts = [(low, head[low:high]) for low, high in ((0, cut), (cut, vocab)) if high > low]
        packed = [statehouse_teacher.summarise(final, part, k, first_id=low) for low, part in parts]
        summary = unpack_summary(statehouse_teacher.combine(torch.stack(packed), k).numpy(), f"topk({k})")
    logits = (final @ head.T).numpy().astype(np.float64)
    assert summary.topk_ids is not None
    assert summary.topk_logits is not None
    np.testing.assert_allclose(summary.logsumexp, np.log(np.exp(logits).sum(-1)), rtol=1e-5, atol=1e-5)
    known = min(k, vocab)
    best = np.sort(logits, axis=1)[:, ::-1][:, :known]
    np.testing.assert_array_equal(summary.topk_logits[:, :known], best)
    np.testing.assert_array_equal(np.take_along_axis(logits, summary.topk_ids[:, :known].astype(int), 1), best)
    for row in summary.topk_ids[:, :known]:
        assert len(set(row.tolist())) == known
    assert np.array_equal(summary.argmax, summary.topk_ids[:, 0])
    assert np.isneginf(summary.topk_logits[:, known:]).all()


def test_scale_bias_and_softcap_are_the_verifiers() -> None:
    random = np.random.default_rng(0)
    final, head, bias = (
        torch.tensor(random.normal(size=shape), dtype=torch.float32) for shape in ((5, 4), (9, 4), (9,))
    )
    packed = statehouse_teacher.summarise(final, head, 1, bias_V=bias, scale=0.5, softcap=3.0)
    logits = torch.tanh((final @ head.T + bias) * 0.5 / 3.0) * 3.0
    np.testing.assert_allclose(packed[:, 0], logits.logsumexp(-1), rtol=1e-6)
    np.testing.assert_array_equal(packed[:, 2], logits.argmax(-1))
