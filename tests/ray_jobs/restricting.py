"""The same drafter over another draft vocabulary: what a server would draft with, had it been trained to this head."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from drafter.export import load_sglang
from drafter.model import Drafter
from drafter.run import Run
from drafter.verifier_weights import VerifierWeights
from vocab.mapping import DraftVocab


def over(drafter: Drafter, vocabulary: DraftVocab) -> Drafter:
    """`drafter` with a head over `vocabulary`: its own rows where it has them, rows of zeros for ids it had not."""
    config = drafter.config.model_copy(update={"draft_vocab_size": vocabulary.size})
    made = Drafter(config, vocabulary, drafter.embed_tokens.weight)
    row_V = torch.from_numpy(drafter.draft_vocab.draft_ids())[torch.from_numpy(vocabulary.target_ids)]
    head_WD = torch.where((row_V >= 0)[:, None], drafter.lm_head.weight.detach()[row_V.clamp(min=0)], 0.0)
    made.load_state_dict({**drafter.state_dict(), "lm_head.weight": head_WD, "d2t": made.d2t, "t2d": made.t2d})
    return made


def run_over(run: Run, name: str, vocabulary: DraftVocab, weights: VerifierWeights, scratch: Path) -> Run:
    """A run beside `run` that holds its drafter over `vocabulary`."""
    folder = Path(run.uri).parent / name
    shutil.copytree(run.uri, folder)
    made = Run(str(folder))
    made.put_drafter(over(load_sglang(run.fetch_drafter(scratch), weights.embedding_VD).float(), vocabulary))
    return made
